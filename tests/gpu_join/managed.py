"""A daemon that runs the control daemon of MPS itself (--mps=managed), without one of ours."""

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from disturbances import SETTLED_STEP
from jobs import Job
from machine import MPS_CONTROL, until
from rows import Check, WrongError
from run import ALONE, Run

SETUP = dataclasses.replace(ALONE, flags=("--mps=managed",))


def checks(run: Run) -> Iterator[Check]:
    yield from run.first()
    for what, wanted, look in (
        ("job", "the first run's bits; nothing is left", _job),
        ("daemon killed", "its successor takes the control daemon over", _killed),
        ("control daemon killed", "the daemon starts another; the same bits", _control_killed),
        ("told to leave in a step", "it leaves in time; nothing is left", _leaves),
    ):
        name = f"managed {what}"
        yield Check(name, wanted, lambda look=look, name=name: look(run, name))


def _begin(run: Run, name: str) -> Job:
    job = run.job(SETUP, name)
    job.relaunch_allowed = True
    job.variables = {"CUDA_MPS_PIPE_DIRECTORY": f"{job.address()}.mps"}
    job.start_trainers()
    job.wait_for_step(SETTLED_STEP)
    return job


def _controls(job: Job) -> list[int]:
    """Control daemons of this job's daemon."""
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if MPS_CONTROL not in command.read_text():
                continue
            variables = (command.parent / "environ").read_text().split("\0")
            if f"CUDA_MPS_PIPE_DIRECTORY={job.address()}.mps" in variables:
                found.append(int(command.parent.name))
    return found


def _one_control(job: Job) -> int:
    controls = _controls(job)
    if len(controls) != 1:
        raise WrongError(f"{len(controls)} control daemons: {controls}")
    return controls[0]


def _nothing_left(job: Job) -> None:
    until("its control daemon ends", lambda: not _controls(job), 20.0)


def _job(run: Run, name: str) -> str:
    job = _begin(run, name)
    _one_control(job)
    found = run.compare(job)
    _nothing_left(job)
    return f"{found}; {job.relaunches} relaunches"


def _killed(run: Run, name: str) -> str:
    job = _begin(run, name)
    job.wait("a snapshot", lambda: job.trainers[0].has_snapshot)
    before = _one_control(job)
    job.replace_daemon()
    after = _one_control(job)
    found = run.compare(job)
    _nothing_left(job)
    if before != after:
        raise WrongError(f"{found}; but control daemon {before} became {after}")
    return f"{found}; {job.relaunches} relaunches"


def _control_killed(run: Run, name: str) -> str:
    job = _begin(run, name)
    before = _one_control(job)
    os.kill(before, signal.SIGKILL)
    until("there is another", lambda: _controls(job) not in ([], [before]), 30.0)
    found = run.compare(job)
    _nothing_left(job)
    return f"{found}; {job.relaunches} relaunches"


def _leaves(run: Run, name: str) -> str:
    job = _begin(run, name)
    job.relaunch_allowed = False
    (daemon,) = job.daemons
    daemon.process.send_signal(signal.SIGTERM)
    if (code := daemon.wait()) != 0:
        raise WrongError(f"it ended with {code}: {daemon.last_words}")
    _nothing_left(job)
    return f"after step {job.reached}"
