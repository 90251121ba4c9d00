"""A script that failed runs again: its job ends, waits for it, or begins anew, and says which."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress

import core_trainer
import dmuond
import habits
import numpy as np
import pytest
import torch
from core_trainer import Job, Tensor, together, whole
from daemons import HANGS_AFTER_S, Daemons, dmuonctl, until
from dmuond import environment, launch, places, types

SQUARE = Tensor("square", (16, 16))


def job_of(world: int, name: str) -> Job:
    return Job((SQUARE,), ((whole(SQUARE),),) * world, name=name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("snapshots")


@pytest.fixture(scope="module")
def alone(folder):
    """One daemon for all of them; each ends its job."""
    with Daemons() as started:
        yield started.start(1, 1, f"--snapshot_dir={folder}", "--jobs_max=1")[0]


@pytest.fixture
def name(request):
    return request.node.name.partition("[")[0][-40:]


@pytest.fixture
def ended(alone, name):
    """Ends the test's job, whatever became of it."""
    yield
    dmuonctl(alone, "job", "end", name)


def trainer(address: str, name: str, rank: int = 0, world: int = 1, **options):
    return core_trainer.Trainer(rank, world, job_of(world, name), address=address, **options)


WAIT = "print('waits', flush=True); signal.pause()"


class Script:
    """A process that trains two steps and then does what the lines say."""

    def __init__(self, address: str, name: str, *lines: str, **variables: str):
        text = [
            "import signal, core_trainer as core",  # not torch: importing it takes seconds
            "signal.signal(signal.SIGINT, signal.default_int_handler)",  # a shell may ignore it
            f"square = core.Tensor('square', {SQUARE.shape})",
            f"job = core.Job((square,), ((core.whole(square),),), name={name!r})",
            f"t = core.Trainer(0, 1, job, address={address!r})",
            "t.step(); t.step()",
            "print('trained', flush=True)",
            *lines,
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-c", "\n".join(text)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | variables,
        )
        assert self.process.stdout.readline() == "trained\n", self.process.communicate()[1]

    def last_words(self) -> str:
        return self.process.communicate(timeout=HANGS_AFTER_S)[1]


def wait_until_gone(address: str) -> None:
    assert json.loads(dmuonctl(address, "jobs", "--json").stdout)["jobs"] == []


def test_a_script_that_raised_says_what_helps_and_runs_again_at_once(alone, name, ended):
    words = Script(alone, name, "raise RuntimeError('mine')").last_words()
    assert "RuntimeError: mine\ndmuond: job" in words
    line = words.splitlines()[-1]
    assert f"job '{name}' keeps its state for 10 min while its daemon runs, for a rep" in line
    for way in ('resume="if_present"', 'resume="discard"', f"dmuonctl job end {name} --address=/"):
        assert way in line
    whose = r"at step 2, in the daemons' memory, of a job of one rank, whose rank 0 \(.* pid \d+\)"
    with pytest.raises(dmuond.FailedPreconditionError, match=whose) as refused:
        trainer(alone, name)
    assert refused.value.reason == "JOB_HAS_STATE"
    assert all(way in str(refused.value) for way in ('"if_present"', "DMUOND_RESUME=discard"))
    with pytest.raises(dmuond.Error, match=f"`dmuonctl job end {name}`") as refused:
        trainer(alone, "another")
    assert refused.value.reason == "OTHER_JOB"
    again = trainer(alone, name, resume="discard")
    assert (again.session.has_state, again.session.last_committed_step) == (False, 0)
    assert np.array_equal(again.weights[0], core_trainer.first_weight(SQUARE))
    again.step()
    again.session.close()


def test_what_a_rank_leaves_goes_on_if_present(alone, name, ended):
    first = trainer(alone, name)
    first.step()
    weights = first.weights[0].copy()
    first.session.drop()
    second = trainer(alone, name, resume="require")
    assert second.session.last_committed_step == 1 and np.array_equal(second.weights[0], weights)
    second.session.close()


@pytest.mark.parametrize("launcher", [{}, {"TORCHELASTIC_RUN_ID": "r"}], ids=["shell", "torchrun"])
def test_ctrl_c_ends_the_job_but_under_torchrun(alone, name, ended, launcher):
    script = Script(alone, name, WAIT, **launcher)
    script.process.send_signal(signal.SIGINT)
    line = script.last_words().splitlines()[-1]
    if launcher:
        assert f"job '{name}' keeps its state" in line
        assert trainer(alone, name, resume="if_present").session.last_committed_step == 2
    else:
        assert f"KeyboardInterrupt: job '{name}' ends after step 2" in line
        wait_until_gone(alone)
        trainer(alone, name).session.close()


