"""The CUDA driver, by cuda-bindings: calls that raise, and a device with its primary context."""

from __future__ import annotations

import ctypes
import os
import time
from contextlib import AbstractContextManager
from typing import Any

from dmuond import errors

try:
    from cuda import bindings
    from cuda.bindings import driver
except ImportError as error:
    raise errors.Error(
        "arenas on a GPU need the package cuda-bindings, which is not installed "
        f"({error}): pip install 'cuda-bindings>=12.9'",
        reason="CUDA_UNAVAILABLE",
    ) from None

# Older ones keep the interpreter's lock in every call, and so the thread that ends a wait from
# ending the wait of a stream that the call waits for.
if tuple(map(int, bindings.__version__.split(".")[:2])) < (12, 9):
    raise errors.Error(
        f"cuda-bindings {bindings.__version__} is too old for arenas on a GPU: pip install "
        "'cuda-bindings>=12.9'",
        reason="CUDA_UNAVAILABLE",
    )

SUCCESS = driver.CUresult.CUDA_SUCCESS
_MPS_RECOVERS = (
    driver.CUresult.CUDA_ERROR_MPS_SERVER_NOT_READY,
    driver.CUresult.CUDA_ERROR_MPS_CONNECTION_FAILED,
)
# In which all who were there may end. A context is refused only where a fault comes between the two
# calls; another process is then as soon at work.
_MPS_PATIENCE_S, _MPS_PATIENCE_FOR_CONTEXT_S, _MPS_PAUSE_S = 20.0, 2.0, 0.02
NOT_READY = driver.CUresult.CUDA_ERROR_NOT_READY
_NOT_CAPTURING = driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE
# The driver's answer for the default stream while another stream is being captured.
_CAPTURE_IMPLICIT = driver.CUresult.CUDA_ERROR_STREAM_CAPTURE_IMPLICIT


def failed(name: str, result: Any) -> errors.Error:
    """The error of a function of the driver."""
    return errors.Error(
        f"{name} failed: {name_of(result)}",
        code="INTERNAL",
        reason="CUDA_FAILED",
        metadata={"call": name, "result": str(int(result))},
    )


def name_of(result: Any) -> str:
    return f"{getattr(result, 'name', result)} ({int(result)})"


def call(name: str, *arguments: Any) -> Any:
    """Calls a function of the driver and returns its answer. Raises Error (CUDA_FAILED)."""
    return _answer(name, *result_of(name, *arguments))


def _answer(name: str, result: Any, *answer: Any) -> Any:
    if result != SUCCESS:
        raise failed(name, result)
    return answer[0] if len(answer) == 1 else answer


def result_of(name: str, *arguments: Any) -> tuple[Any, ...]:
    """Calls a function of the driver and returns its result and its answer."""
    return getattr(driver, name)(*arguments)


def _call_once_mps_has_recovered(patience_s: float, name: str, *arguments: Any) -> Any:
    """As `call`, and repeats it for as long as MPS refuses it, `patience_s` at most.

    After the fault of one client an MPS server turns others away until all that were there have
    ended, and says to nobody when that is. The replacement of a trainer that has faulted comes
    then.
    """
    deadline = time.monotonic() + patience_s
    while True:
        result, *answer = result_of(name, *arguments)
        if result not in _MPS_RECOVERS or time.monotonic() > deadline:
            return _answer(name, result, *answer)
        time.sleep(_MPS_PAUSE_S)


