"""How the ranks' gradients of a parameter come together: who gives one, and what divides the sum.

Three answers: FSDP2 has reduced the gradients of its parameters over its own mesh. The gradient of
another DTensor says by its placements what it is along the dimensions of its mesh. All the rest
is what `mesh` and `mesh_roles` say; where they are not given, that all ranks average their losses,
or `data_parallel_size` of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from dmuond import types
from dmuond.errors import InvalidArgumentError
from dmuond.torch import fsdp
from dmuond.torch.fsdp import Reduced
from dmuond.torch.mesh_roles import MEANINGS, MeshRoles, describe
from dmuond.torch.routing import Named, Routed


@dataclass(frozen=True)
class Share:
    """What this rank gives to the gradient of a parameter."""

    contribution: int
    factor: float  # of the sum
    held_by_all: bool = False  # taken for granted; the daemon checks it
    # Dimensions of a DTensor's own mesh along which its gradient is added up by the daemon.
    added_dims: frozenset[int] = frozenset()
    # Other ranks have computed the same gradient, each by itself, and theirs may be the one that
    # lanes read. One that FSDP2's collective has given to all of them has the same bytes.
    unread: bool = False


@dataclass
class Reduction:
    """What the caller says of it, checked against the job's size."""

    kind: str  # "mean" or "sum"
    world_size: int
    data_parallel_size: int | None = None
    roles: MeshRoles | None = None
    reduced: dict[int, Reduced] = field(default_factory=dict)  # by id of the parameter

    @staticmethod
    def of(kind: str, data_parallel_size: Any, mesh: Any, roles: Any, world_size: int) -> Reduction:
        if kind not in ("mean", "sum"):
            raise InvalidArgumentError(f"reduction='{kind}' is neither 'mean' nor 'sum'")
        if not isinstance(world_size, int) or world_size < 1:
            world_size = 1  # the session refuses the other by name
        if mesh is None and roles is not None:
            raise InvalidArgumentError(
                f"mesh_roles={roles!r} without mesh=: give the DeviceMesh of all ranks, too"
            )
        if data_parallel_size is not None:
            _check_size(data_parallel_size, world_size)
            if mesh is not None or kind == "sum":
                raise InvalidArgumentError(
                    f"data_parallel_size={data_parallel_size} is what reduction='mean' divides by "
                    f"without mesh=: {'mesh=' if mesh is not None else 'reduction=' + repr(kind)} "
                    "says something else"
                )
        checked = None if mesh is None else MeshRoles(mesh, roles, world_size)
        return Reduction(kind, world_size, data_parallel_size, checked, fsdp.reduced())

    def shares(self, routed: Iterable[Routed]) -> dict[int, Share]:
        """By id of the parameter; InvalidArgumentError names what cannot be known."""
        members = [item.named for item in routed if item.route != "trainer"]
        if self.roles is not None:
            return {
                id(named.parameter): self._by_roles(named.name, named.parameter)
                for named in members
            }
        self._check_known_without_roles(members)
        return {id(named.parameter): self._by_default(named.parameter) for named in members}

    # --- without mesh= ---

    def _by_default(self, parameter: Tensor) -> Share:
        if isinstance(parameter, DTensor):
            unread = _has_replicas(parameter, self.reduced.get(id(parameter)))
            return Share(types.CONTRIBUTION_SAME, 1.0, unread=unread)
        if self.kind == "sum":
            return Share(types.CONTRIBUTION_SUM, 1.0)
        divisor = self.data_parallel_size or self.world_size
        everywhere = self.data_parallel_size is None and self.world_size > 1
        return Share(types.CONTRIBUTION_SUM, 1.0 / divisor, held_by_all=everywhere)

    def _check_known_without_roles(self, members: list[Named]) -> None:
        by_hand, others = [], []
        for named in members:
            parameter, reduced = named.parameter, self.reduced.get(id(named.parameter))
            if not isinstance(parameter, DTensor):
                others.append(named)
                continue
            (others if reduced else by_hand).append(named)
            mesh = parameter.device_mesh
            if mesh.size() != self.world_size:
                raise InvalidArgumentError(
                    f"'{named.name}' lies on the mesh {describe(mesh)}, {mesh.size()} of the "
                    f"job's {self.world_size} ranks, and nothing says what the others are to it. "
                    + self._line_to_write(named)
                )
            if reduced and self.world_size not in (reduced.mesh.size(), reduced.divisor):
                raise InvalidArgumentError(
                    f"'{named.name}' lies on the mesh {describe(mesh)}, of which FSDP2 averages "
                    f"over {describe(reduced.mesh)}: nothing says whether the ranks along the rest "
                    "have the same data or other. " + self._line_to_write(named)
                )
        if by_hand and others and self.world_size > 1:
            sharded = isinstance(others[0].parameter, DTensor)
            raise InvalidArgumentError(
                f"'{others[0].name}' is {'a shard of FSDP2' if sharded else 'a plain tensor'} "
                f"beside '{by_hand[0].name}', which lies on the mesh "
                f"{describe(by_hand[0].parameter.device_mesh)}: nothing says whether the ranks "
                "there have equal gradients of what they both hold, or parts of one. "
                + self._line_to_write(by_hand[0])
            )

    def _line_to_write(self, named: Named) -> str:
        """The roles are likely ones: the caller looks at each."""
        mesh = named.parameter.device_mesh
        own = tuple(mesh.mesh_dim_names or ())
        whole = _root_of(mesh)
        if whole.size() == self.world_size and whole.mesh_dim_names:
            names, which = whole.mesh_dim_names, f" {describe(whole)}"
        else:
            names, which = ("replicas", *(own or ("shards",))), ""
        reduced = self.reduced.get(id(named.parameter))
        averaged = reduced.mesh.mesh_dim_names or () if reduced else ()
        same = set() if "expert" in named.name.lower() else {*own} - {*averaged}
        roles = ", ".join(f'"{name}": "{"same" if name in same else "mean"}"' for name in names)
        return (
            f"Write\n    mesh=mesh, mesh_roles={{{roles}}}\nwith the DeviceMesh{which} of all "
            f"ranks, and for each dimension what the ranks along it see. {MEANINGS}"
        )

    # --- with mesh= ---

    def _by_roles(self, name: str, parameter: Tensor) -> Share:
        roles = self.roles
        assert roles is not None
        beside = set(range(len(roles.sizes)))
        equal: set[int] = set()
        added: set[int] = set()
        added_own = []
        reduced = self.reduced.get(id(parameter))
        if isinstance(parameter, DTensor):
            own = roles.dims_of(name, parameter.device_mesh)
            beside.difference_update(*own)
            _refuse_stages(roles, name, set().union(*own))
            for dim, placement in enumerate(parameter.placements):
                if not isinstance(placement, Replicate):
                    continue
                if reduced is None and own[dim] & roles.having("mean"):
                    added |= own[dim] - roles.having("same")
                    equal |= own[dim] & roles.having("same")
                    added_own.append(dim)
                else:
                    equal |= own[dim]
        equal |= beside & roles.having("same")
        added |= beside & roles.having("mean", "sum", "stages")
        if not added:
            contribution = types.CONTRIBUTION_SAME if equal else types.CONTRIBUTION_SUM
        elif any(roles.place[dim] for dim in equal):
            contribution = types.CONTRIBUTION_NONE
        else:
            contribution = types.CONTRIBUTION_SUM
        given = set().union(*roles.dims_of(name, reduced.mesh)) if reduced else set()
        return Share(
            contribution,
            float(self._factor(name, reduced)),
            added_dims=frozenset(added_own),
            unread=contribution != types.CONTRIBUTION_SUM and not equal <= given,
        )

    def _factor(self, name: str, reduced: Reduced | None) -> Fraction:
        """Of the sum over the ranks along all dimensions but those with equal gradients."""
        roles = self.roles
        assert roles is not None
        averaged = roles.having("mean")
        if reduced is None:
            return Fraction(1, roles.size(averaged) if self.kind == "mean" else 1)
        inside = set().union(*roles.dims_of(name, reduced.mesh))
        if self.kind == "sum":
            averaged &= inside
        again = roles.size(averaged) * roles.size(inside & roles.having("same"))
        return Fraction(reduced.divisor) / again


