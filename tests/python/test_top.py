"""dmuonctl top: on a terminal and in a pipe, with a daemon that ends and comes back."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time

import dmuond
import pytest
from daemons import HANGS_AFTER_S, program
from test_core_client import scalars, two_matrices
from test_programs import run


class Terminal:
    """Runs a command on a terminal of 60 rows; what it has written is gathered as it is awaited."""

    def __init__(self, *command: str):
        self.own, self.its = pty.openpty()
        fcntl.ioctl(self.its, termios.TIOCSWINSZ, struct.pack("HHHH", 60, 160, 0, 0))
        self.before = termios.tcgetattr(self.its)
        self.text = ""
        self.process = subprocess.Popen(
            command, stdin=self.its, stdout=self.its, stderr=self.its, start_new_session=True
        )

    def until(self, pattern: str) -> None:
        """Forgets what came before the match's end."""
        deadline = time.monotonic() + HANGS_AFTER_S
        while not (found := re.search(pattern, self.text)):
            assert time.monotonic() < deadline, (pattern, self.text[-2000:])
            if select.select([self.own], [], [], 0.2)[0]:
                self.text += os.read(self.own, 1 << 16).decode()
        self.text = self.text[found.end() :]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self.own)
        os.close(self.its)


@pytest.fixture
def top(daemons):
    daemons.start(1, 1)
    address = f"--address=unix:{daemons.members[0].path}"
    terminal = Terminal(str(program("dmuonctl")), "top", address, "--interval=100ms")
    yield terminal
    terminal.close()


def test_steps_are_shown_as_they_come_and_the_terminal_is_as_before(daemons, top) -> None:
    top.until(re.escape("\x1b[?1049h"))
    top.until("no job")
    with dmuond.Session(f"unix:{daemons.members[0].path}", rank=0, world_size=1) as session:
        two_matrices(session)
        for step in range(1, 4):
            session.step(scalars())
            top.until(rf"step +{step}\b|step {step},")
        top.until(r"0\.00 steps a second")
    top.until("no job")
    os.write(top.own, b"q")
    top.until(re.escape("\x1b[?1049l"))
    assert top.process.wait(HANGS_AFTER_S) == 0
    assert termios.tcgetattr(top.its) == top.before


def test_a_daemon_that_ends_is_said_and_its_successor_shown(daemons, top) -> None:
    top.until("no job")
    daemons.members[0].kill()
    top.until("the daemon does not answer: ")
    daemons.members[0].start()
    top.until("no job")
    top.process.send_signal(signal.SIGTERM)
    top.until(re.escape("\x1b[?1049l"))
    assert top.process.wait(HANGS_AFTER_S) == 0


def test_in_a_pipe_each_look_stands_below_the_last(daemons) -> None:
    daemons.start(1, 1)
    address = f"--address=unix:{daemons.members[0].path}"
    looks = run("dmuonctl", "top", address, "--interval=10ms", "--count=3")
    assert looks.returncode == 0
    assert looks.stdout.count("no job\n") == 3 and "\x1b" not in looks.stdout
    refusals = {"--interval=0": "above 0", "--count=-1": "or more", "--json": "status"}
    for wrong, why in refusals.items():
        refused = run("dmuonctl", "top", address, wrong)
        assert refused.returncode == 2 and why in refused.stderr
    nobody = run("dmuonctl", "top", "--address=unix:/nowhere/d.sock", "--count=1")
    assert nobody.returncode == 1
    assert "the daemon does not answer" in nobody.stdout and "/nowhere" in nobody.stderr
