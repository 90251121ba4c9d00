"""Ordinary PyTorch code stays right: each habit equals torch's own optimizers, or is refused.

Each test runs twice, the second time with weights that are NaN from a step's decision until the new
ones are published. Gradients and steps are here, weights and state in test_torch_weights.py, what
several ranks do in test_torch_ranks.py.
"""

import copy
import os
import shutil
import sys
import warnings

import dmuond
import dmuond.torch
import numpy as np
import pytest
import torch
from dmuond import types
from dmuond.torch.skips import SkippedSteps
from habits import (
    ADAMW_LR,
    LR,
    MATRICES,
    STEPS,
    TOLERANCE,
    TorchOptimizers,
    assert_same_training,
    loss_of,
    make_model,
    plain_loop,
    run_both,
    weights,
)
from torch import nn


def test_a_plain_loop_equals_torch(muon):
    _, optimizer = run_both(muon, plain_loop)
    assert optimizer.last_committed_step == STEPS
    assert optimizer.last_outcome.matrices == 4


def test_the_scripts_default_device_is_the_scripts(muon):
    def loop(model, optimizer):
        for step in range(STEPS):
            loss_of(model, step).backward()
            with torch.device("meta"):  # where a tensor that the optimizer makes has no values
                optimizer.step()
                optimizer.state_dict()
            optimizer.zero_grad()

    model, reference = make_model(), make_model()
    start = weights(reference)
    with torch.device("meta"):
        optimizer = muon(model)
    loop(model, optimizer)
    plain_loop(reference, TorchOptimizers(reference))
    assert_same_training(model, reference, start)


def test_zeroing_in_place_equals_torch(muon):
    def loop(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, step).backward()
            optimizer.step()

    run_both(muon, loop)


@pytest.mark.parametrize("small_max", [0, 4096], ids=["one by one", "together"])
def test_gradients_that_are_zeroed_in_place_are_signalled_early(muon, monkeypatch, small_max):
    """p.grad is the slot then, into which autograd adds."""
    monkeypatch.setattr(dmuond.torch.early, "SMALL_MAX", small_max)
    model = make_model()
    optimizer = muon(model, early_buckets=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, step).backward()
            assert optimizer.session.is_signalled(0) == (step >= 2)
            optimizer.step()


def test_a_bucket_of_small_gradients_that_come_last_is_left_to_the_step(muon):
    def buckets(model, **options):
        optimizer = muon(model, **options)
        for step in range(STEPS):
            loss_of(model, step).backward()
            session = optimizer.session
            count = optimizer.registered.buckets
            signalled = {b for b in range(count) if session.is_signalled(b)}
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()
        return count, signalled

    count, signalled = buckets(make_model())
    assert (count, signalled) == (1, set())
    count, signalled = buckets(make_model(), bucket_bytes=1)
    assert count > 1 and len(signalled) == count - 1
    model = make_model()
    count, signalled = buckets(model, bucket_bytes=1, early_buckets=True)
    assert signalled == set(range(count))


def test_zeroing_by_the_model_equals_torch(muon):
    def loop(model, optimizer):
        for step in range(STEPS):
            loss_of(model, step).backward()
            optimizer.step()
            model.zero_grad(set_to_none=step % 2 == 0)

    run_both(muon, loop)


def test_two_backwards_equal_torch(muon):
    def loop(model, optimizer):
        for step in range(STEPS):
            loss_of(model, step).backward()
            loss_of(model, step + 50).backward()
            optimizer.step()
            optimizer.zero_grad()

    run_both(muon, loop)


def test_a_second_backward_now_and_then_withdraws_and_equals_torch(muon):
    def loop(model, optimizer):
        for step in range(STEPS + 2):
            loss_of(model, step).backward()
            if step == 5:
                loss_of(model, step + 50).backward()
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="withdrawn"):
        run_both(muon, loop, early_buckets=True)


