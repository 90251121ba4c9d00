"""Where the daemon is and who this trainer is, from the environment."""

from __future__ import annotations

import math
import os
import re
import sys

from dmuond import types
from dmuond.errors import InvalidArgumentError

# struct sockaddr_un has 108 bytes with the closing zero.
_SOCKET_PATH_BYTES_MAX = 107
ATTACH_SUFFIX = ".attach"
_JOB_BYTES_MAX = 128
_NOTEBOOK_KERNEL = "ipykernel_launcher"


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
    longest = path + ATTACH_SUFFIX
    if (size := len(longest.encode())) > _SOCKET_PATH_BYTES_MAX:
        raise InvalidArgumentError(
            f"the path of the Unix socket '{longest}' has {size} bytes, at most "
            f"{_SOCKET_PATH_BYTES_MAX} are possible"
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
    """The job's name: DMUOND_JOB, else that of the script's file, which all ranks have in common.

    Without a file (`python -c`, a prompt) it is "default", and in a notebook "notebook".
    """
    return os.environ.get("DMUOND_JOB") or _of_script(sys.argv[0] if sys.argv else "")


def _of_script(path: str) -> str:
    """path: sys.argv[0], which children of multiprocessing inherit."""
    stem = os.path.basename(path).removesuffix(".py")
    if stem == "__main__":  # python -m package
        stem = os.path.basename(os.path.dirname(os.path.abspath(path)))
    if stem == _NOTEBOOK_KERNEL:
        stem = "notebook"
    # As the daemon has it: no dot first, which hides a directory of snapshots.
    name = re.sub(r"[^A-Za-z0-9._-]", "_", stem).lstrip(".")[:_JOB_BYTES_MAX]
    return "default" if name in ("", "-c") else name


def token() -> bytes:
    """The job's token from DMUOND_TOKEN_FILE; empty without one."""
    path = os.environ.get("DMUOND_TOKEN_FILE")
    if not path:
        return b""
    with open(path, "rb") as file:
        return file.read().strip()


def server_uid() -> int | None:
    """A user whose daemon may get the token, beside root and this one: DMUOND_SERVER_UID."""
    return integer("DMUOND_SERVER_UID", 0) if os.environ.get("DMUOND_SERVER_UID") else None


def resume(given: str | int | None = None) -> int:
    """What to do with a job's state: the argument, DMUOND_RESUME (a word, or 1), or the default.

    The default is NEVER, and IF_PRESENT where torchrun has restarted the worker, which does not
    discard what its own run has come to either.
    """
    restarted = integer("TORCHELASTIC_RESTART_COUNT", 0) > 0
    if given is None:
        text = os.environ.get("DMUOND_RESUME", "")
        if text not in ("", "0", "1", *types.RESUMES):
            raise InvalidArgumentError(
                f"DMUOND_RESUME='{text}' is none of 1, {', '.join(types.RESUMES)}"
            )
        default = "if_present" if restarted or text == "1" else "never"
        given = text if text in types.RESUMES else default
    if isinstance(given, bool) or given not in (*types.RESUMES, *types.RESUMES.values()):
        words = " | ".join(f'"{word}"' for word in types.RESUMES)
        raise InvalidArgumentError(f"resume={given!r} is none of {words}")
    mode = types.RESUMES[given] if isinstance(given, str) else given
    return types.RESUME_IF_PRESENT if mode == types.RESUME_DISCARD and restarted else mode


def poison() -> bool:
    return os.environ.get("DMUOND_POISON") == "1"


def reconnect_for_s() -> float:
    """How long a trainer waits for its daemon's successor: DMUOND_RECONNECT_S, else 10 minutes."""
    return number("DMUOND_RECONNECT_S", 600.0)
