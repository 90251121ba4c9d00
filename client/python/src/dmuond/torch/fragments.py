"""What this rank holds of a parameter: a plain tensor whole, a DTensor its shard."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from dmuond import types
from dmuond.errors import InvalidArgumentError
from dmuond.torch.mesh_roles import describe

# Of FSDP2 over a dimension that tensor parallel has cut before: torch writes the later cut first.
SHARDS = (Shard, _StridedShard)
ELEMENT_TYPES = {
    torch.float32: types.ELEMENT_TYPE_FLOAT32,
    torch.bfloat16: types.ELEMENT_TYPE_BFLOAT16,
    torch.float16: types.ELEMENT_TYPE_FLOAT16,
}


@dataclass(frozen=True)
class Holding:
    """This rank's box of a parameter."""

    shape: tuple[int, ...]  # global
    begin: tuple[int, ...]
    local_shape: tuple[int, ...]
    strides: tuple[int, ...]  # elements, of the slot in the arena
    sharded: bool  # the parameter is a DTensor
    # The daemon holds the tensor, and its state, with this dimension moved to the front.
    first: int = 0

    @property
    def box(self) -> types.Box:
        end = [first + size for first, size in zip(self.begin, self.local_shape, strict=True)]
        return types.Box(begin=self.begin, end=end)

    def from_registered(self, values: Tensor) -> Tensor:
        """What the daemon has of the box, row-major, with the dimensions of the parameter."""
        shape = torch.empty(self.local_shape, device="meta").transpose(0, self.first).shape
        return values.reshape(shape).transpose(0, self.first)

    def as_registered(self, local: Tensor) -> Tensor:
        return local.transpose(0, self.first)

    @property
    def elements(self) -> int:
        return torch.Size(self.local_shape).numel()


def holding_of(name: str, parameter: Tensor) -> Holding:
    if isinstance(parameter, DTensor):
        return _sharded(name, parameter)
    if is_traceable_wrapper_subclass(parameter):
        raise _no_bytes(name, parameter)
    shape = tuple(parameter.shape)
    return Holding(shape, (0,) * len(shape), shape, _strides(parameter), False)


def element_type(name: str, dtype: torch.dtype, what: str) -> int:
    if dtype not in ELEMENT_TYPES:
        raise InvalidArgumentError(
            f"{what} of '{name}' is {dtype}; dmuond takes float32, bfloat16 and float16. "
            "Convert the "
            "model, or give the parameter the route 'trainer'"
        )
    return ELEMENT_TYPES[dtype]


def _sharded(name: str, parameter: DTensor) -> Holding:
    """The box that is left when every cut has been made, of which torch has made the same."""
    mesh, place = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    if place is None:
        raise InvalidArgumentError(
            f"'{name}' lies on the mesh {describe(mesh)}, which this rank is not part of: give "
            "each rank's optimizer the parameters that it holds"
        )
    for at, placement in enumerate(parameter.placements):
        if type(placement) not in (*SHARDS, Replicate):
            raise _unread(name, parameter, at, "and dmuond reads Shard and Replicate")
    begin, shape = [0] * parameter.ndim, list(parameter.shape)
    for dim in range(parameter.ndim):
        for at in _cuts(name, parameter, dim):
            chunk = -(-shape[dim] // mesh.size(at))
            first = min(chunk * place[at], shape[dim])
            begin[dim] += first
            shape[dim] = min(chunk, shape[dim] - first)
    local = parameter.to_local()
    if is_traceable_wrapper_subclass(local):
        raise _no_bytes(name, local)
    if list(local.shape) != shape:
        raise InvalidArgumentError(
            f"'{name}': the local shard has shape {list(local.shape)}, its placements "
            f"{parameter.placements} on the mesh {describe(mesh)} say {shape}"
        )
    local_shape = tuple(shape)
    return Holding(
        tuple(parameter.shape), tuple(begin), local_shape, _contiguous(local_shape), True
    )


def _cuts(name: str, parameter: DTensor, dim: int) -> list[int]:
    """The dimensions of the mesh along which this one is cut, in the order of the cuts.

    Cuts are made from left to right, but for a _StridedShard, which is made after those to its
    right that have cut the dimension into as many pieces as it says.
    """
    mesh, order = parameter.device_mesh, []
    for at, placement in reversed(list(enumerate(parameter.placements))):
        if type(placement) is Replicate or placement.dim != dim:
            continue
        pieces, position = 1, 0
        wanted = placement.split_factor if isinstance(placement, _StridedShard) else 1
        while pieces < wanted and position < len(order):
            pieces *= mesh.size(order[position])
            position += 1
        if pieces != wanted:
            raise _unread(name, parameter, at, "so that a rank has several pieces of it")
        order.insert(position, at)
    return order


def _unread(name: str, parameter: DTensor, at: int, why: str) -> InvalidArgumentError:
    own = parameter.placements
    words = ", ".join(
        f"Shard({placement.dim})" if type(placement) in SHARDS else "Replicate()"
        for placement in own
    )
    return InvalidArgumentError(
        f"'{name}' has the placement {own[at]!r} along dimension {at} of the mesh "
        f"{describe(parameter.device_mesh)}, {why}. Pass it as\n"
        f"    nn.Parameter(p.redistribute(placements=[{words}]))\n"
        f"or leave it to the trainer: route=[('{name}', 'trainer')]"
    )


def _no_bytes(name: str, tensor: Tensor) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"'{name}' is a {type(tensor).__name__}, whose elements lie in other tensors: pass a plain "
        f"tensor or a DTensor, or leave it to the trainer: route=[('{name}', 'trainer')]"
    )


def _contiguous(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """The tensor's own, if it lies dense in some order of dimensions; else row-major."""
    step = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != step:
            return _contiguous(tuple(tensor.shape))
        step *= size
    return tuple(tensor.stride())