def test_ctrl_c_saves_a_job_that_has_snapshots_before_it_ends(alone, name, ended):
    script = Script(alone, name, "t.session.save_snapshot(); t.step(); t.step()", WAIT)
    assert script.process.stdout.readline() == "waits\n"
    script.process.send_signal(signal.SIGINT)
    assert "ends after step 4; its newest snapshot: that of step 4" in script.last_words()
    wait_until_gone(alone)
    whose = r"step 4, in the snapshot of 20.*Z, of a job of one rank .*: 1, the first 'square'"
    with pytest.raises(dmuond.Error, match=whose):
        trainer(alone, name)
    again = trainer(alone, name, resume="require")
    assert again.session.last_committed_step == 4
    again.session.close()


def test_an_interrupted_cell_of_a_notebook_ends_nothing(monkeypatch):
    assert places.ends_job(KeyboardInterrupt(), "leave")
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert not places.ends_job(KeyboardInterrupt(), "leave")


def test_an_exception_may_end_the_job_of_all_ranks(alone, name, ended):
    failing, other = together(
        *(lambda r=r: trainer(alone, name, r, 2, on_error="end") for r in range(2))
    )
    together(failing.step, other.step)
    failing.session.end_by(ValueError("mine"))
    with pytest.raises(dmuond.Error, match="rank 0 has ended it: ValueError: mine") as told:
        other.step()
    assert told.value.reason == "JOB_ENDED" and "after step 1" in str(told.value)
    other.session.close()  # there is nothing left to leave
    wait_until_gone(alone)
    with pytest.raises(dmuond.InvalidArgumentError, match="on_error='stop'"):
        trainer(alone, name, on_error="stop")


def test_a_cell_that_runs_twice_takes_its_own_place_over(alone, name, ended):
    """The model is another: the first optimizer is of no use any more, and says so."""
    model, other = habits.make_model(), habits.make_model(seed=1)

    def cell(model, **options):
        made = habits.make_optimizer(model, address=alone, job=name, **options)
        habits.plain_loop(model, made, range(2))
        return made

    first = cell(model)
    with pytest.raises(dmuond.Error, match=r'live session in this very.*resume="discard"') as told:
        cell(other)
    assert told.value.reason == "JOB_HAS_STATE"
    habits.plain_loop(model, first, range(2, 3))  # it has lost nothing

    trained = habits.weights(model)
    second = habits.make_optimizer(other, address=alone, job=name, resume="if_present")
    assert second.last_committed_step == 3
    assert all(torch.equal(p, trained[key]) for key, p in habits.weights(other).items())
    habits.plain_loop(other, second, range(2))
    assert all(torch.equal(p, trained[key]) for key, p in habits.weights(model).items())
    with pytest.raises(dmuond.Error, match="taken rank 0 of job .* over") as told:
        first.step()
    assert told.value.reason == "TAKEN_OVER"

    third = cell(other, resume="discard")
    assert third.last_committed_step == 2
    assert cell(other, resume="discard").last_committed_step == 2
    with pytest.raises(dmuond.Error, match="taken"):
        third.step()


def test_a_job_is_not_discarded_under_a_rank_that_lives(alone, name, ended, monkeypatch):
    monkeypatch.setenv("DMUOND_LAUNCH", "second")
    first, other = together(*(lambda r=r: trainer(alone, name, r, 2) for r in range(2)))
    together(first.step, other.step)
    first.session.drop()
    with pytest.raises(dmuond.Error, match=rf"rank 1 \(pid.*`dmuonctl job end {name}`") as told:
        trainer(alone, name, 0, 2, resume="discard")
    assert told.value.reason == "JOB_IN_USE"
    back = trainer(alone, name, 0, 2, resume="if_present")
    together(back.step, other.step)
    assert other.session.last_committed_step == 2


@pytest.fixture(scope="module")
def two_nodes(folder):
    with Daemons() as started:
        yield started.start(2, 1, f"--snapshot_dir={folder}")


