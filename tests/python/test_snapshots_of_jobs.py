"""Snapshots that a job has, has not, or has no more; whom a job that begins from one waits for."""

import subprocess
import threading
from pathlib import Path

import core_trainer
import dmuond
import pytest
from daemons import dmuonctl, program, until

SQUARE = core_trainer.Tensor("square", (16, 16))


def job(name: str, world: int = 1) -> core_trainer.Job:
    return core_trainer.Job((SQUARE,), ((core_trainer.whole(SQUARE),),) * world, name=name)


def saved(address: str, name: str) -> core_trainer.Trainer:
    """A trainer of the job, whose first step is in a snapshot."""
    trainer = core_trainer.Trainer(0, 1, job(name), address=address)
    trainer.step()
    trainer.session.save_snapshot()
    return trainer


def manifest_of(folder: Path, name: str) -> Path:
    return next((folder / name).glob("*/manifest.json"))


def test_snapshots_of_ended_jobs_go_by_age_and_those_of_others_stay(daemons, tmp_path):
    there = f"--snapshot_dir={tmp_path}"
    saved(daemons.start(1, 1, there, "--group_name=theirs")[0], "a-theirs").session.close()
    subprocess.run([program("write_snapshot"), tmp_path, "1", "3", "1", "2"], check=True)
    assert '"group":' not in manifest_of(tmp_path, "run7").read_text(), "as earlier builds wrote it"
    address = daemons.start(1, 1, there, "--snapshots_of_ended_jobs=1s", "--group_name=ours")[0]
    log = daemons.members[1].text
    unread = saved(address, "a-unread")
    assert '"group": "ours"' in manifest_of(tmp_path, "a-unread").read_text()
    manifest_of(tmp_path, "a-unread").write_text("{")
    unread.session.close()
    # What is being written there may be another group's, which has gone on from ours.
    begun = saved(address, "a-begun")
    whole = manifest_of(tmp_path, "a-begun")
    (tmp_path / "a-begun" / "step-000000000002.900.1").mkdir()
    begun.session.close()
    lives = saved(address, "a-lives")
    saved(address, "a-waits").session.drop()
    saved(address, "ended").session.close()
    gone = r"snapshots of an ended job are removed .*job=ended step=1 written=20\S+ path=.*/ended"
    until(log, gone)
    assert not (tmp_path / "ended").exists()
    # Theirs are older, and were looked at before.
    assert list((tmp_path / "a-lives").iterdir()) and list((tmp_path / "a-waits").iterdir())
    again = core_trainer.Trainer(0, 1, job("a-waits"), address=address, resume="require")
    assert again.session.last_committed_step == 1
    again.session.close()
    until(log, gone.replace("ended step", "a-waits step").replace("/ended", "/a-waits"))
    lives.session.close()
    for name in ("a-theirs", "a-unread", "run7"):
        assert manifest_of(tmp_path, name).exists()
    assert whole.exists()


def test_a_step_without_a_snapshot_is_no_broken_snapshot(daemons, tmp_path):
    address = daemons.start(1, 1, f"--snapshot_dir={tmp_path}")[0]
    trainer = saved(address, "job")
    with pytest.raises(dmuond.Error, match="no snapshot of step 999 in .*; it has steps 1") as told:
        trainer.session.load_snapshot(999)
    assert (told.value.code, told.value.reason) == ("NOT_FOUND", "NO_SUCH_SNAPSHOT")
    asked = dmuonctl(address, "snapshot", "load", "999")
    assert asked.returncode != 0 and "[NO_SUCH_SNAPSHOT]" in asked.stderr, asked
    trainer.step()
    trainer.session.close()


def test_who_begins_from_a_snapshot_hears_which_ranks_have_not_come(daemons, tmp_path):
    address = daemons.start(1, 1, f"--snapshot_dir={tmp_path}", "--register_timeout=1s")[0]
    saved(address, "job").session.close()
    until(lambda: dmuonctl(address, "jobs").stdout, "no job")
    sessions = [
        dmuond.Session(address, rank=rank, world_size=2, job="job", resume="require")
        for rank in range(2)
    ]
    parameters, fragments, size, _ = core_trainer.messages(job("job", 2), 0)
    registering = [
        threading.Thread(
            target=session.register,
            args=(parameters, fragments, [dmuond.types.GroupConfig(preset="dmuon")]),
        )
        for session in sessions
    ]
    for thread in registering:
        thread.start()
    for thread in registering:
        thread.join()
    with pytest.raises(dmuond.Error, match="these have not in time: rank 1 ") as told:
        sessions[0].attach({1: size, 2: size})
    assert told.value.reason == "RANKS_MISSING" and told.value.metadata["missing"] == "rank 1"
    for session in sessions:
        session.drop()
