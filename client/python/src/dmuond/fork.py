"""Forked children (data loaders) let go of what they inherit.

The daemon takes the end of the attach socket for the trainer's death, so a child must not hold it.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Inherited(Protocol):
    def leave_in_child(self) -> None:
        """Called in a forked child: drops the inherited descriptors."""


_sessions: weakref.WeakSet[Inherited] = weakref.WeakSet()


def watch(session: Inherited) -> None:
    _sessions.add(session)


def _leave_in_child() -> None:
    for session in list(_sessions):
        session.leave_in_child()


os.register_at_fork(after_in_child=_leave_in_child)