def test_a_step_left_out_now_and_then_withdraws_and_gradients_are_signalled_again(muon):
    """As where a loss that is not finite is passed over. The third time is the last.

    The step after one that was left out withdraws, and the program is watched in the two after it.
    """
    left_out = [5, 11, 17]
    watched = {0, 1, 7, 8, 13, 14}

    def loop(model, optimizer):
        for step in range(24):
            loss_of(model, step).backward()
            if isinstance(optimizer, dmuond.torch.Muon):
                early = step not in watched and step < 19
                assert optimizer.session.is_signalled(0) == early, step
            if step not in left_out:
                optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="withdrawn") as warned:
        run_both(muon, loop, early_buckets=True)
    texts = [str(warning.message) for warning in warned]
    assert ["from now on" in text for text in texts] == [False, False, True]


def a_backward_more(model, step):
    loss_of(model, step + 50).backward()


def another_gradient(model, step):
    model.up.bias.grad = model.up.bias.grad * 2


def another_gradients_data(model, step):
    model.up.bias.grad.data = model.up.bias.grad * 2


def clip_without_a_trace(model, step):
    for p in model.parameters():
        p.grad.data.mul_(0.25)


def zero_one_gradient_without_a_trace(model, step):
    model.down.weight.grad.data.zero_()


CHANGES = [
    a_backward_more,
    another_gradient,
    another_gradients_data,
    clip_without_a_trace,
    zero_one_gradient_without_a_trace,
]


