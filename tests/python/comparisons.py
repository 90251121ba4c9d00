"""Comparisons of memory on a GPU of the fake driver, in processes of its machine: see gpus."""

import contextlib
import gc
import os
from pathlib import Path

import dmuond
import numpy as np
from dmuond import cuda_kept
from dmuond.cuda_compare import ByteComparison
from dmuond.cuda_driver import Device
from gpus import (
    calls_of,
    hold_up,
    is_done,
    make_stream,
    mapped_memory,
    must,
    own_memory,
    store_nowhere,
    use_device,
)

SIZE = 1 << 21
MANY = 5000  # pairs: more than a comparison has room for at first


class Sides:
    """Two stretches of memory of the device with the same bytes, and a stream that uses them."""

    def __init__(self):
        self.stream = make_stream(0)
        self.bytes = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)
        self.a, self.b = own_memory(SIZE).address, own_memory(SIZE).address
        self.put(self.a, self.bytes)
        self.put(self.b, self.bytes)

    def put(self, address: int, contents: np.ndarray):
        """In the stream's order."""
        contents = np.ascontiguousarray(contents)
        copy = use_device(0).cuMemcpyAsync
        must(copy(address, contents.ctypes.data, contents.nbytes, self.stream))

    def flip(self, address: int, offset: int):
        """One bit of the byte at the offset is another there than in `bytes`."""
        self.put(address + offset, self.bytes[offset : offset + 1] ^ 16)

    def pair(self, offset: int, size_bytes: int, shift: int = 0) -> tuple[int, int, int]:
        return self.a + offset, self.b + offset + shift, size_bytes

    def differing(self, comparison, pairs) -> list[int]:
        comparison.start(pairs, self.stream)
        return comparison.wait()


def make():
    return ByteComparison(Device(0))


def compare_one(_rank: int, _world: int, offset: int, size_bytes: int, flipped: int | None):
    """A range that begins at the offset. flipped: the byte of it that differs."""
    sides = Sides()
    if flipped is not None:
        sides.flip(sides.b, offset + flipped)
    return sides.differing(make(), [sides.pair(offset, size_bytes)])


def compare_beside_what_differs(_rank: int, _world: int) -> list[int]:
    """Ranges before, behind and between bytes that differ; and ranges without a byte."""
    sides = Sides()
    for offset in (99, 300, 70000):
        sides.flip(sides.b, offset)
    pairs = [sides.pair(100, 200), sides.pair(301, 69699), sides.pair(99, 0), (0, 0, 0)]
    return sides.differing(make(), pairs)


def compare_at_other_alignments(_rank: int, _world: int) -> list[list[int]]:
    """One side begins so many bytes later: without, and with the last byte other."""
    sides, comparison, answers = Sides(), make(), []
    for shift in (1, 2, 4, 8, 15):
        sides.put(sides.b + shift, sides.bytes[:40001])
        answers.append(sides.differing(comparison, [sides.pair(0, 40001, shift)]))
        sides.put(sides.b + shift + 40000, sides.bytes[40000:40001] ^ 1)
        answers.append(sides.differing(comparison, [sides.pair(0, 40001, shift)]))
    return answers


def compare_random_pairs(_rank: int, _world: int, seed: int):
    """What was found, and what was to be found."""
    sides, random = Sides(), np.random.default_rng(seed)
    changed = np.zeros(SIZE, bool)
    for offset in random.integers(0, SIZE, 20):
        changed[offset] = True
        sides.flip(sides.b, int(offset))
    pairs, expected = [], []
    for index in range(600):
        offset = int(random.integers(0, SIZE))
        size = min(int(2 ** random.uniform(0, 18)) - 1, SIZE - offset)
        pairs.append(sides.pair(offset, size))
        if changed[offset : offset + size].any():
            expected.append(index)
    return sides.differing(make(), pairs), expected


def compare_numbers(_rank: int, _world: int, first: list[int], second: list[int]) -> list[int]:
    """As float32, by their bits."""
    sides = Sides()
    sides.put(sides.a, np.array(first, np.uint32))
    sides.put(sides.b, np.array(second, np.uint32))
    return sides.differing(make(), [sides.pair(4 * i, 4) for i in range(len(first))])


