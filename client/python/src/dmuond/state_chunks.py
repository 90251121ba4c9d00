"""Optimizer state of fragments, to and from the pieces in which it travels."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from dmuond import types
from dmuond._proto import trainer_pb2 as pb

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class StateTensor:
    """State of one fragment: fp32, row-major over the fragment's box (`step`: one fp64 value)."""

    parameter: str
    fragment: int  # index among this rank's fragments of the parameter
    kind: int  # types.STATE_KIND_*
    values: np.ndarray


def cut(tensors: Iterable[StateTensor]) -> Iterator[pb.StateChunk]:
    for tensor in tensors:
        data = np.ascontiguousarray(tensor.values, dtype=_dtype(tensor.kind)).reshape(-1)
        stride = _CHUNK_BYTES // data.itemsize
        for first in range(0, data.size, stride):
            yield pb.StateChunk(
                parameter=tensor.parameter,
                fragment=tensor.fragment,
                kind=tensor.kind,
                first_element=first,
                data=data[first : first + stride].tobytes(),
            )


def assemble(chunks: Iterable[pb.StateChunk]) -> Iterator[StateTensor]:
    """A tensor's chunks come one after the other."""
    current: tuple[str, int, int] | None = None
    parts: list[bytes] = []
    for chunk in chunks:
        identity = (chunk.parameter, chunk.fragment, chunk.kind)
        if not chunk.parameter:
            continue
        if identity != current:
            if current is not None:
                yield _tensor(current, parts)
            current, parts = identity, []
        parts.append(chunk.data)
    if current is not None:
        yield _tensor(current, parts)


def _tensor(identity: tuple[str, int, int], parts: list[bytes]) -> StateTensor:
    parameter, fragment, kind = identity
    values = np.frombuffer(b"".join(parts), dtype=_dtype(kind))
    return StateTensor(parameter, fragment, kind, values)


def _dtype(kind: int) -> type:
    return np.float64 if kind == types.STATE_KIND_STEP else np.float32
