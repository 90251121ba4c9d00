"""Machines with GPUs of the fake driver (tests/fake_cuda/driver/fake_cuda.h), and trainers there.

The driver is found by LD_LIBRARY_PATH, which a process has from its start: what uses a GPU runs in
processes that are started in the machine's environment. Most functions here are for those, with
rank and world first, as trainers.Ranks calls them.
"""

import contextlib
import ctypes
import gc
import mmap
import os
import signal
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import dmuond
import numpy as np
from core_trainer import Job, Tensor, Trainer, messages, run, whole
from daemons import lane_pids, program
from dmuond import arenas, atomics, types


def environment(folder: Path, devices: int) -> dict[str, str]:
    """Of every process of the machine. `folder`: the driver writes its logs there."""
    return {
        "LD_LIBRARY_PATH": str(program("dmuond").parents[1] / "fake_cuda"),
        "FAKE_CUDA_DEVICES": str(devices),
        "FAKE_CUDA_MACHINE": str(zlib.crc32(str(folder).encode()) >> 1),
        "FAKE_CUDA_NO_CONTEXT": "dmuond",
        "FAKE_CUDA_LOG": str(folder),
    }


# --- the driver, as trainers use it ---


def use_device(ordinal: int):
    """The primary context is the calling thread's; returns the driver."""
    from cuda.bindings import driver

    must(driver.cuInit(0))
    driver.cuCtxSetCurrent(must(driver.cuDevicePrimaryCtxRetain(ordinal)))
    return driver


def must(answer: tuple):
    """What a call of the driver has answered."""
    result, *rest = answer
    assert int(result) == 0, result
    return rest[0] if rest else None


def make_stream(ordinal: int) -> int:
    """A handle of a stream that the default stream does not wait for."""
    driver = use_device(ordinal)
    return int(must(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING)))


def hold_up(stream: int) -> Callable[[], None]:
    """The stream stops here, until what is returned is called."""
    driver = use_device(0)
    address = int(must(driver.cuMemHostAlloc(4096, 0)))
    word = ctypes.c_uint64.from_address(address)
    word.value = 0
    at_least = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
    must(driver.cuStreamWaitValue64(stream, address, 1, at_least))

    def go_on():
        word.value = 1

    return go_on


# Stores a word to an address. The fake driver knows the kernel by its name.
_STORE = b"""
.version 7.0
.target sm_70
.address_size 64
.visible .entry contract_store(.param .u64 to, .param .u64 value) {
  .reg .b64 %d<3>;
  ld.param.u64 %d1, [to];
  ld.param.u64 %d2, [value];
  st.volatile.u64 [%d1], %d2;
  ret;
}
"""


def store_nowhere(stream: int):
    """A kernel makes an illegal access when the stream has come so far."""
    driver = use_device(0)
    module = must(driver.cuModuleLoadData(_STORE))
    store = must(driver.cuModuleGetFunction(module, b"contract_store"))
    arguments = (8, 1), (ctypes.c_uint64, ctypes.c_uint64)
    must(driver.cuLaunchKernel(store, 1, 1, 1, 1, 1, 1, 0, stream, arguments, 0))


def is_done(stream: int) -> bool:
    return int(use_device(0).cuStreamQuery(stream)[0]) == 0


