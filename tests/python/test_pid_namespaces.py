"""Trainers without pids in the daemon's eyes: they and it are in PID namespaces of their own.

The kernel tells the daemon all the same when one has ended (SO_PEERPIDFD, Linux 6.5), and where it
does not, as older ones, a replacement gets arenas of its own.
"""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pid_namespace
import pytest
from daemons import HANGS_AFTER_S, Daemon, dmuonctl, program, until
from test_fault_point import Driver

TRAINER = Path(__file__).with_name("scribbling_trainer.py")
STEPS = 8
STANDS_AFTER = 3

pytestmark = pytest.mark.skipif(
    not pid_namespace.allowed, reason="only root can make a PID namespace"
)


class Trainer:
    """A process of scribbling_trainer.py, whose lines are kept."""

    def __init__(self, address: str, rank: int, *options: str, reconnect_s: int = 0):
        environment = os.environ | {
            "DMUOND_ADDRESS": address,
            "RANK": str(rank),
            "DMUOND_RESUME": "1",
            "DMUOND_RECONNECT_S": str(reconnect_s),
        }
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [*pid_namespace.under(), sys.executable, str(TRAINER), *options],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def read_until(self, word: str) -> None:
        while not self.lines or not self.lines[-1].startswith(word):
            self.lines.append(self.process.stdout.readline().rstrip("\n"))
            assert self.lines[-1], self.lines

    def signal(self, number: signal.Signals) -> None:
        os.kill(pid_namespace.first_process(self.process), number)

    def say(self) -> None:
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def rest(self) -> list[str]:
        output, _ = self.process.communicate(timeout=HANGS_AFTER_S)
        self.lines += output.splitlines()
        return self.lines

    def steps(self) -> list[str]:
        return [line for line in self.rest() if line.startswith("step ")]


@pytest.fixture
def daemon(daemons, tmp_path):
    """Starts one in a PID namespace of its own, on a kernel that does not know `hidden`."""
    drivers = []

    def start(*flags: str, hidden: str = "") -> Daemon:
        environment = {}
        if hidden:
            drivers.append(Driver(tmp_path / "faults", f"fail {errno.ENOPROTOOPT}"))
            environment = {"DMUOND_FAULT_SOCKET": drivers[-1].path, "DMUOND_FAULT_POINTS": hidden}
        daemons.start_alone(
            "--devices=cpu:2",
            "--threads=1",
            "--step_timeout=2s",
            "--register_timeout=4s",
            *flags,
            under=pid_namespace.under(),
            environment=environment,
        )
        daemons.members[-1].wait_ready()
        return daemons.members[-1]

    yield start
    for driver in drivers:
        driver.close()


def address_of(daemon: Daemon) -> str:
    return f"unix:{daemon.path}"


def undisturbed(daemon: Daemon) -> list[str]:
    trainers = [Trainer(address_of(daemon), rank) for rank in range(2)]
    first, second = (trainer.steps() for trainer in trainers)
    assert first == second and len(first) == STEPS
    return first


def with_a_stopped_rank(daemon: Daemon, reconnect_s: int = 0) -> tuple[Trainer, Trainer]:
    """Both ranks of a job; the second has stopped before its fourth step, and counts as dead."""
    address = address_of(daemon)
    first = Trainer(address, 0)
    stopped = Trainer(address, 1, "--stands", "--scribbles", reconnect_s=reconnect_s)
    stopped.read_until("stands")
    stopped.signal(signal.SIGSTOP)
    until(daemon.text, "rank 1 .*counts as dead")
    return first, stopped


def wake(trainer: Trainer) -> None:
    trainer.signal(signal.SIGCONT)
    trainer.say()
    trainer.read_until("scribbles")


def expect_no_pid_0(text: str) -> None:
    shown = re.search(r'.*(\bpid"?[=: ]+"?0\b|kill (-9 )?0\b|process 0\b).*', text)
    assert shown is None, shown[0]


def test_a_stopped_trainer_is_known_by_its_pidfd_and_must_end_before_it_is_replaced(daemon):
    node = daemon()
    address = address_of(node)
    expected = undisturbed(node)
    first, stopped = with_a_stopped_rank(node)
    status = dmuonctl(address, "status")
    assert "not visible" in status.stdout, status
    expect_no_pid_0(status.stdout + dmuonctl(address, "status", "--json").stdout)
    refused = [Trainer(address, rank) for rank in range(2)]
    twice, early = (trainer.rest()[-1] for trainer in refused)
    assert twice.startswith("ended RANK_TWICE") and "another PID namespace" in twice
    assert early.startswith("ended PREDECESSOR_RUNS") and "dmuond-python" in early
    wake(stopped)
    stopped.say()
    late = stopped.rest()[-1]
    assert "which has not ended, has closed its connection" in late
    after = Trainer(address, 1).steps()
    assert first.steps() == expected
    assert after == expected[STANDS_AFTER:]
    for said in (twice, early, late, node.text()):
        expect_no_pid_0(said)


def test_where_its_end_is_not_seen_a_replacement_gets_arenas_of_its_own(daemon):
    node = daemon(hidden="daemon.peer_pidfd")
    expected = undisturbed(node)
    first, stopped = with_a_stopped_rank(node)
    replacement = Trainer(address_of(node), 1, "--stands")
    replacement.read_until("stands")
    wake(stopped)
    replacement.say()
    assert replacement.steps() == expected[STANDS_AFTER:]
    assert first.steps() == expected
    stopped.say()
    assert stopped.rest()[-1].startswith("ended DaemonLost")
    assert "a replacement gets arenas of its own" in node.text()
    expect_no_pid_0(node.text())


def test_where_memory_for_other_arenas_is_short_the_replacement_is_refused_until_the_end(daemon):
    node = daemon("--job_memory_bytes=270000", hidden="daemon.peer_pidfd")
    first, stopped = with_a_stopped_rank(node)
    refused = Trainer(address_of(node), 1).rest()[-1]
    assert refused.startswith("ended PREDECESSOR_UNSEEN") and "--job_memory_bytes" in refused
    stopped.signal(signal.SIGKILL)
    stopped.rest()
    replaced = Trainer(address_of(node), 1).steps()
    assert first.steps()[STANDS_AFTER:] == replaced
    expect_no_pid_0(refused + node.text())


@pytest.mark.parametrize(
    "hidden", ["", "daemon.pidfd_inode", "daemon.peer_pidfd"], ids=["6.9", "6.5", "older"]
)
def test_who_counted_as_dead_and_has_no_replacement_goes_on_when_it_wakes(daemon, hidden):
    node = daemon(hidden=hidden)
    first, stopped = with_a_stopped_rank(node, reconnect_s=20)
    wake(stopped)
    stopped.say()
    assert stopped.steps() == first.steps()
    assert ("a replacement gets arenas of its own" in node.text()) == bool(hidden)
    expect_no_pid_0(node.text())


def test_doctor_says_what_it_is_good_for_to_share_a_pid_namespace(daemon):
    node = daemon()
    doctor = subprocess.run(
        [*pid_namespace.under(), program("dmuonctl"), f"--address={address_of(node)}", "doctor"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "shareProcessNamespace" in doctor.stdout
    expect_no_pid_0(doctor.stdout)
