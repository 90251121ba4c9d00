"""Whatever dies, the job goes on, and its bits are those of an undisturbed one."""

import dataclasses
from collections.abc import Iterator

import disturbances
from disturbances import Disturbance
from jobs import Setup
from rows import Check, WrongError
from run import ALONE, Run

Times = dict[tuple[str, Setup], list[float]]  # in seconds, by whose end it was


def checks(run: Run) -> Iterator[Check]:
    yield from run.first()
    spread = [setup for setup in run.setups if setup != ALONE] or [ALONE]
    times: Times = {}
    for disturbance in disturbances.ALL:
        for setup in spread:
            if setup.nodes > disturbance.nodes_max:
                continue
            # Whose memory it is matters where trainers die.
            for own in (False, True)[: 1 if disturbance.hurts_lanes else 2]:
                yield _disturbed(run, disturbance, dataclasses.replace(setup, own=own), times)
    if run.machine.is_fake:
        return
    for (victim, setup), seconds in times.items():
        limit_s = disturbances.limit_s(victim, setup)
        name = f"times after a {victim} {setup}{run.mode}"
        wanted = f"at work again in {limit_s} s"
        yield Check(name, wanted, lambda s=seconds, m=limit_s: _within(s, m))


def _disturbed(run: Run, disturbance: Disturbance, setup: Setup, times: Times) -> Check:
    name = f"{disturbance.name} {setup}{run.mode}"

    def look() -> str:
        changed = dataclasses.replace(
            setup, flags=disturbance.flags, lanes_can_fault=disturbance.lanes_can_fault
        )
        job = run.job(changed, f"faults-{name}", point=disturbance.point)
        # A lane that faults or is killed in a kernel ends, under MPS, all that is on its GPU.
        job.relaunch_allowed = disturbance.ends_trainers or run.machine.with_mps
        took_s = disturbance.happens(job)
        found = f"{run.compare(job)}; at work again in {took_s:.2f} s"
        if job.relaunches > 0:
            found += f"; {job.relaunches} trainers had ended with it"
        if disturbance.victim and not (disturbance.mps_ends_all and run.machine.with_mps):
            shape = dataclasses.replace(setup, own=False)
            times.setdefault((disturbance.victim, shape), []).append(took_s)
        return found

    return Check(name, "the first run's bits", look)


def _within(seconds: list[float], limit_s: float) -> str:
    found = f"{min(seconds):.2f} … {max(seconds):.2f} s, {len(seconds)} times"
    if max(seconds) > limit_s:
        raise WrongError(found)
    return found
