"""Several jobs on one daemon: each has lanes, memory, steps and an end of its own."""

import json
import os
import signal
from contextlib import suppress

import core_trainer
import dmuond
import habits
import numpy as np
import pytest
import torch
from core_trainer import Job, Tensor, together, whole
from daemons import HANGS_AFTER_S, Daemons, dmuonctl, lane_pids, until

SQUARE = Tensor("square", (24, 16))
JOBS_MAX = 3


def job_of(world: int, name: str) -> Job:
    return Job((SQUARE,), ((whole(SQUARE),),) * world, name=name)


def trainer(address: str, name: str, rank: int = 0, world: int = 1, **options):
    return core_trainer.Trainer(rank, world, job_of(world, name), address=address, **options)


def names(address: str) -> list[str]:
    listed = dmuonctl(address, "jobs", "--json")
    return sorted(job["name"] for job in json.loads(listed.stdout)["jobs"])


class Run:
    """A job with a rank on each node."""

    def __init__(self, addresses: list[str], name: str, **options):
        self.name, self.addresses = name, addresses
        world = len(addresses)
        self.ranks = together(
            *(lambda r=r: trainer(addresses[r], name, r, world, **options) for r in range(world))
        )

    @property
    def committed(self) -> int:
        return self.ranks[0].session.last_committed_step

    def step(self, count: int = 1):
        for _ in range(count):
            together(*(rank.step for rank in self.ranks))

    def weights(self) -> np.ndarray:
        first, *others = [rank.held_weights()[0] for rank in self.ranks]
        assert all(np.array_equal(first, other) for other in others)
        return first

    def close(self):
        together(*(rank.session.close for rank in self.ranks))


@pytest.fixture(scope="module")
def expected():
    """Weights by step, of a job that is alone."""
    with Daemons() as started:
        alone = Run(started.start(2, 1), "alone")
        by_step = [alone.weights()]
        for _ in range(8):
            alone.step()
            by_step.append(alone.weights())
        alone.close()
        return by_step


@pytest.fixture
def group(tmp_path):
    with Daemons() as started:
        flags = [f"--snapshot_dir={tmp_path}", f"--jobs_max={JOBS_MAX}", "--session_linger=30s"]
        started.start(2, 1, *flags)
        yield started


def addresses_of(group: Daemons) -> list[str]:
    return [f"unix:{daemon.path}" for daemon in group.members]


def test_jobs_run_beside_each_other_and_end_alone(group, expected):
    addresses = addresses_of(group)
    first, second = (Run(addresses, name) for name in ("first", "second"))
    for step in range(1, 4):
        together(first.step, second.step)
        assert np.array_equal(first.weights(), expected[step])
        assert np.array_equal(second.weights(), expected[step])
    assert names(addresses[0]) == names(addresses[1]) == ["first", "second"]
    assert len(lane_pids(group.members[0].process.pid)) == 2, "one for each job"
    first.close()
    until(lambda: json.dumps(names(addresses[0])), r'^\["second"\]$')
    second.step()
    assert np.array_equal(second.weights(), expected[4])
    again = Run(addresses, "first")
    together(again.step, second.step)
    assert np.array_equal(again.weights(), expected[1])
    together(again.close, second.close)
    until(lambda: json.dumps(names(addresses[1])), r"^\[\]$")


def test_operators_say_which_job(group):
    addresses = addresses_of(group)
    runs = [Run(addresses, name) for name in ("first", "second")]
    runs[1].step(2)
    unnamed = dmuonctl(addresses[0], "plan")
    assert unnamed.returncode == 1 and "JOB_NOT_NAMED" in unnamed.stderr, unnamed
    assert "'first', 'second'" in unnamed.stderr
    for job, step in (("first", 0), ("second", 2)):
        assert dmuonctl(addresses[0], "plan", f"--job={job}").returncode == 0
        status = json.loads(dmuonctl(addresses[1], "status", f"--job={job}", "--json").stdout)
        assert (status["job"]["name"], status["jobs_max"]) == (job, JOBS_MAX)
        assert int(status["job"]["last_committed_step"]) == step
    assert "jobs here: first, second" in dmuonctl(addresses[0], "status").stdout
    missing = dmuonctl(addresses[0], "status", "--job=third")
    assert "no job 'third' is here: it is 'first', 'second'" in missing.stderr, missing
    saved = dmuonctl(addresses[1], "snapshot", "save", "--job=second")
    assert saved.returncode == 0 and "/second/step-" in saved.stdout, saved
    assert dmuonctl(addresses[0], "job", "end", "second").returncode == 0
    assert names(addresses[0]) == ["first"]
    runs[0].step()
    runs[0].close()


