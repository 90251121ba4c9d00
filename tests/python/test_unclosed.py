"""Ends that no script has written: what ends well has closed, and what fails has died."""

import contextlib
import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import dmuond
import dmuond.torch
import ends
import habits
import pytest
import torch
from core_trainer import Job, Tensor, Trainer, whole
from daemons import Daemons, dmuonctl
from test_session import holdings

PATIENCE_S = 240
SCRIPT = Path(__file__).with_name("ends.py")


def test_a_script_that_ends_well_has_closed_and_one_that_fails_has_died(daemons, tmp_path):
    """Whichever: without a linger no wait is left over."""
    (address,) = daemons.start(1, 1, "--session_linger=0")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), address, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.returncode == 0, done.stderr
    statuses = json.loads(done.stdout.splitlines()[-1])
    said = {name: (tmp_path / name).read_text() for name in statuses}
    gone = [line for line in daemons.members[0].text().splitlines() if "trainer gone" in line]
    died = {word.removeprefix("job=") for line in gone for word in line.split() if "job=" in word}
    for name in ends.WELL:
        assert (statuses[name], said[name]) == (0, ""), (name, said[name])
    assert died == ends.BADLY.keys()
    for name in ("raises", "exits_3", "exits_1_after_an_error", "raises_in_its_block"):
        assert f"dmuond: job '{name}' ends with rank 0" in said[name], name
    assert {status for name, status in statuses.items() if "_3" in name} == {3}


# --- within a process ---

SQUARE = Tensor("square", (16, 16))


@pytest.fixture(scope="module")
def one_place():
    """A daemon that takes one job at a time, and keeps the places of dead trainers."""
    with Daemons() as started:
        yield started.start(1, 1, "--jobs_max=1")[0]


@pytest.fixture
def jobs(one_place):
    """Names of the daemon's jobs; those that the test leaves end."""

    def listed() -> list[str]:
        return [
            job["name"] for job in json.loads(dmuonctl(one_place, "jobs", "--json").stdout)["jobs"]
        ]

    yield listed
    for job in listed():
        dmuonctl(one_place, "job", "end", job)


def trainer(address, name="job", **options):
    job = Job((SQUARE,), ((whole(SQUARE),),), name=name)
    made = Trainer(0, 1, job, address=address, **options)
    made.step()
    return made


def optimizer(model, address, **options):
    made = habits.make_optimizer(model, address=address, **options)
    habits.plain_loop(model, made, range(3))
    return made


@contextlib.contextmanager
def without_collections():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_a_sweep_runs_and_nothing_of_it_stays(one_place, jobs):
    """With one name or many, whether it closes its optimizers or leaves them to Python."""

    def train(name: str, how: str) -> list[weakref.ref]:
        model = habits.make_model()
        opt = optimizer(model, one_place, job=name)
        assert jobs() == [name] and holdings(os.getpid())["mappings"] >= 2
        if how == "close":
            opt.close()
        elif how == "with":
            with opt as entered:
                assert entered is opt
        return [weakref.ref(thing) for thing in (model, opt, opt.session, opt.session._link)]

    train("first", "leave")  # gRPC's own
    with without_collections():
        before = holdings(os.getpid())
        for name, how in [
            ("same", "leave"),
            ("same", "with"),
            ("same", "close"),
            ("other", "leave"),
        ]:
            left = train(name, how)
            assert jobs() == []
            assert [thing() for thing in left] == [None] * len(left), how
            assert holdings(os.getpid())["mappings"] == before["mappings"] == 0
    assert holdings(os.getpid())["descriptors"] <= before["descriptors"] + 4  # gRPC's own


def test_a_block_that_fails_leaves_the_place_to_a_replacement(one_place, jobs):
    model = habits.make_model()
    with pytest.raises(ZeroDivisionError), optimizer(model, one_place, job="job") as opt:
        raise ZeroDivisionError
    assert opt.session.closed and jobs() == ["job"]
    again = optimizer(model, one_place, job="job", resume="require")
    assert again.last_committed_step == 6
    again.close()


def test_what_a_caught_error_has_left_goes_on_or_makes_room(one_place, jobs):
    reached = []

    def train_and_fail(**options):
        failing = trainer(one_place, **options)
        reached.append(failing.session.last_committed_step)
        raise ValueError

    for options in ({}, {"resume": "if_present"}, {}):
        with contextlib.suppress(ValueError):
            train_and_fail(**options)
        assert jobs() == ["job"]
    assert reached == [1, 2, 1], "without resume= it is an optimizer that is made anew"
    trainer(one_place, "another").session.close()
    assert jobs() == []


def test_an_optimizer_of_the_same_parameters_takes_the_place_of_the_one_before(one_place, jobs):
    """It begins with the weights as they are and with fresh state, as torch's own do."""

    def train_twice(closes: bool) -> dict[str, torch.Tensor]:
        model = habits.make_model()
        first = optimizer(model, one_place, job="first")
        if closes:
            first.close()
        second = optimizer(model, one_place, job="second")
        assert (jobs(), second.last_committed_step) == (["second"], 3)
        if not closes:
            with pytest.raises(dmuond.Error, match="go on with that one") as told:
                first.step()
            assert told.value.reason == "TAKEN_OVER"
        third = optimizer(model, one_place, job="second", resume="if_present")
        assert third.last_committed_step == 6, "the job's state is wanted"
        third.close()
        return habits.weights(model)

    in_turn = train_twice(closes=True)
    assert all(torch.equal(p, in_turn[name]) for name, p in train_twice(closes=False).items())
