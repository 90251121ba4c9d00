"""Comparisons of memory of a GPU with other memory of it, bit by bit.

The kernel is same_bytes.ptx, which is made of client/python/kernels/same_bytes.cu.
"""

from __future__ import annotations

import ctypes
import importlib.resources
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from dmuond import cuda_kept
from dmuond.cuda_driver import (
    NOT_READY,
    Device,
    call,
    check_not_captured,
    driver,
    result_of,
)

# As the kernel has them.
_NAME = b"dmuond_same_bytes"
_THREADS = 256
_BLOCKS = 4  # that a multiprocessor has room for at once
_CHUNK_BYTES = 16384
_FIELDS = 4  # of a pair in the table: two addresses, bytes, first chunk
_WORD = np.dtype(np.uint64)
_PAIR_BYTES = _FIELDS * _WORD.itemsize

_PAIRS_AT_FIRST = 1024

_UNTIMED = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING

# By the ordinal of their device; there for the process's life, as its context is.
_kernels: dict[int, Any] = {}


def _kernel_of(device: Device) -> Any:
    """REQUIRES: entered. The first call for a device compiles and loads it, and may wait."""
    if device.ordinal not in _kernels:
        text = importlib.resources.files("dmuond").joinpath("same_bytes.ptx").read_bytes()
        module = call("cuModuleLoadData", text)
        _kernels[device.ordinal] = call("cuModuleGetFunction", module, _NAME)
    return _kernels[device.ordinal]


