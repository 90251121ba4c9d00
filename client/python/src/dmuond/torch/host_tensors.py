"""Parameters on the host, where nothing is enqueued."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from dmuond.device_array import HasMemory
from dmuond.errors import InvalidArgumentError
from dmuond.memory import View
from dmuond.torch.tensor_device import Answer, Known, Pair, TensorDevice, same_bytes

_PAGE_BYTES, _ADDRESSES_END = 4096, 1 << 48


class _Memory:
    """All that this process has mapped, and what it has not, from the first page on."""

    __array_interface__: ClassVar = {
        "version": 3,
        "data": (_PAGE_BYTES, True),
        "typestr": "<u4",
        "shape": ((_ADDRESSES_END - _PAGE_BYTES) // 4,),
    }


_memory = np.asarray(_Memory())


def words_at(addresses: np.ndarray) -> np.ndarray:
    """The words of 32 bits that lie there: one call for words of many tensors.

    REQUIRES: multiples of 4, in memory that somebody keeps.
    """
    return _memory[(addresses - _PAGE_BYTES) >> 2]


class HostTensors(TensorDevice):
    """The memory of the host, which has no streams."""

    name = "cpu"
    unit_bytes, units = 64, 512  # lines of a cache

    def bytes_at(self, arena: View, offset_bytes: int, size_bytes: int) -> Tensor:
        return torch.from_numpy(np.frombuffer(arena, np.uint8, size_bytes, offset_bytes))

    def allocate(self, size_bytes: int) -> HasMemory:
        raise _not_on_the_host()

    def address_of(self, tensor: Tensor) -> int:
        return tensor.data_ptr()

    def allocation_at(self, address: int) -> int:
        raise _not_on_the_host()

    def stream(self) -> int | None:
        return None

    def wait_for(self, streams: Iterable[int]) -> None:
        pass

    def finish(self) -> None:
        pass

    def differing(self, pairs: Sequence[Pair]) -> list[int]:
        return [index for index, pair in enumerate(pairs) if not same_bytes(*pair)]

    def checksum(self, contents: Tensor) -> Tensor:
        return torch.tensor(zlib.crc32(contents.numpy()), device="cpu")

    def bring(self, tensor: Tensor) -> Answer:
        return Known(tensor)

    def unchanged(self, before: Sequence[Tensor], now: Sequence[Tensor]) -> Answer:
        return Known(all(map(torch.equal, before, now)))


def _not_on_the_host() -> InvalidArgumentError:
    return InvalidArgumentError(
        'arenas="trainer" is for parameters on a GPU: arenas on the host are the daemon\'s'
    )
