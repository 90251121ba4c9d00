"""Weights and state: changed, loaded, saved, and continued from, as in torch or refused."""

import copy
import io
import threading

import dmuond
import dmuond.torch
import numpy as np
import pytest
import torch
from dmuond.torch.tensor_device import bytes_of, same_bytes
from habits import (
    MATRICES,
    STEPS,
    TorchOptimizers,
    assert_same_training,
    loss_of,
    make_model,
    make_optimizer,
    plain_loop,
    run_both,
    weights,
)
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoint


def test_weights_swapped_out_and_back_for_an_evaluation_are_no_change(muon):
    def loop(model, optimizer):
        for step in range(STEPS):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            kept = weights(model)
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
                for name, p in model.named_parameters():
                    p.copy_(kept[name])

    run_both(muon, loop)


def test_a_checkpoint_loaded_after_the_optimizer_was_made_is_trained(muon):
    checkpoint = make_model(seed=5).state_dict()

    def loop(model, optimizer):
        model.load_state_dict(checkpoint)
        plain_loop(model, optimizer)

    model, reference = make_model(), make_model()
    optimizer = muon(model)
    loop(model, optimizer)
    loop(reference, TorchOptimizers(reference))
    assert_same_training(model, reference, checkpoint)


@pytest.mark.parametrize("when", ["between steps", "after the backward pass", "instead of a step"])
def test_weights_loaded_while_gradients_are_signalled_early_are_trained(muon, when):
    """Lanes have collected gradients of the attempt that the weights are pushed in."""

    def loop(model, optimizer):
        for step in range(9):
            if step == 3:
                best = copy.deepcopy(model.state_dict())
            if step == 6 and when == "between steps":
                model.load_state_dict(best)
            loss_of(model, step).backward()
            if step == 6 and when != "between steps":
                model.load_state_dict(best)
            if step != 6 or when != "instead of a step":
                optimizer.step()
            optimizer.zero_grad()

    run_both(muon, loop, early_buckets=True)


def test_weights_changed_by_hand_are_refused_by_name_until_they_are_pushed(muon):
    model = make_model()
    optimizer = muon(model)
    loss_of(model, 0).backward()
    with torch.no_grad():
        model.up.weight.mul_(2.0)
    with pytest.raises(dmuond.Error, match=r"call push_parameters\(\['up.weight'\]\)"):
        optimizer.step()
    changed = model.up.weight.detach().clone()
    optimizer.push_parameters()
    assert torch.equal(model.up.weight, changed)
    optimizer.step()
    assert optimizer.last_committed_step == 1


def test_a_push_by_name_is_refused_while_another_weight_is_changed_too(muon):
    model = make_model()
    optimizer = muon(model)
    plain_loop(model, optimizer, range(2))
    with torch.no_grad():
        model.up.weight.mul_(2.0)
        model.down.weight.mul_(2.0)
    changed = model.down.weight.detach().clone()
    both = r"call push_parameters\(\['up.weight', 'down.weight'\]\)"
    with pytest.raises(dmuond.Error, match="weights of 'down.weight' were changed .*" + both):
        optimizer.push_parameters(["up.weight"])
    assert torch.equal(model.down.weight, changed)
    optimizer.push_parameters(["up.weight", "down.weight"])
    assert torch.equal(model.down.weight, changed)
    plain_loop(model, optimizer, [2])


def test_a_checkpoint_of_a_module_is_refused_while_another_is_changed_by_hand(muon):
    model = make_model()
    optimizer = muon(model)
    plain_loop(model, optimizer, range(2))
    loss_of(model, 2).backward()
    with torch.no_grad():
        model.down.weight.mul_(2.0)
    changed = model.down.weight.detach().clone()
    model.up.load_state_dict({k: torch.zeros_like(v) for k, v in model.up.state_dict().items()})
    with pytest.raises(dmuond.Error, match="weights of 'down.weight' were changed"):
        optimizer.step()
    optimizer.push_parameters()
    assert torch.equal(model.down.weight, changed) and not model.up.weight.any()
    optimizer.step()


