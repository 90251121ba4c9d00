"""docs/operations.md: its commands against a running group show what it says that they show."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import core_trainer
import pytest
from core_trainer import Job, Tensor, whole
from daemons import HANGS_AFTER_S, Daemon, program, until
from test_new_epochs import on_both

GUIDE = " ".join((Path(__file__).parents[2] / "docs/operations.md").read_text().split())
WIDE = Tensor("wide", (16, 24), reduce_factor=0.5)
JOB = Job((WIDE,), ((whole(WIDE),),) * 2)


def as_the_guide_says(words: str) -> str:
    """A pattern of words that stand in the guide; what it gives as … and 1234 may be anything."""
    assert words in GUIDE, f"the guide no longer says {words!r}"
    return re.escape(words).replace("…", ".+").replace("1234", r"\d+")


def ask(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [program("dmuonctl"), *arguments, f"--address={daemon.path}"],
        capture_output=True,
        text=True,
        check=False,
    )


def ctl(daemon: Daemon, *arguments: str) -> str:
    done = ask(daemon, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def group(daemons, tmp_path):
    """Two daemons, and a trainer on each after two steps."""
    flags = (f"--snapshot_dir={tmp_path / 'snapshots'}", "--snapshot_every_steps=0")
    addresses = daemons.start(2, 1, *flags)
    trainers = {}

    def begin(rank):
        trainers[rank] = core_trainer.Trainer(rank, 2, JOB, address=addresses[rank])
        trainers[rank].step()
        trainers[rank].step()

    on_both(begin)
    yield daemons.members, trainers
    for trainer in trainers.values():
        trainer.session.drop()  # as a trainer that dies


def test_status_shows_what_the_guide_compares(group):
    (first, second), _ = group
    as_the_guide_says("(`attempt 2.17 open`: epoch and number;")
    seen = []
    for daemon in (first, second):
        text = ctl(daemon, "status")
        head = re.search(r"node \d of 2 \(formed, epoch (\d+)\)", text)
        job = re.search(r"step (\d+) committed, none durable, attempt (\d+)\.(\d+) open", text)
        assert head, text
        assert job, text
        assert head[1] == job[2]
        trainer = rf"\n +\d +{os.getpid()} +{os.geteuid()} +1 +attached"
        assert re.search(trainer, text), "a trainer's pid"
        assert re.search(r"\n +\d +\d+ +ready +0 ", text), "a lane's pid"
        assert re.search(r"snapshots: 0 failed, 0 left out", text), text
        jobs = json.loads(ctl(daemon, "jobs", "--json"))["jobs"]
        attempt = (int(job[2]) << 32) + int(job[3])
        assert (jobs[0]["attempt"], jobs[0]["snapshots_failed"]) == (attempt, 0)
        line = rf"\ndefault +{os.geteuid()} +running +2 +2 +none +{job[2]}\.{job[3]} "
        assert re.search(line, ctl(daemon, "jobs"))
        seen.append((head[1], job[1], job[2], job[3]))
    assert seen[0] == seen[1]
    ctl(first, "doctor")


def test_a_lane_that_is_ended_is_replaced_and_counted(group):
    (first, _), _ = group
    pid = json.loads(ctl(first, "status", "--json"))["lanes"][0]["pid"]
    os.kill(pid, signal.SIGKILL)
    until(first.text, as_the_guide_says('msg="lane lost"'))
    until(first.text, as_the_guide_says('msg="new lanes"'))
    until(lambda: ctl(first, "status"), r"\n +0 +\d+ +ready +1 ")
    assert json.loads(ctl(first, "status", "--json"))["lanes"][0]["restarts"] == 1
    assert "after 1 restarts" in ctl(first, "doctor")


def test_who_is_missing_and_why_is_said(group):
    (first, second), _ = group
    second.kill()
    until(first.text, as_the_guide_says('msg="group broken" node=1'))
    until(first.text, as_the_guide_says("the job waits for the group to form anew"))
    text = until(lambda: ctl(first, "status"), as_the_guide_says("missing: node 1"))
    assert "joining" in text
    assert json.loads(ctl(first, "status", "--json"))["missing_nodes"] == [1]
    first.kill()
    second.start()
    until(lambda: second.text(), as_the_guide_says("joining again"))
    # It says that it joins before it listens to anybody.
    text = until(lambda: ask(second, "status").stdout, as_the_guide_says("not in the group: …"))
    assert "joining" in text
    first.start()
    for daemon in (first, second):
        daemon.wait_ready()
        text = ctl(daemon, "status")
        assert "missing" not in text
        assert "not in the group" not in text


def test_a_snapshot_that_fails_is_counted(group, tmp_path):
    (first, _), _ = group
    (tmp_path / "snapshots" / "default").write_text("in the way")
    assert ask(first, "snapshot", "save").returncode == 1
    until(lambda: ctl(first, "status"), as_the_guide_says("snapshots: 1 failed"))
    (tmp_path / "snapshots" / "default").unlink()
    assert "step 2 saved" in ctl(first, "snapshot", "save")
    assert re.search(r"step 2 committed, 2 durable, .*snapshots: 1 failed", ctl(first, "status"))


def test_a_node_that_is_taken_down_says_what_is_saved(group):
    (first, second), _ = group
    assert re.fullmatch(
        as_the_guide_says("left after step 1234, which is saved") + "\n", ctl(second, "drain")
    )
    assert second.process.wait(HANGS_AFTER_S) == 0
    for daemon in (first, second):
        until(daemon.text, as_the_guide_says("a daemon is leaving") + '" node=1 step=2')
    until(lambda: ctl(first, "status"), "missing: node 1")
    assert "2 durable" in ctl(first, "status")
