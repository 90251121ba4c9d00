"""How the script ends, and whether an exception has released an object: Python says neither.

An atexit handler is not told with which status the process ends, and a finalizer not why its object
goes. Both show in the instruction at which a frame stands. The code of a SystemExit is known from
who raises it: sys.exit(), exit() and quit() note it when they are called.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_INSTRUCTION_BYTES = 2


def error() -> BaseException | None:
    """What has ended the script: an uncaught exception, or a status other than 0.

    None: it has come to its end. A `raise SystemExit(code)` of the script's own counts as a status
    other than 0, since nobody can see its code. So does whoever ends the process while the script
    runs, as multiprocessing ends a forked child.
    """
    if _outermost is None:
        return None
    if _bottom() is _outermost:
        return SystemExit(_UNKNOWN)
    if _instructions(_outermost)[0].startswith("RETURN"):
        return None
    raised = getattr(sys, "last_value", None)
    trace = getattr(raised, "__traceback__", None)
    if trace is not None and trace.tb_frame is _outermost:
        return raised
    return SystemExit(_code) if _code else None


def has_left_script(frame: FrameType | None) -> bool:
    """Whether nothing of the script runs, where `frame` has released an object in this thread.

    So it is where Python has dropped a SystemExit, and what it has passed by, and now exits.
    """
    return frame is None and threading.current_thread() is threading.main_thread()


def is_after_exception(frame: FrameType | None) -> bool:
    """Whether `frame`, which has just released an object, has done so because of an exception.

    The traceback keeps what the exception has passed by until the `except` clause has ended: that
    deletes the clause's name, or takes the exception from the stack. Or a clause (`finally` is one,
    too) has released it itself.
    """
    if frame is None:
        return False
    last, before, first = _instructions(frame)
    if last == "POP_EXCEPT":
        return True
    assigns = last.startswith(("STORE_", "DELETE_"))
    ended = (before, first) == ("LOAD_CONST", "POP_EXCEPT")
    return assigns and (ended or sys.exc_info()[1] is not None)


def _instructions(frame: FrameType) -> tuple[str, str, str]:
    """The name of the instruction at which it stands, and of the two before."""
    code, at = frame.f_code.co_code, frame.f_lasti
    places = (at - back * _INSTRUCTION_BYTES for back in range(3))
    last, before, first = (dis.opname[code[place]] if place >= 0 else "" for place in places)
    return last, before, first


def _bottom() -> FrameType | None:
    """The outermost frame of the main thread."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _noting(ends: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(ends)
    def noted(*arguments: Any, **options: Any) -> Any:
        global _code
        given = [*arguments, *options.values()][-1:]
        _code = given[0] if given and not isinstance(given[0], _Quitter) else None
        return ends(*arguments, **options)

    return noted


_UNKNOWN = "of unknown code"
_outermost = _bottom()
_code: Any = _UNKNOWN  # of the SystemExit that was raised last
_Quitter = type(getattr(builtins, "exit", None))
sys.exit = _noting(sys.exit)
if _Quitter.__module__ == "_sitebuiltins":  # not under `python -S`
    _Quitter.__call__ = _noting(_Quitter.__call__)
