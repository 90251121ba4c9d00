"""Memory of a CUDA device, as an array that torch, CuPy and others take without a copy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dmuond.errors import InvalidArgumentError


class HasMemory(Protocol):
    """What has memory of a CUDA device: a tensor of torch, an array of CuPy, a DeviceArray."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]: ...


class Copies(Protocol):
    """What an array needs its device for."""

    def copy(self, to: int, source: int, size_bytes: int, stream: int) -> None:
        """Enqueues a copy between two addresses, of the device or of the host."""

    def synchronize(self, stream: int) -> None:
        """Waits until the stream has done what is enqueued there."""


class DeviceArray:
    """An array in memory of a CUDA device. It keeps that memory mapped as long as it lives.

    `torch.as_tensor(array, device=array.device)` and `cupy.asarray(array)` are views of it. Each
    has a storage of its own and keeps the array. When the last of them has gone, the arena is
    unmapped, and the host waits for the device first.

    Attributes: device ("cuda:0", as this process counts devices), address (of the first element),
    shape, dtype (numpy's), strides (in elements), nbytes.
    """

    def __init__(
        self,
        device: str,
        copies: Copies,
        owner: object,
        address: int,
        shape: Sequence[int],
        dtype: npt.DTypeLike = np.uint8,
        strides: Sequence[int] | None = None,
    ) -> None:
        """Is called by the client. Callers get arrays from Session.attach() and slot()."""
        self.device, self._copies, self._owner = device, copies, owner
        self.address = address
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self.strides = _dense(self.shape) if strides is None else tuple(strides)

    @property
    def nbytes(self) -> int:
        """The bytes of its elements, without what lies between them."""
        return math.prod(self.shape) * self.dtype.itemsize

    def slot(
        self,
        offset_bytes: int,
        shape: Sequence[int],
        dtype: npt.DTypeLike = np.float32,
        strides: Sequence[int] | None = None,
    ) -> DeviceArray:
        """Makes an array of a part of these bytes: of a fragment in its arena.

        offset_bytes: where the first element begins, counted from the beginning of this array.
        dtype: numpy's. Numpy has no bfloat16: take "int16", and then `tensor.view(torch.bfloat16)`.
        strides: in elements, as in types.Slice; None means dense and row-major. Raises
        InvalidArgumentError where the part would not lie within this array.
        """
        place = self.address + offset_bytes
        part = DeviceArray(self.device, self._copies, self._owner, place, shape, dtype, strides)
        if len(part.strides) != len(part.shape) or min((*part.shape, *part.strides, 0)) < 0:
            raise InvalidArgumentError(f"a slot of shape {part.shape} and strides {part.strides}")
        end_bytes = offset_bytes
        if part.nbytes:
            last = sum((n - 1) * s for n, s in zip(part.shape, part.strides, strict=True))
            end_bytes += (last + 1) * part.dtype.itemsize
        if offset_bytes < 0 or end_bytes > self.nbytes:
            raise InvalidArgumentError(
                f"bytes {offset_bytes} to {end_bytes} of an array of {self.nbytes}"
            )
        return part

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Has version 3 and names no stream: it says nothing of work that is under way."""
        size = self.dtype.itemsize
        dense = self.strides == _dense(self.shape)
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.address if self.nbytes else 0, False),
            "strides": None if dense else tuple(stride * size for stride in self.strides),
        }

    def read(self, stream: int = 0) -> np.ndarray:
        """Returns a copy on the host, which is made when the stream has come so far.

        The host waits for the stream. Raises InvalidArgumentError unless the array is dense.
        """
        values = np.empty(self.shape, self.dtype)
        self._copy(values.ctypes.data, self.address, stream)
        self._copies.synchronize(stream)
        return values

    def write(self, values: npt.ArrayLike, stream: int = 0) -> None:
        """Enqueues a copy of values of the host in the stream.

        The values are cast to the array's dtype and broadcast to its shape. They may change when
        the call has returned, though the copy may still be under way. Raises as `read` does.
        """
        source = np.ascontiguousarray(np.broadcast_to(np.asarray(values, self.dtype), self.shape))
        self._copy(self.address, source.ctypes.data, stream)

    def _copy(self, to: int, source: int, stream: int) -> None:
        if self.strides != _dense(self.shape):
            raise InvalidArgumentError(f"an array with strides {self.strides} cannot be copied so")
        if self.nbytes:
            self._copies.copy(to, source, self.nbytes, stream)

    def __repr__(self) -> str:
        return (
            f"DeviceArray({self.device!r}, {self.address:#x}, shape={self.shape}, "
            f"dtype={self.dtype.name!r})"
        )


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
