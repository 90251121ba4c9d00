"""What the optimizer needs of the device that a model's parameters are on.

host_tensors and cuda_tensors implement it; devices chooses. Work is enqueued in the calling
thread's current stream, as torch's own operations are.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dmuond.device_array import HasMemory
from dmuond.memory import View

Pair = tuple[Tensor, Tensor]  # of one dtype and shape


class Answer(abc.ABC):
    """Values of a tensor: known at once, or when the device has computed them."""

    @abc.abstractmethod
    def is_known(self) -> bool:
        """Does not wait."""

    @abc.abstractmethod
    def value(self) -> Tensor | bool:
        """On the CPU. REQUIRES: is_known."""


class Known(Answer):
    def __init__(self, value: Tensor | bool) -> None:
        self._value = value

    def is_known(self) -> bool:
        return True

    def value(self) -> Tensor | bool:
        return self._value


class TensorDevice(abc.ABC):
    """What the optimizer asks of the device that its parameters are on.

    Attributes: name (of the session's device: "cpu", "cuda:0"); takes_turns (this process and
    others compute there in turn: a GPU without MPS); unit_bytes and units (samples.py looks at so
    many parts of memory in a step, each of so many bytes: what is cheap to read there).
    """

    name: str
    takes_turns = False
    unit_bytes: int
    units: int

    @abc.abstractmethod
    def bytes_at(self, arena: View, offset_bytes: int, size_bytes: int) -> Tensor:
        """A part of an arena, as bytes with a storage of their own that keeps the mapping."""

    @abc.abstractmethod
    def allocate(self, size_bytes: int) -> HasMemory:
        """Memory of this process for an arena, which its allocator counts."""

    @abc.abstractmethod
    def address_of(self, tensor: Tensor) -> int:
        """Of the first element, as the device sees it."""

    @abc.abstractmethod
    def allocation_at(self, address: int) -> int:
        """Where the allocation begins that holds this address of the device."""

    @abc.abstractmethod
    def stream(self) -> int | None:
        """The current stream, as dmuond.Session takes it. None: nothing is enqueued here."""

    @abc.abstractmethod
    def wait_for(self, streams: Iterable[int]) -> None:
        """Lets the current stream wait for what is enqueued in those."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Returns when the current stream has done what is enqueued there."""

    @abc.abstractmethod
    def differing(self, pairs: Sequence[Pair]) -> list[int]:
        """Which pairs are not equal bit by bit. The host waits until the device has looked."""

    @abc.abstractmethod
    def checksum(self, contents: Tensor) -> Tensor:
        """Of a tensor of bytes, for `unchanged`."""

    @abc.abstractmethod
    def bring(self, tensor: Tensor) -> Answer:
        """Its values, when the current stream has come so far. The host does not wait."""

    def unchanged(self, before: Sequence[Tensor], now: Sequence[Tensor]) -> Answer:
        """Whether all are equal. All have one shape. The host does not wait."""
        if not before:
            return Known(True)
        return self.bring((torch.stack(list(before)) == torch.stack(list(now))).all())


def same_bytes(a: Tensor, b: Tensor) -> bool:
    """Compares bit by bit, so that equal NaNs are equal."""
    return torch.equal(bytes_of(a), bytes_of(b))


def bytes_of(tensor: Tensor) -> Tensor:
    """The tensor's bytes, row-major. view() would refuse some strides of at most one element."""
    flat = tensor.contiguous().as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)
