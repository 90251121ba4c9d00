"""The daemon's process, as the kernel knows it: whether it has ended, or has only gone silent."""

from __future__ import annotations

import os
import select
import socket
import struct

_SO_PEERPIDFD = 77  # Linux 6.5
_CREDENTIALS = struct.Struct("3i")  # struct ucred


class DaemonProcess:
    """The process that listens at the other end of a connected Unix socket. Owns a pidfd.

    pid: 0 where the process has none here, because it is in another PID namespace.
    end_is_seen: False where the kernel tells nothing of the end of a process without a pid.
    """

    def __init__(self, connected: socket.socket) -> None:
        size = _CREDENTIALS.size
        credentials = connected.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        self.pid = _CREDENTIALS.unpack(credentials)[0]
        self._ended = False
        self._pidfd = _pidfd(connected, self.pid)
        self.end_is_seen = self._pidfd >= 0

    def has_ended(self, within_s: float = 0.0) -> bool:
        """Whether it is known to have ended, or ends within that time."""
        if self._pidfd < 0:
            return self._ended
        poller = select.poll()
        poller.register(self._pidfd, select.POLLIN)
        return bool(poller.poll(1e3 * within_s))

    def __str__(self) -> str:
        return f"the daemon (pid {self.pid})" if self.pid else "the daemon"

    def close(self) -> None:
        if self._pidfd >= 0:
            self._ended = self.has_ended()
            os.close(self._pidfd)
        self._pidfd = -1


def _pidfd(connected: socket.socket, pid: int) -> int:
    """Opens it from the socket where the kernel can: a pid may be used again, and may be 0."""
    try:
        return connected.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pass
    try:
        return os.pidfd_open(pid) if pid > 0 else -1
    except OSError:
        return -1
