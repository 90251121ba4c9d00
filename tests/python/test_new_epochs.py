"""A lane that dies between steps: a new epoch, in which nothing that was pushed is lost."""

import os
import signal
import threading
import time

import core_trainer
import dmuond
import numpy as np
import pytest
from core_trainer import Job, Tensor, whole
from daemons import HANGS_AFTER_S, lane_pids
from dmuond import types

WIDE = Tensor("wide", (16, 24), reduce_factor=0.5)
JOB = Job((WIDE,), ((whole(WIDE),),) * 2)


def on_both(function):
    """Runs function(rank) for two ranks at once; raises what either raised."""
    failures = []

    def run(rank):
        try:
            function(rank)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANGS_AFTER_S)
        assert not thread.is_alive()
    if failures:
        raise failures[0]


@pytest.fixture
def pair(daemons):
    """Two trainers of one daemon, after a step; they end without closing if the test fails."""
    address = daemons.start(1, 1)[0]
    trainers = {}

    def begin(rank):
        trainers[rank] = core_trainer.Trainer(rank, 2, JOB, address=address)
        trainers[rank].step()

    on_both(begin)
    yield trainers
    on_both(lambda rank: trainers[rank].session.close())


def kill_lane_and_wait(daemons, session):
    """Until the new lanes have published the masters."""
    published = max(session._published_attempts())
    (lane,) = lane_pids(daemons.members[0].process.pid)
    os.kill(lane, signal.SIGKILL)
    deadline = time.monotonic() + HANGS_AFTER_S
    while max(session._published_attempts()) >> 32 == published >> 32:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def masters(session):
    (master,) = session.pull(kinds=[types.STATE_KIND_MASTER])
    return master.values


def test_a_push_that_is_waiting_for_the_other_rank_survives_with_its_weights(pair, daemons):
    sent = threading.Event()

    def push(rank):
        session, (weight,) = pair[rank].session, pair[rank].weights
        weight[...] = 42.0
        if rank == 0:
            push_stream = session._link.channel.push

            def send(requests):
                def observed():
                    yield from requests()
                    sent.set()

                return push_stream(observed)

            session._link.channel.push = send
            session.push()
            return
        assert sent.wait(HANGS_AFTER_S)
        kill_lane_and_wait(daemons, session)
        assert not np.all(weight == 42.0)  # the masters came
        with pytest.raises(dmuond.FailedPreconditionError) as caught:
            session.push()
        assert caught.value.reason == "WEIGHTS_REPUBLISHED"
        weight[...] = 42.0
        session.push()

    on_both(push)
    for rank in range(2):
        assert np.all(pair[rank].weights[0] == 42.0)
        assert np.all(masters(pair[rank].session) == 42.0)


def test_state_is_read_and_the_next_step_taken_after_a_lane_died_between_steps(pair, daemons):
    before = masters(pair[0].session)
    kill_lane_and_wait(daemons, pair[0].session)
    assert np.array_equal(masters(pair[0].session), before)
    on_both(lambda rank: pair[rank].step())
    assert pair[0].session.last_committed_step == 2
    assert np.array_equal(pair[0].weights[0], pair[1].weights[0])


def test_state_can_be_read_while_lanes_are_replaced(pair, daemons):
    before = masters(pair[0].session)
    stop = threading.Event()
    wrong = []

    def read():
        while not stop.is_set():
            wrong.extend([1] if not np.array_equal(masters(pair[0].session), before) else [])

    reader = threading.Thread(target=read)
    reader.start()
    kill_lane_and_wait(daemons, pair[1].session)
    stop.set()
    reader.join(HANGS_AFTER_S)
    assert not reader.is_alive() and not wrong
