"""The timeline page: 64-bit counters that trainer, daemon and lanes share.

Layout and rules: proto/dmuond/wire/timeline.h. Values are attempts, never step numbers.
"""

from __future__ import annotations

import ctypes
import enum
import mmap
import struct
import time
from collections.abc import Callable, Iterable

from dmuond import atomics
from dmuond.errors import Error
from dmuond.host_memory import HostMemory
from dmuond.memory import Memory

POISON = 1 << 62
BUCKETS_MAX = 4096
_MAGIC, _VERSION = 0x4C544D44, 2
_WORD_BYTES = 16
_SUBMITTED = 64
_READY = 128
_ROLLBACK_MARK = 0xFFFFFFFF  # lower half of what a rollback stores: see timeline.h
_POLLS = 200
# A sleeper looks up this often even if nobody wakes it, so that a lost session ends every wait.
_SLICE_S = 0.5


def page_bytes(buckets: int) -> int:
    return _READY + 2 * buckets * _WORD_BYTES


class Published(enum.Enum):
    """How a wait for weights ended."""

    YES = enum.auto()
    LATE = enum.auto()  # not in the time given, or not any more: the job goes back
    ENDED = enum.auto()  # never: the page was poisoned, or the daemon has gone


class Timeline:
    """A mapped page. Owns the mapping.

    Any thread may read, wait and poison. Only the session's caller stores and enqueues waits; a
    stream is a handle as in Session, and without one a store happens at once.
    """

    def __init__(
        self, descriptor: int, size_bytes: int, buckets: int, memory: Memory | None = None
    ) -> None:
        """memory: whose streams are to use the page; None means the host's, which has none."""
        if not 0 <= buckets <= BUCKETS_MAX or size_bytes < page_bytes(buckets):
            raise Error(f"a timeline page of {size_bytes} bytes has no room for {buckets} buckets")
        self._memory = mmap.mmap(descriptor, size_bytes)
        magic, version, count = struct.unpack_from("<3I", self._memory)
        if (magic, version, count) != (_MAGIC, _VERSION, buckets):
            raise Error(
                f"timeline page with magic {magic:#x}, version {version} and {count} buckets; "
                "expected "
                f"{_MAGIC:#x}, {_VERSION} and {buckets}"
            )
        self._anchor = ctypes.c_char.from_buffer(self._memory)  # keeps the mapping
        self._base = ctypes.addressof(self._anchor)
        self.buckets = buckets
        memory = memory or HostMemory()
        self._words = memory.words(self._anchor, self._base, page_bytes(buckets))

    def set_submitted(self, attempt: int, streams: Iterable[int] = ()) -> None:
        self._words.store([self._base + _SUBMITTED], attempt, streams)

    def set_ready(self, buckets: Iterable[int], attempt: int, streams: Iterable[int] = ()) -> None:
        words = [self._base + _READY + bucket * _WORD_BYTES for bucket in buckets]
        if words:
            self._words.store(words, attempt, streams)

    def enqueue_wait(self, buckets: Iterable[int], attempt: int, stream: int) -> None:
        """Lets the stream wait for the weights after `attempt`.

        Poison and a rollback end its wait, too.
        """
        words = [self._published(bucket) for bucket in buckets]
        self._words.wait([word for word in words if atomics.load(word) < attempt], attempt, stream)

    @property
    def can_fail(self) -> bool:
        """Whether signals and waits are a device's, which may fail: see check_device."""
        return self._words.can_fail

    def check_device(self) -> None:
        """Raises Error (CUDA_FAILED) where signals and waits that are enqueued never happen."""
        self._words.check()

    def finish_streams(self) -> None:
        """Returns when every store and every wait of a stream has happened."""
        self._words.finish()

    def published(self, bucket: int) -> int:
        return atomics.load(self._published(bucket))

    def poison(self) -> None:
        """Ends the page: every wait for `published` returns."""
        for bucket in range(self.buckets):
            atomics.advance(self._published(bucket), POISON)

    def wait_published(
        self, buckets: Iterable[int], attempt: int, is_lost: Callable[[], bool], for_s: float
    ) -> Published:
        """Waits for the weights after `attempt`, `for_s` seconds at most."""
        deadline = time.monotonic() + for_s
        for bucket in buckets:
            found = self._wait(self._published(bucket), attempt, is_lost, deadline)
            if found is not Published.YES:
                return found
        return Published.YES

    def _published(self, bucket: int) -> int:
        return self._base + _READY + (self.buckets + bucket) * _WORD_BYTES

    @staticmethod
    def _wait(word: int, attempt: int, is_lost: Callable[[], bool], deadline: float) -> Published:
        for _ in range(_POLLS):
            value = atomics.load(word)
            if value >= attempt:
                return _arrived(value, is_lost)
        while not is_lost():
            seen = atomics.load_changes(word + atomics.CHANGES)
            value = atomics.load(word)
            if value >= attempt:
                return _arrived(value, is_lost)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return Published.LATE
            atomics.futex_wait(word + atomics.CHANGES, seen, min(left_s, _SLICE_S))
        return Published.ENDED


def _arrived(value: int, is_lost: Callable[[], bool]) -> Published:
    if value >= POISON or is_lost():
        return Published.ENDED
    return Published.LATE if value & 0xFFFFFFFF == _ROLLBACK_MARK else Published.YES
