"""Whose daemon it is, before it gets a token.

Whoever may write into the directory can put a socket of his own there.
"""

from __future__ import annotations

import os
import socket
import struct

from dmuond import environment, errors

_UCRED = struct.Struct("iII")  # struct ucred: pid, uid, gid


def check(path: str, attach: socket.socket, server_uid: int | None) -> None:
    """Raises Error (SOCKET_OWNER) unless all is root's, this user's own or `server_uid`'s.

    All: the socket, its directory, and the process at the other end of `attach`, which is connected
    to its attach socket, whatever lies at the path by now.
    """
    peer = attach.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    directory = os.path.dirname(path)
    owners = {
        directory: os.stat(directory).st_uid,
        path: os.stat(path).st_uid,
        environment.attach_path(path): _UCRED.unpack(peer)[1],
    }
    for what, uid in owners.items():
        if uid not in (0, os.geteuid(), server_uid):
            raise errors.Error(
                f"{what} is that of uid {uid}, neither root's nor this process's (uid "
                f"{os.geteuid()}), and might be a stranger's who waits for tokens. If that user "
                f"runs the daemon, say so: DMUOND_SERVER_UID={uid}, or server_uid={uid}",
                code="PERMISSION_DENIED",
                reason="SOCKET_OWNER",
                metadata={"path": what, "uid": str(uid), "own_uid": str(os.geteuid())},
            )
