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


def requests(tensors: Iterable[StateTensor], together: bool) -> Iterator[bytes]:
    """PushParametersRequests with the state, as they are on the wire.

    together: a request may have several chunks; an older daemon takes one.

    protobuf would copy values four times, and a message for each small tensor takes as long as
    100 KiB: here they are copied once, together.
    """
    parts: list[bytes | np.ndarray] = []
    room = _CHUNK_BYTES
    for tensor in tensors:
        data = np.ascontiguousarray(tensor.values, dtype=_dtype(tensor.kind)).reshape(-1)
        first = 0
        while first < data.size:
            piece = data[first : first + max(room // data.itemsize, 1)]
            parts += _chunk(tensor, first, piece), piece
            first += piece.size
            room -= piece.nbytes
            if room < data.itemsize or not together:
                yield b"".join(parts)
                parts, room = [], _CHUNK_BYTES
    if parts:
        yield b"".join(parts)


def _chunk(tensor: StateTensor, first: int, piece: np.ndarray) -> bytes:
    """What stands before the data of a chunk, which is the last of its fields."""
    named = pb.StateChunk(
        parameter=tensor.parameter,
        fragment=tensor.fragment,
        kind=tensor.kind,
        first_element=first,
    ).SerializeToString()
    named += _before_bytes(pb.StateChunk.DATA_FIELD_NUMBER, piece.nbytes)
    size = len(named) + piece.nbytes
    return _before_bytes(pb.PushParametersRequest.CHUNKS_FIELD_NUMBER, size) + named


def _before_bytes(field: int, size: int) -> bytes:
    """What protobuf has before so many bytes: the field's number with their wire type, the size."""
    return _varint(field << 3 | 2) + _varint(size)


def _varint(value: int) -> bytes:
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    found.append(value)
    return bytes(found)


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
