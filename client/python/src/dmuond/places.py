"""The places in jobs that this process has taken, and what becomes of those that it gives up.

A process may take its own place again (a notebook's cell that runs twice). And whoever ends without
closing is told what becomes of the job.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
import weakref
from dataclasses import dataclass
from typing import Protocol

from dmuond import environment, errors, types

_WHY_CHARACTERS = 300


@dataclass
class Place:
    """A rank of a job, at a daemon; and what is known of the job when the process gives it up."""

    path: str
    job: str
    rank: int
    in_job: bool = False  # the job has state, and this rank its place in it
    linger_ms: int | None = None  # how long the daemon waits for a replacement; None: not told
    left_at: float = 0.0  # time.monotonic()

    @property
    def key(self) -> tuple[str, str, int]:
        return os.path.realpath(self.path), self.job, self.rank

    @property
    def end_command(self) -> str:
        elsewhere = self.path != environment.socket_path()
        return f"dmuonctl job end {self.job}" + f" --address={self.path}" * elsewhere

    def fate(self) -> str:
        """Says in words what becomes of the job. REQUIRES: in_job."""
        if self.linger_ms == 0:
            return (
                f"job '{self.job}' ends with rank {self.rank}, which has not closed its session: "
                "--session_linger is 0"
            )
        waits = "the daemon's --session_linger"
        if self.linger_ms is not None:
            seconds = self.linger_ms / 1000
            waits = f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"
        return (
            f"job '{self.job}' keeps its state for {waits} while its daemon runs, for a "
            f"replacement of rank {self.rank}: "
            'resume="if_present" (DMUOND_RESUME=1) goes on with it, resume="discard" '
            f"(DMUOND_RESUME=discard) starts anew, `{self.end_command}` ends it now"
        )


class Holder(Protocol):
    """A session, as far as the places know it; Member says what its attributes mean."""

    place: Place
    last_committed_step: int

    @property
    def closed(self) -> bool: ...

    @property
    def in_child(self) -> bool: ...

    @property
    def lost(self) -> bool: ...

    def give_way(self) -> None: ...


_sessions: dict[tuple[str, str, int], weakref.ref[Holder]] = {}  # the newest of each place
_left: dict[tuple[str, str, int], Place] = {}


def take(holder: Holder, resume: int) -> bool:
    """For a new session; one that this process has of the same rank gives way to it.

    Returns whether there has been one: memory that it had mapped may be in use still. Raises
    FailedPreconditionError, and leaves it alone, where it has state that `resume` does not want.
    """
    key = holder.place.key
    reference = _sessions.get(key)
    older = reference() if reference is not None else None
    if older is not None and not older.closed and not older.in_child:
        if resume == types.RESUME_NEVER and older.place.in_job and not older.lost:
            raise errors.FailedPreconditionError(
                f"rank {holder.place.rank} of job '{holder.place.job}' has a live session in this "
                f"very process (pid {os.getpid()}), at step {older.last_committed_step}: "
                'resume="discard" starts anew in its place, resume="if_present" goes on with '
                "its state; or close() it first. Models that train side by side need a job= each",
                reason="JOB_HAS_STATE",
            )
        older.give_way()
    hold(holder)
    _left.pop(key, None)
    return reference is not None


def hold(holder: Holder) -> None:
    """The place is this session's."""
    _sessions[holder.place.key] = weakref.ref(holder)


def leave(place: Place) -> None:
    """Gives the place up without closing: the daemon takes this trainer for dead."""
    if place.in_job:
        place.left_at = time.monotonic()
        _left[place.key] = place


def ends_job(error: BaseException, on_error: str) -> bool:
    """Whether the whole job ends with it: where that is wanted, or by Ctrl-C.

    torchrun ends its workers by itself, and starts them again; in a notebook or a shell Ctrl-C ends
    a command and not the process.
    """
    if on_error == "end":
        return not isinstance(error, SystemExit) or bool(error.code)
    interactive = hasattr(sys, "ps1") or bool(sys.flags.interactive)
    under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    return isinstance(error, KeyboardInterrupt) and not interactive and not under_torchrun


def has_ended(error: BaseException) -> bool:
    """Whether an error says that the job has ended, or is lost, already."""
    if isinstance(error, errors.Aborted | errors.StateLost | errors.DaemonLost):
        return True
    if not isinstance(error, errors.Error):
        return False
    waited_in_vain = error.reason == "PEER_LOST" and "linger_ms" in error.metadata
    return waited_in_vain or error.reason == "JOB_ENDED"


def describe(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text[:_WHY_CHARACTERS]


def tell(text: str) -> None:
    print(f"dmuond: {text}", file=sys.stderr, flush=True)


def _tell_fates() -> None:
    for place in _left.values():
        waits_s = math.inf if not place.linger_ms else place.linger_ms / 1000
        if time.monotonic() - place.left_at < waits_s:
            tell(place.fate())


def forget() -> None:
    """Forgets the places given up so far: nothing is told of them at the end."""
    _left.clear()


atexit.register(_tell_fates)  # the last to run, for sessions register after it
os.register_at_fork(after_in_child=forget)