class _Buffers(cuda_kept.Used):
    """The table of pairs and the answer, for so many pairs at most. It owns their memory.

    Attributes: table (a pair is a row) and answer (a word for each pair), as the host has them;
    device_table, device_answer (addresses, as the kernel has them); event (behind the last use).
    """

    def __init__(self, device: Device, pairs_max: int) -> None:
        self.device, self.pairs_max = device, pairs_max
        self._page = mmap.mmap(-1, pairs_max * (_PAIR_BYTES + _WORD.itemsize))  # of zeros
        words = np.frombuffer(self._page, _WORD)
        self.table = words[: pairs_max * _FIELDS].reshape(pairs_max, _FIELDS)
        self.answer = words[pairs_max * _FIELDS :]
        granules = -(-pairs_max * _PAIR_BYTES // device.granularity)
        self._mapped_bytes = granules * device.granularity
        self.event: Any = None
        self.device_table, self._is_mapped, self._is_registered = 0, False, False
        try:
            with device.entered():
                self._make()
        except BaseException:
            self.release()
            raise

    def _make(self) -> None:
        self.event = call("cuEventCreate", _UNTIMED)
        flags = driver.CU_MEMHOSTREGISTER_DEVICEMAP
        call("cuMemHostRegister", self.table.ctypes.data, len(self._page), flags)
        self._is_registered = True
        self.device_answer = int(call("cuMemHostGetDevicePointer", self.answer.ctypes.data, 0))
        # To unmap memory does not wait for the device; to free what cuMemAlloc has made would.
        handle = self.device.create(self._mapped_bytes)
        try:
            size, alignment = self._mapped_bytes, self.device.granularity
            self.device_table = int(call("cuMemAddressReserve", size, alignment, 0, 0))
            call("cuMemMap", self.device_table, size, 0, handle, 0)
            self._is_mapped = True
        finally:
            call("cuMemRelease", handle)  # the mapping keeps the memory
        self.device.allow(self.device_table, self._mapped_bytes)

    def release(self) -> bool:
        with self.device.entered():
            if self.event is not None:
                if result_of("cuEventQuery", self.event)[0] == NOT_READY:
                    return False
                call("cuEventDestroy", self.event)
            if self._is_mapped:
                call("cuMemUnmap", self.device_table, self._mapped_bytes)
            if self.device_table:
                call("cuMemAddressFree", self.device_table, self._mapped_bytes)
            if self._is_registered:
                call("cuMemHostUnregister", self.table.ctypes.data)
            return True


class ByteComparison:
    """Compares pairs of ranges of memory bit by bit: all pairs by one kernel, in a stream's order.

        comparison.start([(parameter, its_copy, size_bytes), …], stream)
        …
        for index in comparison.wait():  # of the pairs that differ

    One comparison is under way at a time. Without more pairs than ever before `start` allocates
    nothing. One thread at a time may use it, and no forked child. Its memory is given back when
    nobody refers to it any more and its last comparison is done.
    """

    def __init__(self, device: Device) -> None:
        """Loads the kernel, and may wait for the device. Raises Error."""
        self._device = device
        with device.entered():
            self._kernel = _kernel_of(device)
        self._make_buffers(_PAIRS_AT_FIRST)
        self._pairs: list[tuple[int, int, int]] = []  # what the device's table has
        self._chunks = 0
        self._round = 0  # of this comparison: its word for a pair that differs
        self._under_way = False

    def start(self, pairs: Sequence[tuple[int, int, int]], stream: int) -> None:
        """Compares when the stream has done what is enqueued there. The host does not wait.

        pairs: two addresses that the device reads, and how many bytes are compared there; none is
        well. Ranges may have any alignment, and overlap. Where both addresses are multiples of 16,
        it is fastest. A table of other pairs than before is uploaded first.

        Only where nobody has waited for the comparison before, `start` waits for it; its answer is
        lost then. Raises FailedPreconditionError where the stream is being captured, and Error;
        then nothing is compared.
        """
        with self._device.entered():
            check_not_captured(stream, "compare the memory of one step")
            if self._under_way:
                call("cuEventSynchronize", self._buffers.event)
                self._under_way = False
            pairs = list(pairs)
            if pairs != self._pairs:
                self._upload(pairs, stream)
            self._round += 1
            if self._chunks:
                self._launch(stream)
            call("cuEventRecord", self._buffers.event, stream)
            self._under_way = True

    def wait(self) -> list[int]:
        """The indices of the pairs that differ, in their order. REQUIRES: started.

        Waits for the comparison alone, whatever else the device has to do. Raises Error where the
        device has failed.
        """
        with self._device.entered():
            call("cuEventSynchronize", self._buffers.event)
        self._under_way = False
        answer = self._buffers.answer[: len(self._pairs)]
        return np.flatnonzero(answer == self._round).tolist()

    def _make_buffers(self, pairs_max: int) -> None:
        """Those before, if any, stay until this object goes: giving memory back could wait."""
        self._buffers = _Buffers(self._device, pairs_max)
        cuda_kept.release_with(self, self._buffers)

    def _upload(self, pairs: list[tuple[int, int, int]], stream: int) -> None:
        """REQUIRES: no comparison is under way."""
        self._pairs, self._chunks = [], 0  # unless all goes well
        if len(pairs) > self._buffers.pairs_max:
            self._make_buffers(max(len(pairs), 2 * self._buffers.pairs_max))
        if pairs:
            buffers = self._buffers
            rows = np.array(pairs, _WORD)
            chunks = -(-rows[:, 2].astype(np.int64) // _CHUNK_BYTES)
            ends = np.cumsum(chunks)
            table = buffers.table[: len(pairs)]
            table[:, :3] = rows
            table[:, 3] = ends - chunks
            call("cuMemcpyAsync", buffers.device_table, table.ctypes.data, table.nbytes, stream)
            self._chunks = int(ends[-1])
        self._pairs = pairs

    def _launch(self, stream: int) -> None:
        buffers = self._buffers
        blocks = min(self._chunks, self._device.multiprocessors * _BLOCKS)
        arguments = (
            (
                buffers.device_table,
                buffers.device_answer,
                self._chunks,
                self._round,
                len(self._pairs),
            ),
            (ctypes.c_uint64,) * 4 + (ctypes.c_uint32,),
        )
        call("cuLaunchKernel", self._kernel, blocks, 1, 1, _THREADS, 1, 1, 0, stream, arguments, 0)