def test_weights_changed_without_a_trace_are_refused_by_name_until_they_are_pushed(muon):
    model = make_model()
    optimizer = muon(model)
    plain_loop(model, optimizer, range(2))
    loss_of(model, 2).backward()
    kept = model.up.weight.detach().clone()
    model.up.weight.data.clamp_(-0.01, 0.01)
    with pytest.raises(dmuond.Error, match=r"call push_parameters\(\['up.weight'\]\)"):
        optimizer.step()
    model.up.weight.data.copy_(kept)
    optimizer.step()
    model.up.weight.data.clamp_(-0.01, 0.01)
    changed = model.up.weight.detach().clone()
    optimizer.push_parameters(["up.weight"])
    assert torch.equal(model.up.weight, changed)
    plain_loop(model, optimizer, [3])


@pytest.mark.parametrize("overlap", [False, True])
def test_weights_changed_without_a_trace_are_refused_in_whatever_step(muon, overlap):
    model = make_model()
    optimizer = muon(model, overlap_forward=overlap, bucket_bytes=1)
    changes = {
        "down.weight": lambda: model.down.weight.data[14:].zero_(),
        "up.bias": lambda: model.up.bias.detach().numpy().__imul__(2),
    }
    for begin, (name, change) in zip((0, 30), changes.items(), strict=True):
        plain_loop(model, optimizer, range(begin, begin + 9))
        loss_of(model, begin + 9).backward()
        change()
        for _ in range(2):  # a step that was refused is refused again
            with pytest.raises(dmuond.Error, match=rf"push_parameters\(\['{name}'\]\)"):
                optimizer.step()
        optimizer.push_parameters([name])
        optimizer.step()
        optimizer.zero_grad()


def test_weights_moved_elsewhere_are_refused_until_they_are_pushed(muon):
    model = make_model()
    optimizer = muon(model)
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    loss_of(model, 0).backward()
    with pytest.raises(dmuond.Error, match="push_parameters"):
        optimizer.step()
    optimizer.push_parameters()
    optimizer.step()


def test_parameters_replaced_by_assignment_are_refused(muon):
    model = make_model()
    optimizer = muon(model)
    model.load_state_dict(make_model(3).state_dict(), assign=True)
    loss_of(model, 0).backward()
    with pytest.raises(dmuond.Error, match="make the optimizer after"):
        optimizer.step()


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(70.0)[::7][:1],  # contiguous by its size, with a stride of 7
        torch.arange(35.0).as_strided((1, 1, 1), (3, 5, 9)),
        torch.arange(70.0)[::7][:0],
        torch.arange(35.0).as_strided((0, 5), (1, 7)),
        torch.arange(35.0).reshape(5, 7).t(),
        torch.tensor(3.0),
    ],
    ids=lambda t: f"{tuple(t.shape)} by {t.stride()}",
)
def test_tensors_of_any_strides_are_compared_byte_by_byte(tensor):
    assert same_bytes(tensor, tensor.clone())
    assert same_bytes(tensor, tensor.contiguous())
    assert same_bytes(tensor, tensor + 1) == (tensor.numel() == 0)
    assert bytes_of(tensor).numpy().tobytes() == tensor.numpy().tobytes()


def test_a_model_of_parameters_with_odd_strides_is_trained(muon):
    model = make_model()
    model.scale = nn.Parameter(torch.arange(70.0)[::7][:1])  # contiguous, with a stride of 7
    model.turned = nn.Parameter(torch.randn(5, 7).t())
    model.cut = nn.Parameter(torch.randn(8, 9)[::2, ::3])
    optimizer = muon(model, route=[("turned", "muon"), ("cut", "muon")])
    for step in range(2):
        before = weights(model)
        model.load_state_dict(before)
        for p in model.parameters():
            p.grad = torch.full_like(p, 0.1)
        optimizer.step()
        for name, value in weights(model).items():
            assert value.isfinite().all() and not torch.equal(value, before[name]), (step, name)


def test_saved_weights_are_the_weights_alone(muon):
    model = make_model()
    optimizer = muon(model)
    plain_loop(model, optimizer)
    file = io.BytesIO()
    torch.save(model.up.weight.detach(), file)
    assert file.tell() < 4 * model.up.weight.numel() + 4096
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.up.weight, model.up.weight)
    other = make_model(3)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.head.weight, model.head.weight)


def test_tied_weights_are_one_parameter(muon):
    def tie(model):
        model.head.weight = model.embed.weight
        return model

    model, reference = tie(make_model()), tie(make_model())
    start = weights(reference)
    optimizer = muon(model)
    plain_loop(model, optimizer)
    plain_loop(reference, TorchOptimizers(reference))
    assert model.head.weight is model.embed.weight
    assert_same_training(model, reference, start)


