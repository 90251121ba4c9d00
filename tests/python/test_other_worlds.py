"""A run under torchrun that goes on with another number of ranks is the undisturbed run."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from daemons import HANGS_AFTER_S, program

STEPS = 9
TRAINER = Path(__file__).with_name("world_trainer.py")


@pytest.fixture
def torchrun(daemons, tmp_path):
    """Runs the trainer on some ranks under torchrun, as a job of a name; its exit status."""
    address = daemons.start(1, 1, f"--snapshot_dir={tmp_path / 'snapshots'}")[0]

    def run(job: str, ranks: int, *arguments: object, resume: str = "never"):
        launcher = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        variables = {"DMUOND_ADDRESS": address, "DMUOND_JOB": job, "DMUOND_RESUME": resume}
        return subprocess.run(
            [sys.executable, "-m", *launcher, TRAINER, *map(str, arguments)],
            env=os.environ | variables,
            stderr=subprocess.PIPE,
            timeout=HANGS_AFTER_S,
            text=True,
        )

    def end(job: str) -> str:
        return subprocess.run(
            [program("dmuonctl"), f"--address={address}", "job", "end", job, "--save"],
            check=True,
            stdout=subprocess.PIPE,
            timeout=HANGS_AFTER_S,
            text=True,
        ).stdout

    return run, end


def test_a_run_that_loses_a_rank_goes_on_with_more_ranks_and_then_with_fewer(torchrun, tmp_path):
    """New ranks get the learning rates of the step, which all must have alike."""
    run, end = torchrun
    whole, parts = tmp_path / "whole.pt", tmp_path / "parts.pt"
    done = run("whole", 2, whole, STEPS)
    assert done.returncode == 0, done.stderr

    assert run("parts", 2, parts, STEPS, 4).returncode != 0
    assert "after step 3; its newest snapshot is of step 3" in end("parts")
    lost = run("parts", 3, parts, STEPS, 7, resume="require")
    assert "after step 6; its newest snapshot is of step 6" in end("parts"), lost.stderr
    done = run("parts", 1, parts, STEPS, resume="require")
    assert done.returncode == 0, done.stderr

    want, found = torch.load(whole), torch.load(parts)
    assert (want["first"], found["first"]) == (1, 7)
    torch.testing.assert_close(found["weights"], want["weights"], rtol=1e-4, atol=1e-6)
    states = [one["optimizer"]["state"] for one in (found, want)]
    torch.testing.assert_close(*states, rtol=1e-4, atol=1e-6)
    rates = [[g["lr"] for g in one["optimizer"]["param_groups"]] for one in (found, want)]
    assert rates[0] == rates[1]
