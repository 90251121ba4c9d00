"""Whoever dies is noticed within seconds: the others get a status that names it, nobody hangs.

Nobody lingers for a replacement here; test_replacement.py has that.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from daemons import HANGS_AFTER_S, dmuonctl, lane_pids, program, until

NOTICED_WITHIN_S = 45.0  # a silent daemon counts as gone after 60 s, an ended one at once
LANES_END_WITHIN_S = 25.0  # a lane that hears nothing more goes after --lane_timeout, 30 s

TRAINER = Path(__file__).with_name("endless_trainer.py")
LOADING_TRAINER = Path(__file__).with_name("loading_trainer.py")


class Trainer:
    """A process that steps until something stops it; prints how that looked to it."""

    def __init__(self, address: str, rank: int):
        environment = os.environ | {
            "DMUOND_ADDRESS": address,
            "RANK": str(rank),
            "WORLD_SIZE": "2",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(TRAINER)], env=environment, stdout=subprocess.PIPE, text=True
        )

    def wait_stepping(self):
        assert self.process.stdout.readline() == "stepping\n"

    def last_words(self) -> str:
        output, _ = self.process.communicate(timeout=NOTICED_WITHIN_S)
        return output

    def end(self):
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def pair(daemons):
    """Two trainers in mid-run, on one daemon or two."""
    started = []

    def start(nodes: int = 1):
        addresses = daemons.start(nodes, 1, "--session_linger=0")
        started.extend(Trainer(addresses[rank % nodes], rank) for rank in range(2))
        for trainer in started:
            trainer.wait_stepping()
        return started

    yield start
    for trainer in started:
        trainer.end()


def test_a_dead_torch_rank_is_noticed_while_its_forked_workers_live(daemons):
    """A worker that held the rank's socket would keep the news until its own end."""
    (address,) = daemons.start(1, 1, "--session_linger=0")
    (daemon,) = daemons.members
    with subprocess.Popen(
        [sys.executable, str(LOADING_TRAINER)],
        env=os.environ | {"DMUOND_ADDRESS": address},
        stdout=subprocess.PIPE,
        text=True,
        # Its workers are ended with it.
        start_new_session=True,
    ) as trainer:
        try:
            workers = [int(pid) for pid in trainer.stdout.readline().split()]
            assert len(workers) == 2
            trainer.kill()
            until(daemon.text, rf"trainer gone.* rank=0 .*pid={trainer.pid}\b")
            assert all(runs(worker) for worker in workers), "its workers ended before"
        finally:
            os.killpg(trainer.pid, signal.SIGKILL)


def test_a_dead_trainer_is_named_to_the_other(pair):
    first, second = pair()
    second.process.kill()
    assert "TRAINER" in (words := first.last_words()) and "rank 1" in words


def test_a_dead_trainer_on_another_node_is_named_to_the_other(pair):
    first, second = pair(nodes=2)
    second.process.kill()
    assert "TRAINER" in (words := first.last_words()) and "rank 1" in words


def test_a_dead_lane_is_replaced_and_its_trainers_hear_of_nothing(pair, daemons):
    first, second = pair()
    (lane,) = lane_pids(daemons.members[0].process.pid)
    os.kill(lane, signal.SIGKILL)
    deadline = time.monotonic() + HANGS_AFTER_S
    while not set(lane_pids(daemons.members[0].process.pid)) - {lane}:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # Both step on: it takes a death to end that.
    second.process.kill()
    words = first.last_words()
    assert "rank 1" in words and "lane" not in words


def test_signals_that_mean_nothing_end_neither_daemon_nor_lane(pair, daemons):
    first, second = pair()
    daemon = daemons.members[0].process
    (lane,) = lane_pids(daemon.pid)
    names = ("USR1", "USR2", "ALRM", "VTALRM", "PROF", "POLL", "PWR", "STKFLT", "PIPE", "XFSZ")
    numbers = [signal.Signals[f"SIG{name}"] for name in names]
    for number in [*numbers, signal.SIGRTMIN, signal.SIGRTMAX]:
        for pid in (daemon.pid, lane):
            os.kill(pid, number)
    assert dmuonctl(f"unix:{daemons.members[0].path}", "status").returncode == 0
    assert lane_pids(daemon.pid) == [lane]
    second.process.kill()
    words = first.last_words()
    assert "rank 1" in words and "lane" not in words