def device_of(address: int) -> int | None:
    """The ordinal of the device whose memory lies there, or None. REQUIRES: entered.

    Asks the driver itself: cuda-bindings 13.2 and 13.3 answer 0 for every device.
    """
    ordinal = ctypes.c_int()
    attribute = int(driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    ask = ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute
    if ask(ctypes.byref(ordinal), attribute, ctypes.c_uint64(address)) != int(SUCCESS):
        return None
    return ordinal.value


def initialise() -> None:
    """Raises Error where there is no driver that works."""
    try:
        _call_once_mps_has_recovered(_MPS_PATIENCE_S, "cuInit", 0)
    except (RuntimeError, OSError) as error:  # what cuda-bindings raises without a driver, too
        raise errors.Error(
            f"the CUDA driver cannot be used: {error}",
            code="UNAVAILABLE",
            reason="CUDA_UNAVAILABLE",
        ) from None


def check_not_captured(stream: int, otherwise: str) -> None:
    """Raises FailedPreconditionError where the stream is being captured into a graph.

    otherwise: what the graph would do then, at every launch. REQUIRES: entered.
    """
    result, *status = result_of("cuStreamIsCapturing", stream)
    if result == SUCCESS and status[0] == _NOT_CAPTURING:
        return
    if result not in (SUCCESS, _CAPTURE_IMPLICIT):
        raise failed("cuStreamIsCapturing", result)
    raise errors.FailedPreconditionError(
        f"the stream is being captured into a CUDA graph, which would {otherwise} for ever: "
        "call it after the graph's launch, with the stream that it was launched in",
        code="FAILED_PRECONDITION",
        reason="SESSION_STATE",
    )


class _Entered(AbstractContextManager[None]):
    """Makes a context the calling thread's, and the one before it afterwards."""

    def __init__(self, context: Any) -> None:
        self._context = context
        self._before: Any = None

    def __enter__(self) -> None:
        before = call("cuCtxGetCurrent")
        if int(before) != int(self._context):
            call("cuCtxSetCurrent", self._context)
            self._before = before

    def __exit__(self, *_: object) -> None:
        if self._before is not None:
            call("cuCtxSetCurrent", self._before)


class Device:
    """A device of this process and its primary context, which the CUDA runtime uses, too.

    Any thread may use it, but no forked child: its driver has not been initialised (see `here`).
    Attributes: ordinal, uuid ("GPU-…"), granularity (of mappings, bytes), multiprocessors,
    takes_turns (processes compute there one after the other: without MPS).
    """

    def __init__(self, ordinal: int) -> None:
        """As CUDA counts the devices of this process. Raises Error, or InvalidArgumentError."""
        initialise()
        count = call("cuDeviceGetCount")
        if ordinal >= count:
            raise errors.InvalidArgumentError(
                f"there is no device cuda:{ordinal}; this process sees {count}",
                code="NOT_FOUND",
            )
        self.ordinal = ordinal
        self._pid = os.getpid()
        handle = call("cuDeviceGet", ordinal)
        digits = call("cuDeviceGetUuid", handle).bytes.hex()
        parts = (digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])
        self.uuid = "GPU-" + "-".join(parts)
        self._context = _call_once_mps_has_recovered(  # for the process's life
            _MPS_PATIENCE_FOR_CONTEXT_S, "cuDevicePrimaryCtxRetain", handle
        )
        self._location = driver.CUmemLocation()
        self._location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._location.id = ordinal
        self._memory = self._kind_of_memory()
        multiprocessors = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT
        self.multiprocessors: int = call("cuDeviceGetAttribute", multiprocessors, handle)
        mps = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_MPS_ENABLED
        self.takes_turns = call("cuDeviceGetAttribute", mps, handle) == 0
        recommended = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        with self.entered():
            self.granularity: int = call("cuMemGetAllocationGranularity", self._memory, recommended)

    @property
    def here(self) -> bool:
        """Whether this is the process that has opened it."""
        return self._pid == os.getpid()

    def entered(self) -> AbstractContextManager[None]:
        """`with device.entered():` the context is the calling thread's."""
        return _Entered(self._context)

    def allow(self, address: int, size_bytes: int) -> None:
        """Lets the device use what is mapped there. REQUIRES: entered."""
        access = driver.CUmemAccessDesc()
        access.location = self._location
        access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        call("cuMemSetAccess", address, size_bytes, [access], 1)

    def copy(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        """See device_array.Copies."""
        with self.entered():
            call("cuMemcpyAsync", to, source, size_bytes, stream)

    def wait(self) -> None:
        """Waits for all that is enqueued in any stream of the context."""
        with self.entered():
            call("cuCtxSynchronize")

    def synchronize(self, stream: int) -> None:
        with self.entered():
            call("cuStreamSynchronize", stream)

    def create(self, size_bytes: int) -> Any:
        """A handle of memory of the device, for cuMemMap. REQUIRES: a multiple of granularity."""
        return call("cuMemCreate", size_bytes, self._memory, 0)

    def _kind_of_memory(self) -> Any:
        kind = driver.CUmemAllocationProp()
        kind.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.requestedHandleTypes = (
            driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
        )
        kind.location = self._location
        return kind
