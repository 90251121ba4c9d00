"""The core client with arenas on GPUs: real daemons, lanes and trainers on the fake driver.

What befalls trainers, lanes and daemons there, tests/faults has.
"""

import contextlib
import ctypes
import subprocess
import sys
import threading

import core_trainer
import gpus
import needs
import numpy as np
import pytest
from core_trainer import Job, Tensor, assemble, whole
from gpu_machine import Machine
from trainers import Ranks, TrainerFailedError

needs.fake_gpus()
needs.package("cuda.bindings")

TENSORS = (
    Tensor("a", (48, 32), reduce_factor=0.5),
    Tensor("b", (32, 48), reduce_factor=0.5),
    Tensor("half", (32, 32), reduce_factor=0.5, dtype="bfloat16"),
    Tensor("bias", (100,), route="adamw", reduce_factor=0.5),
)


def job(world: int = 1, **more) -> Job:
    held = tuple(whole(tensor) for tensor in TENSORS)
    return Job(TENSORS, (held,) * world, bucket_bytes=4096, **more)


@pytest.fixture
def machine(tmp_path, monkeypatch, daemons):
    with Ranks() as ranks:
        yield Machine(tmp_path, monkeypatch, daemons, ranks)


def weights_on_gpus(machine, world: int, options=None, **more) -> dict[str, np.ndarray]:
    """options: GpuTrainer's. more: of the job."""
    results = machine.run(gpus.train, job(world, **more), options or {}, world=world)
    return assemble(job(world, **more), results)


def assert_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]):
    for name, values in expected.items():
        assert np.array_equal(found[name], values), name


@pytest.mark.parametrize("world", [1, 2])
def test_weights_have_the_bits_of_the_cpu_in_arenas_of_both_kinds(world, machine, daemons):
    machine.start_daemon(world, devices=f"cpu:{world}")
    machine.compute_as_the_lanes()
    results = machine.run(core_trainer.train, job(world), world=world)
    machine.start_daemon(world)
    # Poison: weights that are read too early are NaN.
    for options in ({}, {"own": True}, {"default_stream": True}, {"poison": True}):
        assert_same(weights_on_gpus(machine, world, options), assemble(job(world), results))


def test_no_call_of_a_step_waits_for_the_device_or_allocates(machine):
    machine.start_daemon(2)
    for calls in machine.run(gpus.calls_in_steps, job(2, steps=8), str(machine.folder), world=2):
        assert calls == []


def test_absent_gradients_and_clipping_are_as_on_the_host(machine):
    machine.start_daemon(devices="cpu:1")
    more = {"absent": frozenset({(2, 0, "b"), (3, 0, "bias")}), "max_grad_norm": 0.5}
    machine.compute_as_the_lanes()
    results = machine.run_one(core_trainer.train, job(**more))
    machine.start_daemon()
    assert_same(weights_on_gpus(machine, 1, **more), assemble(job(**more), [results]))


def test_a_stream_that_is_captured_is_refused_and_nothing_has_changed(machine):
    machine.start_daemon()
    refusals, weights = machine.run_one(gpus.train_beside_captures, job())
    assert len(refusals) == 3
    for reason, text in refusals:
        assert reason == "SESSION_STATE"
        assert "captured into a CUDA graph" in text and "after the graph's launch" in text
    assert_same(assemble(job(), [weights]), weights_on_gpus(machine, 1))


def test_a_lane_that_dies_in_a_step_has_its_buckets_signalled_again(machine):
    machine.start_daemon(2)
    expected = weights_on_gpus(machine, 2)
    pid = machine.daemon.process.pid
    results = machine.run(gpus.train_while_lanes_die, job(2), pid, world=2)
    assert_same(assemble(job(2), results), expected)


@pytest.mark.parametrize("own", [False, True])
def test_a_replacement_of_a_killed_trainer_goes_on(machine, own):
    machine.start_daemon()
    expected = weights_on_gpus(machine, 1)
    seen = machine.folder / "seen.npz"
    with pytest.raises(TrainerFailedError, match="ended without a result"):
        machine.run(gpus.train_and_be_killed, job(), own, 2, str(seen))
    memory, found, results = machine.run_one(gpus.replace_and_train, job(), own)
    left = np.load(seen)
    assert all(np.array_equal(left[name], found[name]) for name in found)
    if not own:
        assert list(left["memory"]) == memory, "it has mapped other arenas"
    assert_same(assemble(job(), [results]), expected)


