"""What the ranks along each dimension of the job's DeviceMesh see, as the caller says.

mean: other data, and the job's loss is the mean of theirs (data and expert parallel).
sum: parts of one loss, so that the gradients of replicas are parts as well (sequence parallel).
same: the same data, so that the gradients of replicas are equal (plain tensor parallel).
stages: other parameters of one loss (pipeline).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from dmuond.errors import InvalidArgumentError

ROLES = ("mean", "sum", "same", "stages")
MEANINGS = (
    "'mean': other data, and the losses are averaged; 'sum': parts of one loss, as under sequence "
    "parallel; 'same': the same data, so that replicas have equal gradients, as under plain tensor "
    "parallel; 'stages': other parameters of one loss, as in a pipeline"
)


class MeshRoles:
    """The mesh of all ranks of the job, and this rank's place in it. Dimensions are indices."""

    def __init__(self, mesh: Any, roles: Any, world_size: int) -> None:
        if not isinstance(mesh, DeviceMesh):
            raise InvalidArgumentError(
                f"mesh={mesh!r} is not a DeviceMesh: give the one of all ranks (init_device_mesh)"
            )
        if mesh.mesh_dim_names is None:
            raise InvalidArgumentError(
                "mesh= has no names for its dimensions, which mesh_roles is about: give "
                "init_device_mesh mesh_dim_names"
            )
        self._names = tuple(mesh.mesh_dim_names)
        self.sizes = tuple(mesh.mesh.shape)
        self._check_roles(roles)
        self.roles = tuple(roles[name] for name in self._names)
        ranks = mesh.mesh.flatten().tolist()
        place = mesh.get_coordinate()
        if len(ranks) != world_size or len(set(ranks)) != world_size or place is None:
            raise InvalidArgumentError(
                f"mesh={describe(mesh)} has {len(set(ranks))} ranks and the job {world_size}: give "
                "the DeviceMesh of all ranks of the job, each once"
            )
        self._grid = mesh.mesh
        self.place = tuple(place)

    def having(self, *roles: str) -> set[int]:
        """The dimensions with one of these roles that have more than one rank."""
        return {dim for dim, role in enumerate(self.roles) if role in roles and self.sizes[dim] > 1}

    def size(self, dims: Iterable[int]) -> int:
        return math.prod(self.sizes[dim] for dim in dims)

    def names(self, dims: Iterable[int]) -> str:
        return ", ".join(f"'{self._names[dim]}'" for dim in sorted(dims))

    def dims_of(self, name: str, mesh: DeviceMesh) -> list[set[int]]:
        """For each dimension of a parameter's own mesh, the dimensions here that it consists of.

        Found by the ranks along it, so that flattened dimensions are found, too.
        """
        mine = mesh.get_coordinate()
        found = []
        for dim in range(mesh.ndim):
            at = [slice(None) if d == dim else mine[d] for d in range(mesh.ndim)]
            found.append(self._spanning(name, mesh, set(mesh.mesh[tuple(at)].flatten().tolist())))
        return found

    def _spanning(self, name: str, mesh: DeviceMesh, ranks: set[int]) -> set[int]:
        wide = [dim for dim, size in enumerate(self.sizes) if size > 1]
        for count in range(len(wide) + 1):
            for dims in itertools.combinations(wide, count):
                if self.size(dims) == len(ranks) and self._ranks_along(dims) == ranks:
                    return set(dims)
        raise InvalidArgumentError(
            f"'{name}' lies on the mesh {describe(mesh)}, of which the ranks {sorted(ranks)} are "
            f"not along dimensions of mesh=({self._shape()}): slice the parameter's mesh from it"
        )

    def _ranks_along(self, dims: tuple[int, ...]) -> set[int]:
        at = [slice(None) if d in dims else self.place[d] for d in range(len(self.sizes))]
        return set(self._grid[tuple(at)].flatten().tolist())

    def _shape(self) -> str:
        return ", ".join(
            f"{name}={size}" for name, size in zip(self._names, self.sizes, strict=True)
        )

    def _check_roles(self, roles: Any) -> None:
        given = roles if isinstance(roles, Mapping) else {}
        wrong = [name for name in self._names if given.get(name) not in ROLES]
        unknown = [name for name in given if name not in self._names]
        if not wrong and not unknown:
            return
        line = ", ".join(
            f'"{name}": "{given[name] if given.get(name) in ROLES else "..."}"'
            for name in self._names
        )
        if unknown:
            what = f"names {unknown[0]!r}, which mesh=({self._shape()}) does not have"
        elif wrong[0] in given:
            what = f"gives '{wrong[0]}' the role {given[wrong[0]]!r}, which there is not"
        else:
            what = f"says nothing of '{wrong[0]}'"
        raise InvalidArgumentError(
            f"mesh_roles {what}. Write mesh_roles={{{line}}} with what the ranks along each "
            f"dimension see. {MEANINGS}"
        )


def describe(mesh: DeviceMesh) -> str:
    """As "(dp=2, tp=2)"."""
    names = mesh.mesh_dim_names or [""] * mesh.ndim
    sizes = mesh.mesh.shape
    pairs = (f"{n}={size}" if n else f"{size}" for n, size in zip(names, sizes, strict=True))
    return f"({', '.join(pairs)})"