def test_a_dead_daemon_ends_its_trainers_waits(pair, daemons):
    first, second = pair()
    daemons.members[0].kill()
    for trainer in (first, second):
        assert "DaemonLost" in trainer.last_words() or "Unreachable" in trainer.last_words()


def test_a_dead_daemon_of_another_node_is_named(pair, daemons):
    first, _ = pair(nodes=2)
    daemons.members[1].kill()
    words = first.last_words()
    assert "PEER_LOST" in words or "TRAINER" in words


def runs(pid: int) -> bool:
    """A process that has ended stays visible until somebody waits for it: in a container, never."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def test_lanes_end_with_their_daemon(pair, daemons):
    pair()
    lanes = lane_pids(daemons.members[0].process.pid)
    assert lanes
    daemons.members[0].kill()
    deadline = time.monotonic() + LANES_END_WITHIN_S
    while any(runs(lane) for lane in lanes):
        assert time.monotonic() < deadline, "a lane outlives its daemon"
        time.sleep(0.02)


def test_sigterm_finishes_the_step_and_leaves_with_zero(pair, daemons):
    first, second = pair()
    daemons.members[0].process.send_signal(signal.SIGTERM)
    assert daemons.members[0].process.wait(HANGS_AFTER_S) == 0
    for trainer in (first, second):
        assert trainer.last_words() != ""


def wait_until_it_waits_for(rank: int, address: str):
    """Until the step in flight has been submitted by every other rank, and not by this one."""
    command = [program("dmuonctl"), "status", "--json", f"--address={address}"]
    deadline = time.monotonic() + HANGS_AFTER_S
    while True:
        status = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        states = {t.get("rank", 0): t["state"] for t in status["job"]["trainers"]}
        submitted = {other for other, state in states.items() if state == "submitted"}
        if submitted == states.keys() - {rank}:
            return
        assert time.monotonic() < deadline, states
        time.sleep(0.02)


def test_a_signal_during_a_drain_is_the_first_one(pair, daemons):
    """`systemctl stop` while `dmuonctl drain` waits for a step ends nothing early."""
    _, second = pair()
    second.process.send_signal(signal.SIGSTOP)
    daemon = daemons.members[0]
    wait_until_it_waits_for(1, daemon.path)
    drain = subprocess.Popen([program("dmuonctl"), "drain", f"--address={daemon.path}"])
    try:
        until(daemon.text, "leaving: finishing the step")
        daemon.process.send_signal(signal.SIGTERM)
        until(daemon.text, "leaving already")
        second.process.send_signal(signal.SIGCONT)
        assert daemon.process.wait(HANGS_AFTER_S) == 0
        drain.wait(HANGS_AFTER_S)
    finally:
        drain.kill()
        drain.wait()


def test_a_second_signal_ends_the_daemon_at_once(pair, daemons):
    """The first waits for a step that a stopped trainer holds up."""
    first, second = pair()
    second.process.send_signal(signal.SIGSTOP)
    wait_until_it_waits_for(1, daemons.members[0].path)
    daemon = daemons.members[0].process
    daemon.send_signal(signal.SIGTERM)
    until(daemons.members[0].text, "leaving: finishing the step")
    daemon.send_signal(signal.SIGINT)  # so soon that it is the same wish
    with pytest.raises(subprocess.TimeoutExpired):
        daemon.wait(0.6)
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(HANGS_AFTER_S) == 1
    second.process.send_signal(signal.SIGCONT)
    for trainer in (first, second):
        assert trainer.last_words() != ""