@pytest.mark.parametrize("together", [0, 100, 4096], ids=["one by one", "mixed", "together"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_signals_withdraw_however_gradients_are_copied(
    muon, monkeypatch, together, change
):
    """Small gradients of a bucket are copied together, large ones by their own hooks."""
    monkeypatch.setattr(dmuond.torch.early, "SMALL_MAX", together)

    def loop(model, optimizer):
        for step in range(STEPS + 2):
            loss_of(model, step).backward()
            if step == 5:
                if isinstance(optimizer, dmuond.torch.Muon):
                    assert optimizer.session.is_signalled(0)
                change(model, step)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="withdrawn"):
        run_both(muon, loop, early_buckets=True)


def test_accumulation_under_no_sync_signals_early_and_equals_torch(muon):
    model, reference = make_model(), make_model()
    start = weights(reference)
    optimizer = muon(model, early_buckets=True)
    torch_optimizers = TorchOptimizers(reference)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(STEPS):
            with optimizer.no_sync():
                loss_of(model, step).backward()
            loss_of(model, step + 50).backward()
            if step >= 2:
                assert optimizer.session.is_signalled(0)
            optimizer.step()
            optimizer.zero_grad()
            loss_of(reference, step).backward()
            loss_of(reference, step + 50).backward()
            torch_optimizers.step()
            torch_optimizers.zero_grad()
    assert_same_training(model, reference, start)


def clip_by_torch(model, step):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def replace_gradients(model, step):
    for p in model.parameters():
        p.grad = p.grad * 0.5


def replace_gradients_data(model, step):
    for p in model.parameters():
        p.grad.data = p.grad * 0.5


@pytest.mark.parametrize(
    "change", [clip_by_torch, clip_without_a_trace, replace_gradients, replace_gradients_data]
)
def test_gradients_changed_by_hand_equal_torch(muon, change):
    def loop(model, optimizer):
        for step in range(STEPS):
            loss_of(model, step).backward()
            change(model, step)
            optimizer.step()
            optimizer.zero_grad()

    run_both(muon, loop)


@pytest.mark.parametrize("small_max", [0, 4096], ids=["one by one", "together"])
@pytest.mark.parametrize("kept", [lambda p: p.grad, lambda p: p.grad.view(-1).view_as(p)])
def test_gradients_kept_over_zero_grad_stay_what_they_were(muon, monkeypatch, small_max, kept):
    """Two losses' gradients are combined by hand (PCGrad), and compared with the last step's."""
    monkeypatch.setattr(dmuond.torch.early, "SMALL_MAX", small_max)

    def loop(model, optimizer):
        last = None
        for step in range(STEPS):
            loss_of(model, step).backward()
            first = [kept(p) for p in model.parameters()]
            optimizer.zero_grad()
            loss_of(model, step + 50).backward()
            for p, gradient in zip(model.parameters(), first, strict=True):
                p.grad = gradient + 0.5 * p.grad
            if last is not None:
                p, gradient = model.up.weight, last
                p.grad = p.grad + 0.1 * gradient
            optimizer.step()
            last = model.up.weight.grad
            optimizer.zero_grad()

    run_both(muon, loop)


def flat_buffer(model):
    """One tensor for all gradients, of which each p.grad is a part."""
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    parts = flat.split([p.numel() for p in model.parameters()])
    for p, part in zip(model.parameters(), parts, strict=True):
        p.grad = part.view_as(p)
    return [flat]


def buffers(model):
    kept = [torch.zeros_like(p) for p in model.parameters()]
    for p, buffer in zip(model.parameters(), kept, strict=True):
        p.grad = buffer
    return kept


def views_of_buffers(model):
    kept = [torch.zeros(p.numel()) for p in model.parameters()]
    for p, buffer in zip(model.parameters(), kept, strict=True):
        p.grad = buffer.view_as(p)
    return kept


@pytest.mark.parametrize("begin", [0, 5])
@pytest.mark.parametrize("small_max", [0, 4096], ids=["one by one", "together"])
@pytest.mark.parametrize("place", [flat_buffer, buffers, views_of_buffers])
def test_buffers_of_the_script_for_gradients_stay_the_gradients(
    muon, monkeypatch, place, small_max, begin
):
    """It zeroes and scales them in place, and never touches p.grad again."""
    monkeypatch.setattr(dmuond.torch.early, "SMALL_MAX", small_max)

    def loop(model, optimizer):
        kept = []
        for step in range(STEPS + 4):
            if step == begin:
                kept = place(model)
            for buffer in kept:
                buffer.zero_()
            loss_of(model, step).backward()
            for buffer in kept:
                buffer.mul_(1 + step)
            optimizer.step()
            if not kept:
                optimizer.zero_grad()

    run_both(muon, loop)


@pytest.mark.parametrize("early", [False, None])
@pytest.mark.parametrize("small_max", [0, 4096], ids=["one by one", "together"])
def test_a_loss_made_of_gradients_equals_torch(muon, monkeypatch, early, small_max):
    """Of those in p.grad, by a backward pass that has made a graph."""
    monkeypatch.setattr(dmuond.torch.early, "SMALL_MAX", small_max)

    def loop(model, optimizer):
        for step in range(STEPS):
            loss_of(model, step).backward(create_graph=True)
            penalty = sum(p.grad.square().sum() for p in model.parameters())
            (0.1 * penalty).backward()
            optimizer.step()
            optimizer.zero_grad()

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*create_graph=True")  # torch's: a cycle
        run_both(muon, loop, early_buckets=early)


@pytest.mark.parametrize("small_max", [0, 4096], ids=["one by one", "together"])
def test_gradients_that_are_views_of_others_equal_torch(muon, monkeypatch, small_max):
    monkeypatch.setattr(dmuond.torch.early, "SMALL_MAX", small_max)

    def loop(model, optimizer):
        for step in range(STEPS):
            loss_of(model, step).backward()
            up, down = model.up.weight, model.down.weight
            up.grad, down.grad = down.grad.t(), up.grad.t()
            model.norm.weight.grad = model.norm.bias.grad.view(-1)
            optimizer.step()
            optimizer.zero_grad()

    run_both(muon, loop)


def test_clipping_that_starts_late_withdraws_and_equals_torch(muon):
    def loop(model, optimizer):
        for step in range(STEPS + 2):
            loss_of(model, step).backward()
            if step >= 5:
                clip_by_torch(model, step)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="withdrawn"):
        run_both(muon, loop, early_buckets=True)


def test_a_change_that_a_refused_step_has_seen_is_withdrawn_by_the_next(muon):
    def refuse_a_step(model, optimizer):
        loss_of(model, 50).backward()
        clip_by_torch(model, 50)
        optimizer.trainer_state = bytes(dmuond.session.TRAINER_STATE_BYTES_MAX + 1)
        with pytest.raises(dmuond.InvalidArgumentError):
            optimizer.step()
        optimizer.trainer_state = b""
        optimizer.zero_grad()

    def loop(model, optimizer):
        ours = isinstance(optimizer, dmuond.torch.Muon)
        plain_loop(model, optimizer)
        if ours:
            refuse_a_step(model, optimizer)
            signalled = optimizer.session.next_attempt
        plain_loop(model, optimizer, range(STEPS, STEPS + 1))
        if ours:
            assert optimizer.last_outcome.attempt == signalled + 1

    with pytest.warns(UserWarning, match="withdrawn"):
        run_both(muon, loop, early_buckets=True)