def test_poison_ends_the_wait_of_a_stream_and_the_next_call_says_so(machine):
    machine.start_daemon()
    text = machine.run_one(
        gpus.lose_the_daemon_while_a_stream_waits, job(), machine.daemon.process.pid
    )
    assert "the weights are undefined" in text


def test_a_trainer_whose_device_fails_hears_so_and_is_replaced(machine):
    machine.start_daemon()
    seen = machine.folder / "seen"
    with pytest.raises(TrainerFailedError, match="ended without a result"):
        machine.run(gpus.fail_while_a_step_waits, job(), str(seen))
    assert seen.read_text().startswith("CUDA_FAILED: cuStreamQuery failed: CUDA_ERROR_ILLEGAL")
    _, _, weights = machine.run_one(gpus.replace_and_train, job(), False)
    assert_same(assemble(job(), [weights]), weights_on_gpus(machine, 1))


def test_a_client_waits_for_an_mps_server_that_recovers(machine):
    machine.set({"FAKE_CUDA_NOT_READY": "3"})
    machine.start_daemon()
    machine.run_one(gpus.open_and_close, "cuda:0")


@pytest.mark.parametrize("own", [False, True])
def test_a_daemons_successor_takes_its_place_at_the_same_addresses(machine, own):
    machine.start_daemon(1, f"--snapshot_dir={machine.folder / 'snapshots'}")
    expected = weights_on_gpus(machine, 1, steps=5)
    daemon = machine.daemon

    def start_again():
        daemon.process.wait()
        daemon.start()

    keeper = threading.Thread(target=start_again)
    keeper.start()
    more = job(steps=5, name="more")
    same, results = machine.run_one(gpus.outlive_the_daemon, more, daemon.process.pid, own)
    keeper.join()
    assert same
    assert_same(assemble(more, [results]), expected)


def test_a_snapshot_that_is_loaded_ends_waits_is_heard_of_and_its_weights_are_there(machine):
    machine.start_daemon(1, f"--snapshot_dir={machine.folder / 'snapshots'}")
    expected = weights_on_gpus(machine, 1, steps=5)
    back, after, again, results = machine.run_one(gpus.go_back, job(steps=5, name="back"))
    assert back == (3, b"three", False)
    assert all(np.array_equal(*pair) for pair in zip(after, again, strict=True))
    assert_same(assemble(job(steps=5), [results]), expected)


def test_arenas_stay_mapped_until_the_last_array_over_them_is_gone(machine):
    machine.start_daemon()
    mapped, weights_after_close = machine.run_one(gpus.hold_arrays, job())
    assert mapped == {"in the session": 2, "closed, a slot held": 1, "no slot held": 0}
    assert np.isfinite(weights_after_close).all()


def test_a_session_closes_when_no_stream_waits_for_it_any_more(machine):
    machine.start_daemon()
    assert machine.run_one(gpus.close_before_a_stream_has_come_so_far, job())


def test_no_weight_is_written_before_the_stream_of_the_step_has_come_so_far(machine):
    machine.set({"FAKE_CUDA_MPS": "1"})  # else nothing is summed before, and nothing decided
    machine.start_daemon()
    seen = machine.run_one(gpus.read_weights_behind_a_step, job())
    published, before, meanwhile, after = seen
    assert not any(published)
    for old, still, new in zip(before, meanwhile, after, strict=True):
        assert np.array_equal(old, still) and not np.array_equal(old, new)


def test_a_session_that_is_dropped_ends_waits_and_keeps_pages_that_streams_use(machine):
    machine.start_daemon()
    assert machine.run_one(gpus.drop_sessions_that_streams_use, job()) == [1, 0]


