"""Registering a model: its parameters as fragments, and slots for them in two arenas."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import nn

from dmuond import types
from dmuond.device_array import HasMemory
from dmuond.errors import InvalidArgumentError
from dmuond.session import Session
from dmuond.torch.collect import LeftAlone
from dmuond.torch.first_weights import digests
from dmuond.torch.fragments import Holding, element_type
from dmuond.torch.reduction import Share, divisor_unknown
from dmuond.torch.routing import ROUTES, Routed
from dmuond.torch.slots import Place, ShardedSlot, Slot, grad_dtype_of, slot_bytes
from dmuond.torch.tensor_device import TensorDevice
from dmuond.torch.trainer_arenas import weight_places

_WEIGHTS, _GRADIENTS = 1, 2  # ids of the daemon's arenas


@dataclass
class _Request:
    """A registration in the making. `groups`: index of a parameter's group, by id."""

    groups: dict[int, int]
    shares: dict[int, Share]  # in a parameter's gradient, by id
    holdings: dict[int, Holding]  # of a parameter, by id
    # Some weights stay where they are. This is their place, by id of the parameter.
    weights: Mapping[int, Place]
    parameters: list[types.Parameter] = field(default_factory=list)
    fragments: list[types.Fragment] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    arena_bytes: dict[int, int] = field(default_factory=lambda: {_WEIGHTS: 0, _GRADIENTS: 0})

    def add(self, item: Routed, ready_order: int) -> None:
        name, p = item.named.name, item.named.parameter
        if item.route == "trainer":
            self.add_left_alone(name, tuple(p.shape), item.reason)
            return
        holding = layout = self.holdings[id(p)]
        if item.rows is not None:
            holding, layout = flattened(name, holding, item.rows)
        grad_dtype = grad_dtype_of(p)
        share = self.shares[id(p)]
        index = len(self.parameters)
        weight = self.weights.get(id(p)) or self._place(_WEIGHTS, holding, p.dtype)
        gradient = self._place(_GRADIENTS, holding, grad_dtype)
        self.parameters.append(
            types.Parameter(
                name=name,
                shape=layout.shape,
                weight_type=element_type(name, p.dtype, "the dtype"),
                gradient_type=element_type(name, grad_dtype, "the gradient's dtype"),
                route=ROUTES[item.route],
                route_reason=item.reason,
                view=item.view if item.route == "muon" else None,
                group=self.groups[id(p)],
                reduce_factor=share.factor,
                ready_order=ready_order,
                held_by_all=share.held_by_all,
            )
        )
        self.fragments.append(
            types.Fragment(
                parameter=index,
                box=layout.box,
                contribution=share.contribution,
                gradient=_slice(gradient, layout),
                weight=_slice(weight, layout),
            )
        )
        if holding.sharded:
            slot = ShardedSlot(item, index, holding, grad_dtype, share.added_dims)
        else:
            slot = Slot(item, index, holding, grad_dtype)
        slot.weight_at, slot.gradient_at = weight, gradient
        self.slots.append(slot)

    def add_left_alone(self, name: str, shape: tuple[int, ...], why: str) -> None:
        """Adds it to the routing table alone: the daemon does not touch or restore it."""
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

    def _place(self, arena: int, holding: Holding, dtype: torch.dtype) -> Place:
        place = Place(arena, self.arena_bytes[arena])
        self.arena_bytes[arena] += slot_bytes(holding, dtype)
        return place


def refuse_sparse(models: Iterable[nn.Module], routed: Iterable[Routed]) -> None:
    """Refuses weights of layers that make sparse gradients, unless they are left alone."""
    sparse = {
        id(module.weight)
        for model in models
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    for item in routed:
        if item.route != "trainer" and id(item.named.parameter) in sparse:
            raise InvalidArgumentError(
                f"'{item.named.name}' has sparse gradients, and dmuond takes dense ones: make its "
                "layer with sparse=False, or give the parameter the route 'trainer'"
            )


def flattened(name: str, holding: Holding, rows: int) -> tuple[Holding, Holding]:
    """A parameter that lies so, and the matrix that is registered for it.

    rows: the dimension whose indices are the matrix's rows: the first or the second. Columns are
    the other of these two, and all that follow.
    """
    begin, size, shape = holding.begin, holding.local_shape, holding.shape
    if size[2:] != shape[2:]:
        raise InvalidArgumentError(
            f"views: '{name}' of shape {list(shape)} is cut in other dimensions than its first two,"
            " and 'flatten' needs the rest whole: shard it on dimension 0"
        )
    other = 1 - rows
    inner = torch.Size(shape[2:]).numel()
    width = size[other] * inner
    strides = list(torch.empty((size[rows], size[other], *size[2:]), device="meta").stride())
    strides[0], strides[rows] = strides[rows], strides[0]
    matrix = Holding(
        (shape[rows], shape[other] * inner),
        (begin[rows], begin[other] * inner),
        (size[rows], width),
        (width, 1),
        holding.sharded,
    )
    return dataclasses.replace(holding, strides=tuple(strides), first=rows), matrix


def _slice(place: Place, holding: Holding) -> types.Slice:
    return types.Slice(arena=place.arena, offset_bytes=place.offset_bytes, strides=holding.strides)


def register(
    session: Session,
    device: TensorDevice,
    routed: list[Routed],
    groups: dict[int, int],
    left_alone: LeftAlone,
    configs: list[types.GroupConfig],
    *,
    shares: dict[int, Share],
    holdings: dict[int, Holding],
    bucket_bytes: int,
    broadcast: bool,
    own_arenas: bool,
) -> list[Slot]:
    """Registers and attaches. The slots it returns are mapped and hold nothing yet.

    own_arenas: weights stay where they are, and gradients come into memory of this process.
    """
    updated = [item.named for item in routed if item.route != "trainer" and item.rows is None]
    own, places = weight_places(updated, device, _GRADIENTS + 1) if own_arenas else ({}, {})
    request = _Request(groups, shares, holdings, places)
    for index, item in enumerate(routed):
        request.add(item, ready_order=len(routed) - index)  # backward passes run from the end
    for name, shape, why in left_alone:
        request.add_left_alone(name, shape, why)
    try:
        session.register(request.parameters, request.fragments, configs, bucket_bytes=bucket_bytes)
    except InvalidArgumentError as error:
        if error.reason != "DIVISOR_UNKNOWN":
            raise
        raise InvalidArgumentError(
            divisor_unknown(str(error), error.metadata),
            code=error.code,
            reason=error.reason,
            metadata=error.metadata,
        ) from None
    # A job with state has weights of its own.
    known = [] if session.has_state else digests(request.slots, len(request.fragments))
    arenas: dict[int, int | HasMemory] = dict(own)
    for key, size in request.arena_bytes.items():
        if any(key in (slot.weight_at.arena, slot.gradient_at.arena) for slot in request.slots):
            arenas[key] = device.allocate(max(size, 1)) if own_arenas else max(size, 1)
    session.attach(arenas, weight_digests=known, broadcast=broadcast)
    map_slots(session, device, request.slots)
    return request.slots


def map_slots(session: Session, device: TensorDevice, slots: Iterable[Slot]) -> None:
    """Puts the slots into the session's arenas, and into the buckets of its plan."""
    assert session.registered is not None
    for slot in slots:
        slot.bucket = session.registered.parameter_bucket[slot.index]
        slot.map(session.arenas, device)
