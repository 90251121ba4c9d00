"""Undisturbed jobs have the same bits in every setup, with arenas of both kinds."""

import dataclasses
from collections.abc import Iterator

from jobs import Setup
from rows import Check
from run import Run

STEPS = 20


def checks(run: Run) -> Iterator[Check]:
    yield from run.first()
    kinds = [{"own": False}, {"own": True}]
    if run.machine.with_mps:
        kinds.append({"flags": ("--mps=off",)})
    for setup in run.setups:
        for kind in kinds:
            yield _undisturbed(run, dataclasses.replace(setup, **kind))


def _undisturbed(run: Run, setup: Setup) -> Check:
    name = f"{setup}{run.mode}"

    def look() -> str:
        job = run.job(setup, f"equal-{name}", min(STEPS, run.steps))
        job.start_trainers()
        return run.compare(job)

    return Check(name, "the first run's bits", look)
