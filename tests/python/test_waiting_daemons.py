"""Two ranks and a real daemon: who is awaited is known, and a planned restart loses nothing."""

import json
import logging
import signal
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor

import dmuond
import numpy as np
import one_matrix
import pytest
from daemons import program, until
from dmuond import types

SIDE, WORLD = one_matrix.SIDE, 2


def open_rank(address, rank, **more):
    return dmuond.Session(address, rank=rank, world_size=WORLD, reconnect_for_s=20.0, **more)


def step(session, number):
    seed = 100 * session.rank + number
    gradient = np.random.default_rng(seed).standard_normal(SIDE * SIDE).astype(np.float32)
    session.arenas[2].view(np.float32)[...] = gradient
    scalars = types.StepScalars(groups=[types.GroupScalars(learning_rate=0.1, momentum=0.9)])
    return session.step(scalars)


@pytest.fixture
def threads():
    with ThreadPoolExecutor(WORLD) as pool:
        yield pool


def begin(address, threads, **more):
    """Both ranks with equal weights, after step 1."""
    sessions = [open_rank(address, rank, **more) for rank in range(WORLD)]

    def first_step(session):
        one_matrix.register(session)
        session.arenas[1].view(np.float32)[...] = np.linspace(-1, 1, SIDE * SIDE)
        session.push()
        step(session, 1)

    list(threads.map(first_step, sessions))
    return sessions


def status(address):
    command = [program("dmuonctl"), f"--address={address}", "--json", "status"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_who_is_awaited_is_in_the_log_and_in_the_status(daemons, threads, caplog):
    address = daemons.start(1, 1)[0]
    survivor, victim = begin(address, threads)
    victim.__exit__(RuntimeError, RuntimeError("it dies"), None)
    waiting = threads.submit(step, survivor, 2)
    job = json.loads(until(lambda: status(address), '"waiting"'))["job"]
    (awaited,) = job["awaited"]
    assert awaited["what"].startswith("rank 1 (pid ")
    assert awaited["what"].endswith(" on node 0), whose trainer has died")
    assert awaited["since_ms"] >= 5000
    assert 590_000 < awaited["patience_ms"] <= 595_000
    command = [program("dmuonctl"), f"--address={address}", "status"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "waits, for 5s now, for rank 1 (pid " in text
    assert "the job ends with TRAINER_MISSING, unless a replacement has come" in text
    until(lambda: caplog.text, r"rank 0: step 2 has waited 5 s so far, for rank 1 \(pid \d+ on")
    replacement = open_rank(address, 1, resume=types.RESUME_REQUIRE)
    one_matrix.register(replacement)
    step(replacement, 2)
    assert waiting.result().step == 2
    until(lambda: caplog.text, "rank 0: step 2 goes on after")
    until(lambda: status(address), '"running"')
    survivor.close()
    replacement.close()


def finish(sessions, threads, number):
    """Step `number` of both; what the weights are then."""
    outcomes = list(threads.map(lambda session: step(session, number), sessions))
    assert [outcome.step for outcome in outcomes] == [number] * WORLD
    return [session.arenas[1].tobytes() for session in sessions]


def restart(daemon):
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(30) == 0
    daemon.start()


def test_a_trainer_that_starts_while_its_daemon_leaves_waits_for_the_successor(
    daemons, threads, tmp_path, caplog
):
    address = daemons.start(1, 1, f"--snapshot_dir={tmp_path}", "--drain_timeout=2s")[0]
    daemon = daemons.members[0]
    sessions = begin(address, threads)
    first = threads.submit(step, sessions[0], 2)  # a drain waits for the other rank
    until(lambda: status(address), '"submitted"')
    daemon.process.send_signal(signal.SIGTERM)
    until(lambda: status(address), '"draining"')
    start = {"rank": 0, "world_size": 1, "job": "other", "reconnect_for_s": 20.0}
    starting = threads.submit(dmuond.Session, address, **start)
    until(lambda: caplog.text, "is leaving; waiting up to 20 s for its successor")
    assert daemon.process.wait(30) == 0
    daemon.start()
    other = starting.result()
    one_matrix.register(other)
    step(sessions[1], 2)
    assert first.result().step == 2
    for session in (other, *sessions):
        session.close()


def test_a_planned_restart_is_not_noticed_between_two_steps_nor_in_one(
    daemons, threads, tmp_path, caplog
):
    address = daemons.start(1, 1, f"--snapshot_dir={tmp_path}", "--drain_timeout=2s")[0]
    daemon = daemons.members[0]
    undisturbed = begin(address, threads, job="undisturbed")
    expected = [finish(undisturbed, threads, number) for number in (2, 3, 4)]
    for session in undisturbed:
        session.close()
    caplog.set_level(logging.INFO, "dmuond")
    sessions = begin(address, threads)
    memory = [dict(session.arenas) for session in sessions]
    restart(daemon)  # between two steps
    assert finish(sessions, threads, 2) == expected[0]
    first = threading.Thread(target=step, args=(sessions[0], 3))
    first.start()
    until(lambda: status(address), '"submitted"')
    restart(daemon)  # while one rank waits for the other in a step
    step(sessions[1], 3)
    first.join()
    assert [session.arenas[1].tobytes() for session in sessions] == expected[1]
    assert finish(sessions, threads, 4) == expected[2]
    for session, held in zip(sessions, memory, strict=True):
        assert all(session.arenas[identity] is arena for identity, arena in held.items())
        session.close()
    assert caplog.text.count("with the daemon's successor; nothing is lost") == 2 * WORLD
