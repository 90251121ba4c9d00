"""Sessions that nobody has closed: those that Python collects, and those of a script that ends.

One that is collected between two steps closes at once. Where a step is open, or a caught exception
has released it, its place is kept until the script ends, or makes another session. A script that
ends well has closed what it has left; one that fails has died, and its replacement may come.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from types import FrameType
from typing import Protocol

from dmuond import errors, fork, places, script_end
from dmuond.places import Place

THREAD_PREFIX = "dmuond-"  # of this package's threads
# A finalizer waits so long at most for its session to be closed, and the script's end so long.
_FINALIZER_WAITS_S, _EXIT_WAITS_S = 5.0, 60.0


class Unclosed(Protocol):
    """A session, as far as this module knows it; Member says what the methods do."""

    place: Place

    @property
    def closed(self) -> bool: ...

    @property
    def in_child(self) -> bool: ...

    @property
    def step_is_open(self) -> bool: ...

    def close(self) -> None: ...

    def give_way(self) -> None: ...

    def end_by(self, error: BaseException) -> None: ...

    def stay(self) -> None: ...

    def leave_in_child(self) -> None: ...


_kept: list[Unclosed] = []
_closing: set[threading.Event] = set()


def collected(session: Unclosed, frame: FrameType | None) -> None:
    """Called by a session's finalizer, in any thread. frame: which the finalizer interrupts."""
    if script_end.has_left_script(frame):
        _end_in_thread(session, script_end.error())
    elif session.step_is_open or script_end.is_after_exception(frame):
        session.stay()
        _kept.append(session)
    else:
        _end_in_thread(session, None)


def end(session: Unclosed, error: BaseException | None = None) -> None:
    """Closes it, or lets an error end it, whatever happens meanwhile. What goes wrong is told."""
    while not session.closed and not session.in_child:
        try:
            if error is not None:
                session.end_by(error)
            else:
                session.close()  # not by a call that hears that the job has gone back
        except errors.Error as problem:
            places.tell(str(problem))


def make_room(place: Place, goes_on: bool) -> None:
    """Another session is to take this place: what is kept ends.

    goes_on: with the state of the one that is kept there, which leaves it to its successor then.
    """
    while _kept:
        session = _kept.pop()
        if not (goes_on and session.place.key == place.key):
            end(session)
        elif not session.closed:  # as it is in a forked child
            session.give_way()


def end_at_exit(reference: weakref.ref[Unclosed]) -> None:
    _finish()
    session = reference()
    if session is not None:
        end(session, script_end.error())


def _end_in_thread(session: Unclosed, error: BaseException | None) -> None:
    """A finalizer may interrupt a call of gRPC's or a holder of a lock: it makes no call itself.

    It waits all the same, so that no call is in flight when the script goes on.
    """
    done = threading.Event()
    fork.watch(session)

    def run() -> None:
        try:
            end(session, error)
        finally:
            _closing.discard(done)
            done.set()

    _closing.add(done)
    threading.Thread(target=run, name=f"{THREAD_PREFIX}closer", daemon=True).start()
    if not threading.current_thread().name.startswith(THREAD_PREFIX):  # whose end is waited for
        done.wait(_FINALIZER_WAITS_S)


def _finish() -> None:
    for done in list(_closing):
        done.wait(_EXIT_WAITS_S)


atexit.register(_finish)
os.register_at_fork(after_in_child=_closing.clear)
