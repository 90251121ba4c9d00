"""Two jobs on the same daemons and GPUs: the bits of one that is alone, whatever befalls one."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from disturbances import SETTLED_STEP
from jobs import Job, Setup
from rows import Check, WrongError
from run import Run

KILLS = 3


def checks(run: Run) -> Iterator[Check]:
    yield from run.first()
    for setup in run.setups:
        for look, what in ((_side_by_side, "two jobs"), (_lanes_die, "lanes of one killed")):
            name = f"{what} {setup}{run.mode}"
            yield Check(
                name,
                "both have the first run's bits",
                lambda look=look, setup=setup, name=name: look(run, setup, name),
            )


def _begin(run: Run, setup: Setup, name: str) -> tuple[Job, Job]:
    job = run.job(setup, f"several-{name}")
    job.relaunch_allowed = run.machine.with_mps
    other = job.beside()
    for each in (job, other):
        each.start_trainers()
    for each in (job, other):
        each.wait_for_step(SETTLED_STEP)
    return job, other


def _compare(run: Run, job: Job, other: Job) -> str:
    run.compare_weights(other, other.weights())
    return run.compare(job)


def _side_by_side(run: Run, setup: Setup, name: str) -> str:
    return _compare(run, *_begin(run, setup, name))


def _lanes_die(run: Run, setup: Setup, name: str) -> str:
    job, other = _begin(run, setup, name)
    for _ in range(KILLS):
        reached = job.reached
        for pid in _lanes_of(job, "default")[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.wait_for_step(reached + 2)
    found = _compare(run, job, other)
    attempts = _attempts(other)
    if not run.machine.with_mps and attempts > other.steps + 1:  # with one for the first push
        raise WrongError(f"{found}, and the other job had {attempts} attempts")
    return f"{found}; {attempts} attempts beside {_attempts(job)}"


def _lanes_of(job: Job, name: str) -> list[int]:
    found = []
    for pid in job.lanes():
        with suppress(OSError):  # it has ended meanwhile
            if f"--job={name}" in Path(f"/proc/{pid}/cmdline").read_text().split("\0"):
                found.append(pid)
    return found


def _attempts(job: Job) -> int:
    """In all epochs."""
    newest: dict[int, int] = {}
    for line in job.trainers[0].lines:
        if line.startswith("step "):
            attempt = int(line.split()[3])
            epoch, counter = attempt >> 32, attempt & ((1 << 26) - 1)
            newest[epoch] = max(newest.get(epoch, 0), counter)
    return sum(newest.values())
