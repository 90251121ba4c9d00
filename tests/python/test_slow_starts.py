"""A daemon, or a trainer, that is slow when a session begins: nobody that lives is called gone."""

import signal
import time
from pathlib import Path

import dmuond
import pytest
from daemons import HANGS_AFTER_S
from dmuond import attach, link


def wait_until(condition):
    deadline = time.monotonic() + HANGS_AFTER_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def late(monkeypatch):
    """The first sessions open only when the daemon has closed their attach connections."""
    opened = []

    def make(times: int):
        timely = link.Link.open

        def open_late(self, identity, resume):
            opened.append(self)
            if len(opened) <= times:
                wait_until(self.is_lost)
            timely(self, identity, resume)

        monkeypatch.setattr(link.Link, "open", open_late)
        return opened

    return make


def test_a_start_that_comes_after_the_claim_timeout_connects_again(daemons, late):
    address = daemons.start(1, 1, "--claim_timeout=100ms")[0]
    tries = late(2)
    with dmuond.Session(address, rank=0, world_size=1, connect_for_s=0.0):
        assert len(tries) == 3


def test_one_that_is_always_late_hears_of_the_timeout_and_not_of_the_daemons_end(daemons, late):
    address = daemons.start(1, 1, "--claim_timeout=50ms")[0]
    tries = late(100)
    with pytest.raises(dmuond.Error, match="--claim_timeout gives slow starts more time") as caught:
        dmuond.Session(address, rank=0, world_size=1, connect_for_s=0.0)
    assert caught.value.reason == "CLAIM_EXPIRED"
    assert not isinstance(caught.value, dmuond.DaemonLost)
    pid = daemons.members[0].process.pid
    assert f"the daemon (pid {pid}), which has not ended, has closed" in tries[0].how_it_ended()


def test_a_stopped_daemon_has_not_answered_and_an_ended_one_has_ended(daemons, monkeypatch):
    address = daemons.start(1, 1)[0]
    process = daemons.members[0].process
    monkeypatch.setattr(attach, "_WELCOME_TIMEOUT_S", 0.2)
    process.send_signal(signal.SIGSTOP)
    wait_until(lambda: "\nState:\tT" in Path(f"/proc/{process.pid}/status").read_text())
    try:
        with pytest.raises(dmuond.Unreachable) as caught:
            dmuond.Session(address, rank=0, world_size=1, connect_for_s=0.1)
    finally:
        process.send_signal(signal.SIGCONT)
    assert caught.value.reason == "DAEMON_UNREACHABLE"
    assert f"the daemon (pid {process.pid}) at" in str(caught.value)
    assert "has not answered for 0.2 s, and has not ended" in str(caught.value)
    monkeypatch.undo()
    session = dmuond.Session(address, rank=0, world_size=1)
    daemons.members[0].kill()
    with pytest.raises(dmuond.DaemonLost, match=rf"the daemon \(pid {process.pid}\) has ended"):
        session.save_snapshot()
