"""torch's CPU tensors in the place of tensors on a GPU of the fake driver.

torch has no CUDA here. Its CPU computes what would be enqueued, at once, in memory of the fake
driver that a host can use (fakeCudaAlias): a tensor there stands for one on the GPU. Streams, words
and the daemon's lanes are the fake driver's, and the optimizer and the client are the product's.
What torch's own streams and allocator do, these tests cannot see.
"""

import contextlib
import ctypes
import unittest.mock
from collections.abc import Iterable, Iterator

import dmuond.torch.muon
import gpus
import numpy as np
import torch
from dmuond.cuda_compare import ByteComparison
from dmuond.cuda_driver import Device, call
from dmuond.session import Session
from dmuond.torch.cuda_tensors import CudaTensors
from dmuond.torch.tensor_device import Answer, Known, TensorDevice
from torch.distributed.tensor import DTensor

SEGMENT_BYTES = 1 << 20  # of the stand-in for torch's allocator


class Late(Answer):
    """Known when it has been asked for so many times."""

    def __init__(self, value: torch.Tensor, asked: int):
        self._value, self._left = value, asked

    def is_known(self) -> bool:
        self._left -= 1
        return self._left < 0

    def value(self) -> torch.Tensor:
        return self._value


class Aliases:
    """Memory of a device as the host can use it, and back."""

    def __init__(self):
        self._find = ctypes.CDLL("libcuda.so.1").fakeCudaAlias
        self._find.restype, self._find.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        self._known: list[tuple[int, int, int]] = []  # where the host has it, size, its address

    def tensor(self, address: int, size_bytes: int, owner: object) -> torch.Tensor:
        """Its bytes, with a storage of their own that keeps the owner."""
        there = self._find(address)
        self._known.append((there, size_bytes, address))
        contents = (ctypes.c_uint8 * size_bytes).from_address(there)
        contents.owner = owner
        return torch.from_numpy(np.frombuffer(contents, np.uint8))

    def address_of(self, tensor: torch.Tensor) -> int | None:
        """The device's address, or None where this is other memory."""
        at = tensor.data_ptr()
        for begin, size_bytes, address in reversed(self._known):
            if begin <= at < begin + size_bytes:
                return address + at - begin
        return None


class StandIn(TensorDevice):
    """A GPU whose tensors are torch's CPU tensors.

    Attributes: current (the stream in which torch would enqueue), answers_late (an answer is not
    known before it has been asked for so many times), looks (how often all bytes were compared).
    """

    unit_bytes, units = CudaTensors.unit_bytes, CudaTensors.units

    def __init__(self, ordinal: int):
        self.name, self._driver = f"cuda:{ordinal}", Device(ordinal)
        self.takes_turns = self._driver.takes_turns
        self._comparison = ByteComparison(self._driver)
        self._aliases, self._ordinal = Aliases(), ordinal
        self.current = gpus.make_stream(ordinal)
        self.answers_late = 0
        self.looks = 0

    def bytes_at(self, arena, offset_bytes, size_bytes):
        part = arena.slot(offset_bytes, (size_bytes,), "uint8")
        return self._aliases.tensor(part.address, size_bytes, part)

    def allocate(self, size_bytes):
        return gpus.own_memory(size_bytes, self._ordinal)

    def address_of(self, tensor):
        return self._aliases.address_of(tensor)

    def allocation_at(self, address):
        with self._driver.entered():
            begin, _ = call("cuMemGetAddressRange", address)
        return int(begin)

    def stream(self):
        return self.current

    def wait_for(self, streams: Iterable[int]):
        driver = gpus.use_device(self._ordinal)
        for stream in set(streams) - {self.current}:
            event = gpus.must(driver.cuEventCreate(0))
            gpus.must(driver.cuEventRecord(event, stream))
            gpus.must(driver.cuStreamWaitEvent(self.current, event, 0))

    def finish(self):
        self._driver.synchronize(self.current)

    def differing(self, pairs):
        if not pairs:
            return []
        self.looks += 1
        on_device = [[self._there(tensor) for tensor in pair] for pair in pairs]
        ranges = [
            (self.address_of(a) or 0, self.address_of(b) or 0, a.nbytes) for a, b in on_device
        ]
        self._comparison.start(ranges, self.current)
        return self._comparison.wait()

    def _there(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, or a copy of it on the device: a shard lies elsewhere."""
        if not tensor.nbytes or self.address_of(tensor) is not None:
            return tensor.contiguous()
        memory = gpus.own_memory(tensor.nbytes, self._ordinal)
        return _placed(self._aliases.tensor(memory.address, tensor.nbytes, memory), 0, tensor)

    def move(self, parameters: list[torch.Tensor]):
        """As torch's allocator would have them: several in an allocation, other things between."""
        memory, used = None, SEGMENT_BYTES
        for parameter in parameters:
            local = parameter._local_tensor if isinstance(parameter, DTensor) else parameter
            used = -(-used // 512) * 512 + 512
            if used + local.nbytes > SEGMENT_BYTES:
                memory, used = gpus.own_memory(SEGMENT_BYTES, self._ordinal), 512
            flat = self._aliases.tensor(memory.address, SEGMENT_BYTES, memory)
            local.data = _placed(flat, used, local)
            used += local.nbytes

    def checksum(self, contents):
        return contents.sum(dtype=torch.int64)

    def bring(self, tensor):
        value = tensor.clone()
        return Late(value, self.answers_late) if self.answers_late else Known(value)


def _placed(flat: torch.Tensor, at: int, like: torch.Tensor) -> torch.Tensor:
    """The values of a tensor, in bytes that begin there."""
    place = torch.empty(0, dtype=like.dtype)
    begin = at // like.dtype.itemsize
    place.set_(flat.untyped_storage(), begin, like.shape, like.detach().contiguous().stride())
    return place.copy_(like.detach())


class _AtOnce(Session):
    """What is called next is not enqueued behind the waits of a stream, but computed at once."""

    def step(self, *arguments, stream=None, **options):
        outcome = super().step(*arguments, stream=stream, **options)
        self._come_to(stream)
        return outcome

    def wait_published(self, buckets=None, stream=None):
        super().wait_published(buckets, stream)
        self._come_to(stream)

    def _come_to(self, stream):
        if stream is not None:
            self._memory._device.synchronize(stream)


@contextlib.contextmanager
def in_their_place(ordinal: int, own: bool = False) -> Iterator[StandIn]:
    """Optimizers that are made meanwhile have their parameters on that GPU.

    own: those lie there before the optimizer comes, as with arenas="trainer".
    """
    device = StandIn(ordinal)

    def device_of(parameters):
        if own:
            device.move([parameter for _, parameter in parameters])
        return device

    with (
        unittest.mock.patch.object(dmuond.torch.muon, "device_of", device_of),
        unittest.mock.patch.object(dmuond.torch.muon, "Session", _AtOnce),
    ):
        yield device
