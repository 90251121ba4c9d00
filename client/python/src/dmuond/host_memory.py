"""Arenas in memory of the host: numpy arrays over shared memory."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterable, Sequence

import numpy as np

from dmuond import atomics, errors
from dmuond.device_array import HasMemory
from dmuond.memory import Arena, Exported, Memory, Words

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p


class HostArena(Arena):
    """Shared memory, mapped by an array of bytes."""

    def __init__(self, descriptor: int, size_bytes: int) -> None:
        self.view: np.ndarray = np.frombuffer(mmap.mmap(descriptor, size_bytes), dtype=np.uint8)
        self.address = self.view.ctypes.data

    def contents(self) -> np.ndarray:
        return self.view

    def read(self, offset_bytes: int, size_bytes: int) -> np.ndarray:
        return self.view[offset_bytes : offset_bytes + size_bytes].copy()

    def write(self, contents: np.ndarray, offset_bytes: int = 0) -> None:
        if contents is not self.view:
            self.view[offset_bytes : offset_bytes + contents.nbytes] = contents

    def adopt(self, fresh: Arena) -> None:
        found = _libc.mremap(
            ctypes.c_void_p(fresh.address),
            ctypes.c_size_t(0),  # of a shared mapping: another one of the same pages
            ctypes.c_size_t(self.view.nbytes),
            ctypes.c_int(_MREMAP_MAYMOVE | _MREMAP_FIXED),
            ctypes.c_void_p(self.address),
        )
        if found == _FAILED:
            why = os.strerror(ctypes.get_errno())
            raise errors.Error(
                f"the successor's memory cannot be mapped in the place of the old one: {why}"
            )


class HostWords(Words):
    """Stores at once, without any stream."""

    can_fail = False

    def store(self, words: Sequence[int], value: int, streams: Iterable[int]) -> None:
        for word in words:
            atomics.advance(word, value)

    def wait(self, words: Sequence[int], value: int, stream: int) -> None:
        raise _no_stream()

    def check(self) -> None:
        pass

    def finish(self) -> None:
        pass


class HostMemory(Memory):
    """The memory of the host, which has no streams."""

    device = "cpu"
    device_uuid = ""

    def map(self, descriptor: int, size_bytes: int) -> Arena:
        return HostArena(descriptor, size_bytes)

    def export(self, memory: HasMemory) -> Exported:
        raise errors.InvalidArgumentError(
            "arenas in host memory are the daemon's: give their number of bytes. Memory of a GPU "
            'needs a session of that device, Session(device="cuda:0")'
        )

    def words(self, page: object, address: int, size_bytes: int) -> Words:
        return HostWords()

    def check_stream(self, stream: int | None) -> None:
        if stream is not None:
            raise _no_stream()


def _no_stream() -> errors.Error:
    return errors.FailedPreconditionError(
        "a stream was given, but the session's arenas lie in host memory: Session(device=…) says "
        "on which GPU they are to lie",
        code="FAILED_PRECONDITION",
        reason="SESSION_STATE",
    )
