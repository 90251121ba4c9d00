"""RegisterLayout's request and reply travel in parts: no message is larger than 4 MiB.

What is no list stands in the first part; lists go on from part to part.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from dmuond._proto import trainer_pb2 as pb

PART_BYTES = 1 << 20  # about: a part may be longer by one entry of a list
_LISTS = {
    pb.RegisterLayoutRequest: ("parameters", "fragments", "groups"),
    pb.RegisterLayoutReply: ("routing", "parameter_bucket"),
}


def split(whole: Any) -> Iterator[Any]:
    """The parts of a RegisterLayoutRequest or RegisterLayoutReply, in their order."""
    lists = _LISTS[type(whole)]
    part = type(whole)()
    for field, value in whole.ListFields():
        if field.name in lists:
            continue
        if field.message_type is not None:
            getattr(part, field.name).CopyFrom(value)
        else:
            setattr(part, field.name, value)
    size = 0
    for name in lists:
        for entry in getattr(whole, name):
            entry_bytes = 10 if isinstance(entry, int) else entry.ByteSize() + 8
            if size > 0 and size + entry_bytes > PART_BYTES:
                yield part
                part, size = type(whole)(), 0
            getattr(part, name).append(entry)
            size += entry_bytes
    yield part


def merge(parts: Iterable[Any]) -> Any:
    """What was split; None where there is no part."""
    whole = None
    for part in parts:
        if whole is None:
            whole = type(part)()
            whole.CopyFrom(part)
            continue
        for name in _LISTS[type(whole)]:
            getattr(whole, name).extend(getattr(part, name))
    return whole