def test_a_forked_child_leaves_the_device_alone(machine):
    machine.start_daemon()
    code, results = machine.run_one(gpus.fork_in_a_session, job())
    assert code == 0
    assert_same(assemble(job(), [results]), weights_on_gpus(machine, 1))


def refusal(machine, function, *arguments) -> tuple[str, str, str]:
    """Class, reason and text of the error."""
    return machine.run_one(gpus.refused, function, *arguments)


def test_memory_that_cannot_be_an_arena_is_refused_with_what_to_set(machine):
    machine.start_daemon()
    expected = {
        "of_a_pool": ("FailedPreconditionError", "without expandable_segments:True and backend:"),
        "of_two_pieces": ("FailedPreconditionError", "and PYTORCH_ALLOC_CONF without expandable_"),
        "of_another_device": ("InvalidArgumentError", "memory of device cuda:1"),
        "beyond_its_end": ("InvalidArgumentError", "within their allocation"),
        "unaligned": ("InvalidArgumentError", "multiple of 16"),
        "of_the_host": ("InvalidArgumentError", "no memory of a GPU"),
        "with_strides": ("InvalidArgumentError", "not in one piece"),
        "no_memory": ("InvalidArgumentError", "no __cuda_array_interface__"),
        "freed": ("InvalidArgumentError", "cannot be opened"),
    }
    for kind, (name, text) in expected.items():
        found = refusal(machine, gpus.attach_memory, kind)
        assert found[:2] == (name, "ARENA_INVALID"), found
        assert text in found[2] and "arena 2" in found[2], found


def test_devices_and_streams_that_cannot_be_are_refused(machine):
    machine.start_daemon()
    for device, name, text in [
        ("cuda:2", "InvalidArgumentError", "this process sees 2"),
        ("cuda", "InvalidArgumentError", 'neither "cpu" nor "cuda:0"'),
        ("cpu", "InvalidArgumentError", "no GPU"),  # by the daemon, whose lanes are on one
    ]:
        found = refusal(machine, gpus.open_session, device)
        assert found[0] == name and text in found[2], found
    found = refusal(machine, gpus.signal_with, "not a handle", "cuda:0")
    assert found[0] == "InvalidArgumentError" and "stream.cuda_stream" in found[2], found
    machine.start_daemon(devices="cpu:1")
    found = refusal(machine, gpus.open_session, "cuda:0")
    assert found[1] == "DEVICE_UNKNOWN", found


def test_a_session_on_the_host_refuses_streams_and_memory(address):
    for function, arguments, text in [
        (gpus.signal_with, (0, "cpu"), "Session(device="),
        (gpus.attach_memory, ("no_memory", "cpu"), "number of bytes"),
    ]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DMUOND_ADDRESS", address)
            found = gpus.refused(0, 1, function, *arguments)
        assert found[1] in ("SESSION_STATE", "ARENA_INVALID") and text in found[2], found


def run_python(code: str, environment=None) -> str:
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    return done.stdout + done.stderr


def test_cuda_is_imported_for_a_gpu_only_and_named_where_it_is_missing():
    look = "print(any(name == 'cuda' or name.startswith('cuda.') for name in sys.modules))"
    assert run_python(f"import sys, dmuond; {look}") == "False\n"
    for change, why in [
        ("sys.modules['cuda.bindings'] = None", "is not installed"),
        ("import cuda.bindings; cuda.bindings.__version__ = '12.8.0'", "12.8.0 is too old"),
    ]:
        use = "import dmuond; dmuond.Session('/tmp/none', device='cuda:0')"
        text = run_python(f"import sys; {change}; {use}")
        assert why in text and "pip install 'cuda-bindings>=12.9'" in text


def test_a_machine_without_a_driver_says_so():
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcuda.so.1")
        pytest.skip("there is a driver")
    text = run_python("import dmuond; dmuond.Session('/tmp/none', device='cuda:0')")
    assert "the CUDA driver cannot be used" in text.splitlines()[-1]


def test_no_event_holds_up_a_stream_while_weights_are_awaited(machine):
    machine.start_daemon()
    assert machine.run_one(gpus.store_while_weights_are_awaited) == (0, 0, 5)
