"""Control groups for tests: a limit of memory or of processes for those that a test puts in."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path("/sys/fs/cgroup")
# By controller: the files of a limit and of what is used, in version 1 and 2.
FILES = {
    "memory": (
        ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ("memory.max", "memory.current"),
    ),
    "pids": (("pids.max", "pids.current"),) * 2,
}


class Cgroup:
    def __init__(self, path: Path, limit: str, used: str):
        self.path, self._limit, self._used = path, path / limit, path / used

    def add(self, pid: int) -> None:
        """The process, and those that it starts from now on."""
        (self.path / "cgroup.procs").write_text(str(pid))

    def used(self) -> int:
        return int(self._used.read_text())

    def set_limit(self, most: int | str) -> None:
        self._limit.write_text(str(most))


@contextlib.contextmanager
def cgroup(controller: str) -> Iterator[Cgroup]:
    """Whoever is put in has ended before the end of it.

    Skips where none may be made: that takes root, and a container that gives it the files.
    """
    old = (ROOT / controller / "cgroup.procs").exists()
    path = (ROOT / controller if old else ROOT) / f"dmuond-test-{os.getpid()}"
    limit, used = FILES[controller][0 if old else 1]
    try:
        path.mkdir()
    except OSError as why:
        pytest.skip(f"needs a control group of its own: {why}")
    try:
        if not (path / limit).exists():
            pytest.skip(f"needs the controller {controller} in {path.parent}")
        yield Cgroup(path, limit, used)
    finally:
        path.rmdir()
