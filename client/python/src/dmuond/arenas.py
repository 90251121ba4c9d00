"""Where weights lie in arenas, and how a successor's arenas take the place of those before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from dmuond import types
from dmuond._proto import trainer_pb2 as pb
from dmuond.memory import Arena


def take_over(
    layout: pb.RegisterLayoutRequest, kept: Mapping[int, Arena], fresh: Mapping[int, Arena]
) -> None:
    """Maps the memory behind `fresh` at the addresses of `kept`.

    What they held stays, gradients too; but weights are those that have been published to `fresh`,
    because the predecessor may have died while it wrote others.
    """
    for identity, arena in fresh.items():
        if arena.address == kept[identity].address:
            continue  # the trainer's own memory, into which weights have been published
        contents = arena.contents()
        weights = list(_weights(layout, identity, contents))
        published = [view.copy() for view in weights]
        contents[...] = kept[identity].contents()
        for view, values in zip(weights, published, strict=True):
            view[...] = values
        arena.write(contents)
    for identity, arena in fresh.items():
        kept[identity].adopt(arena)


def weight_spans(layout: pb.RegisterLayoutRequest) -> list[tuple[int, int, int]]:
    """Where the daemon writes weights: arena, and the bytes from where to where.

    What touches, or lies within another, is one span.
    """
    extents = []
    for place, shape, size in _places(layout):
        last = sum((n - 1) * stride for n, stride in zip(shape, place.strides, strict=True))
        begin = place.offset_bytes
        extents.append((place.arena, begin, begin + (last + 1) * size))
    spans: list[tuple[int, int, int]] = []
    for arena, begin, end in sorted(extents):
        if spans and spans[-1][0] == arena and begin <= spans[-1][2]:
            spans[-1] = arena, spans[-1][1], max(end, spans[-1][2])
        else:
            spans.append((arena, begin, end))
    return spans


def _weights(
    layout: pb.RegisterLayoutRequest, identity: int, contents: np.ndarray
) -> Iterator[np.ndarray]:
    """What the daemon writes of this arena, whose contents these are."""
    for place, shape, size in _places(layout):
        if place.arena == identity:
            strides = tuple(size * stride for stride in place.strides)
            yield np.ndarray(shape, f"u{size}", contents, place.offset_bytes, strides)


def _places(
    layout: pb.RegisterLayoutRequest,
) -> Iterator[tuple[types.Slice, tuple[int, ...], int]]:
    """Of each fragment's weights that the daemon writes: place, shape, bytes of an element."""
    for fragment in layout.fragments:
        parameter = layout.parameters[fragment.parameter]
        shape = _extents(fragment.box)
        if parameter.route != types.ROUTE_TRAINER and 0 not in shape:
            yield fragment.weight, shape, types.ELEMENT_BYTES[parameter.weight_type]


def _extents(box: types.Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in zip(box.begin, box.end, strict=True))
