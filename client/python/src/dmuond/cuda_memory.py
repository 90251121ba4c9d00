"""Arenas on a GPU, and streams that store into the timeline page and wait for it.

The daemon's arenas come as descriptors and are mapped here; the trainer's own memory goes to the
lanes by handles of 64 bytes. The host waits for the device only where a session begins, ends or
goes back, and where the last array over an arena goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from dmuond import cuda_kept, errors
from dmuond.cuda_driver import (
    NOT_READY,
    SUCCESS,
    Device,
    call,
    check_not_captured,
    device_of,
    driver,
    failed,
    name_of,
    result_of,
)
from dmuond.device_array import DeviceArray, HasMemory
from dmuond.memory import Arena, Exported, Memory, Words

_HANDLE_BYTES = 64
_ALIGNMENT_BYTES = 16  # of an arena in the trainer's memory
_NON_BLOCKING = driver.CUstream_flags.CU_STREAM_NON_BLOCKING
_UNTIMED = driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
_AT_LEAST = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
_PLAIN_WRITE = driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT
# A graph that has captured a store or a wait would do this for ever.
_IF_CAPTURED = "signal one attempt"


class _Mapping:
    """Memory that came as a descriptor, and the addresses at which it is mapped here.

    It is unmapped when nobody refers to this object any more.
    """

    def __init__(self, device: Device, descriptor: int, size_bytes: int) -> None:
        self.device = device
        granules = -(-size_bytes // device.granularity)
        self.mapped_bytes = granules * device.granularity
        self.address, self._handle, self._mapped = 0, None, False
        try:
            with device.entered():
                kind = driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
                self._handle = call("cuMemImportFromShareableHandle", descriptor, kind)
                reserved = call("cuMemAddressReserve", self.mapped_bytes, device.granularity, 0, 0)
                self.address = int(reserved)
                self._map()
        except BaseException:
            self._release()
            raise

    def adopt(self, fresh: _Mapping) -> None:
        """Maps the memory of `fresh` at these addresses. What was mapped here goes with `fresh`."""
        self.device.wait()
        with self.device.entered():
            self._unmap()
            fresh._unmap()
            self._handle, fresh._handle = fresh._handle, self._handle
            self._map()

    def _map(self) -> None:
        call("cuMemMap", self.address, self.mapped_bytes, 0, self._handle, 0)
        self._mapped = True
        self.device.allow(self.address, self.mapped_bytes)

    def _unmap(self) -> None:
        call("cuMemUnmap", self.address, self.mapped_bytes)
        self._mapped = False

    def _release(self) -> None:
        with self.device.entered():
            if self._mapped:
                self._unmap()
            if self.address:
                call("cuMemAddressFree", self.address, self.mapped_bytes)
            if self._handle is not None:
                call("cuMemRelease", self._handle)
                self._handle = None

    def __del__(self) -> None:
        # A process that ends gives everything back by itself.
        if self._handle is None or not self.device.here or sys.is_finalizing():
            return
        # A device that has failed keeps its memory: nothing works there any more.
        with contextlib.suppress(errors.Error):
            if self._mapped:  # what is enqueued may use the memory of a tensor that has gone
                self.device.wait()
            self._release()


class _DeviceArena(Arena):
    """An arena on a device. `owner` keeps its memory: a _Mapping, or the trainer's own object."""

    def __init__(self, device: Device, owner: object, address: int, size_bytes: int) -> None:
        self._device, self._owner = device, owner
        self.address = address
        self.view: DeviceArray = DeviceArray(
            f"cuda:{device.ordinal}", device, owner, address, (size_bytes,)
        )

    def contents(self) -> np.ndarray:
        self._device.wait()  # for gradients that are still being computed, in whatever stream
        return self.view.read()

    def read(self, offset_bytes: int, size_bytes: int) -> np.ndarray:
        return self.view.slot(offset_bytes, (size_bytes,), np.uint8).read()

    def write(self, contents: np.ndarray, offset_bytes: int = 0) -> None:
        self.view.slot(offset_bytes, contents.shape, np.uint8).write(contents)
        self._device.synchronize(0)

    def adopt(self, fresh: Arena) -> None:
        # The trainer's own memory is the same with every daemon.
        if isinstance(self._owner, _Mapping):
            assert isinstance(fresh, _DeviceArena) and isinstance(fresh._owner, _Mapping)
            self._owner.adopt(fresh._owner)