@pytest.mark.parametrize("clip_muon", [True, False])
def test_one_norm_of_all_gradients_clips_muons_too_or_adamws_alone(muon, clip_muon):
    """Of gradients whose sizes differ: Muon's momentum shows which of them were clipped."""
    model, reference = make_model(), make_model()
    start = weights(reference)
    optimizer = muon(model, max_grad_norm=0.1, clip_muon=clip_muon)
    others = TorchOptimizers(reference)
    clipped = [p for name, p in reference.named_parameters() if clip_muon or name not in MATRICES]
    for step in range(STEPS):
        for each in (model, reference):
            (loss_of(each, step) / 3**step).backward()
        norm = nn.utils.get_total_norm([p.grad for p in reference.parameters()])
        nn.utils.clip_grads_with_norm_(clipped, 0.1, norm)
        for each in (optimizer, others):
            each.step()
            each.zero_grad()
        assert optimizer.last_outcome.gradient_norm == pytest.approx(float(norm), rel=1e-5)
    assert_same_training(model, reference, start)


def test_parameters_without_a_gradient_stay_as_in_torch(muon):
    def loop(model, optimizer):
        for step in range(STEPS):
            loss_of(model, step).backward()
            if step % 2:
                model.down.weight.grad = None
                model.norm.bias.grad = None
            optimizer.step()
            optimizer.zero_grad()

    run_both(muon, loop)


def test_a_closure_and_schedulers_equal_torch(muon):
    model, reference = make_model(), make_model()
    start = weights(reference)
    optimizer, others = muon(model), TorchOptimizers(reference)
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(optimizer, [LR, ADAMW_LR], total_steps=STEPS + 1)
    ]
    schedules += [
        torch.optim.lr_scheduler.OneCycleLR(part, lr, total_steps=STEPS + 1)
        for part, lr in zip(others.parts, (LR, ADAMW_LR), strict=True)
    ]
    for step in range(STEPS):

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        assert optimizer.step(closure).item() > 0
        others.zero_grad()
        loss_of(reference, step).backward()
        others.step()
        for schedule in schedules:
            schedule.step()
    assert_same_training(model, reference, start)


def test_evaluation_and_averaging_between_steps_equal_torch(muon):
    averages = []

    def loop(model, optimizer):
        average = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        copied = copy.deepcopy(model)
        for step in range(STEPS):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            model.eval()
            with torch.no_grad():
                loss_of(model, 99)
                loss_of(copied, 99)
            model.train()
        averages.append(average)

    run_both(muon, loop)
    mine, torchs = averages
    start = weights(make_model())
    for name, want in torchs.module.named_parameters():
        got = dict(mine.module.named_parameters())[name]
        assert (got - want).norm() <= TOLERANCE * (want - start[name]).norm() + 1e-7


def test_grad_scaler_equals_torch_and_skips_an_overflow(muon):
    scales = []

    def loop(model, optimizer):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        for step in range(STEPS + 2):
            loss = loss_of(model, step)
            scaler.scale(loss).backward()
            if step == 2:
                model.up.weight.grad[0, 0] = float("inf")
            if isinstance(optimizer, TorchOptimizers):
                # One overflow anywhere skips the step everywhere, as one optimizer would.
                finite = all(torch.isfinite(p.grad).all() for p in model.parameters())
                for part in optimizer.parts:
                    if finite:
                        scaler.step(part)
                if not finite:
                    scaler.update(scaler.get_scale() / 2)
                    optimizer.zero_grad()
                    continue
            else:
                if step == 6:
                    scaler.unscale_(optimizer)
                scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        scales.append(scaler.get_scale())

    model, reference = make_model(), make_model()
    start = weights(reference)
    optimizer = muon(model)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("error", FutureWarning)
        warnings.filterwarnings("ignore", message="GradScaler is going to stop passing")
        warnings.filterwarnings("ignore", message="dmuond: the gradient of .* was changed")
        loop(model, optimizer)
    (told,) = warned
    assert 'step 3 was skipped on all ranks: the gradient of parameter "up.weight" is not' in str(
        told.message
    )
    loop(reference, TorchOptimizers(reference))
    assert_same_training(model, reference, start)
    assert optimizer.last_committed_step == STEPS + 2
    assert scales[0] == 1024.0  # halved once by the overflow, doubled once by growth


