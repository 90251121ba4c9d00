"""After the daemon's end: finding its successor and taking the session's place in the job again."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass

from dmuond import errors, types
from dmuond._proto import trainer_pb2 as pb
from dmuond.device_array import HasMemory
from dmuond.fault_point import fault_point
from dmuond.link import Identity, Link
from dmuond.memory import Memory

log = logging.getLogger("dmuond")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
# A group that has not noticed the old session's end calls the rank taken.
_TAKEN_FOR_S = 30.0
# What passes by itself: the successor is starting, the group forming, other ranks are on their way.
_PASSING = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
_NOTHING_LEFT = ("JOB_HAS_NO_STATE", "STATE_LOST")


@dataclass(frozen=True)
class Returned:
    """A session's new place: linked, registered, attached, its weights published."""

    link: Link
    registered: pb.RegisterLayoutReply
    attached: pb.AttachBuffersReply


def come_back(
    path: str,
    identity: Identity,
    layout: pb.RegisterLayoutRequest,
    arenas: Mapping[int, int | HasMemory],
    memory: Memory,
    *,
    for_s: float,
    silent_for_s: float,
) -> Returned:
    """Tries for `for_s` seconds, then raises the last error; one that cannot pass at once.

    For `silent_for_s` see Channel.
    """
    started = time.monotonic()
    pause_s = _FIRST_PAUSE_S
    while True:
        try:
            return _try(Link(path, silent_for_s, memory=memory), identity, layout, arenas)
        except errors.Error as error:
            tried_s = time.monotonic() - started
            if not passes(error, tried_s) or tried_s + pause_s > for_s:
                raise
            log.debug("not back yet: %s", error)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def nothing_left(error: errors.Error) -> bool:
    """Whether the successor says that there is no state to come back to."""
    return error.reason in _NOTHING_LEFT


def _try(
    link: Link,
    identity: Identity,
    layout: pb.RegisterLayoutRequest,
    arenas: Mapping[int, int | HasMemory],
) -> Returned:
    try:
        fault_point("trainer.returning")
        link.open(identity, types.RESUME_REQUIRE)
        registered = link.register(layout)
        attached = link.attach(arenas)
        if not attached.published:
            raise errors.Error("the successor has begun the job anew", reason="JOB_HAS_NO_STATE")
        return Returned(link, registered, attached)
    except BaseException:
        link.close()
        raise


def passes(error: errors.Error, tried_s: float = 0.0) -> bool:
    """Whether a later try may succeed."""
    if nothing_left(error):
        return False
    if isinstance(error, errors.Unreachable):
        return not isinstance(error.__context__, PermissionError)
    if isinstance(error, errors.DaemonLost) or error.code in _PASSING:
        return True
    # The session ended between two calls: the job began again meanwhile.
    if error.reason == "INCARNATION_OLD":
        return True
    return error.reason == "RANK_TWICE" and tried_s < _TAKEN_FOR_S