class _Page(cuda_kept.Used):
    """A timeline page as streams of a device use it. It owns what they need for that."""

    def __init__(self, device: Device, page: object, address: int, size_bytes: int) -> None:
        self.device, self.page, self.address = device, page, address
        self.waits: dict[int, Any] = {}  # stream → an event behind its last wait
        with device.entered():
            flags = driver.CU_MEMHOSTREGISTER_DEVICEMAP
            call("cuMemHostRegister", address, size_bytes, flags)
            self.offset = int(call("cuMemHostGetDevicePointer", address, 0)) - address
            # Stores have a stream of their own: in the trainer's, each would hold up what follows.
            self.stores = call("cuStreamCreate", _NON_BLOCKING)
            # Tells the stream of stores how far the trainer's has come.
            self.reached = call("cuEventCreate", _UNTIMED)

    def release(self) -> bool:
        with self.device.entered():
            if self._is_used():
                return False
            for event in (*self.waits.values(), self.reached):
                call("cuEventDestroy", event)
            call("cuStreamDestroy", self.stores)
            call("cuMemHostUnregister", self.address)
            return True

    def _is_used(self) -> bool:
        found = [result_of("cuStreamQuery", self.stores)[0]]
        found += [result_of("cuEventQuery", event)[0] for event in self.waits.values()]
        return NOT_READY in found


class CudaWords(Words):
    """Stores and waits that the device makes, and lanes on the host see and answer."""

    can_fail = True

    def __init__(self, device: Device, page: object, address: int, size_bytes: int) -> None:
        self._device = device
        self._page = _Page(device, page, address, size_bytes)
        cuda_kept.release_with(self, self._page)

    def store(self, words: Sequence[int], value: int, streams: Iterable[int]) -> None:
        page, awaited = self._page, tuple(streams)
        with self._device.entered():
            for stream in awaited:
                check_not_captured(stream, _IF_CAPTURED)
            for stream in awaited:
                call("cuEventRecord", page.reached, stream)
                call("cuStreamWaitEvent", page.stores, page.reached, 0)
            for word in words:
                call("cuStreamWriteValue64", page.stores, word + page.offset, value, _PLAIN_WRITE)

    def wait(self, words: Sequence[int], value: int, stream: int) -> None:
        page = self._page
        with self._device.entered():
            check_not_captured(stream, _IF_CAPTURED)
            if stream not in page.waits:
                page.waits[stream] = call("cuEventCreate", _UNTIMED)
            # The stores that come next wait for events of this stream. A stream that an event holds
            # up takes its process's turns on the GPU, from the lane that is waited for; one that a
            # word holds up takes none.
            for waiting in (stream, page.stores):
                for word in words:
                    call("cuStreamWaitValue64", waiting, word + page.offset, value, _AT_LEAST)
            call("cuEventRecord", page.waits[stream], stream)

    def check(self) -> None:
        with self._device.entered():
            result, *_ = result_of("cuStreamQuery", self._page.stores)
        if result not in (SUCCESS, NOT_READY):
            raise failed("cuStreamQuery", result)

    def finish(self) -> None:
        with self._device.entered():
            call("cuStreamSynchronize", self._page.stores)
            for event in self._page.waits.values():
                call("cuEventSynchronize", event)


