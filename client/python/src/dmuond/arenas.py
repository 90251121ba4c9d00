"""Maps the arenas of a daemon's successor over those of its predecessor, at the same addresses."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Mapping

import numpy as np

from dmuond import types
from dmuond._proto import trainer_pb2 as pb
from dmuond.errors import Error

_MREMAP_MAYMOVE, _MREMAP_FIXED = 1, 2
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p


def take_over(
    layout: pb.RegisterLayoutRequest,
    kept: Mapping[int, np.ndarray],
    fresh: Mapping[int, np.ndarray],
) -> None:
    """The arrays in `kept` become views of the memory behind `fresh`.

    What they held stays, gradients too; but weights are those that have been published to `fresh`,
    because the predecessor may have died while it wrote others.
    """
    for identity, arena in fresh.items():
        weights = list(_weights(layout, identity, arena))
        published = [view.copy() for view in weights]
        arena[...] = kept[identity]
        for view, values in zip(weights, published, strict=True):
            view[...] = values
    for identity, arena in fresh.items():
        _map_over(kept[identity], arena)


def _weights(
    layout: pb.RegisterLayoutRequest, identity: int, arena: np.ndarray
) -> Iterator[np.ndarray]:
    """Where the daemon writes into this arena."""
    for fragment in layout.fragments:
        parameter, place = layout.parameters[fragment.parameter], fragment.weight
        shape = _extents(fragment.box)
        if parameter.route == types.ROUTE_TRAINER or place.arena != identity or 0 in shape:
            continue
        size = types.ELEMENT_BYTES[parameter.weight_type]
        strides = tuple(size * stride for stride in place.strides)
        yield np.ndarray(shape, f"u{size}", arena, place.offset_bytes, strides)


def _extents(box: types.Box) -> tuple[int, ...]:
    return tuple(end - begin for begin, end in zip(box.begin, box.end, strict=True))


def _map_over(kept: np.ndarray, fresh: np.ndarray) -> None:
    """A second mapping of `fresh`'s memory, in the place of `kept`'s."""
    found = _libc.mremap(
        ctypes.c_void_p(fresh.ctypes.data),
        ctypes.c_size_t(0),  # of a shared mapping: another one of the same pages
        ctypes.c_size_t(kept.nbytes),
        ctypes.c_int(_MREMAP_MAYMOVE | _MREMAP_FIXED),
        ctypes.c_void_p(kept.ctypes.data),
    )
    if found == _FAILED:
        why = os.strerror(ctypes.get_errno())
        raise Error(f"the successor's memory cannot be mapped in the place of the old one: {why}")
