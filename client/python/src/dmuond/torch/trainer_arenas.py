"""Arenas where the model's weights lie already: memory of torch's allocator that lanes write into.

An allocator cuts its allocations into tensors, and a handle is of a whole allocation: what an
optimizer updates in one of them is one arena.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuond.device_array import HasMemory
from dmuond.torch.fragments import holding_of
from dmuond.torch.routing import Named
from dmuond.torch.slots import Place
from dmuond.torch.tensor_device import TensorDevice

_ALIGNMENT_BYTES = 16  # of the beginning of an arena


class _Part:
    """Part of an allocation. Keeps the tensors that lie there, and so the memory."""

    def __init__(self, address: int, size_bytes: int, tensors: list[Tensor]) -> None:
        self._address, self._size_bytes, self._tensors = address, size_bytes, tensors

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        shape = (self._size_bytes,)
        return {"version": 3, "shape": shape, "typestr": "|u1", "data": (self._address, False)}


def weight_places(
    parameters: Iterable[Named], device: TensorDevice, first_id: int
) -> tuple[dict[int, HasMemory], Mapping[int, Place]]:
    """Arenas with ids from `first_id` on, and where weights lie in them, by id of the parameter.

    A weight that does not lie dense, or is empty, has no place.
    """
    found: dict[int, list[tuple[int, Named, Tensor]]] = {}  # by where the allocation begins
    for named in parameters:
        parameter = named.parameter.detach()
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        holding = holding_of(named.name, named.parameter)
        if holding.elements and tuple(local.stride()) == holding.strides:
            address = device.address_of(local)
            found.setdefault(device.allocation_at(address), []).append((address, named, local))
    arenas: dict[int, HasMemory] = {}
    places: dict[int, Place] = {}
    for identity, members in enumerate(found.values(), first_id):
        begin = min(address for address, _, _ in members)
        begin -= begin % _ALIGNMENT_BYTES
        end = max(address + local.nbytes for address, _, local in members)
        arenas[identity] = _Part(begin, end - begin, [local for _, _, local in members])
        for address, named, _ in members:
            places[id(named.parameter)] = Place(identity, address - begin, padded=False)
    return arenas, places
