"""Undisturbed jobs have the same bits in every setup, with arenas of both kinds.

All copies of their weights are equal.
"""

import dataclasses
import json
import signal
import subprocess
from collections.abc import Iterator

from jobs import Job, Setup
from rows import Check, WrongError
from run import Run

STEPS = 20
LOOKS = 3
FEW = 100  # steps: a job that has less is over before anybody looks


def checks(run: Run) -> Iterator[Check]:
    yield from run.first()
    kinds = [{"own": False}, {"own": True}]
    if run.machine.with_mps:
        kinds.append({"flags": ("--mps=off",)})
    for setup in run.setups:
        for kind in kinds:
            yield _undisturbed(run, dataclasses.replace(setup, **kind))
        if run.steps >= FEW:
            yield _checked(run, setup)


def _undisturbed(run: Run, setup: Setup) -> Check:
    name = f"{setup}{run.mode}"

    def look() -> str:
        job = run.job(setup, f"equal-{name}", min(STEPS, run.steps))
        job.start_trainers()
        return run.compare(job)

    return Check(name, "the first run's bits", look)


def _checked(run: Run, setup: Setup) -> Check:
    """All copies are compared while a trainer stands still between two of its steps."""
    name = f"checked {setup}{run.mode}"

    def look() -> str:
        job = run.job(setup, f"equal-{name}")
        job.start_trainers()
        job.wait_for_step(STEPS)
        job.trainers[0].process.send_signal(signal.SIGSTOP)
        told = [_compare_copies(run, job) for _ in range(LOOKS)]
        job.trainers[0].process.send_signal(signal.SIGCONT)
        return f"{run.compare(job)}; {told[-1]}"

    return Check(name, f"{LOOKS} looks find no difference", look)


def _compare_copies(run: Run, job: Job) -> str:
    command = [run.machine.programs / "dmuonctl", f"--address={job.address()}", "check", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise WrongError(f"dmuonctl check: {done.stdout}{done.stderr}")
    said = json.loads(done.stdout)
    return f"{said['digests']} digests in {said['took_ms']} ms"
