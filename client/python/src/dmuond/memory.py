"""Where a session's arenas lie: one interface, for memory of the host and of a CUDA device.

host_memory and cuda_memory implement it; devices chooses.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dmuond.device_array import DeviceArray, HasMemory

# What a caller gets of an arena: all its bytes.
View = np.ndarray | DeviceArray


class Arena(abc.ABC):
    """A mapped arena. The mapping ends when nobody refers to this object or to its view.

    Attributes: view (what the caller gets), address (of its first byte).
    """

    view: View
    address: int

    @abc.abstractmethod
    def contents(self) -> np.ndarray:
        """All its bytes: the memory itself where it is the host's, a copy where it is a device's.

        Waits for what the device has to do.
        """

    @abc.abstractmethod
    def write(self, contents: np.ndarray) -> None:
        """Its bytes are these when it returns, for whatever is enqueued afterwards."""

    @abc.abstractmethod
    def adopt(self, fresh: Arena) -> None:
        """The memory of `fresh` lies at the addresses of this arena from now on.

        `fresh` is of the same size and the same Memory, and is not used any more afterwards. Raises
        Error where the memory cannot be mapped here; then nothing may use this arena.
        """


@dataclass(frozen=True)
class Exported:
    """An arena in the trainer's own memory, and what lanes open it by: fields of Arena.CudaIpc."""

    arena: Arena
    size_bytes: int
    handle: bytes  # 64
    base_offset: int
    allocation_bytes: int
    buffer_id: int


class Words(abc.ABC):
    """The words of one mapped timeline page, for those who store into them and wait in streams.

    Words are named by their addresses. A stream is a handle (see Session); None: none. Attributes:
    can_fail (what is enqueued may never happen: see check).
    """

    can_fail: bool

    @abc.abstractmethod
    def store(self, words: Sequence[int], value: int, stream: int | None) -> None:
        """Stores into the words, in their order, when the stream has come so far; None: at once.

        No store overtakes an earlier one. Nothing waits: neither the host nor the stream. Raises
        FailedPreconditionError, and has stored nothing, where the stream is being captured.
        """

    @abc.abstractmethod
    def wait(self, words: Sequence[int], value: int, stream: int) -> None:
        """Has the stream wait until each word is at least the value. Raises as `store` does."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raises Error (CUDA_FAILED) where nothing that is enqueued happens any more.

        The device's context has failed then, by an illegal access, say. Does not wait.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Returns when all of these stores and waits have happened."""


class Memory(abc.ABC):
    """The memory of one device, or the host's. For several sessions, one after the other.

    Attributes: device ("cpu", "cuda:0"), device_uuid ("GPU-…"; empty: the host).
    """

    device: str
    device_uuid: str

    @abc.abstractmethod
    def map(self, descriptor: int, size_bytes: int) -> Arena:
        """Maps an arena that the daemon has made. The descriptor stays the caller's."""

    @abc.abstractmethod
    def export(self, memory: HasMemory) -> Exported:
        """Exports memory that the trainer has already, and keeps the object that owns it.

        Raises InvalidArgumentError where it is not all of one allocation of this device, and
        FailedPreconditionError, with what to set, where memory of its kind has no handle.
        """

    @abc.abstractmethod
    def words(self, page: object, address: int, size_bytes: int) -> Words:
        """The words of a mapped page. They keep `page`, whose mapping must last as long."""

    @abc.abstractmethod
    def check_stream(self, stream: int | None) -> None:
        """Raises InvalidArgumentError or FailedPreconditionError unless this may be a stream."""
