"""Which cells there are: points that processes pass, and the faults that each of them can have."""

import random
from dataclasses import replace

from cells import GROUPS, KINDS, Cell, Fault, Undisturbed
from runs import Run

LAST_STEP_HURT = 4  # with passings, two later: the run still has steps to show what it is worth
# A trainer's attach socket alone is cut; a lane is stopped for ever (daemons are their peers' and
# their service manager's to watch, trainers count as dead and are the launcher's). A trainer is
# stopped until it counts as dead and is replaced.
ONLY = {"detach": "trainer", "hang": "lane", "wake": "trainer", "replace": "lane"}
# At these points the call that follows may fail with ENOMEM.
ALLOCATING = ("memory.create", "memory.allocate", "memory.map", "daemon.spawn")

# Passed once by each process, before the first step (or at its end).
SETUP_POINTS = {
    "coordinator.plan_ready",
    "coordinator.registration",
    "cuda.create",
    "cuda.map",
    "daemon.attach",
    "daemon.attached",
    "daemon.formed",
    "daemon.member_state",
    "daemon.peer_pidfd",
    "daemon.pidfd_inode",
    "daemon.plan",
    "daemon.plan_ready",
    "daemon.session",
    "lane.attached",
    "lane.configured",
    "lane.ready",
    "trainer.attached",
    "trainer.closing",
    "trainer.opened",
    "trainer.registered",
    *ALLOCATING,
}
# Later it is the coordinator's alone.
SETUP_PASSINGS = {("other", "storage.read")}


def at_setup(victim: str, point: str) -> bool:
    """Whether nobody passes this point any more once steps are made."""
    return point in SETUP_POINTS or (victim, point) in SETUP_PASSINGS


def kinds_of(group: str, victim: str, point: str) -> list[str]:
    # gRPC 1.51 shuts a port for good when accept() finds no descriptor: nobody could join again.
    listens = victim == "coordinator" and not group.startswith("1x")
    # The fake driver's memory takes descriptors where a GPU's takes none.
    no_files = not listens and GROUPS[group].device == "cpu"
    return [
        kind
        for kind in KINDS
        if ONLY.get(kind, victim) == victim
        and (kind != "nomem" or point in ALLOCATING)
        and (kind != "wake" or (GROUPS[group].namespaces and not at_setup(victim, point)))
        # Which program starts next does not depend on where the last one was killed.
        and (kind != "replace" or point == "lane.gathered")
        and (kind != "nofile" or (victim != "trainer" and no_files))
    ]


def all_faults(group: str, reference: Undisturbed, seed: int) -> list[Fault]:
    """Every point of every victim with every kind; who of them, step and passing by seed."""
    chance = random.Random(f"{seed} {group}")
    faults = []
    for victim, points in sorted(reference.points.items()):
        for point, indices in sorted(points.items()):
            setup = at_setup(victim, point)
            for kind in kinds_of(group, victim, point):
                index = chance.choice(sorted(indices))
                passings = reference.at_start[victim, index, point] if setup else 3
                fault = Fault(
                    victim,
                    point,
                    kind,
                    index,
                    1 if setup else chance.randint(2, LAST_STEP_HURT),
                    chance.randrange(max(1, passings)),
                )
                faults.append(replace(fault, passing=0) if fault.of_snapshots else fault)
    return faults


# Each group recovers from these faults, in one of four ways: a trainer is replaced, lanes are new,
# a new epoch has the old one's memory, or the job goes back to a snapshot. Every step passes these
# points.
FIRST = {
    "1x1": ("trainer0:trainer.submitted:kill:2:0", "lane0:lane.gathered:kill:2:0"),
    "1x2s": ("coordinator0:daemon.decision:kill:3:0",),
    "2x1": ("trainer1:trainer.submitted:kill:2:0", "other1:daemon.decision:cut:2:0"),
    "2x1s": (
        "lane1:lane.gathered:kill:3:0",
        "coordinator0:coordinator.decided:kill:3:0",
        "other1:daemon.decision:kill:3:0",
    ),
    "2x2s": ("lane3:lane.gathered:kill:3:0",),
    "3x1s": ("other2:daemon.decision:kill:3:0",),
    "2x1ps": ("coordinator0:coordinator.decided:kill:3:0",),
    "2x1pes": ("trainer1:trainer.submitted:kill:3:0",),
}


def recovery_faults(group: str, reference: Undisturbed, seed: int) -> list[tuple[Fault, Fault]]:
    """Who recovers from a first fault is hurt at every point that it passes meanwhile."""
    chance = random.Random(f"{seed} {group} then")
    pairs = []
    for first in map(Fault.parse, FIRST.get(group, ())):
        run = Run(Cell(group, (first,)), group, reference)
        run.all_points = run.replacements_are_hurt = True
        result = run.run()
        if not result.holds:
            raise RuntimeError(f"{first} alone does not hold: {result.wrong}\n{result.logs}")
        for victim, points in sorted(run.points_after.items()):
            for point, indices in sorted(points.items()):
                for kind in kinds_of(group, victim, point):
                    index = chance.choice(sorted(indices - {-1}) or [0])
                    pairs.append((first, Fault(victim, point, kind, index)))
    return pairs
