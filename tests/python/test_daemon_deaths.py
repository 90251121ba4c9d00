"""A daemon that dies or leaves has a successor, and its trainers live through it.

They end where the undisturbed run ends, bit for bit.
"""

import signal

import pytest
from daemons import HANGS_AFTER_S, wait_for_snapshot
from survivors import Survivor

STEPS, EVERY, WORLD = 60, 10, 2


@pytest.fixture
def start(daemons, tmp_path):
    """Starts a job on a daemon with snapshots; its trainers end with the test.

    The first one is held a few steps after `hold`, and so is the other.
    """
    started = []

    def start(hold: int):
        flags = [f"--snapshot_dir={tmp_path}", f"--snapshot_every_steps={EVERY}"]
        address = daemons.start(1, 2, *flags)[0]
        held = (hold, None)
        trainers = [Survivor(address, rank, WORLD, STEPS, hold=held[rank]) for rank in range(WORLD)]
        started.extend(trainers)
        return trainers

    yield start
    for trainer in started:
        trainer.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """What each rank prints when nothing happens. Without snapshots: they must not matter."""
    from daemons import Daemons

    with Daemons() as group:
        address = group.start(1, 2)[0]
        trainers = [Survivor(address, rank, WORLD, STEPS) for rank in range(WORLD)]
        for trainer in trainers:
            trainer.finish()
        return [trainer.run() for trainer in trainers]


def finish(trainers, undisturbed):
    """The steps that the run was set back to, once every rank has ended as undisturbed.

    A rank that had not yet heard of a step after the snapshot's goes on without being set back.
    """
    for trainer, expected in zip(trainers, undisturbed, strict=True):
        trainer.finish()
        assert trainer.run() == expected
    return sorted({step for trainer in trainers for step in trainer.returns()})


def test_a_killed_daemon_sets_the_run_back_to_its_newest_snapshot(
    daemons, start, undisturbed, tmp_path
):
    trainers = start(EVERY + 2)
    wait_for_snapshot(tmp_path)
    trainers[0].wait_for(EVERY + 2)  # at the snapshot's own step there is nothing to go back
    daemon = daemons.members[0]
    daemon.kill()
    reached = max(trainer.step() for trainer in trainers)
    daemon.start()
    (back,) = finish(trainers, undisturbed)
    assert back % EVERY == 0
    assert EVERY <= back <= reached + 1
    assert "waiting up to 120 s for its successor" in trainers[0].errors


@pytest.mark.rest("test_a_killed_daemon_sets_the_run_back_to_its_newest_snapshot")
def test_a_daemon_may_be_killed_again_and_again(daemons, start, undisturbed, tmp_path):
    trainers = start(22)
    wait_for_snapshot(tmp_path)
    for step in (22, 32, 42):
        trainers[0].wait_for(step)
        daemons.members[0].kill()
        daemons.members[0].start()
    # A kill just after a snapshot sets nobody back, and two may lead to the same one.
    returns = finish(trainers, undisturbed)
    assert 1 <= len(returns) <= 3
    assert all(step % EVERY == 0 for step in returns)


def test_a_daemon_that_is_told_to_leave_loses_no_step(daemons, start, undisturbed):
    trainers = start(23)
    trainers[0].wait_for(23)
    daemon = daemons.members[0]
    daemon.process.send_signal(signal.SIGTERM)
    assert daemon.process.wait(HANGS_AFTER_S) == 0
    daemon.start()
    # Both stand where its last snapshot does: nobody is set back.
    assert finish(trainers, undisturbed) == []
    assert "with the daemon's successor; nothing is lost" in trainers[0].errors


@pytest.mark.rest("survival_test, with trainers in C++")
def test_a_trainer_and_its_daemon_may_die_together(daemons, start, undisturbed, tmp_path):
    trainers = start(EVERY + 2)
    wait_for_snapshot(tmp_path)
    trainers[0].wait_for(EVERY + 2)
    trainers[1].end()
    daemons.members[0].kill()
    daemons.members[0].start()
    address = f"unix:{daemons.members[0].path}"
    replacement = Survivor(address, 1, WORLD, STEPS, resume=True)
    try:
        trainers[0].finish()
        replacement.finish()
    finally:
        replacement.end()
    assert trainers[0].run() == undisturbed[0]
    after = replacement.run()
    assert after == {key: undisturbed[1][key] for key in after}
    (back,) = trainers[0].returns()
    assert f"step {back + 1}" in after
    assert f"step {back}" not in after