def test_bf16_weights_keep_fp32_masters(muon):
    model = make_model().to(torch.bfloat16)
    optimizer = muon(model, lr=1e-5, adamw_lr=1e-6)
    before = {n: p.clone() for n, p in model.named_parameters()}
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Steps too small for bf16 are in the masters.
    state = optimizer.state_dict()["state"]
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    position = names.index("down.weight")
    moved = state[position]["master"] - before["down.weight"].float()
    assert moved.abs().max() > 0
    assert torch.equal(state[position]["master"].to(torch.bfloat16), model.down.weight.detach())


def test_pushed_weights_of_half_precision_keep_the_masters_that_round_to_them(muon):
    model = make_model().to(torch.bfloat16)
    optimizer = muon(model, lr=1e-5, adamw_lr=1e-6)
    plain_loop(model, optimizer, range(3))
    before = state_by_name(optimizer.state_dict())
    with torch.no_grad():
        model.up.bias.add_(1)
    optimizer.push_parameters()
    after = state_by_name(optimizer.state_dict())
    assert torch.equal(after["up.bias"]["master"], model.up.bias.detach().float())
    for name in before.keys() - {"up.bias"}:
        assert torch.equal(after[name]["master"], before[name]["master"]), name
    plain_loop(model, optimizer, [3])


class Watch(threading.Thread):
    """Looks at a weight until it is told to end; whether it was ever NaN."""

    def __init__(self, weight):
        super().__init__()
        self._first = weight.detach().numpy().reshape(-1)[:1]
        self._end = threading.Event()
        self.seen_nan = False

    def run(self):
        while not self._end.is_set():
            self.seen_nan |= bool(np.isnan(self._first[0]))

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._end.set()
        self.join()


def test_weights_are_nan_between_decision_and_publication_if_asked_for(muon, poison):
    """What makes the other tests' second run say something."""
    torch.manual_seed(0)
    model = nn.Linear(768, 768, bias=False)  # its update takes a tenth of a second
    optimizer = muon(model)
    with Watch(model.weight) as watch:
        model.weight.grad = torch.randn(768, 768)
        optimizer.step()
    assert watch.seen_nan == poison
    assert model.weight.isfinite().all()


def state_by_name(state_dict):
    names = [name for group in state_dict["param_groups"] for name in group["param_names"]]
    return {names[position]: state for position, state in state_dict["state"].items()}


