"""The daemon has no context on a GPU, and its memory outlives every lane and trainer."""

from collections.abc import Iterator

import disturbances
from jobs import Setup
from machine import until
from rows import Check, WrongError
from run import Run

LEFT_OVER_MIB = 16


def checks(run: Run) -> Iterator[Check]:
    yield from run.first()
    setup = Setup(1, run.machine.gpus)
    if run.machine.is_fake:  # which ends a daemon that wants a context
        stays = _weights_stay
    else:
        stays = _memory_stays
        name = f"daemon's context {setup}{run.mode}"
        yield Check(name, "the driver lists no daemon", lambda: _no_context(run, setup, name))
    killed = f"lanes and trainers killed {setup}{run.mode}"
    yield Check(killed, "memory stays; the same bits", lambda: stays(run, setup, killed))


def _no_context(run: Run, setup: Setup, name: str) -> str:
    job = run.job(setup, name)
    job.start_trainers()
    job.wait_for_step(disturbances.SETTLED_STEP)
    listed = set(run.machine.compute_processes())
    daemons = {daemon.process.pid for daemon in job.daemons}
    trainers = {trainer.process.pid for trainer in job.trainers}
    run.compare(job)
    if daemons & listed:
        raise WrongError(f"daemons {daemons} in {listed}")
    return f"{len(listed)} processes, {len(listed & trainers)} of {job.world} trainers among them"


def _weights_stay(run: Run, setup: Setup, name: str, look=lambda: None) -> str:
    job = run.job(setup, name)
    job.relaunch_allowed = run.machine.with_mps
    disturbances.lanes_and_trainers_die(job, look)
    return run.compare(job)


def _memory_stays(run: Run, setup: Setup, name: str) -> str:
    machine = run.machine
    before_mib = machine.settled_memory_mib()
    held_mib = 0

    def look() -> None:
        nonlocal held_mib
        held_mib = machine.settled_memory_mib() - before_mib

    found = _weights_stay(run, setup, name, look)
    if held_mib <= 0:
        raise WrongError(f"{held_mib} MiB more than before are in use")
    machine.end_programs()
    if not machine.with_mps:  # whose server stays

        def given_back() -> bool:
            return machine.memory_in_use_mib() <= before_mib + LEFT_OVER_MIB

        until("memory is given back", given_back, 20.0)
    return f"{found}; {held_mib} MiB stay, and go with the daemon"
