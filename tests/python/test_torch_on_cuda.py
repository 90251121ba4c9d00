"""dmuond.torch on GPUs as torch has them, beside torch's own optimizers on the same tensors.

Needs GPUs, torch built for them, and daemons built for CUDA: `gpu-join torch` runs it on a machine
that has them. test_torch_on_gpus.py asks the fake driver the same.
"""

import os

import fsdp_trainer
import pytest
import test_torch_ranks as replicated
import torch
import torch_gpu_trainer
from habits import STEPS, loss_of, make_model, make_optimizer, torch_in_fp32, train_torch
from habits import weights as weights_of
from test_fsdp2 import clip, clip_late

if not torch.cuda.is_available():
    pytest.skip("no GPU that torch can use", allow_module_level=True)

GPUS = torch.cuda.device_count()
REPLICAS = max(2, GPUS)  # of which two share a GPU, where there is one
TRAINER_ENVIRONMENT = {"DMUOND_POISON": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
ARENAS = ("daemon", "trainer")
TOLERANCE = 1e-3  # of what training changes: products of a GPU are another library's


def on_its_gpu(rank, world, function, arguments, options):
    """What the function returns, on the CPU. What it makes is on the rank's GPU."""
    device = torch.device("cuda", rank % GPUS)
    torch.cuda.set_device(device)
    torch.set_default_device(device)
    torch.use_deterministic_algorithms(True)
    return _on_the_cpu(function(rank, world, *arguments, **options))


def _on_the_cpu(result):
    if isinstance(result, torch.Tensor):
        return result.cpu()
    if isinstance(result, dict):
        return {name: _on_the_cpu(value) for name, value in result.items()}
    if isinstance(result, list | tuple):
        return type(result)(_on_the_cpu(value) for value in result)
    return result


def in_this_process(rank, world, function, *arguments):
    """What torch's optimizers make of it."""
    with torch_in_fp32():
        return function(*arguments)


class Machine:
    def __init__(self, daemons, ranks):
        self._daemons, self._ranks = daemons, ranks
        self._addresses: list[str] = []

    def start(self, *flags: str):
        """One daemon with a lane on each GPU."""
        devices = f"--devices=cuda:{GPUS}"
        self._addresses = self._daemons.start(1, GPUS, devices, *flags)

    def run(self, world: int, function, *arguments, **options):
        return self._ranks.run(
            on_its_gpu,
            world,
            self._addresses or ["unix:/nowhere"],
            function,
            arguments,
            options,
            environment=TRAINER_ENVIRONMENT,
        )

    def torchs(self, function, *arguments):
        return self.run(1, in_this_process, function, *arguments)[0]


@pytest.fixture
def machine(daemons, ranks):
    return Machine(daemons, ranks)


def difference(found, want):
    """Of what training has changed, relative to the change: the largest of all parameters."""
    start = weights_of(make_model())
    return max(
        float((found[name] - want[name]).norm() / (want[name] - start[name]).norm())
        for name in want
    )


def assert_same(found, expected):
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def compare(machine, world, runs, want, record):
    """Each run has the bits of the first, on every rank; that one is what torch has trained."""
    first = None
    for function, arguments, options in runs:
        for arenas in ARENAS:
            results = machine.run(world, function, *arguments(), arenas=arenas, **options)
            first = first or results[0]
            for result in results:
                assert_same(result, first)
    assert (found := difference(first, want)) <= TOLERANCE
    record("found", f"{found:.1e} from torch's, {len(ARENAS) * len(runs)} runs with equal bits")


def replicas(loop, **options):
    return replicated.train, lambda: (loop,), options


def test_replicas_train_as_torchs_optimizers(machine, record_property):
    want = machine.torchs(train_torch, REPLICAS)
    machine.start()
    bucket = {"bucket_bytes": 1}
    overlapped = replicas(replicated.plain, overlap_forward=True, **bucket)
    runs = [replicas(replicated.plain), replicas(replicated.plain, **bucket), overlapped]
    compare(machine, REPLICAS, runs, want, record_property)


def test_replicas_that_clip_jointly(machine, record_property):
    want = machine.torchs(train_torch, REPLICAS, STEPS, clip)
    machine.start()
    runs = [
        replicas(replicated.plain, max_grad_norm=0.1),
        replicas(replicated.plain, max_grad_norm=0.1, overlap_forward=True, bucket_bytes=1),
    ]
    compare(machine, REPLICAS, runs, want, record_property)


def test_gradients_of_a_late_stream_are_waited_for(machine, record_property):
    want = machine.torchs(train_torch, 1)
    machine.start()
    runs = [
        (head_in_a_late_stream, tuple, {}),
        (head_in_a_late_stream, tuple, {"overlap_forward": True, "bucket_bytes": 1}),
    ]
    compare(machine, 1, runs, want, record_property)


def head_in_a_late_stream(rank, world, **options):
    """The head computes, and has its gradient made, in a stream that is milliseconds late."""
    model, side = make_model(), torch.cuda.Stream()
    plain = model.head.forward

    def late(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            logits = plain(x)
        torch.cuda.current_stream().wait_stream(side)
        return logits

    def delay(gradient):
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
        return gradient

    model.head.forward = late
    model.head.weight.register_hook(delay)
    optimizer = make_optimizer(model, **options)
    for step in range(STEPS):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return weights_of(model)


@pytest.mark.parametrize("arenas", ARENAS)
def test_weights_that_are_changed_by_hand_are_pushed_or_named(machine, arenas):
    machine.start()
    machine.run(1, torch_gpu_trainer.push_by_hand, arenas=arenas)
    (text,) = machine.run(1, torch_gpu_trainer.change_by_hand, arenas=arenas)
    assert "'up.weight' were changed by other means" in text


@pytest.mark.parametrize("arenas", ARENAS)
def test_what_was_changed_without_a_trace_is_named(machine, arenas, record_property):
    machine.start()
    (told,) = machine.run(1, torch_gpu_trainer.change_without_a_trace, arenas=arenas)
    (weights_told, of_weights), (gradients_told, of_gradients) = told
    assert weights_told in (5, 6) and gradients_told in (15, 16)
    assert "the weights of 'up.weight' were changed by other means" in of_weights
    assert "the gradient of 'up.weight' was changed after it had been" in of_gradients
    record_property(
        "found", f"weights of step 5 in {weights_told}, gradients of 15 in {gradients_told}"
    )


@pytest.mark.parametrize("arenas", ARENAS)
def test_a_nan_that_no_lane_reads_skips_the_step_on_all_ranks(machine, arenas, tmp_path):
    machine.start()
    overflow = torch_gpu_trainer.overflow_in_a_replica
    told = machine.run(REPLICAS, overflow, str(tmp_path / "group"), arenas=arenas)
    why = f'the gradient of parameter "norm.weight" is not finite on rank {REPLICAS - 1}'
    assert told == [[(3, why)]] * REPLICAS


@pytest.mark.parametrize("arenas", ARENAS)
def test_clipping_by_hand_is_told_once_with_the_option_to_use(machine, arenas):
    machine.start()
    for told in machine.run(REPLICAS, replicated.clipping_by_hand, arenas=arenas):
        assert len(told) == 1 and "say max_grad_norm=0.1 to the optimizer instead" in told[0]


@pytest.mark.parametrize("arenas", ARENAS)
def test_a_snapshot_that_is_loaded_brings_its_weights(machine, arenas, tmp_path):
    machine.start(f"--snapshot_dir={tmp_path}")
    (undisturbed,) = machine.run(1, replicated.train, replicated.plain, arenas=arenas)
    (found,) = machine.run(1, torch_gpu_trainer.load_a_snapshot, arenas=arenas)
    assert_same(found, undisturbed)


def sharded(tmp_path, loop, **options):
    return fsdp_trainer.train, lambda: (str(tmp_path / os.urandom(4).hex()), loop), options


def test_shards_train_as_torchs_optimizers(machine, tmp_path, record_property):
    want = machine.torchs(train_torch, GPUS)
    machine.start()
    runs = [
        sharded(tmp_path, fsdp_trainer.plain),
        sharded(tmp_path, fsdp_trainer.zeroing_in_place),
        sharded(tmp_path, fsdp_trainer.signalling_early, early_buckets=True),
    ]
    compare(machine, GPUS, runs, want, record_property)


def test_shards_that_clip_by_hand(machine, tmp_path, record_property):
    want = machine.torchs(train_torch, GPUS, STEPS, clip_late)
    machine.start()
    late = fsdp_trainer.clipping_what_was_signalled
    runs = [
        sharded(tmp_path, fsdp_trainer.clipping_late),
        sharded(tmp_path, late, early_buckets=True),
    ]
    compare(machine, GPUS, runs, want, record_property)


@pytest.mark.parametrize("arenas", ARENAS)
def test_shards_in_mixed_precision_and_with_a_scaler(machine, tmp_path, arenas):
    machine.start()
    folder = str(tmp_path / "group")
    losses = machine.run(GPUS, fsdp_trainer.in_mixed_precision, folder, arenas=arenas)[0]
    assert losses[-1] < losses[0]
    machine.run(GPUS, fsdp_trainer.scaled, str(tmp_path / "scaled"), arenas=arenas)