def _has_replicas(parameter: DTensor, reduced: Reduced | None) -> bool:
    """Whether other ranks compute the gradient of the same part.

    The dimensions along which FSDP2 reduces are the first ones of its parameters' meshes.
    """
    first = reduced.mesh.ndim if reduced else 0
    dims = range(first, len(parameter.placements))
    replicas = (dim for dim in dims if isinstance(parameter.placements[dim], Replicate))
    return any(parameter.device_mesh.size(dim) > 1 for dim in replicas)


def _check_size(size: Any, world_size: int) -> None:
    whole = isinstance(size, int) and not isinstance(size, bool)
    if not whole or size < 1 or world_size % size:
        raise InvalidArgumentError(
            f"data_parallel_size={size!r} must be a number that divides the {world_size} ranks of "
            "the job: how many of them have other data, their losses averaged"
        )


def _refuse_stages(roles: MeshRoles, name: str, dims: set[int]) -> None:
    wrong = dims & roles.having("stages")
    if wrong:
        raise InvalidArgumentError(
            f"'{name}' is one DTensor over {roles.names(wrong)}, whose role 'stages' says that "
            f"the ranks along it have other parameters. {MEANINGS}"
        )


def _root_of(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that this one was sliced from, where torch tells."""
    root = getattr(mesh, "_get_root_mesh", None)
    return mesh if root is None else root()


def divisor_unknown(message: str, metadata: dict[str, str]) -> str:
    """The daemon's refusal (DIVISOR_UNKNOWN), and the lines of which one helps."""
    holders, world = metadata.get("holders", "1"), metadata.get("world_size", "1")
    lines = (
        f"    data_parallel_size={holders}  # those {holders} have other data, their losses "
        "averaged; the others have other stages of it\n"
        f"    data_parallel_size={world}  # all {world} have other data, their losses averaged; "
        "the parameter is an expert\n"
        '    mesh=mesh, mesh_roles={"pp": "stages", "dp": "mean"}  # the DeviceMesh of all ranks'
    )
    return f"{message}\nWrite one of\n{lines}"
