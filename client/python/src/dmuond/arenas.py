"""Puts the arenas of a daemon's successor in the place of its predecessor's."""

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


def _weights(
    layout: pb.RegisterLayoutRequest, identity: int, contents: np.ndarray
) -> Iterator[np.ndarray]:
    """Where the daemon writes into this arena."""
    for fragment in layout.fragments:
        parameter, place = layout.parameters[fragment.parameter], fragment.weight
        shape = _extents(fragment.box)
        if parameter.route == types.ROUTE_TRAINER or place.arena != identity or 0 in shape:
            continue
        size = types.ELEMENT_BYTES[parameter.weight_type]
        strides = tuple(size * stride for stride in place.strides)
        yield np.ndarray(shape, f"u{size}", contents, place.offset_bytes, strides)


def _extents(box: types.Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in zip(box.begin, box.end, strict=True))
