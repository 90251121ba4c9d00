"""dmuond.torch with parameters on GPUs of the fake driver: the bits of the CPU, in both arenas."""

import itertools

import fsdp_trainer
import golden_trainer
import needs
import pytest
import test_golden_bits as golden
import test_torch_ranks as replicated
import torch
import torch_gpu_trainer
from gpu_machine import Machine
from habits import STEPS
from trainers import Ranks, TrainerFailedError

needs.fake_gpus()
needs.package("cuda.bindings")

NODES, LANES = 2, 2
WORLD = NODES * LANES
WORLDS = pytest.mark.parametrize("world", [1, WORLD])
KINDS = pytest.mark.parametrize("own", [False, True], ids=["daemon", "trainer"])


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """A folder of the driver, and trainers that import torch once."""
    with Ranks() as ranks:
        yield tmp_path_factory.mktemp("gpus"), ranks


class TorchMachine(Machine):
    """Runs a function with each rank's parameters on the CPU, or on a GPU of its own."""

    def start(self, world: int, *flags: str, device: str = "cuda"):
        nodes = NODES if world > 1 else 1
        lanes = world // nodes
        self.start_daemon(lanes, *flags, devices=f"{device}:{lanes}", nodes=nodes)

    def on_the_cpu(self, world: int, runs, *flags: str):
        """Lanes on GPUs that start afterwards compute the same bits."""
        self.start(world, *flags, device="cpu")
        self.compute_as_the_lanes()
        return [self.run(torch_gpu_trainer.on_cpu, *run, world=world) for run in runs]

    def on_gpus(self, world: int, run, own: bool, answers_late: int = 0):
        """Results, and looks at bytes, by rank."""
        on_gpu = torch_gpu_trainer.on_gpu
        return zip(*self.run(on_gpu, *run, own, answers_late, world=world), strict=True)


@pytest.fixture
def machine(processes, monkeypatch, daemons):
    folder, ranks = processes
    monkeypatch.setenv("DMUOND_POISON", "1")  # weights that are read too early are NaN
    return TorchMachine(folder, monkeypatch, daemons, ranks, devices=WORLD)


def assert_same(found, expected):
    for result, wanted in zip(found, expected, strict=True):
        for name, value in wanted.items():
            assert torch.equal(result[name], value), name


@WORLDS
def test_replicas_have_the_bits_of_the_cpu(machine, world):
    runs = [
        (replicated.train, (loop,), options)
        for loop, options in [
            (replicated.plain, {}),
            (replicated.plain, {"overlap_forward": True, "bucket_bytes": 1}),
            (replicated.plain, {"max_grad_norm": 0.1}),
            (replicated.accumulating, {}),
            # What was signalled is withdrawn.
            (replicated.clipping_late_on_one_rank, {"early_buckets": True}),
        ]
    ]
    expected = machine.on_the_cpu(world, runs)
    machine.start(world)
    for own in (False, True):
        for run, wanted in zip(runs, expected, strict=True):
            found, looks = machine.on_gpus(world, run, own)
            assert_same(found, wanted)
            assert set(looks) == {0}, "nothing but FSDP2 has all bytes compared"


@WORLDS
def test_shards_have_the_bits_of_the_cpu(machine, world, tmp_path):
    early = {"early_buckets": True}
    runs = [
        (fsdp_trainer.train, (fsdp_trainer.plain,), {}),
        (fsdp_trainer.train, (fsdp_trainer.accumulating,), {}),
        (fsdp_trainer.train, (fsdp_trainer.clipping_late,), {}),
        (fsdp_trainer.train, (fsdp_trainer.signalling_early,), early),
        (fsdp_trainer.train, (fsdp_trainer.clipping_what_was_signalled,), early),  # and withdrawn
        (fsdp_trainer.scaled, (), {}),
    ]
    numbers = itertools.count()

    def in_a_folder(run):
        function, arguments, options = run
        return function, (str(tmp_path / str(next(numbers))), *arguments), options

    expected = machine.on_the_cpu(world, map(in_a_folder, runs))
    machine.start(world)
    for own in (False, True):
        for run, wanted in zip(runs, expected, strict=True):
            found, looks = machine.on_gpus(world, in_a_folder(run), own)
            if run[0] is fsdp_trainer.scaled:
                assert [scales for _, scales in found] == [scales for _, scales in wanted]
                found, wanted = [given for given, _ in found], [given for given, _ in wanted]
            assert_same(found, wanted)
            assert max(looks) <= STEPS, "all bytes of a step are compared in one go"


@pytest.mark.parametrize(
    ("world", "jobs", "own"),
    [
        (1, ("muon in bf16", "adamw in fp16", "views, dmuon", "scaled, clipped"), False),
        (1, ("clipped, not muon", "absent", "loaded, sum to ema", "frozen"), True),
        (WORLD, ("mean in bf16, clipped", "absent", "data_parallel_size", "stages"), False),
        (WORLD, ("shards", "shards and replicas of them", "shards of tensor parallel"), True),
    ],
)
def test_recorded_bits_of_the_cpu_are_those_of_gpus(machine, tmp_path, world, jobs, own):
    machine.set(golden.ENVIRONMENT)
    machine.start(world)
    run = golden_trainer.run, (str(tmp_path / "group"), list(jobs)), {}
    found, _ = machine.on_gpus(world, run, own)
    golden.check(golden_trainer.of_all(found))


