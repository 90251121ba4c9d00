"""Where the daemon is and who this trainer is, from the environment."""

from __future__ import annotations

import math
import os

from dmuond import types
from dmuond.errors import InvalidArgumentError

# struct sockaddr_un has 108 bytes with the closing zero.
_PATH_BYTES_MAX = 107
ATTACH_SUFFIX = ".attach"


def socket_path(address: str | None = None) -> str:
    """The path of the daemon's socket: argument, DMUOND_ADDRESS, or the default of this user."""
    address = address or os.environ.get("DMUOND_ADDRESS") or default_socket_path()
    if not isinstance(address, str):
        raise InvalidArgumentError(f"address {address!r} is not a text")
    path = address.removeprefix("unix:")
    if path.startswith("//"):
        path = path[2:]
    if not path.startswith("/"):
        raise InvalidArgumentError(
            f"address '{address}' is not the path of a Unix socket (unix:/path/to/dmuond.sock)"
        )
    if len(path.encode()) + len(ATTACH_SUFFIX) > _PATH_BYTES_MAX:
        raise InvalidArgumentError(
            f"socket path '{path}' is longer than {_PATH_BYTES_MAX - len(ATTACH_SUFFIX)} bytes"
        )
    return path


def default_socket_path() -> str:
    base = os.environ.get("XDG_RUNTIME_DIR") or "/tmp"
    return f"{base}/dmuond-{os.getuid()}/dmuond.sock"


def attach_path(path: str) -> str:
    return path + ATTACH_SUFFIX


def integer(name: str, default: int) -> int:
    """The integer in an environment variable."""
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        return int(text)
    except ValueError:
        raise InvalidArgumentError(f"{name}='{text}' is not an integer") from None


def number(name: str, default: float) -> float:
    """The number, finite and not negative, in an environment variable."""
    text = os.environ.get(name, "")
    if not text:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise InvalidArgumentError(f"{name}='{text}' is not a number of at least 0")
    return value


def job() -> str:
    return os.environ.get("DMUOND_JOB") or "default"


def token() -> bytes:
    """The job's token from DMUOND_TOKEN_FILE; empty without one."""
    path = os.environ.get("DMUOND_TOKEN_FILE")
    if not path:
        return b""
    with open(path, "rb") as file:
        return file.read().strip()


def server_uid() -> int | None:
    """The user whose daemon gets the token, beside root and this one: DMUOND_SERVER_UID."""
    return integer("DMUOND_SERVER_UID", 0) if os.environ.get("DMUOND_SERVER_UID") else None


def resume() -> int:
    """IF_PRESENT when torchrun has restarted the worker or DMUOND_RESUME=1; else NEVER."""
    if os.environ.get("DMUOND_RESUME") == "1" or integer("TORCHELASTIC_RESTART_COUNT", 0) > 0:
        return types.RESUME_IF_PRESENT
    return types.RESUME_NEVER


def poison() -> bool:
    return os.environ.get("DMUOND_POISON") == "1"


def reconnect_for_s() -> float:
    """How long a trainer waits for its daemon's successor: DMUOND_RECONNECT_S, else 10 minutes."""
    return number("DMUOND_RECONNECT_S", 600.0)
