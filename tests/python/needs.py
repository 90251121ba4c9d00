"""What a test needs of its machine: without it the test is skipped, or fails in CI, which has all.

Each of these is called by a test, or by a module for all tests in it. They are hidden from
tracebacks, so that a module is skipped where it asks: of two that are skipped at one place, for one
reason, pytest's processes tell as of one.
"""

import contextlib
import importlib.util
import os
import shutil

import daemons
import pytest


def package(name: str) -> None:
    __tracebackhide__ = True
    found = None
    with contextlib.suppress(ModuleNotFoundError):  # where it is a part of a missing one
        found = importlib.util.find_spec(name)
    if found is None:
        lack(f"the Python package {name} (./dev setup --frameworks)")


def program(name: str, of: str) -> None:
    """of: what one installs to have it."""
    __tracebackhide__ = True
    if shutil.which(name) is None:
        lack(f"{name} ({of})")


def fake_gpus() -> None:
    """A build with the headers of CUDA, which has the lane for the fake driver and the rest."""
    __tracebackhide__ = True
    if not (daemons.program("dmuond").parent / "dmuond-lane-fake").exists():
        lack("the headers of CUDA, and a build with them")


def lack(what: str) -> None:
    __tracebackhide__ = True
    if os.environ.get("CI") == "true":
        pytest.fail(f"CI lacks {what}")
    pytest.skip(f"needs {what}", allow_module_level=True)
