"""Named points at which a test's driver can stop this process and do something to it.

base/fault_point.h has the protocol, and the same points in the other programs. Only a
script that calls `connect_driver()` has a driver, which is always one of the tests'; everywhere
else a point costs a look at a variable.
"""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass

_ANSWER_BYTES_MAX = 127
_CUTS = {
    "cut tcp": ((socket.AF_INET, socket.AF_INET6), socket.SOCK_STREAM),
    "cut unix": ((socket.AF_UNIX,), socket.SOCK_STREAM),
    "cut packets": ((socket.AF_UNIX,), socket.SOCK_SEQPACKET),
}


@dataclass(frozen=True)
class _Driver:
    path: str
    points: frozenset[str]

    def report(self, name: str) -> int:
        if name not in self.points and "*" not in self.points:
            return 0
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            try:
                connection.connect(self.path)
                connection.send(f"{os.getpid()} {name}".encode())
                answer = connection.recv(_ANSWER_BYTES_MAX).decode()
            except OSError:
                return 0  # the driver has ended
            if answer in _CUTS:
                _cut(*_CUTS[answer], own=connection.fileno())
        return int(answer.removeprefix("fail ")) if answer.startswith("fail ") else 0


_driver: _Driver | None = None


def connect_driver() -> bool:
    """Looks at DMUOND_FAULT_SOCKET and DMUOND_FAULT_POINTS. Returns whether there is a driver."""
    global _driver
    path, points = (os.environ.get(f"DMUOND_FAULT_{name}") for name in ("SOCKET", "POINTS"))
    if path is not None and points is not None:
        _driver = _Driver(path, frozenset(points.split(",")))
    return _driver is not None


def fault_point(name: str) -> int:
    """Returns 0, or the errno that the driver wants the caller to fail with."""
    return 0 if _driver is None else _driver.report(name)


def _cut(domains: tuple[int, ...], kind: int, own: int) -> None:
    """Shuts connections: both ends see them end, as if a peer was killed. Listeners stay."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed by another thread meanwhile
            if int(name) != own and os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                _shut(int(name), domains, kind)


def _shut(descriptor: int, domains: tuple[int, ...], kind: int) -> None:
    with socket.socket(fileno=os.dup(descriptor)) as copy:
        listens = copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        if copy.family in domains and copy.type == kind and not listens:
            copy.shutdown(socket.SHUT_RDWR)