class Memory:
    """Memory of this process, as other libraries have it."""

    def __init__(self, address: int, size_bytes: int, strides=None):
        self.address, self.size_bytes, self.strides = int(address), size_bytes, strides

    @property
    def __cuda_array_interface__(self):
        return {
            "version": 3,
            "shape": (self.size_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": self.strides,
        }


def own_memory(size_bytes: int, ordinal: int = 0) -> Memory:
    return Memory(must(use_device(ordinal).cuMemAlloc(size_bytes)), size_bytes)


def identity_of(address: int) -> int:
    """Of memory: equal in all processes that have mapped it, on the fake driver."""
    driver = use_device(0)
    attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
    return int(must(driver.cuPointerGetAttribute(attribute, address)))


def mapped_memory() -> int:
    """How many allocations of a device this process has mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:fake_cuda:")


def calls_of(folder: Path, pid: int) -> list[str]:
    """What a process has called that allocates, gives back, or waits for a device."""
    path = folder / "calls.log"
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split(" ", 2)[2] for line in lines if line.split(" ")[1] == f"pid={pid}"]


# --- trainers ---


class GpuTrainer(Trainer):
    """On a GPU: its host never waits for the device in a step."""

    trainer_state = b""

    def __init__(
        self,
        rank: int,
        world: int,
        job: Job,
        *,
        own: bool = False,
        default_stream: bool = False,
        **session,
    ):
        made = make_stream(rank)
        self.own, self.stream = own, 0 if default_stream else made
        super().__init__(rank, world, job, device=f"cuda:{rank}", **session)

    def memory(self, size_bytes: int):
        return own_memory(size_bytes, self.rank) if self.own else size_bytes

    def place(self, arena, offset_bytes: int, shape, dtype):
        return arena.slot(offset_bytes, shape, dtype)

    def put(self, fragment, values: np.ndarray):
        fragment.write(values, self.stream)

    def get(self, fragment) -> np.ndarray:
        return fragment.read(self.stream)

    def push(self):
        must(use_device(self.rank).cuStreamSynchronize(self.stream))
        self.session.push()

    def submit(self, scalars: types.StepScalars, absent: list[int]):
        """Every other bucket is signalled before, by another thread, as autograd has them."""
        held_back = {self.registered.parameter_bucket[index] for index in absent}

        def signal_some():
            for bucket in set(range(1, self.registered.buckets, 2)) - held_back:
                self.session.signal(bucket, self.stream)

        thread = threading.Thread(target=signal_some)
        thread.start()
        thread.join()
        return self.session.step(
            scalars, absent=absent, stream=self.stream, trainer_state=self.trainer_state
        )

    def named_weights(self) -> dict[str, np.ndarray]:
        names = [held.tensor for held in self.job.held[self.rank]]
        return dict(zip(names, self.held_weights(), strict=True))

    def arenas_identities(self) -> list[int]:
        return [identity_of(self.session.arenas[arena].address) for arena in (1, 2)]

    def wait_for_what_never_comes(self):
        """The stream waits for the weights of an attempt that nobody decides."""
        session = self.session
        session.wait_published()
        session._unpublished = dict.fromkeys(session._receives, session.next_attempt)
        session.wait_published(stream=self.stream)
        assert not is_done(self.stream)

    def wait_as_if_weights_had_not_come(self):
        """The stream waits for the weights of the last step."""
        session = self.session
        session.wait_published()
        decided = session.next_attempt - 1
        for bucket in session._receives:
            atomics.advance(session._link.timeline._published(bucket), decided - 1)
        session._unpublished = dict.fromkeys(session._receives, decided)
        session.wait_published(stream=self.stream)
        assert not is_done(self.stream)


def train(rank: int, world: int, job: Job, options: dict):
    """As core_trainer.train, on the GPU with the number of the rank. options: GpuTrainer's."""
    return run(GpuTrainer(rank, world, job, **options))


def calls_in_steps(rank: int, world: int, job: Job, folder: str) -> list[str]:
    """What the trainer has called in its steps that waits for a device or allocates."""
    trainer = GpuTrainer(rank, world, job)
    for _ in range(2):
        trainer.step()
    before = len(calls_of(Path(folder), os.getpid()))
    for _ in range(job.steps - 2):
        trainer.step()
    calls = calls_of(Path(folder), os.getpid())[before:]
    trainer.session.close()
    return calls


@contextlib.contextmanager
def captured(stream):
    """What is enqueued there meanwhile comes into a graph, which nobody launches."""
    driver = use_device(0)
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    must(driver.cuStreamBeginCapture(stream, mode))
    yield
    must(driver.cuGraphDestroy(must(driver.cuStreamEndCapture(stream))))


class _Capturing(GpuTrainer):
    """Tries everything while its stream is being captured, and then does it."""

    def submit(self, scalars: types.StepScalars, absent: list[int]):
        session, stream = self.session, self.stream
        self.refusals = []
        self._try(lambda: session.signal(0, stream))
        self._try(lambda: session.step(scalars, stream=stream))
        outcome = session.step(scalars, stream=stream, wait=False)
        self._try(lambda: session.wait_published(stream=stream))
        session.wait_published(stream=stream)
        return outcome

    def _try(self, call):
        with captured(self.stream):
            try:
                call()
            except dmuond.FailedPreconditionError as error:
                self.refusals.append((error.reason, str(error)))


def train_beside_captures(rank: int, world: int, job: Job):
    """What was refused in the last step, and as `train`."""
    trainer = _Capturing(rank, world, job)
    results = run(trainer)
    return trainer.refusals, results


class _KillsLanes(GpuTrainer):
    daemon = 0

    def submit(self, scalars: types.StepScalars, absent: list[int]):
        self.session.signal(0, self.stream)
        step = self.session.last_committed_step + 1
        if self.rank == 0 and step % 2 == 0:
            lanes = sorted(lane_pids(self.daemon))
            os.kill(lanes[step // 2 % len(lanes)], signal.SIGKILL)
        return super().submit(scalars, absent)


def train_while_lanes_die(rank: int, world: int, job: Job, daemon: int):
    trainer = _KillsLanes(rank, world, job)
    trainer.daemon = daemon
    return run(trainer)


def train_and_be_killed(rank: int, world: int, job: Job, own: bool, steps: int, seen: str):
    """In the step after those; what its arenas were then is in a file."""
    trainer = GpuTrainer(rank, world, job, own=own)
    for _ in range(steps):
        trainer.step()
    np.savez(seen, memory=trainer.arenas_identities(), **trainer.named_weights())
    trainer.session.signal(0, trainer.stream)
    os.kill(os.getpid(), signal.SIGKILL)


def replace_and_train(rank: int, world: int, job: Job, own: bool):
    """What it finds in its arenas, and as `train`."""
    trainer = GpuTrainer(rank, world, job, own=own, resume="require")
    found = trainer.named_weights()
    return trainer.arenas_identities(), found, run(trainer)


def lose_the_daemon_while_a_stream_waits(rank: int, world: int, job: Job, daemon: int) -> str:
    """What the next call says."""
    trainer = GpuTrainer(rank, world, job, reconnect_for_s=0.0)
    trainer.step()
    trainer.wait_for_what_never_comes()
    os.kill(daemon, signal.SIGKILL)
    must(use_device(0).cuStreamSynchronize(trainer.stream))
    try:
        trainer.step()
    except dmuond.DaemonLost as error:
        return str(error)
    raise AssertionError("the step was made")


def fail_while_a_step_waits(rank: int, world: int, job: Job, seen: str):
    """What the step raises, whose signals never come, is in a file when the process has ended."""
    trainer = GpuTrainer(rank, world, job)
    trainer.step()

    def submit(scalars, _):
        threading.Timer(0.3, hold_up(trainer.stream)).start()
        store_nowhere(trainer.stream)
        return trainer.session.step(scalars, stream=trainer.stream)

    trainer.submit = submit
    try:
        trainer.step()
    except dmuond.Error as error:
        Path(seen).write_text(f"{error.reason}: {error}")
    os._exit(3)


def outlive_the_daemon(rank: int, world: int, job: Job, daemon: int, own: bool):
    """Whether it went on in the same place without a word, and as `train`.

    The gradients of step 3 are on their way until after the successor's memory is there.
    """
    trainer = GpuTrainer(rank, world, job, own=own, reconnect_for_s=60.0)
    trainer.step()
    trainer.step()
    trainer.session.save_snapshot()
    trainer.session.wait_published()
    addresses = {key: arena.address for key, arena in trainer.session.arenas.items()}
    go_on, take_over = hold_up(trainer.stream), arenas.take_over

    def take_over_meanwhile(*arguments):
        threading.Timer(0.3, go_on).start()
        take_over(*arguments)

    arenas.take_over = take_over_meanwhile
    submit = trainer.submit

    def lose_the_daemon_first(*arguments):
        trainer.submit = submit
        os.kill(daemon, signal.SIGKILL)
        return submit(*arguments)

    trainer.submit = lose_the_daemon_first
    trainer.step()
    after = {key: arena.address for key, arena in trainer.session.arenas.items()}
    return after == addresses, run(trainer)


def go_back(rank: int, world: int, job: Job):
    """To step 3, while the host waits for a stream, and the stream for weights that never come.

    What it heard, its weights before and afterwards; and as `train`.
    """
    trainer = GpuTrainer(rank, world, job)
    for step in range(3):
        trainer.trainer_state = b"three" if step == 2 else b""
        trainer.step()
    trainer.session.save_snapshot()
    before = trainer.held_weights()
    trainer.step()
    trainer.wait_as_if_weights_had_not_come()
    trainer.session.load_snapshot(3)
    must(use_device(0).cuStreamSynchronize(trainer.stream))
    try:
        trainer.step()
    except dmuond.RolledBack as back:
        heard = back.to_step, back.trainer_state, back.fresh_arenas
    again = trainer.held_weights()
    return heard, before, again, run(trainer)


def hold_arrays(rank: int, world: int, job: Job):
    """How many arenas are mapped, and what a slot has when its session is gone."""
    trainer = GpuTrainer(rank, world, job)
    trainer.step()
    mapped = {"in the session": mapped_memory()}
    slot = trainer.weights[0]
    trainer.session.close()
    del trainer
    gc.collect()
    mapped["closed, a slot held"] = mapped_memory()
    values = slot.read()
    stream = make_stream(0)
    threading.Timer(0.3, hold_up(stream)).start()
    slot.write(values, stream)  # is not done when the slot has gone
    del slot
    gc.collect()
    mapped["no slot held"] = mapped_memory()
    return mapped, values


def close_before_a_stream_has_come_so_far(rank: int, world: int, job: Job) -> bool:
    """Whether the stream's wait is over when close() has returned."""
    trainer = GpuTrainer(rank, world, job)
    late = make_stream(0)
    go_on = hold_up(late)
    trainer.submit = lambda scalars, _: trainer.session.step(scalars, wait=False, stream=late)
    threading.Timer(0.3, go_on).start()  # for the step's signals
    trainer.step()
    threading.Timer(0.6, hold_up(late)).start()
    trainer.session.wait_published(stream=late)
    trainer.session.close()
    return is_done(late)


def read_weights_behind_a_step(rank: int, world: int, job: Job):
    """Which buckets are published before the trainer's stream has come so far, and weights.

    Before the step; as the stream reads them, which the step waits for; and afterwards.
    """
    trainer = GpuTrainer(rank, world, job)
    session, stream = trainer.session, trainer.stream
    before = trainer.held_weights()

    def submit(scalars, _):
        for bucket in range(trainer.registered.buckets):
            session.signal(bucket, stream)
        trainer.go_on = hold_up(stream)
        return session.step(scalars, stream=stream, wait=False)

    trainer.submit = submit
    attempt = trainer.step().attempt
    time.sleep(0.3)  # a lane that did not wait would be done
    published = [session._link.timeline.published(b) >= attempt for b in session._receives]
    trainer.stream = make_stream(0)
    meanwhile = trainer.held_weights()
    trainer.go_on()
    session.wait_published(stream=trainer.stream)
    after = trainer.held_weights()
    session.close()
    return published, before, meanwhile, after


def open_and_close(_rank: int, _world: int, device: str):
    open_session(device)


def store_while_weights_are_awaited(_rank: int, _world: int) -> tuple[int, int, int]:
    """How many streams an event has held up meanwhile; the stored word then, and in the end."""
    from dmuond.cuda_driver import Device
    from dmuond.cuda_memory import CudaWords

    held_up_by_events = ctypes.CDLL("libcuda.so.1").fakeCudaHeldUpByEvents
    memory = mmap.mmap(-1, mmap.PAGESIZE)
    page = (ctypes.c_uint64 * 512).from_buffer(memory)
    address = ctypes.addressof(page)
    words = CudaWords(Device(0), memory, address, mmap.PAGESIZE)
    stream = make_stream(0)
    words.wait([address + 16], 1, stream)
    words.store([address + 24], 5, [stream])
    end, held_up = time.monotonic() + 0.2, 0
    while time.monotonic() < end:
        held_up = max(held_up, held_up_by_events())
    stored = page[3]
    page[2] = 1
    words.finish()
    return held_up, stored, page[3]


def drop_sessions_that_streams_use(rank: int, world: int, job: Job) -> list[int]:
    """How many timeline pages are kept, whose sessions have gone: at first, and in the end."""
    from dmuond import cuda_kept

    driver = use_device(0)
    trainer = GpuTrainer(rank, world, job)
    trainer.step()
    trainer.wait_for_what_never_comes()
    held_up = make_stream(0)
    open_gate = hold_up(held_up)
    trainer.session.signal(0, held_up)
    trainer.session.drop()
    must(driver.cuStreamSynchronize(trainer.stream))  # its wait has ended
    arrays = trainer.weights, trainer.gradients  # who drops the last one waits for the device
    del trainer
    gc.collect()
    kept = [len(cuda_kept.kept)]
    open_gate()
    must(driver.cuStreamSynchronize(held_up))
    del arrays
    run(GpuTrainer(rank, world, job, resume="require"))
    gc.collect()
    return [*kept, len(cuda_kept.kept)]


def fork_in_a_session(rank: int, world: int, job: Job):
    """The exit code of a child that drops all it has inherited; and as `train`."""
    trainer = GpuTrainer(rank, world, job)
    trainer.step()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            trainer.session.signal(0, trainer.stream)
        except dmuond.Error:
            code = 0
        del trainer
        gc.collect()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), run(trainer)


# --- what is refused ---


def refused(_rank: int, _world: int, function, *arguments) -> tuple[str, str, str]:
    """Class, reason and text of the error that the call raises."""
    try:
        function(*arguments)
    except dmuond.Error as error:
        return type(error).__name__, error.reason, str(error)
    raise AssertionError("nothing was raised")


def open_session(device: str):
    dmuond.Session(rank=0, world_size=1, device=device).close()


def signal_with(stream: object, device: str):
    with _registered(device) as (session, size):
        session.attach({1: size, 2: size})
        session.signal(0, stream)


def attach_memory(kind: str, device: str = "cuda:0"):
    with _registered(device) as (session, size):
        if kind == "freed":
            _free_behind_its_handle(session)
        session.attach({1: size, 2: _wrong_memory(kind, size)})


class _registered:  # noqa: N801 (used as a function)
    """A session with one matrix, and the bytes of its arenas. It leaves as a dead trainer does."""

    def __init__(self, device: str):
        matrix = Tensor("w", (32, 32))
        job = Job((matrix,), ((whole(matrix),),))
        parameters, fragments, self.size, _ = messages(job, 0)
        self.session = dmuond.Session(rank=0, world_size=1, device=device)
        self.session.register(parameters, fragments, [types.GroupConfig(preset="dmuon")])

    def __enter__(self):
        return self.session, self.size

    def __exit__(self, *_):
        self.session.drop()


def _wrong_memory(kind: str, size: int):
    if kind == "no_memory":
        return np.zeros(size, np.uint8)
    if kind == "of_the_host":
        return Memory(np.zeros(size, np.uint8).ctypes.data, size)
    if kind == "of_a_pool":
        return Memory(must(use_device(0).cuMemAllocAsync(size, 0)), size)
    if kind == "of_two_pieces":
        return _memory_of_two_pieces(size)
    if kind == "of_another_device":
        return own_memory(size, 1)
    memory = own_memory(size)
    whole_bytes = int(use_device(0).cuMemGetAddressRange(memory.address)[2])
    if kind == "beyond_its_end":
        memory.address += whole_bytes - 64
    elif kind == "unaligned":
        memory.address += 8
    elif kind == "with_strides":
        memory.strides = (2,)
    return memory


def _memory_of_two_pieces(size: int) -> Memory:
    """Across the end of the first, as torch's allocator has it with expandable_segments:True."""
    driver = use_device(0)
    place = driver.CUmemLocation()
    place.type, place.id = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE, 0
    properties, access = driver.CUmemAllocationProp(), driver.CUmemAccessDesc()
    properties.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    properties.location = access.location = place
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    piece_bytes = 2 << 20
    begin = int(must(driver.cuMemAddressReserve(2 * piece_bytes, 0, 0, 0)))
    for at in (begin, begin + piece_bytes):
        piece = must(driver.cuMemCreate(piece_bytes, properties, 0))
        must(driver.cuMemMap(at, piece_bytes, 0, piece, 0))
    must(driver.cuMemSetAccess(begin, 2 * piece_bytes, [access], 1))
    return Memory(begin + piece_bytes - 256, size)


def _free_behind_its_handle(session: dmuond.Session):
    export = session._memory.export

    def export_and_free(memory: Memory):
        exported = export(memory)
        must(use_device(0).cuMemFree(memory.address))
        return exported

    session._memory.export = export_and_free
