"""Registering a model: its parameters as fragments, and slots for them in two arenas."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from dmuond import types
from dmuond.errors import InvalidArgumentError
from dmuond.session import Session
from dmuond.torch.collect import LeftAlone
from dmuond.torch.first_weights import digests
from dmuond.torch.fragments import Holding, element_type, holding_of
from dmuond.torch.routing import ROUTES, Routed
from dmuond.torch.slots import ShardedSlot, Slot, slot_bytes

_WEIGHTS, _GRADIENTS = 1, 2  # arena ids


@dataclass
class _Request:
    """A registration in the making. `groups`: index of a parameter's group, by id."""

    groups: dict[int, int]
    reduce_factor: float  # of gradients that torch has not reduced
    parameters: list[types.Parameter] = field(default_factory=list)
    fragments: list[types.Fragment] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    arena_bytes: dict[int, int] = field(default_factory=lambda: {_WEIGHTS: 0, _GRADIENTS: 0})

    def add(self, item: Routed, ready_order: int) -> None:
        name, p = item.named.name, item.named.parameter
        holding = holding_of(name, p)
        if item.route == "trainer":
            self.add_left_alone(name, holding.shape, item.reason)
            return
        if p.device.type != "cpu":
            raise InvalidArgumentError(
                f"'{name}' is on {p.device}; this client's arenas are in host memory: train on cpu"
            )
        grad_dtype = getattr(p, "grad_dtype", None) or p.dtype
        averaged = holding.averaged
        index = len(self.parameters)
        self.parameters.append(
            types.Parameter(
                name=name,
                shape=holding.shape,
                weight_type=element_type(name, p.dtype, "the dtype"),
                gradient_type=element_type(name, grad_dtype, "the gradient's dtype"),
                route=ROUTES[item.route],
                route_reason=item.reason,
                view=item.view if item.route == "muon" else None,
                group=self.groups[id(p)],
                reduce_factor=1.0 if averaged else self.reduce_factor,
                ready_order=ready_order,
            )
        )
        self.fragments.append(
            types.Fragment(
                parameter=index,
                box=holding.box,
                contribution=types.CONTRIBUTION_SAME if averaged else types.CONTRIBUTION_SUM,
                gradient=self._slice(_GRADIENTS, holding, grad_dtype),
                weight=self._slice(_WEIGHTS, holding, p.dtype),
            )
        )
        kind = ShardedSlot if holding.sharded else Slot
        self.slots.append(kind(item, index, holding, grad_dtype))

    def add_left_alone(self, name: str, shape: tuple[int, ...], why: str) -> None:
        """In the routing table, and nowhere else: the daemon does not touch or restore it."""
        self.parameters.append(
            types.Parameter(
                name=name,
                shape=shape,
                weight_type=types.ELEMENT_TYPE_FLOAT32,
                gradient_type=types.ELEMENT_TYPE_FLOAT32,
                route=types.ROUTE_TRAINER,
                route_reason=why,
                reduce_factor=1.0,
            )
        )
        self.fragments.append(
            types.Fragment(
                parameter=len(self.parameters) - 1,
                box=types.Box(begin=[0] * len(shape), end=shape),
                contribution=types.CONTRIBUTION_SAME,
            )
        )

    def _slice(self, arena: int, holding: Holding, dtype: torch.dtype) -> types.Slice:
        offset = self.arena_bytes[arena]
        self.arena_bytes[arena] += slot_bytes(holding, dtype)
        return types.Slice(arena=arena, offset_bytes=offset, strides=holding.strides)


def register(
    session: Session,
    routed: list[Routed],
    groups: dict[int, int],
    left_alone: LeftAlone,
    configs: list[types.GroupConfig],
    *,
    reduction: str,
    bucket_bytes: int,
    broadcast: bool,
) -> list[Slot]:
    """Registers and attaches; the slots are mapped, and hold nothing yet."""
    factor = 1.0 / session.world_size if reduction == "mean" else 1.0
    request = _Request(groups, factor)
    for index, item in enumerate(routed):
        request.add(item, ready_order=len(routed) - index)  # backward passes run from the end
    for name, shape, why in left_alone:
        request.add_left_alone(name, shape, why)
    session.register(request.parameters, request.fragments, configs, bucket_bytes=bucket_bytes)
    # A job with state has weights of its own.
    known = [] if session.has_state else digests(request.slots, len(request.fragments))
    session.attach(
        {key: max(size, 1) for key, size in request.arena_bytes.items()},
        weight_digests=known,
        broadcast=broadcast,
    )
    for slot in request.slots:
        fragment = request.fragments[slot.index]
        slot.weight_at = fragment.weight.offset_bytes
        slot.gradient_at = fragment.gradient.offset_bytes
    map_slots(session, request.slots)
    return request.slots


def map_slots(session: Session, slots: Iterable[Slot]) -> None:
    """Puts the slots into the session's arenas, and into the buckets of its plan."""
    assert session.registered is not None
    for slot in slots:
        slot.bucket = session.registered.parameter_bucket[slot.index]
        slot.map(session.arenas[_WEIGHTS], session.arenas[_GRADIENTS])