def test_streams_of_shards_wait_in_the_place_of_the_host(machine, tmp_path):
    machine.set({"FAKE_CUDA_MPS": "0"})
    machine.start(WORLD)
    found = []
    for number, waits in enumerate((False, True)):
        run = torch_gpu_trainer.train_shards, (str(tmp_path / str(number)), waits), {}
        results, _ = machine.on_gpus(WORLD, run, own=False)
        trained, waited = zip(*results, strict=True)
        assert waited == (STEPS if waits else 0,) * WORLD
        found.append(trained)
    assert_same(found[1], found[0])


def test_a_late_look_at_bytes_only_puts_off_early_signals(machine):
    run = replicated_with()
    expected = machine.on_the_cpu(1, [run])
    machine.start(1)
    for late in (1, 3, 100):
        found, _ = machine.on_gpus(1, run, False, answers_late=late)
        assert_same(found, expected[0])


def test_a_bucket_is_signalled_when_every_stream_of_its_gradients_has_come_so_far(machine):
    expected = machine.on_the_cpu(1, [replicated_with()])
    machine.start(1)
    two_streams = torch_gpu_trainer.make_gradients_in_two_streams
    signalled, done_early, found = machine.run_one(two_streams, STEPS)
    assert signalled and not done_early
    assert_same([found], expected[0])


@KINDS
def test_weights_that_are_changed_by_hand_are_pushed_or_named(machine, own):
    run = torch_gpu_trainer.push_by_hand, (), {}
    expected = machine.on_the_cpu(1, [run])
    machine.start(1)
    found, _ = machine.on_gpus(1, run, own)
    assert_same(found, expected[0])
    (text,), _ = machine.on_gpus(1, (torch_gpu_trainer.change_by_hand, (), {}), own)
    assert "'up.weight' were changed by other means" in text


@KINDS
def test_what_was_changed_without_a_trace_is_named_as_soon_as_the_device_has_looked(
    machine, own, tmp_path
):
    machine.start(1)
    for late, weights_at, gradients_at in ((0, 5, 15), (1, 6, 16)):
        run = torch_gpu_trainer.change_without_a_trace, (), {}
        (told,), _ = machine.on_gpus(1, run, own, answers_late=late)
        (weights_told, of_weights), (gradients_told, of_gradients) = told
        assert (weights_told, gradients_told) == (weights_at, gradients_at)
        assert "the weights of 'up.weight' were changed by other means" in of_weights
        assert ("before step 5, which has undone that: change them again" in of_weights) == late
        assert "the gradient of 'up.weight' was changed after it had been" in of_gradients
        assert ("in step 15 already, which may have used what" in of_gradients) == late
    run = fsdp_trainer.changed_by_hand, (str(tmp_path / "group"),), {}
    ((words, committed),), _ = machine.on_gpus(1, run, own)
    assert "'up.weight'" in words and committed == 2


def test_a_nan_that_no_lane_reads_skips_the_step_on_all_ranks(machine, tmp_path):
    machine.start(WORLD)
    run = torch_gpu_trainer.overflow_in_a_replica, (str(tmp_path / "group"),), {}
    told, _ = machine.on_gpus(WORLD, run, own=False)
    why = f'the gradient of parameter "norm.weight" is not finite on rank {WORLD - 1}'
    assert list(told) == [[(3, why)]] * WORLD


def test_a_hook_in_a_stream_that_is_captured_says_which_option_captures_it(machine):
    machine.start(1)
    ((early, reason, text),) = machine.run_one(torch_gpu_trainer.capture_a_backward_pass)
    assert early and reason == "SESSION_STATE"
    assert "'embed.weight'" in text and "captured into a CUDA graph" in text
    assert "make the optimizer with early_buckets=False" in text


@KINDS
def test_a_snapshot_that_is_loaded_brings_its_weights(machine, own):
    plain = replicated_with()
    expected = machine.on_the_cpu(1, [plain])
    machine.start(1, f"--snapshot_dir={machine.folder / f'snapshots-{own}'}")
    found, _ = machine.on_gpus(1, (torch_gpu_trainer.load_a_snapshot, (), {}), own)
    assert_same(found, expected[0])


@KINDS
def test_a_killed_trainers_replacement_goes_on(machine, own, tmp_path):
    plain = replicated_with()
    expected = machine.on_the_cpu(1, [plain])
    machine.start(1)
    seen = str(tmp_path / "seen")
    with pytest.raises(TrainerFailedError, match="ended without a result"):
        machine.run(torch_gpu_trainer.be_killed, own, seen)
    arenas, found, trained = machine.run_one(torch_gpu_trainer.go_on, own, STEPS)
    arenas_before, left = torch.load(seen)
    assert own or arenas == arenas_before, "it has mapped other memory"
    assert_same([found, trained], [left, expected[0][0]])


def test_a_lost_daemon_ends_what_streams_wait_for_and_the_next_step_says_so(machine):
    machine.start(1)
    pid = machine.daemon.process.pid
    assert "the weights are undefined" in machine.run_one(torch_gpu_trainer.lose_the_daemon, pid)


def test_arenas_of_the_trainers_are_for_gpus(machine):
    machine.start(1, device="cpu")
    with pytest.raises(TrainerFailedError, match='arenas="trainer" is for parameters on a GPU'):
        machine.run(torch_gpu_trainer.on_cpu, *replicated_with(arenas="trainer"))
    with pytest.raises(TrainerFailedError, match="neither 'daemon' nor 'trainer'"):
        machine.run(torch_gpu_trainer.on_cpu, *replicated_with(arenas="mine"))


def replicated_with(**options):
    return replicated.train, (replicated.plain,), options