def compare_again_and_again(_rank: int, _world: int) -> list[list[int]]:
    """The same pairs while memory changes, then many of them, then few again."""
    sides, comparison = Sides(), make()
    few = [sides.pair(16 * i, 16) for i in range(3)]
    answers = [sides.differing(comparison, few)]
    sides.flip(sides.b, 17)
    answers.append(sides.differing(comparison, few))
    sides.put(sides.b, sides.bytes)
    sides.flip(sides.a, 40)
    answers.append(sides.differing(comparison, few))
    many = [sides.pair(16 * i, 16) for i in range(MANY)]
    sides.flip(sides.b, 16 * (MANY - 1))
    answers.append(sides.differing(comparison, many))
    answers.append(sides.differing(comparison, few[::-1]))
    answers.append(sides.differing(comparison, []))
    return answers


def compare_in_the_stream_s_order(_rank: int, _world: int):
    """Beside a stream that stands; then in one that does, with a change that is enqueued."""
    sides, comparison = Sides(), make()
    go_on = hold_up(make_stream(0))
    beside = sides.differing(comparison, [sides.pair(0, 64)])
    go_on()
    go_on = hold_up(sides.stream)
    sides.flip(sides.b, 3)
    comparison.start([sides.pair(0, 64)], sides.stream)
    before = is_done(sides.stream)
    go_on()
    return beside, before, comparison.wait(), is_done(sides.stream)


def start_twice(_rank: int, _world: int) -> list[int]:
    """Nobody waits for the first, whose table is another."""
    sides, comparison = Sides(), make()
    sides.flip(sides.b, 0)
    comparison.start([sides.pair(0, 64)], sides.stream)
    return sides.differing(comparison, [sides.pair(64, 64), sides.pair(0, 8)])


def calls_of_comparisons(_rank: int, _world: int, folder: str) -> list[str]:
    """What is called that allocates or waits: in two comparisons, and in two of other pairs."""
    sides, comparison = Sides(), make()
    sides.differing(comparison, [sides.pair(0, 64)])
    before = len(calls_of(Path(folder), os.getpid()))
    for pairs in ([sides.pair(0, 64)], [sides.pair(i, 8) for i in range(1000)]):
        for _ in range(2):
            sides.differing(comparison, pairs)
    return calls_of(Path(folder), os.getpid())[before:]


def compare_while_captured(_rank: int, _world: int):
    """Reason and text of the refusal, and what the next comparison finds."""
    sides, comparison = Sides(), make()
    driver = use_device(0)
    must(driver.cuStreamSynchronize(sides.stream))
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    must(driver.cuStreamBeginCapture(sides.stream, mode))
    refusal = None
    try:
        comparison.start([sides.pair(0, 64)], sides.stream)
    except dmuond.FailedPreconditionError as error:
        refusal = error.reason, str(error)
    must(driver.cuGraphDestroy(must(driver.cuStreamEndCapture(sides.stream))))
    sides.flip(sides.b, 5)
    return refusal, sides.differing(comparison, [sides.pair(0, 64)])


def compare_when_the_device_fails(_rank: int, _world: int) -> str:
    sides, comparison = Sides(), make()
    store_nowhere(sides.stream)
    try:
        comparison.start([sides.pair(0, 64)], sides.stream)  # already, where the store was faster
        comparison.wait()
    except dmuond.Error as error:
        return error.reason
    raise AssertionError("it has an answer")


def drop_comparisons(_rank: int, _world: int) -> dict[str, tuple[int, int]]:
    """Allocations of the device that are mapped, and what is kept for enqueued work."""
    sides, seen = Sides(), {}

    def look(when: str):
        gc.collect()
        seen[when] = mapped_memory() - mapped, len(cuda_kept.kept)

    mapped = mapped_memory()
    comparison = make()
    sides.differing(comparison, [sides.pair(0, 64)])
    look("there")
    del comparison
    look("gone")
    comparison = make()
    go_on = hold_up(sides.stream)
    comparison.start([sides.pair(0, 64)], sides.stream)
    del comparison
    look("gone while its stream stands")
    go_on()
    must(use_device(0).cuStreamSynchronize(sides.stream))
    assert is_done(sides.stream)
    make()
    look("another one has gone afterwards")
    return seen


def fork_with_a_comparison(_rank: int, _world: int):
    """The exit code of a child that tries it and drops it; and what the parent finds then."""
    sides, comparison = Sides(), make()
    sides.flip(sides.b, 1)
    pairs = [sides.pair(0, 64)]
    sides.differing(comparison, pairs)
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            try:
                comparison.start(pairs, sides.stream)
            except dmuond.Error:
                code = 0
            del comparison
            gc.collect()
        os._exit(code)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status), sides.differing(comparison, pairs)
