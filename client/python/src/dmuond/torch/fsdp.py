"""What is read of FSDP2 beyond what torch documents: the parameters it manages, and its streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _composable_state
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Reduced:
    """What FSDP2 does to a gradient before it is seen here."""

    mesh: DeviceMesh  # of the ranks that it adds up
    divisor: float


def reduced() -> dict[int, Reduced]:
    """By id of each sharded parameter in this process.

    A parameter does not tell: one that parallelize_module has made is a DTensor, too.
    """
    found = {}
    for group in _groups():
        mesh = group.mesh_info
        ranks = getattr(mesh, "shard_mesh_size", 1) * getattr(mesh, "replicate_mesh_size", 1)
        of = Reduced(mesh.mesh, getattr(group, "gradient_divide_factor", None) or ranks)
        for member in group.fsdp_params:
            found[id(member.sharded_param)] = of
    return found


def gathered() -> set[int]:
    """Ids of the whole parameters that stand in modules while shards are gathered."""
    whole = (
        getattr(member, "_unsharded_param", None)
        for group in _groups()
        for member in group.fsdp_params
    )
    return {id(parameter) for parameter in whole if parameter is not None}


def streams(parameters: Iterable[Tensor]) -> set[int]:
    """All in which the next use of these shards begins, beside the current one; empty: unknown.

    Unknown are those of a parameter that is cut along other dimensions of its mesh, too (tensor
    parallel): their collectives run in streams that torch keeps to itself.
    """
    wanted = {id(parameter): parameter for parameter in parameters}
    found: set[int] = set()
    for group in _groups():
        for member in group.fsdp_params:
            parameter = wanted.pop(id(member.sharded_param), None)
            if parameter is None:
                continue
            assert isinstance(parameter, DTensor)
            if parameter.device_mesh.ndim != group.mesh_info.mesh.ndim:
                return set()
            kept = vars(group.comm_ctx).values()
            found |= {s.cuda_stream for s in kept if isinstance(s, torch.cuda.Stream)}
    return set() if wanted else found


def _groups() -> Iterator[Any]:
    for module in list(_composable_state._module_state_mapping):
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:  # before torch 2.15
            groups = [state._fsdp_param_group]
        yield from filter(None, groups)