def test_a_lane_that_dies_is_its_jobs_alone(group, expected):
    addresses = addresses_of(group)
    hurt = Run(addresses, "hurt")
    lanes = set(lane_pids(group.members[1].process.pid))
    other = Run(addresses, "other")
    others_lanes = set(lane_pids(group.members[1].process.pid)) - lanes
    together(hurt.step, other.step)
    for step in (2, 3):
        (lane,) = set(lane_pids(group.members[1].process.pid)) - others_lanes
        os.kill(lane, signal.SIGKILL)
        together(hurt.step, other.step)
        assert np.array_equal(hurt.weights(), expected[step])
        assert np.array_equal(other.weights(), expected[step])
        assert others_lanes <= set(lane_pids(group.members[1].process.pid))
    outcomes = [
        json.loads(dmuonctl(addresses[0], "status", f"--job={job}", "--json").stdout)
        for job in ("hurt", "other")
    ]
    assert [int(one["epoch"]) for one in outcomes] == [3, 1]
    assert int(outcomes[1]["job"]["aborted_attempts"]) == 0
    together(hurt.close, other.close)


def test_all_jobs_go_on_when_a_daemon_comes_back(group, expected):
    addresses = addresses_of(group)
    runs = [Run(addresses, name) for name in ("first", "second")]
    for run in runs:
        run.step(2)
        run.ranks[0].session.save_snapshot()
    group.members[1].kill()
    for run in runs:
        for rank in run.ranks:
            rank.session.drop()
    group.members[1].start()
    group.members[1].wait_ready()
    for run in runs:
        back = Run(addresses, run.name, resume="require")
        assert back.committed == 2
        back.step()
        assert np.array_equal(back.weights(), expected[3])
        back.close()


def test_a_group_that_ends_has_saved_every_job(group, expected):
    addresses = addresses_of(group)
    runs = [Run(addresses, name) for name in ("first", "second")]
    runs[0].step(2)
    runs[1].step(3)
    left = dmuonctl(addresses[1], "drain")
    assert "job 'first': left after step 2, which is saved\n" in left.stdout, left
    assert "job 'second': left after step 3, which is saved\n" in left.stdout, left
    for run in runs:
        for rank in run.ranks:
            with suppress(dmuond.Error):
                rank.session.drop()
    group.members[1].process.wait(HANGS_AFTER_S)
    group.members[0].stop()
    with Daemons() as successors:
        folder = next(f for f in group.members[0]._flags if f.startswith("--snapshot_dir"))
        anew = successors.start(2, 1, folder, f"--jobs_max={JOBS_MAX}")
        for name, step in (("second", 3), ("first", 2)):
            back = Run(anew, name, resume="require")
            assert back.committed == step
            back.step()
            assert np.array_equal(back.weights(), expected[step + 1])
            back.close()


def test_one_job_too_many_is_refused_and_a_place_that_is_free_is_taken(group):
    addresses = addresses_of(group)
    runs = [Run(addresses, f"job{i}") for i in range(JOBS_MAX)]
    for rank in runs[0].ranks:
        rank.session.drop()
    with pytest.raises(dmuond.Error, match="'job0', 'job1', 'job2'.*--jobs_max") as refused:
        Run(addresses, "more")
    assert refused.value.reason == "JOBS_TOO_MANY"
    assert "dead trainers: 'job0' (`dmuonctl job end job0` ends it now) [" in str(refused.value)
    runs[0] = Run(addresses, "job0", resume="require")
    with pytest.raises(dmuond.Error) as refused:
        trainer(addresses[0], "job1", 0, 2)
    assert refused.value.reason in ("RANK_TWICE", "JOB_HAS_STATE"), "its own place's answer"
    runs[1].close()
    runs[1] = Run(addresses, "more")
    together(*(run.step for run in runs))
    together(*(run.close for run in runs))


def test_a_user_has_so_many(tmp_path):
    with Daemons() as started:
        (address,) = started.start(1, 1, "--jobs_max=4", "--jobs_per_uid=1")
        first = trainer(address, "first")
        with pytest.raises(dmuond.Error, match="has 'first'.*--jobs_per_uid=1") as refused:
            trainer(address, "second")
        assert refused.value.reason == "JOBS_TOO_MANY"
        first.step()
        first.session.close()
        trainer(address, "second").session.close()


def test_one_process_trains_two_models_in_turn():
    """As a generator and a discriminator are: an optimizer each, with a job each."""
    with Daemons() as started:
        (address,) = started.start(1, 2)

        def train(jobs: dict[str, int]) -> list[dict[str, torch.Tensor]]:
            models = [habits.make_model(seed) for seed in jobs.values()]
            optimizers = [
                habits.make_optimizer(model, address=address, job=name)
                for model, name in zip(models, jobs, strict=True)
            ]
            for step in range(4):
                for model, optimizer in zip(models, optimizers, strict=True):
                    habits.plain_loop(model, optimizer, range(step, step + 1))
            for optimizer in optimizers:
                optimizer.close()
            return [habits.weights(model) for model in models]

        alone = train({"first": 0}) + train({"second": 1})
        both = train({"generator": 0, "discriminator": 1})
    for got, wanted in zip(both, alone, strict=True):
        assert all(torch.equal(got[name], wanted[name]) for name in wanted)
