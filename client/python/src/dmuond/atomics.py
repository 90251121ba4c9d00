"""Atomic stores and futexes on shared memory, by ctypes.

Aligned words are read and written whole by ctypes on every platform that CPython runs on. Order and
read-modify-write come from libatomic where it is there; without it x86-64, whose stores are
ordered, does by itself, and other processors are refused.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform

_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_RELEASE, _ACQUIRE = 3, 2
_INT_MAX = 2**31 - 1
CHANGES = 8  # offset of the 32-bit change count in a word of a timeline page

_libc = ctypes.CDLL(None, use_errno=True)  # calls release the interpreter's lock
_quick_libc = ctypes.PyDLL(None, use_errno=True)  # calls keep it: cheaper for what cannot block


def _load_libatomic() -> ctypes.PyDLL | None:
    try:
        library = ctypes.PyDLL("libatomic.so.1")
    except OSError:
        if platform.machine() != "x86_64":
            raise ImportError(
                "dmuond needs libatomic.so.1 on this processor (package libatomic1)"
            ) from None
        return None
    library.__atomic_store_8.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_int]
    library.__atomic_store_8.restype = None
    library.__atomic_load_8.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.__atomic_load_8.restype = ctypes.c_uint64
    library.__atomic_load_4.argtypes = [ctypes.c_void_p, ctypes.c_int]
    library.__atomic_load_4.restype = ctypes.c_uint32
    library.__atomic_fetch_add_4.argtypes = [ctypes.c_void_p, ctypes.c_uint32, ctypes.c_int]
    library.__atomic_fetch_add_4.restype = ctypes.c_uint32
    return library


_libatomic = _load_libatomic()

if _libatomic is not None:

    def store(address: int, value: int) -> None:
        _libatomic.__atomic_store_8(address, value, _RELEASE)

    def load(address: int) -> int:
        return _libatomic.__atomic_load_8(address, _ACQUIRE)

    def load_changes(address: int) -> int:
        return _libatomic.__atomic_load_4(address, _ACQUIRE)

    def raise_changes(address: int) -> None:
        _libatomic.__atomic_fetch_add_4(address, 1, _RELEASE)

else:

    def store(address: int, value: int) -> None:
        ctypes.c_uint64.from_address(address).value = value

    def load(address: int) -> int:
        return ctypes.c_uint64.from_address(address).value

    def load_changes(address: int) -> int:
        return ctypes.c_uint32.from_address(address).value

    def raise_changes(address: int) -> None:
        word = ctypes.c_uint32.from_address(address)
        word.value = (word.value + 1) & 0xFFFFFFFF


def advance(word: int, value: int) -> None:
    """Stores a value into a word of a timeline page, and wakes who sleeps for its change."""
    store(word, value)
    raise_changes(word + CHANGES)
    futex_wake(word + CHANGES)


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


def futex_wake(address: int) -> None:
    """Wakes everybody who sleeps on the 32-bit word."""
    _quick_libc.syscall(
        ctypes.c_long(_SYS_FUTEX),
        ctypes.c_void_p(address),
        ctypes.c_long(_FUTEX_WAKE),
        ctypes.c_long(_INT_MAX),
        None,
        None,
        ctypes.c_long(0),
    )


def futex_wait(address: int, seen: int, timeout_s: float) -> None:
    """Sleeps while the 32-bit word is `seen`, at most `timeout_s`. Signals end it, too."""
    timeout = _Timespec(int(timeout_s), int(timeout_s % 1 * 1e9))
    result = _libc.syscall(
        ctypes.c_long(_SYS_FUTEX),
        ctypes.c_void_p(address),
        ctypes.c_long(_FUTEX_WAIT),
        ctypes.c_long(seen),
        ctypes.byref(timeout),
        None,
        ctypes.c_long(0),
    )
    if result != 0:
        error = ctypes.get_errno()
        if error not in (errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT):
            raise OSError(error, os.strerror(error))
