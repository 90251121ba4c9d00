"""Parameters on a GPU: torch's streams and allocator, and looks at bytes that the device takes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from dmuond.cuda_compare import ByteComparison
from dmuond.cuda_driver import Device, call
from dmuond.device_array import DeviceArray, HasMemory
from dmuond.memory import View
from dmuond.torch.tensor_device import Answer, Pair, TensorDevice


class _Later(Answer):
    """An answer on its way to the host."""

    def __init__(self, value: Tensor) -> None:
        self._value = torch.empty(value.shape, dtype=value.dtype, device="cpu", pin_memory=True)
        self._value.copy_(value, non_blocking=True)
        self._there = torch.cuda.Event()
        self._there.record(torch.cuda.current_stream(value.device))

    def is_known(self) -> bool:
        return self._there.query()

    def value(self) -> Tensor:
        return self._value


class CudaTensors(TensorDevice):
    """A GPU of this process, with torch's current stream there."""

    unit_bytes, units = 16, 4096  # as a thread reads, and enough threads

    def __init__(self, device: torch.device) -> None:
        self._device, self._driver = device, Device(device.index)
        self.name, self.takes_turns = str(device), self._driver.takes_turns
        self._comparison = ByteComparison(self._driver)

    def bytes_at(self, arena: View, offset_bytes: int, size_bytes: int) -> Tensor:
        assert isinstance(arena, DeviceArray)
        part = arena.slot(offset_bytes, (size_bytes,), "uint8")
        return torch.as_tensor(part, device=self._device)

    def allocate(self, size_bytes: int) -> HasMemory:
        return torch.empty(size_bytes, dtype=torch.uint8, device=self._device)

    def address_of(self, tensor: Tensor) -> int:
        return tensor.data_ptr()

    def allocation_at(self, address: int) -> int:
        with self._driver.entered():
            begin, _ = call("cuMemGetAddressRange", address)
        return int(begin)

    def stream(self) -> int | None:
        return torch.cuda.current_stream(self._device).cuda_stream

    def wait_for(self, streams: Iterable[int]) -> None:
        current = torch.cuda.current_stream(self._device)
        for stream in set(streams) - {current.cuda_stream}:
            current.wait_stream(torch.cuda.ExternalStream(stream, self._device))

    def finish(self) -> None:
        torch.cuda.current_stream(self._device).synchronize()

    def differing(self, pairs: Sequence[Pair]) -> list[int]:
        if not pairs:
            return []
        dense = [(a.contiguous(), b.contiguous()) for a, b in pairs]
        ranges = [(self.address_of(a), self.address_of(b), a.nbytes) for a, b in dense]
        stream = self.stream()
        assert stream is not None
        self._comparison.start(ranges, stream)
        return self._comparison.wait()

    def checksum(self, contents: Tensor) -> Tensor:
        words = contents.view(torch.int64) if contents.numel() % 8 == 0 else contents
        return words.sum(dtype=torch.int64)

    def bring(self, tensor: Tensor) -> Answer:
        return _Later(tensor)

    def unchanged(self, before: Sequence[Tensor], now: Sequence[Tensor]) -> Answer:
        for made in before:  # in whatever stream
            made.record_stream(torch.cuda.current_stream(self._device))
        return super().unchanged(before, now)
