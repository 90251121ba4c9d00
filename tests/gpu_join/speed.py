"""A step of next to nothing: what it costs beside its bytes and its arithmetic."""

import statistics
from collections.abc import Iterator

from jobs import Setup
from rows import Check, WrongError
from run import Run

STEPS = 1000


def checks(run: Run) -> Iterator[Check]:
    for setup in run.setups:
        # Half as much again as two H100s have taken (bench/results/2xh100).
        limit_ms = 6.0 if setup.nodes > 1 else 1.6
        name = f"step {setup}{run.mode}"
        wanted = f"p50 at most {limit_ms} ms"
        yield Check(name, wanted, lambda s=setup, n=name, m=limit_ms: _median_step(run, s, n, m))


def _median_step(run: Run, setup: Setup, name: str, limit_ms: float) -> str:
    job = run.job(setup, name, STEPS)
    job.start_trainers()
    job.finish()
    times = [at for _, _, at in job.trainers[0].steps()][STEPS // 2 :]
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    median_ms = statistics.median(gaps) / 1e6
    if median_ms > limit_ms:
        raise WrongError(f"{median_ms:.2f} ms")
    return f"{median_ms:.2f} ms"
