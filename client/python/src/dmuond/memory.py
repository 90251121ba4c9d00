"""Where a session's arenas lie: one interface, for memory of the host and of a CUDA device.

host_memory and cuda_memory implement it; devices chooses.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from dmuond.device_array import DeviceArray, HasMemory

# All bytes of an arena, as the caller gets them.
View = np.ndarray | DeviceArray


class Arena(abc.ABC):
    """A mapped arena. The mapping ends when nobody refers to this object or to its view.

    Attributes: view (what the caller gets), address (of its first byte).
    """

    view: View
    address: int

    @abc.abstractmethod
    def contents(self) -> np.ndarray:
        """All its bytes: the memory itself on the host, and a copy of a device's memory.

        Waits until the device has done what is enqueued.
        """

    @abc.abstractmethod
    def read(self, offset_bytes: int, size_bytes: int) -> np.ndarray:
        """A copy of some of its bytes. REQUIRES: nothing is enqueued that changes them."""

    @abc.abstractmethod
    def write(self, contents: np.ndarray, offset_bytes: int = 0) -> None:
        """Replaces bytes from there on. It is done when it returns."""

    @abc.abstractmethod
    def adopt(self, fresh: Arena) -> None:
        """Maps the memory of `fresh` at the addresses of this arena, in the place of its own.

        REQUIRES: `fresh` has the same size and comes from the same Memory. Nobody uses `fresh`
        afterwards. Raises Error where the memory cannot be mapped; then nobody may use this arena.
        """


@dataclass(frozen=True)
class Exported:
    """An arena in the trainer's own memory, and by which fields of Arena.CudaIpc lanes open it."""

    arena: Arena
    size_bytes: int
    handle: bytes  # 64 of them
    base_offset: int
    allocation_bytes: int
    buffer_id: int


class Words(abc.ABC):
    """Stores into the words of one mapped timeline page, and lets streams wait for them.

    A word is named by its address, a stream by its handle (see Session). Attributes: can_fail (what
    is enqueued may never happen: see check).
    """

    can_fail: bool

    @abc.abstractmethod
    def store(self, words: Sequence[int], value: int, streams: Iterable[int]) -> None:
        """Stores into the words, in their order, when the streams have done what is enqueued there.

        Without a stream it stores at once. No store overtakes an earlier one. Neither the host nor
        a stream waits. Raises FailedPreconditionError where one is being captured; then nothing is
        stored.
        """

    @abc.abstractmethod
    def wait(self, words: Sequence[int], value: int, stream: int) -> None:
        """Lets the stream wait until each word is at least the value. Raises as `store` does."""

    @abc.abstractmethod
    def check(self) -> None:
        """Raises Error (CUDA_FAILED) where nothing that is enqueued happens any more.

        The device's context has failed then, by an illegal access, say. Does not wait.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Returns when all of these stores and waits have happened."""


class Memory(abc.ABC):
    """The memory of one device, or of the host.

    Attributes: device ("cpu", "cuda:0"), device_uuid ("GPU-…"; empty: the host).
    """

    device: str
    device_uuid: str

    @abc.abstractmethod
    def map(self, descriptor: int, size_bytes: int) -> Arena:
        """Maps an arena that the daemon has made. The descriptor stays the caller's."""

    @abc.abstractmethod
    def export(self, memory: HasMemory) -> Exported:
        """Makes an arena of memory that the trainer has already. It keeps the object.

        Raises InvalidArgumentError where it is not all of one allocation of this device, and
        FailedPreconditionError, with what to set, where memory of its kind has no handle.
        """

    @abc.abstractmethod
    def words(self, page: object, address: int, size_bytes: int) -> Words:
        """The words of the page that is mapped at `address`. They keep `page`, its mapping."""

    @abc.abstractmethod
    def check_stream(self, stream: int | None) -> None:
        """Raises InvalidArgumentError or FailedPreconditionError unless this may be a stream."""