def test_a_scaler_hands_itself_to_wrappers_of_step_that_pass_on_what_they_are_given(muon):
    model, scaler = make_model(), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = muon(model, early_buckets=False)
    step, called = optimizer.step, []

    def scaled():
        scaler.scale(loss_of(model, 0)).backward()
        scaler.step(optimizer)
        scaler.update()
        return optimizer.last_outcome.gradient_norm

    def wrapper(*args, **kwargs):
        called.append(kwargs)
        return step(*args, **kwargs)

    optimizer.step = wrapper
    assert scaled() < 100.0 and called == [{"grad_scaler": scaler}]

    optimizer.step = lambda: step()
    gradient = model.up.weight.grad.clone()
    with pytest.raises(dmuond.InvalidArgumentError, match="step\\(\\) is wrapped by .*<lambda>"):
        scaler.step(optimizer)
    assert torch.equal(model.up.weight.grad, gradient)
    optimizer.step = step
    scaler.step(optimizer)
    assert optimizer.last_committed_step == 2


def test_skipped_steps_are_told_in_powers_of_two_and_else_twice_a_minute(caplog):
    now, step = [0.0], [0]
    skips = SkippedSteps(tells=True, clock=lambda: now[0])

    def tells(kind):
        step[0] += 1
        caplog.clear()
        skips.after_step(types.Outcome(kind=kind, step=step[0], detail="w is NaN"))
        return caplog.messages

    skipped, committed = types.Outcome.KIND_SKIPPED, types.Outcome.KIND_COMMITTED
    with pytest.warns(UserWarning, match="step 1 was skipped on all ranks: w is NaN; skipped in a"):
        assert tells(skipped) == []
    said = "step {} was skipped on all ranks: w is NaN; skipped in a row: {}, since the optimizer"
    assert tells(skipped)[0].startswith(said.format(2, 2))
    assert tells(committed) == []
    assert tells(skipped) == []  # the third
    assert tells(skipped)[0].startswith(said.format(5, 2))
    now[0] += 29.0
    assert tells(skipped) == []
    now[0] += 1.0
    assert tells(skipped)[0].endswith("was made: 6")


class SparseEmbedding(nn.Embedding):
    """Makes sparse gradients without its layer's saying so."""

    def forward(self, tokens):
        return nn.functional.embedding(tokens, self.weight, sparse=True)


@pytest.mark.parametrize("layer", [nn.Embedding, nn.EmbeddingBag])
def test_layers_with_sparse_gradients_are_refused_by_name(muon, layer):
    model = make_model()
    model.embed = layer(11, 24, sparse=True)
    with pytest.raises(dmuond.InvalidArgumentError, match=r"embed.weight.*sparse=False"):
        muon(model)
    muon(model, route=[("embed.weight", "trainer")]).close()
    model.head.weight = model.embed.weight  # the layer's, under another name
    optimizer = muon(model.up)
    tied = nn.Sequential(model.head, model.embed)
    with pytest.raises(dmuond.InvalidArgumentError, match=r"'0.weight'.*sparse=False"):
        optimizer.add_param_group({"params": tied})


def test_sparse_gradients_that_no_layer_says_are_refused_by_name(muon):
    model = make_model()
    model.embed = SparseEmbedding(11, 24)
    optimizer = muon(model)
    loss_of(model, 0).backward()
    with pytest.raises(dmuond.InvalidArgumentError, match=r"embed.weight.*sparse=False"):
        optimizer.step()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="of newer versions of torch")