def test_saved_loaded_and_continued_equals_the_uninterrupted_run_bit_for_bit(muon):
    uninterrupted = make_model()
    optimizer = muon(uninterrupted, preset="dmuon", ns_dtype=None)
    plain_loop(uninterrupted, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": uninterrupted.state_dict(), "optimizer": optimizer.state_dict()}, file)
    plain_loop(uninterrupted, optimizer, range(3, 6))
    after = state_by_name(optimizer.state_dict())
    optimizer.close()

    file.seek(0)
    saved = torch.load(file)
    continued = make_model(seed=7)
    optimizer = muon(continued, preset="dmuon", ns_dtype=None)
    continued.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    plain_loop(continued, optimizer, range(3, 6))
    for name, want in uninterrupted.named_parameters():
        assert torch.equal(dict(continued.named_parameters())[name], want), name
    for name, state in state_by_name(optimizer.state_dict()).items():
        assert state.keys() == after[name].keys()
        for key, value in state.items():
            assert torch.equal(value, after[name][key]), f"{key} of {name}"


def test_state_has_torchs_keys_shapes_and_step_counts(muon):
    model = make_model()
    optimizer = muon(model, early_buckets=False)
    plain_loop(model, optimizer, range(2))
    loss_of(model, 2).backward()
    model.down.weight.grad = None  # this step does not count for it
    optimizer.step()
    state = state_by_name(optimizer.state_dict())
    named = dict(model.named_parameters())
    assert state.keys() == named.keys()
    for name, entry in state.items():
        muon_keys, adamw_keys = {"momentum_buffer"}, {"exp_avg", "exp_avg_sq"}
        expected = muon_keys if name in MATRICES else adamw_keys
        assert entry.keys() == expected | {"master", "step"}, name
        assert entry["step"].item() == (2 if name == "down.weight" else 3)
        for key in expected | {"master"}:
            assert entry[key].shape == named[name].shape and entry[key].device.type == "cpu"
        assert torch.equal(entry["master"], named[name].detach())
    # Kept apart from the running job: the next step does not change what was saved.
    before = state["up.weight"]["momentum_buffer"].clone()
    plain_loop(model, optimizer, [3])
    assert torch.equal(state["up.weight"]["momentum_buffer"], before)


@pytest.mark.parametrize(
    ("saved_as", "loaded_as", "factor"), [("sum", "ema", 1 - 0.75), ("ema", "sum", 1 / (1 - 0.75))]
)
def test_momentum_is_converted_by_the_mu_that_it_was_saved_with(muon, saved_as, loaded_as, factor):
    """One is (1 - mu) of the other, whatever mu the new group begins with."""
    model = make_model()
    optimizer = muon(model, momentum_form=saved_as, momentum=0.75)
    plain_loop(model, optimizer, range(2))
    saved = optimizer.state_dict()
    optimizer.close()
    optimizer = muon(model, momentum_form=loaded_as, momentum=0.5)
    optimizer.load_state_dict(saved)
    before, after = state_by_name(saved), state_by_name(optimizer.state_dict())
    for name in MATRICES:
        want = before[name]["momentum_buffer"] * factor
        assert torch.allclose(after[name]["momentum_buffer"], want, rtol=1e-6, atol=0), name


def test_the_state_of_torchs_own_optimizers_is_continued_from(muon):
    model, reference = make_model(), make_model()
    others = TorchOptimizers(reference)
    plain_loop(reference, others, range(3))
    start = weights(reference)
    model.load_state_dict(reference.state_dict())
    optimizer = muon(model)
    for part in others.parts:
        optimizer.load_state_dict(part.state_dict())
    assert state_by_name(optimizer.state_dict())["embed.weight"]["step"].item() == 3
    for step in range(3, 6):
        for m, o in ((model, optimizer), (reference, others)):
            loss_of(m, step).backward()
            o.step()
            o.zero_grad()
    assert_same_training(model, reference, start)


def test_state_in_ema_form_is_continued_in_sum_form(muon):
    """Torch's momentum is an EMA, this preset's a sum: the directions are the same."""
    model, reference = make_model(), make_model()
    others = TorchOptimizers(reference)
    plain_loop(reference, others, range(3))
    start = weights(reference)
    model.load_state_dict(reference.state_dict())
    optimizer = muon(model, momentum_form="sum")
    for part in others.parts:
        optimizer.load_state_dict(part.state_dict())
    plain_loop(model, optimizer, range(3, 6))
    plain_loop(reference, others, range(3, 6))
    assert_same_training(model, reference, start)


def test_state_that_does_not_fit_is_refused_and_changes_nothing(muon):
    model = make_model()
    optimizer = muon(model)
    plain_loop(model, optimizer, range(2))
    before = state_by_name(optimizer.state_dict())
    wrong_shape = optimizer.state_dict()
    wrong_shape["state"][0]["momentum_buffer"] = torch.zeros(3, 3)
    unknown = copy.deepcopy(optimizer.state_dict())
    unknown["param_groups"][0]["param_names"][0] = "nobody.weight"
    other_route = torch.optim.AdamW(model.named_parameters())
    for p in model.parameters():
        other_route.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
    few = torch.optim.AdamW([model.embed.weight])
    few.state[model.embed.weight] = {"exp_avg": torch.zeros_like(model.embed.weight)}
    for state_dict, words in (
        (wrong_shape, r"momentum_buffer of 'up.weight'.*\[3, 3\].*\[40, 24\]"),
        (unknown, "'nobody.weight'"),
        (other_route.state_dict(), "exp_avg.*route"),
        (few.state_dict(), "1 parameters; this optimizer has 4 on muon and 6 on adamw"),
    ):
        with pytest.raises(dmuond.InvalidArgumentError, match=words):
            optimizer.load_state_dict(state_dict)
    for name, entry in state_by_name(optimizer.state_dict()).items():
        for key, value in entry.items():
            assert torch.equal(value, before[name][key])
    plain_loop(model, optimizer, range(2, 4))
    assert optimizer.last_committed_step == 4


PATTERNS = {"up.weight": {"lr": 0.5}, "down.weight": {"lr": 0.25, "weight_decay": 0.0}}


def options_by_name(optimizer):
    return {
        name: (group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
        for name in group["param_names"]
    }


@pytest.mark.parametrize("by", ["state_dict", "checkpoint"])
def test_groups_and_parameters_in_another_order_take_what_was_theirs(muon, by):
    """By torch.distributed.checkpoint, too, which has names in an order of its own."""
    model = make_model()
    optimizer = muon(list(model.named_parameters()), groups=PATTERNS)
    plain_loop(model, optimizer, range(2))
    saved = optimizer.state_dict()
    if by == "checkpoint":
        kept = copy.deepcopy(checkpoint.get_optimizer_state_dict(model, optimizer))
    optimizer.close()
    others = muon(
        list(reversed(list(model.named_parameters()))), groups=dict(reversed(PATTERNS.items()))
    )
    for group in others.param_groups:
        group["lr"] = 77.0
    if by == "checkpoint":
        checkpoint.set_optimizer_state_dict(model, others, kept)
    else:
        others.load_state_dict(saved)
    assert options_by_name(others) == options_by_name(optimizer)
    assert options_by_name(others)["down.weight"] == (0.25, 0.0)
    before = state_by_name(saved)
    for name, state in state_by_name(others.state_dict()).items():
        for key, value in state.items():
            assert torch.equal(value, before[name][key]), f"{key} of {name}"


def test_groups_that_do_not_match_those_that_were_saved_are_refused_by_name(address):
    model = make_model()
    optimizer = make_optimizer(model, address=address, groups=PATTERNS)
    plain_loop(model, optimizer, range(2))
    saved = optimizer.state_dict()
    optimizer.close()
    without = copy.deepcopy(saved)
    without["param_groups"][2]["params"].pop()
    without["param_groups"][2]["param_names"].pop()
    nothing = copy.deepcopy(saved)
    nothing["param_groups"][1] = {k: saved["param_groups"][1][k] for k in ("params", "param_names")}
    routed = copy.deepcopy(saved)
    routed["state"] = {}
    routed["param_groups"][0]["route"] = "adamw"
    both = {"[ud]*[pn].weight": {"lr": 0.5}, "wide.weight": {"lr": 0.5}}
    for patterns, state_dict, words in (
        (
            both,
            saved,
            r"'up.weight' and 'down.weight' are both in param_groups\[0\], .* groups 0 "
            "and 1, whose options differ: lr is 0.5 and 0.25",
        ),
        ({}, saved, "4 parameter groups; this optimizer has 2"),
        (PATTERNS, without, r"do not have 'wide.weight', which is in param_groups\[2\]"),
        (PATTERNS, nothing, r"group 1 .* has no options, .* param_groups\[1\], .*'down.weight'"),
        (PATTERNS, routed, "'up.weight' is on muon, .* has it on adamw, in its group 0"),
    ):
        other = make_optimizer(make_model(1), address=address, groups=patterns)
        before, state = options_by_name(other), state_by_name(other.state_dict())
        with pytest.raises(dmuond.InvalidArgumentError, match=words):
            other.load_state_dict(state_dict)
        assert options_by_name(other) == before
        master = state_by_name(other.state_dict())["up.weight"]["master"]
        assert torch.equal(master, state["up.weight"]["master"])
        other.close()


def test_a_bf16_model_is_continued_bit_for_bit_with_its_masters(muon):
    uninterrupted = make_model().to(torch.bfloat16)
    optimizer = muon(uninterrupted, preset="dmuon", ns_dtype=None)
    plain_loop(uninterrupted, optimizer, range(3))
    model_state = {k: v.clone() for k, v in uninterrupted.state_dict().items()}
    optimizer_state = optimizer.state_dict()
    plain_loop(uninterrupted, optimizer, range(3, 6))
    optimizer.close()

    continued = make_model(seed=7).to(torch.bfloat16)
    optimizer = muon(continued, preset="dmuon", ns_dtype=None)
    optimizer.load_state_dict(optimizer_state)  # either order of the two
    continued.load_state_dict(model_state)
    plain_loop(continued, optimizer, range(3, 6))
    for name, want in uninterrupted.named_parameters():
        assert torch.equal(dict(continued.named_parameters())[name], want), name
