"""dmuonctl orthogonality: what it says of updates, of a real run."""

import json
import os
import signal
import subprocess

import dmuond
import numpy as np
import pytest
from daemons import lane_pids, program
from test_core_client import scalars, two_matrices
from test_programs import run


class Sampling:
    """dmuonctl orthogonality that waits for steps; `step` makes one, until it has ended."""

    def __init__(self, address: str, *arguments: str):
        self._process = subprocess.Popen(
            [program("dmuonctl"), "orthogonality", f"--address={address}", "--json", *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )

    def rows(self, step) -> list[dict]:
        while self._process.poll() is None:
            step()
        assert self._process.returncode == 0
        return json.loads(self._process.stdout.read())["rows"]


def test_error_and_size_are_those_of_the_updates_direction(daemons) -> None:
    address = daemons.start(1, 2)[0]
    made = {}  # by step: the weights' change over the learning rate, of both matrices

    with dmuond.Session(address, rank=0, world_size=1) as session:
        two_matrices(session, "w")
        weights, gradients = (session.arenas[arena].view(np.float32) for arena in (1, 2))
        random = np.random.default_rng(3)

        def step() -> None:
            gradients[:16] = random.normal(size=16)  # the second matrix's stays zero
            before = weights.copy()
            outcome = session.step(scalars())
            change = (before - weights) / scalars().groups[0].learning_rate
            made[outcome.step] = {"w0": change[:16], "w1": change[64:80]}

        rows = Sampling(address, "--matrices=2").rows(step)
        named = Sampling(address, "w0").rows(step)
    assert sorted(row["parameter"] for row in rows) == ["w0", "w1"]
    assert [row["parameter"] for row in named] == ["w0"]
    for row in rows + named:
        assert (row["rows"], row["cols"]) == (4, 4) and row["held_us"] > 0
        if row["parameter"] == "w1":
            assert "orthogonality_error" not in row
            continue
        update = made[row["step"]]["w0"].reshape(4, 4).astype(np.float64)
        # scale(4, 4) is 1 here: the update is the direction.
        error = np.linalg.norm(np.eye(4) - update @ update.T) / np.sqrt(4)
        assert row["orthogonality_error"] == pytest.approx(error, abs=2e-3)
        assert row["update_rms"] == pytest.approx(np.sqrt(np.mean(update**2)), rel=1e-3)


def test_a_lane_that_dies_meanwhile_is_asked_again(daemons) -> None:
    address = daemons.start(1, 1)[0]
    with dmuond.Session(address, rank=0, world_size=1) as session:
        two_matrices(session, "w")
        gradients = session.arenas[2].view(np.float32)
        gradients[:16] = np.arange(16)
        session.step(scalars())
        sampling = Sampling(address, "w0")
        killed = []

        def step() -> None:
            if not killed:
                killed.append(lane_pids(daemons.members[0].process.pid)[0])
                os.kill(killed[0], signal.SIGKILL)
            session.step(scalars())

        rows = sampling.rows(step)
    assert [row["parameter"] for row in rows] == ["w0"] and killed


def test_what_cannot_be_sampled_is_said(daemons) -> None:
    address = daemons.start(1, 1)[0]
    flag = f"--address={address}"
    assert "NO_PLAN" in run("dmuonctl", "orthogonality", flag).stderr
    with dmuond.Session(address, rank=0, world_size=1) as session:
        two_matrices(session, "w")
        for wrong in ("--matrices=0", "--matrices=101", "--sample_timeout=0", "no.such.name"):
            refused = run("dmuonctl", "orthogonality", flag, wrong)
            assert refused.returncode == 1 and "SAMPLE_INVALID" in refused.stderr
        late = run("dmuonctl", "orthogonality", flag, "--sample_timeout=100ms")
        assert late.returncode == 1 and "no step has updated" in late.stderr