@pytest.mark.parametrize("name", ["up.weight", "up.bias"])
def test_a_gradients_dtype_that_is_set_too_late_is_refused_by_name(muon, name):
    model = make_model().bfloat16()
    model.down.weight.grad_dtype = torch.float32  # in time
    optimizer = muon(model)
    plain_loop(model, optimizer, range(1))
    parameter = model.get_parameter(name)
    parameter.grad_dtype = torch.float32
    loss_of(model, 1).backward()
    words = f"'{name}' was registered with gradients of torch.bfloat16, and its grad_dtype is"
    with pytest.raises(dmuond.InvalidArgumentError, match=words):
        optimizer.step()
    optimizer.zero_grad()
    parameter.grad_dtype = torch.bfloat16
    plain_loop(model, optimizer, range(1, 3))
    assert optimizer.last_committed_step == 3


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_model_equals_torch(muon, poison, backend):
    if backend == "inductor" and (poison or shutil.which(os.environ.get("CXX", "g++")) is None):
        pytest.skip("inductor: once is enough, and it needs a C++ compiler")

    def loop(model, optimizer):
        compiled = torch.compile(model, backend=backend)
        for step in range(STEPS):
            loss_of(compiled, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    run_both(muon, loop)


@pytest.mark.parametrize("options", [{}, {"overlap_forward": True}], ids=["plain", "overlap"])
def test_compiled_blocks_equal_torch(muon, options):
    def loop(model, optimizer):
        model.up.compile(backend="aot_eager")  # in place
        model.wide = torch.compile(model.wide, backend="aot_eager")  # wrapped, weights as before
        plain_loop(model, optimizer)
        model.wide = model.wide._orig_mod

    run_both(muon, loop, **options)


def test_an_optimizer_made_of_a_compiled_model_has_the_plain_names(muon):
    compiled = torch.compile(make_model(), backend="aot_eager")
    names = {row.parameter for row in muon(compiled).routing}
    assert "up.weight" in names


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return STEPS

    def __getitem__(self, index):
        return index


def test_data_loader_workers_by_fork_do_no_harm(muon):
    def loop(model, optimizer):
        loader = torch.utils.data.DataLoader(
            Tokens(), batch_size=1, num_workers=2, multiprocessing_context="fork"
        )
        for step in loader:
            loss_of(model, int(step)).backward()
            optimizer.step()
            optimizer.zero_grad()

    run_both(muon, loop)


def test_backward_after_the_step_through_a_kept_graph_is_an_error_as_in_torch(muon):
    model = make_model()
    optimizer = muon(model)
    loss = loss_of(model, 0)
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_wrapped_models_are_refused_with_the_remedy(address, monkeypatch):
    model = make_model()
    wrapper = type("DistributedDataParallel", (nn.Module,), {})()
    wrapper.module = model
    with pytest.raises(dmuond.InvalidArgumentError, match="Take the wrapper away"):
        dmuond.torch.Muon(wrapper, adamw_lr=1e-3, address=address)


def test_numpy_writes_into_the_arena_are_what_the_daemon_reads(muon):
    """The slot is shared memory: what is written by whatever means is the gradient."""
    model, reference = make_model(), make_model()
    start = weights(reference)

    def loop(model, optimizer):
        for step in range(STEPS):
            loss_of(model, step).backward()
            for p in model.parameters():
                p.grad.numpy()[...] *= np.float32(0.5)
            optimizer.step()
            optimizer.zero_grad()

    optimizer = muon(model)
    loop(model, optimizer)
    loop(reference, TorchOptimizers(reference))
    assert_same_training(model, reference, start)


def test_a_step_can_be_logged_as_numbers(muon):
    model = make_model()
    optimizer = muon(model, max_grad_norm=0.1)
    assert optimizer.metrics() == {}
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    metrics = optimizer.metrics()
    assert all(type(value) is float for value in metrics.values())
    assert (metrics["step"], metrics["committed"]) == (3, 1)
    assert metrics["clip_coefficient"] == pytest.approx(0.1 / metrics["gradient_norm"], rel=1e-5)
    assert metrics["matrices"] == len(MATRICES)
    assert [metrics[f"lr/{index}"] for index in range(2)] == [LR, ADAMW_LR]
    assert metrics["lr"] == LR and "durable_step" not in metrics
    assert all(metrics[f"{phase}_us"] > 0 for phase in ("collect", "update", "publish", "quiet"))


def test_layers_have_rates_of_their_own_by_patterns(muon):
    model, reference = make_model(), make_model()
    start = weights(reference)
    first = {"lr": LR / 2, "adamw_lr": ADAMW_LR, "name": "first"}
    optimizer = muon(model, groups={"up.*": first})
    assert [group["lr"] for group in optimizer.param_groups if group.get("name")] == [
        LR / 2,
        ADAMW_LR,
    ]
    others = TorchOptimizers(reference)
    named = dict(reference.named_parameters())
    others.parts[0] = torch.optim.Muon(
        [
            {
                "params": [named[name] for name in MATRICES if (name == "up.weight") == first],
                "lr": lr,
            }
            for first, lr in ((True, LR / 2), (False, LR))
        ],
        weight_decay=0.1,
        momentum=0.95,
    )
    plain_loop(model, optimizer)
    plain_loop(reference, others)
    assert_same_training(model, reference, start)


def unfreezing(model, optimizer):
    for step in range(STEPS):
        if step == 3:
            model.up.requires_grad_(True)
            model.embed.requires_grad_(True)
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def make_partly_frozen():
    model = make_model()
    model.up.requires_grad_(False)
    model.embed.requires_grad_(False)
    return model


def test_layers_can_be_unfrozen_while_they_train(muon):
    model, reference = make_partly_frozen(), make_partly_frozen()
    start = weights(reference)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        unfreezing(model, muon(model, include_frozen=True))
    unfreezing(reference, TorchOptimizers(reference))
    assert_same_training(model, reference, start)


def test_layers_that_were_frozen_at_first_are_refused_with_what_to_write(muon):
    model = make_partly_frozen()
    optimizer = muon(model)
    assert {"frozen (include_frozen=True registers it)"} == {
        row.why for row in optimizer.routing if row.parameter in ("up.weight", "embed.weight")
    }
    with pytest.raises(dmuond.Error, match="'embed.weight' was frozen .* include_frozen=True"):
        unfreezing(model, optimizer)


def test_weights_that_are_put_into_shared_memory_go_on_training(muon):
    def loop(model, optimizer):
        for step in range(STEPS):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                model.share_memory()  # as a process that gets the model does

    run_both(muon, loop)


def test_compiled_functions_may_have_backward_passes_and_steps_in_them(muon):
    def loop(model, optimizer):
        @torch.compile(backend="eager")
        def backward(step):
            loss_of(model, step).backward()

        @torch.compile(backend="eager")
        def whole(step):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()

        for step in range(STEPS):
            if step % 2:
                whole(step)
                continue
            backward(step)
            optimizer.step()
            optimizer.zero_grad()

    run_both(muon, loop)


def test_a_step_that_is_interrupted_anywhere_is_made_by_the_next_call(muon):
    model = make_model()
    optimizer = muon(model)
    here = os.path.dirname(dmuond.__file__)
    calls = interrupted = 0

    def interrupt(frame, event, _):
        """Where Python looks for signals."""
        nonlocal calls
        code = frame.f_code
        is_function = event == "call" and code.co_name[0] != "<"
        if is_function and code.co_filename.startswith(here):
            calls += 1
            if calls == interrupted:
                raise KeyboardInterrupt

    def train(step):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()

    for step in range(STEPS):
        train(step)
    while calls >= interrupted:
        calls, interrupted = 0, interrupted + 1
        loss_of(model, STEPS).backward()
        sys.setprofile(interrupt)
        try:
            optimizer.step()
        except KeyboardInterrupt:
            sys.setprofile(None)
            before = optimizer.last_committed_step
            optimizer.step()
            assert optimizer.last_committed_step == before + 1
        finally:
            sys.setprofile(None)
        optimizer.zero_grad()
    assert interrupted > 50
