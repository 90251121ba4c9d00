"""Fixtures of the Python tests: a fake daemon, and real ones on private sockets."""

import pytest
from daemons import Daemons
from fake_daemon import FakeDaemon


@pytest.fixture
def fake(tmp_path):
    daemon = FakeDaemon(str(tmp_path / "d.sock"))
    yield daemon
    daemon.die()


@pytest.fixture
def daemons(tmp_path_factory):
    """Starts real daemons; ends them, and shows their logs when the test has failed."""
    # Socket paths are short: pytest's own directories carry the test's name.
    with Daemons(tmp_path_factory.mktemp("d")) as started:
        yield started
