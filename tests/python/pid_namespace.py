"""Runs a command as the first process of a PID namespace of its own, as a container's is.

`under()` stands before the command. The process that it starts lives as long as the command does,
passes SIGTERM on to it, and ends with its status; the command dies with it.
"""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

_NEW_MOUNTS, _NEW_PIDS = 0x00020000, 0x20000000  # clone(2)
_PRIVATE_BELOW = 0x4000 | 0x40000  # mount(2): MS_REC | MS_PRIVATE
_DIE_WITH_PARENT = 1  # prctl(2)

allowed = os.geteuid() == 0


def under() -> list[str]:
    return [sys.executable, __file__]


def first_process(started: subprocess.Popen) -> int:
    """The command's pid, as it is seen from here. -1: it has not begun, or has ended."""
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children")
    try:
        return int(children.read_text() or -1)
    except FileNotFoundError:
        return -1


def _check(result: int, what: str) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")


def _main(command: list[str]) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    _check(libc.unshare(_NEW_MOUNTS | _NEW_PIDS), "unshare")
    child = os.fork()
    if child == 0:
        libc.prctl(_DIE_WITH_PARENT, signal.SIGKILL)
        _check(libc.mount(b"none", b"/", None, _PRIVATE_BELOW, None), "mount /")
        _check(libc.mount(b"proc", b"/proc", b"proc", 0, None), "mount /proc")
        os.execvp(command[0], command)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
