"""What this rank holds of a parameter: a plain tensor whole, a DTensor its shard."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dmuond import types
from dmuond.errors import InvalidArgumentError

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

    @property
    def box(self) -> types.Box:
        end = [first + size for first, size in zip(self.begin, self.local_shape, strict=True)]
        return types.Box(begin=self.begin, end=end)

    @property
    def elements(self) -> int:
        return torch.Size(self.local_shape).numel()


def holding_of(name: str, parameter: Tensor) -> Holding:
    if isinstance(parameter, DTensor):
        return _sharded(name, parameter)
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
    for placement in parameter.placements:
        if type(placement) not in (*SHARDS, Replicate):
            raise _no_box(name, placement)
    local_shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    for placement in parameter.placements:
        if isinstance(placement, _StridedShard):
            lines = _lines_of(parameter, placement.dim)
            if not torch.equal(lines, torch.arange(len(lines)) + offset[placement.dim]):
                raise _no_box(name, placement)
    local = parameter.to_local()
    if tuple(local.shape) != tuple(local_shape):
        raise InvalidArgumentError(
            f"'{name}': the local shard has shape {list(local.shape)}, its placements say "
            f"{list(local_shape)}"
        )
    strides = _contiguous(tuple(local_shape))
    return Holding(tuple(parameter.shape), tuple(offset), tuple(local_shape), strides, True)


def _lines_of(parameter: DTensor, dim: int) -> Tensor:
    """Which lines of a dimension this rank has, in their order: torch cuts their numbers, too."""
    alone = [
        Replicate()
        if isinstance(placement, Replicate) or placement.dim != dim
        else Shard(0)
        if isinstance(placement, Shard)
        else _StridedShard(0, split_factor=placement.split_factor)
        for placement in parameter.placements
    ]
    numbers = torch.arange(parameter.shape[dim])
    cut = distribute_tensor(numbers, parameter.device_mesh, alone, src_data_rank=None)
    return cut.to_local().cpu()


def _no_box(name: str, placement: Placement) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"'{name}' has the placement {placement}, which is not a box of the tensor; dmuond takes "
        "Shard and Replicate (fully_shard over one or two mesh dimensions, over tensor parallel, "
        "too). Give the parameter the route 'trainer', or shard it on another dimension"
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
