"""What can go wrong, as exceptions.

An error of the daemon keeps its status code, the stable `reason` of its google.rpc.ErrorInfo
(docs/errors.md lists them) and the metadata with names and both values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc

    from dmuond._proto.types_pb2 import Outcome


class Error(RuntimeError):
    """Base of all errors of dmuond.

    code: name of the gRPC status code ("INVALID_ARGUMENT"), empty where no call failed.
    reason: stable, for programs ("SCALARS_DIFFER"); may be empty.
    metadata: names and values, as text.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str = "",
        reason: str = "",
        metadata: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.metadata = metadata or {}


class InvalidArgumentError(Error, ValueError):
    """What was asked is wrong by itself, or the trainers disagree. Nothing has changed."""


class FailedPreconditionError(Error):
    """What was asked does not fit the state of the job. Nothing has changed."""


class Unreachable(Error, ConnectionError):  # noqa: N818 (a state, not a fault)
    """No daemon answers at the address."""


class DaemonLost(Error, ConnectionError):  # noqa: N818
    """The daemon has gone, and none has taken its place in time. The weights are undefined."""


class StateLost(Error):  # noqa: N818
    """No daemon has the job's state any more, and no snapshot does. The message says what is lost.

    last_committed_step: as far as this rank had come. durable_step: the newest snapshot that it
    had heard of; None: of none.
    """

    def __init__(self, why: str, last_committed_step: int, durable_step: int | None) -> None:
        known = "none is known" if durable_step is None else f"step {durable_step}"
        super().__init__(
            f"the job's state is lost after step {last_committed_step} (newest snapshot: {known}): "
            f"{why}",
            reason="STATE_LOST",
        )
        self.last_committed_step = last_committed_step
        self.durable_step = durable_step


class Aborted(Error):  # noqa: N818 (names an outcome of the protocol)
    """The step was aborted and a retry cannot help. Nothing has changed; `outcome` says why."""

    def __init__(self, outcome: Outcome, reason: str) -> None:
        super().__init__(
            f"step {outcome.step} was aborted ({reason}): {outcome.detail}",
            code="ABORTED",
            reason=reason,
        )
        self.outcome = outcome


class RolledBack(Error):  # noqa: N818 (names an outcome of the protocol)
    """Weights and optimizer are again those after `to_step`; continue the loop from there.

    trainer_state: what this rank handed in with `to_step`. fresh_arenas: the daemon has a
    successor, and weights and gradients lie in other memory now: `Session.arenas` (the optimizer of
    dmuond.torch has moved its parameters there).
    """

    def __init__(self, to_step: int, trainer_state: bytes, fresh_arenas: bool = False) -> None:
        super().__init__(f"the job went back to step {to_step}: continue from there")
        self.to_step = to_step
        self.trainer_state = trainer_state
        self.fresh_arenas = fresh_arenas


_CLASSES: dict[str, type[Error]] = {
    "INVALID_ARGUMENT": InvalidArgumentError,
    "OUT_OF_RANGE": InvalidArgumentError,
    "FAILED_PRECONDITION": FailedPreconditionError,
}


def from_rpc(error: grpc.RpcError, call: str) -> Error:
    """The exception for a failed call."""
    code = error.code().name
    reason, metadata = "", {}
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            reason, metadata = _error_info(value)
    if not reason:
        reason, metadata = _too_large(code, error.details() or "")
    suffix = f" [{reason}]" if reason else ""
    return _CLASSES.get(code, Error)(
        f"{call}: {error.details()}{suffix}", code=code, reason=reason, metadata=metadata
    )


def _too_large(code: str, details: str) -> tuple[str, dict[str, str]]:
    """Messages beyond a limit are refused by gRPC itself, before the daemon sees them."""
    if code != "RESOURCE_EXHAUSTED" or "larger than max" not in details:
        return "", {}
    sizes = re.search(r"\((\d+) vs\. (\d+)\)", details)
    metadata = dict(zip(("bytes", "limit_bytes"), sizes.groups(), strict=True)) if sizes else {}
    return "MESSAGE_TOO_LARGE", metadata


def _error_info(status: bytes) -> tuple[str, dict[str, str]]:
    """Reason and metadata of the first ErrorInfo in a serialised google.rpc.Status.

    Read by hand: the three messages come from a package that clients need for nothing else.
    Status{details=3}, Any{type_url=1, value=2}, ErrorInfo{reason=1, metadata=3}.
    """
    for number, detail in _fields(status):
        if number != 3:
            continue
        packed = dict(_fields(detail))
        if packed.get(1, b"").rpartition(b"/")[2] != b"google.rpc.ErrorInfo":
            continue
        reason, metadata = "", {}
        for field, value in _fields(packed.get(2, b"")):
            if field == 1:
                reason = value.decode()
            elif field == 3:
                entry = dict(_fields(value))
                metadata[entry.get(1, b"").decode()] = entry.get(2, b"").decode()
        return reason, metadata
    return "", {}


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of every length-delimited field of a serialised message."""
    position = 0

    def varint() -> int:
        nonlocal position
        value = shift = 0
        while position < len(data):
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        return value

    while position < len(data):
        tag = varint()
        wire = tag & 7
        if wire == 2:
            size = varint()
            yield tag >> 3, data[position : position + size]
            position += size
        elif wire == 0:
            varint()
        else:
            position += {1: 8, 5: 4}.get(wire, len(data))