class CudaMemory(Memory):
    """A GPU of this process."""

    def __init__(self, ordinal: int) -> None:
        """Raises InvalidArgumentError where there is no such device, Error where no driver is."""
        self._device = Device(ordinal)
        self.device = f"cuda:{ordinal}"
        self.device_uuid = self._device.uuid

    def map(self, descriptor: int, size_bytes: int) -> Arena:
        mapping = _Mapping(self._device, descriptor, size_bytes)
        return _DeviceArena(self._device, mapping, mapping.address, size_bytes)

    def export(self, memory: HasMemory) -> Exported:
        address, size_bytes = _place_of(memory)
        wrong = f"{size_bytes} bytes at {address:#x}"
        with self._device.entered():
            base, whole = self._allocation_of(address, wrong)
            if address % _ALIGNMENT_BYTES:
                raise errors.InvalidArgumentError(
                    f"{wrong} do not begin at a multiple of {_ALIGNMENT_BYTES}"
                )
            # Before the range is looked at: of what cuMemMap has put together of several pieces,
            # as expandable_segments:True does, the driver gives the range of one piece.
            result, handle = result_of("cuIpcGetMemHandle", address)
            if result != SUCCESS:
                raise errors.FailedPreconditionError(
                    f"{wrong} cannot be exported: only memory of cudaMalloc (cuMemAlloc) has such "
                    "a handle, not that of cudaMallocAsync or cuMemMap. In PyTorch set "
                    "PYTORCH_CUDA_ALLOC_CONF and PYTORCH_ALLOC_CONF without "
                    "expandable_segments:True and backend:cudaMallocAsync, or leave the arena to "
                    'the daemon (dmuond.torch: arenas="daemon"; cuIpcGetMemHandle failed: '
                    f"{name_of(result)})"
                )
            if size_bytes == 0 or size_bytes > whole - (address - base):
                raise errors.InvalidArgumentError(
                    f"{wrong} do not lie within their allocation, which has {whole} bytes from "
                    f"{base:#x} on"
                )
            attribute = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_BUFFER_ID
            buffer_id = call("cuPointerGetAttribute", attribute, address)
        return Exported(
            arena=_DeviceArena(self._device, memory, address, size_bytes),
            size_bytes=size_bytes,
            handle=ctypes.string_at(handle.getPtr(), _HANDLE_BYTES),
            base_offset=address - base,
            allocation_bytes=whole,
            buffer_id=int(buffer_id),
        )

    def words(self, page: object, address: int, size_bytes: int) -> Words:
        return CudaWords(self._device, page, address, size_bytes)

    def check_stream(self, stream: int | None) -> None:
        if stream is None:
            return
        if isinstance(stream, bool) or not isinstance(stream, int) or stream < 0:
            raise errors.InvalidArgumentError(
                f"stream={stream!r} is not a handle, as an integer (of torch: stream.cuda_stream)"
            )

    def _allocation_of(self, address: int, wrong: str) -> tuple[int, int]:
        """Where the allocation begins that holds the address, and its bytes."""
        ordinal = device_of(address)
        found = result_of("cuMemGetAddressRange", address)
        if ordinal is None or found[0] != SUCCESS:
            raise errors.InvalidArgumentError(f"{wrong} are no memory of a GPU")
        if ordinal != self._device.ordinal:
            raise errors.InvalidArgumentError(
                f"{wrong} are memory of device cuda:{ordinal}, and the session is of {self.device}"
            )
        return int(found[1]), int(found[2])


def _place_of(memory: HasMemory) -> tuple[int, int]:
    """The address of the memory, and its bytes."""
    interface = getattr(memory, "__cuda_array_interface__", None)
    if not isinstance(interface, dict):
        raise errors.InvalidArgumentError(
            f"{type(memory).__name__} is neither a number of bytes nor memory of a GPU (it has no "
            "__cuda_array_interface__)"
        )
    shape, size = interface["shape"], np.dtype(interface["typestr"]).itemsize
    strides = interface.get("strides")
    dense = tuple(size * math.prod(shape[d + 1 :]) for d in range(len(shape)))
    if strides is not None and tuple(strides) != dense:
        raise errors.InvalidArgumentError(f"memory with strides {strides} is not in one piece")
    return int(interface["data"][0]), size * math.prod(shape)