def test_ranks_on_two_nodes_begin_anew_once_for_each_launch(two_nodes, name, folder, monkeypatch):
    def start(resume="never"):
        return together(
            *(lambda r=r: trainer(two_nodes[r], name, r, 2, resume=resume) for r in range(2))
        )

    def steps(ranks, count):
        for _ in range(count):
            together(*(rank.step for rank in ranks))

    def leave(ranks):
        for rank in ranks:
            rank.session.drop()

    def states():
        listed = dmuonctl(two_nodes[0], "snapshot", "list", str(folder), name, "--json")
        return sorted((one["step"], one["state"]) for one in json.loads(listed.stdout))

    ranks = start()
    steps(ranks, 3)
    ranks[0].session.save_snapshot()
    steps(ranks, 1)
    (live, _) = ranks
    ranks[1].session.drop()
    monkeypatch.setenv("DMUOND_LAUNCH", "second")
    with pytest.raises(dmuond.Error, match="rank 0 on node 0 of another start") as told:
        trainer(two_nodes[1], name, 1, 2, resume="discard")
    assert told.value.reason == "JOB_IN_USE"
    live.session.drop()

    ranks = start("discard")
    assert [rank.session.last_committed_step for rank in ranks] == [0, 0]
    assert states() == [(3, "discarded")]
    steps(ranks, 1)
    leave(ranks)
    with pytest.raises(dmuond.Error, match="launch 'second' has begun .* step 1: .*DMUOND_LAUNCH"):
        start("discard")
    ranks = start("if_present")
    steps(ranks, 1)
    leave(ranks)
    assert dmuonctl(two_nodes[1], "job", "end", name, "--save").returncode == 0
    assert states() == [(2, "durable"), (3, "discarded")]

    monkeypatch.setenv("DMUOND_LAUNCH", "third")
    ranks = start("require")  # the new life's snapshot, though the old one was of a later step
    assert ranks[0].session.last_committed_step == 2
    leave(ranks)
    monkeypatch.setenv("DMUOND_LAUNCH", "fourth")
    leave(start("discard"))
    assert states() == [(2, "discarded"), (3, "discarded")]
    dmuonctl(two_nodes[0], "job", "end", name)


def test_a_job_goes_on_from_a_group_that_has_come_further(two_nodes, name, folder):
    """Another group has the same directory, and is in a later epoch: each start begins one."""

    def work(addresses, resume, to_step):
        ranks = together(
            *(lambda r=r: trainer(addresses[r], name, r, 2, resume=resume) for r in (0, 1))
        )
        while ranks[0].session.last_committed_step < to_step:
            together(*(rank.step for rank in ranks))
        assert dmuonctl(addresses[0], "job", "end", name, "--save").returncode == 0
        with suppress(dmuond.Error):  # it has ended
            together(*(rank.session.close for rank in ranks))

    for step in (1, 2, 3):
        with Daemons() as others:
            work(others.start(1, 1, f"--snapshot_dir={folder}") * 2, "if_present", step)
    for step in (4, 5):
        work(two_nodes, "require", step)
    listed = dmuonctl(two_nodes[0], "snapshot", "list", str(folder), name, "--json")
    assert [one["step"] for one in json.loads(listed.stdout)][:2] == [5, 4], listed
    back = together(
        *(lambda r=r: trainer(two_nodes[r], name, r, 2, resume="require") for r in (0, 1))
    )
    assert [rank.session.last_committed_step for rank in back] == [5, 5]
    together(*(rank.session.close for rank in back))


@pytest.mark.parametrize("way", ["ended", "discarded"])
def test_a_job_is_over_before_a_lost_daemon_is_back_and_the_next_one_runs(
    daemons, way, tmp_path, monkeypatch
):
    addresses = daemons.start(
        2, 1, f"--snapshot_dir={tmp_path}", "--jobs_max=1", "--register_timeout=5s"
    )

    def begin(rank, resume="never"):
        return trainer(addresses[rank], way, rank, 2, resume=resume)

    ranks = together(lambda: begin(0), lambda: begin(1))
    together(*(rank.step for rank in ranks))
    ranks[0].session.save_snapshot()
    for rank in ranks:
        rank.session.drop()
    here, lost = daemons.members
    lost.kill()
    until(here.text, "the job waits for the group to form anew")
    monkeypatch.setenv("DMUOND_LAUNCH", "second")
    resume = "discard" if way == "discarded" else "if_present"

    def come_back():
        lost.start()
        lost.wait_ready()

    if way == "ended":
        done, _ = together(lambda: dmuonctl(addresses[0], "job", "end", way), come_back)
        assert done.returncode == 0, done.stderr
        ranks = together(lambda: begin(0, resume), lambda: begin(1, resume))
    else:
        ranks = together(lambda: begin(0, resume), lambda: (come_back(), begin(1, resume))[1])
    together(*(rank.step for rank in ranks))
    assert [rank.session.last_committed_step for rank in ranks] == [2 if way == "ended" else 1] * 2
    together(*(rank.session.close for rank in ranks))


