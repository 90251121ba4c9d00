"""Who keeps a step waiting is said by the log: with a fake daemon that says what it is told to."""

import logging
import subprocess
import sys
import threading
import time

import pytest
from dmuond import types, waiting
from dmuond._proto import trainer_pb2 as pb
from test_core_client import layout_of_two_matrices, open_session, scalars, two_matrices

AWAITED = {
    "what": "rank 1 (pid 4711 on node 0), whose trainer has died",
    "since_ms": 22_000,
    "patience_ms": 595_000,
    "otherwise": "the job ends with TRAINER_MISSING, unless a replacement has come",
}


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(waiting, "_SAID_AFTER_S", (0.2, 0.6))
    monkeypatch.setattr(waiting, "_LOOK_AGAIN_S", 0.05)


def lines(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_a_step_that_waits_says_for_whom_then_again_and_that_it_goes_on(fake, soon, caplog):
    looks = []

    def on_wait(request, context):
        looks.append(request.wait_ms)
        if len(lines(caplog)) < 2:
            return pb.WaitStepReply(awaited=[types.Awaited(**AWAITED)])
        return pb.WaitStepReply(outcome=fake._commit())

    with open_session(fake) as session:
        two_matrices(session)
        fake.on_wait = on_wait
        # An absent gradient: the outcome comes by WaitStep.
        session.step(scalars(), absent=[0])
    first, again, last = lines(caplog)
    assert first == (
        "rank 0: step 1 has waited 0 s so far, for rank 1 (pid 4711 on node 0), whose trainer has "
        "died (awaited for 22 s; in 9 min 55 s the job ends with TRAINER_MISSING, unless a "
        "replacement has come)"
    )
    assert again == first
    assert last == "rank 0: step 1 goes on after 0 s"
    assert 0 < looks[0] <= 201, "the first look comes when it is time to say something"


def test_a_step_that_does_not_wait_says_nothing(fake, caplog):
    with open_session(fake) as session:
        two_matrices(session)
        session.step(scalars())
    assert lines(caplog) == []


def test_a_push_that_waits_says_so_too(fake, soon, caplog):
    asked = threading.Event()

    def on_wait(request, context):
        asked.set()
        assert (request.step, request.attempt) == (0, fake.attempt)
        return pb.WaitStepReply(awaited=[types.Awaited(**AWAITED)] * 6)

    fake.on_wait = on_wait
    fake.first["PushParameters"] = lambda context: asked.wait(10)
    with open_session(fake) as session:
        two_matrices(session)
    first, *_ = lines(caplog)
    assert first.startswith("rank 0: a push has waited 0 s so far, for rank 1 (pid 4711")
    assert first.endswith("; for 2 more")


def test_a_start_that_waits_says_for_what(fake, soon, caplog):
    waits = {"OpenSession": "the daemon at ", "RegisterLayout": "all ranks of job 'default' to"}

    def wait(context):
        said = len(lines(caplog))
        deadline = time.monotonic() + 10
        while len(lines(caplog)) == said and time.monotonic() < deadline:
            time.sleep(0.01)

    fake.first = dict.fromkeys(waits, wait)
    with open_session(fake) as session:
        layout_of_two_matrices(session)
    start, goes_on, registration, registered = lines(caplog)
    assert start.startswith(f"rank 0: the start has waited 0 s so far, for {waits['OpenSession']}")
    assert registration.startswith(
        f"rank 0: the registration has waited 0 s so far, for {waits['RegisterLayout']}"
    )
    assert goes_on == "rank 0: the start goes on after 0 s"
    assert registered == "rank 0: the registration goes on after 0 s"


def test_a_script_without_any_logging_shows_it_on_stderr():
    script = (
        "from dmuond import types, waiting\n"
        "waiting._SAID_AFTER_S = (0.0,)\n"
        "notice = waiting.WaitNotice(3, 'step 17')\n"
        f"notice.hear([types.Awaited(**{AWAITED!r})])\n"
        "notice.end()\n"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    first, last = run.stderr.splitlines()
    assert first.startswith(
        "rank 3: step 17 has waited 0 s so far, for rank 1 (pid 4711 on node 0)"
    )
    assert last == "rank 3: step 17 goes on after 0 s"
    assert run.stdout == ""
