"""Ordinary PyTorch code stays right: each habit equals torch's own optimizers, or is refused."""

import copy
import io
import warnings

import dmuond
import dmuond.torch
import numpy as np
import pytest
import torch
from torch import nn

LR, ADAMW_LR, STEPS = 0.02, 1e-3, 6
# Both sides orthogonalise in fp32 here: in bf16 two correct orders of operation differ by 3e-2,
# and a training loop amplifies that. test_conformance.py compares bf16 on fixed gradients.
TOLERANCE = 1e-3


def newton_schulz_in_fp32(grad, ns_coefficients, ns_steps, eps):
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    a, b, c = ns_coefficients
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


@pytest.fixture(autouse=True)
def _torch_in_fp32(monkeypatch):
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", newton_schulz_in_fp32)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 24)
        self.up = nn.Linear(24, 40)
        self.down = nn.Linear(40, 24, bias=False)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 11, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(self.norm(x + self.down(torch.relu(self.up(x)))))


def make_model(seed=0) -> Model:
    torch.manual_seed(seed)
    return Model()


def batch(step: int):
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(0, 11, (4, 9), generator=generator)


def loss_of(model, step: int):
    tokens = batch(step)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class TorchOptimizers:
    """torch.optim.Muon for what dmuond routes to muon, AdamW for the rest; steps as one."""

    def __init__(self, model):
        muon = [model.up.weight, model.down.weight]
        rest = [p for p in model.parameters() if all(p is not m for m in muon)]
        self.parts = [
            torch.optim.Muon(muon, lr=LR, weight_decay=0.1, momentum=0.95),
            torch.optim.AdamW(rest, lr=ADAMW_LR, weight_decay=0.1, betas=(0.9, 0.999)),
        ]

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none=True):
        for part in self.parts:
            part.zero_grad(set_to_none)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_training(model, reference, start):
    for name, want in reference.named_parameters():
        got = dict(model.named_parameters())[name].detach()
        change = (want - start[name]).norm()
        assert (got - want).norm() <= TOLERANCE * change + 1e-7, name


@pytest.fixture
def address(daemons):
    return daemons.start(1, 1)[0]


@pytest.fixture
def muon(address):
    """Makes optimizers of the test's daemon; closes them at the end."""
    made = []

    def make(model, lr=LR, **options):
        options = {"adamw_lr": ADAMW_LR, "preset": "torch", "verbose": False} | options
        options.setdefault("ns_dtype", torch.float32)
        made.append(dmuond.torch.Muon(model, lr, address=address, **options))
        return made[-1]

    yield make
    for optimizer in made:
        if not optimizer.session.closed:
            optimizer.close()


def run_both(muon, loop, **options):
    """The same script with dmuond and with torch's optimizers."""
    model, reference = make_model(), make_model()
    start = weights(reference)
    optimizer = muon(model, **options)
    loop(model, optimizer)
    loop(reference, TorchOptimizers(reference))
    assert_same_training(model, reference, start)
    return model, optimizer


def plain_loop(model, optimizer):
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_plain_loop_equals_torch(muon):
    _, optimizer = run_both(muon, plain_loop)
    assert optimizer.last_committed_step == STEPS
    assert optimizer.last_outcome.matrices == 2


def test_zeroing_in_place_equals_torch(muon):
    def loop(model, optimizer):
        for step in range(STEPS):
            optimizer.zero_grad(set_to_none=False)
            loss_of(model, step).backward()
            optimizer.step()

    run_both(muon, loop)


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
        run_both(muon, loop)


def test_accumulation_under_no_sync_signals_early_and_equals_torch(muon):
    model, reference = make_model(), make_model()
    start = weights(reference)
    optimizer, torch_optimizers = muon(model), TorchOptimizers(reference)
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


def clip_without_a_trace(model, step):
    for p in model.parameters():
        p.grad.data.mul_(0.25)


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


def test_clipping_that_starts_late_withdraws_and_equals_torch(muon):
    def loop(model, optimizer):
        for step in range(STEPS + 2):
            loss_of(model, step).backward()
            if step >= 5:
                clip_by_torch(model, step)
            optimizer.step()
            optimizer.zero_grad()

    with pytest.warns(UserWarning, match="withdrawn"):
        run_both(muon, loop)


def test_max_grad_norm_equals_clipping_by_torch(muon):
    model, reference = make_model(), make_model()
    start = weights(reference)
    optimizer = muon(model, max_grad_norm=0.1)
    others = TorchOptimizers(reference)
    for step in range(STEPS):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(reference, step).backward()
        norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
        others.step()
        others.zero_grad()
        if step == 0:
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
        torch.optim.lr_scheduler.OneCycleLR(
            part, lr, total_steps=STEPS + 1, cycle_momentum=isinstance(part, torch.optim.AdamW)
        )
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


def test_weights_changed_by_hand_are_refused_by_name_until_they_are_pushed(muon):
    model = make_model()
    optimizer = muon(model)
    loss_of(model, 0).backward()
    with torch.no_grad():
        model.up.weight.mul_(2.0)
    with pytest.raises(dmuond.Error, match=r"'up.weight'.*push_parameters"):
        optimizer.step()
    changed = model.up.weight.detach().clone()
    optimizer.push_parameters()
    assert torch.equal(model.up.weight, changed)
    optimizer.step()
    assert optimizer.last_committed_step == 1


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
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        warnings.filterwarnings("ignore", message="GradScaler is going to stop passing")
        warnings.filterwarnings("ignore", message="dmuond: the gradient of .* was changed")
        loop(model, optimizer)
    loop(reference, TorchOptimizers(reference))
    assert_same_training(model, reference, start)
    assert optimizer.last_committed_step == STEPS + 2
    assert scales[0] == 1024.0  # halved once by the overflow, doubled once by growth


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


def test_sparse_gradients_are_refused_by_name(muon):
    model = make_model()
    model.embed = nn.Embedding(11, 24, sparse=True)
    muon(model)
    with pytest.raises(dmuond.InvalidArgumentError, match=r"embed.weight.*sparse=False"):
        loss_of(model, 0).backward()


def test_a_compiled_model_equals_torch(muon):
    def loop(model, optimizer):
        compiled = torch.compile(model, backend="aot_eager")
        for step in range(STEPS):
            loss_of(compiled, step).backward()
            optimizer.step()
            optimizer.zero_grad()

    run_both(muon, loop)


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