def test_a_job_whose_coordinator_never_returns_is_ended_after_a_session_linger(daemons):
    addresses = daemons.start(2, 1, "--session_linger=2s")
    ranks = together(*(lambda r=r: trainer(addresses[r], "alone", r, 2) for r in range(2)))
    together(*(rank.step for rank in ranks))
    daemons.members[0].kill()
    done = dmuonctl(addresses[1], "job", "end", "alone")
    assert done.returncode == 0, done.stderr
    with pytest.raises(dmuond.Error, match="job 'alone'"):
        ranks[1].step()
    wait_until_gone(addresses[1])


def test_an_operator_ends_a_job_and_its_trainers_are_told(alone, name, folder):
    running = trainer(alone, name)
    running.step()
    missing = dmuonctl(alone, "job", "end", "another")
    assert missing.returncode == 1 and f"it is '{name}'" in missing.stderr, missing
    done = dmuonctl(alone, "job", "end", name, "--save")
    assert done.stdout == (
        f"job '{name}' has ended after step 1; its newest snapshot is of step 1\n"
    ), done
    with pytest.raises(dmuond.FailedPreconditionError, match="`dmuonctl job end` has ended it"):
        running.step()
    running.session.close()
    again = trainer(alone, name, resume="if_present")
    assert again.session.last_committed_step == 1
    again.step()
    done = dmuonctl(alone, "job", "end", name, "--json")
    assert json.loads(done.stdout) == {"last_committed_step": 2, "durable_step": 1}
    assert dmuonctl(alone, "job").returncode == 2


def test_resume_is_a_word(monkeypatch):
    for word, mode in types.RESUMES.items():
        assert environment.resume(word) == environment.resume(mode) == mode
        monkeypatch.setenv("DMUOND_RESUME", word)
        assert environment.resume() == mode
    for text, mode in {"": "never", "0": "never", "1": "if_present"}.items():
        monkeypatch.setenv("DMUOND_RESUME", text)
        assert environment.resume() == types.RESUMES[mode]
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert environment.resume() == types.RESUME_IF_PRESENT
    assert environment.resume("discard") == types.RESUME_IF_PRESENT, "its own run's state"
    assert environment.resume("never") == types.RESUME_NEVER
    for wrong in ("IF_PRESENT", True, 9):
        with pytest.raises(dmuond.InvalidArgumentError, match=f'resume={wrong!r} .*"discard"'):
            environment.resume(wrong)
    monkeypatch.setenv("DMUOND_RESUME", "yes")
    with pytest.raises(dmuond.InvalidArgumentError, match="DMUOND_RESUME='yes'"):
        environment.resume()


def test_a_launch_has_a_name_of_its_own(monkeypatch):
    for variable in ("DMUOND_LAUNCH", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "SLURM_JOB_ID"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launch.name(1) != launch.name(1)
    with pytest.raises(dmuond.InvalidArgumentError, match="Set DMUOND_LAUNCH"):
        launch.name(2)
    monkeypatch.setenv("MASTER_ADDR", "host")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert launch.name(2) == "master:host:29500"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert launch.name(2).startswith(f"master:host:29500/parent:{os.getppid()}.")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x" * 200)
    assert len(launch.name(2)) == 128 and "parent:" in launch.name(2), "the telling end stays"
    monkeypatch.setenv("DMUOND_LAUNCH", "mine")
    assert launch.name(2) == "mine"
    monkeypatch.setenv("DMUOND_LAUNCH", "x" * 129)
    with pytest.raises(dmuond.InvalidArgumentError, match="DMUOND_LAUNCH has 129 bytes"):
        launch.name(2)


def test_a_job_is_called_after_its_script(monkeypatch):
    monkeypatch.delenv("DMUOND_JOB")
    for path, name in {
        "/home/me/my project/train.py": "train",
        "run-2.1.py": "run-2.1",
        "/venv/bin/lightning": "lightning",
        "/lib/package/__main__.py": "package",
        "/lib/ipykernel_launcher.py": "notebook",
        ".hidden é.py": "hidden__",
        "x" * 200 + ".py": "x" * 128,
        "-c": "default",
        "": "default",
        "...": "default",
    }.items():
        monkeypatch.setattr(sys, "argv", [path])
        assert environment.job() == name
    monkeypatch.setattr(sys, "argv", [])
    assert environment.job() == "default"
    monkeypatch.setenv("DMUOND_JOB", "mine")
    assert environment.job() == "mine"
