"""One cell of the fault matrix: a group, what is done to whom at which point, what came of it."""

import re
from collections import Counter
from dataclasses import dataclass, field

from processes import Shape

STEPS = 8
# Daemons x lanes; s: with snapshots, p: trainers in Python, m: in both languages, t: on torch, e:
# they signal early, and in Python wait for weights as late as they can; g: lanes and trainers are
# on GPUs, of the fake driver; o: arenas are memory of the trainers; n: daemons and trainers are in
# PID namespaces of their own, u: on a kernel that tells nothing of the ends of such processes.
GROUPS = {
    "1x1": Shape(1, 1),
    "1x2": Shape(1, 2),
    "2x1": Shape(2, 1),
    "2x2": Shape(2, 2),
    "3x1": Shape(3, 1),
    "1x2s": Shape(1, 2, snapshots=True),
    "2x1s": Shape(2, 1, snapshots=True),
    "2x2s": Shape(2, 2, snapshots=True),
    "3x1s": Shape(3, 1, snapshots=True),
    "1x2b": Shape(1, 2, beside=True),
    "2x1bs": Shape(2, 1, snapshots=True, beside=True),
    "1x2e": Shape(1, 2, early=True),
    "1x2p": Shape(1, 2, clients=("python",)),
    "1x2m": Shape(1, 2, clients=("cpp", "python")),
    "2x1ps": Shape(2, 1, snapshots=True, clients=("python",)),
    "2x1pes": Shape(2, 1, snapshots=True, clients=("python",), early=True),
    "1x2te": Shape(1, 2, clients=("torch",), early=True),
    "1x2g": Shape(1, 2, device="cuda"),
    "1x2ge": Shape(1, 2, device="cuda", early=True),
    "1x2gs": Shape(1, 2, snapshots=True, device="cuda"),
    "1x2go": Shape(1, 2, device="cuda", own_memory=True),
    "1x2gp": Shape(1, 2, device="cuda", clients=("python",)),
    "1x2gm": Shape(1, 2, device="cuda", clients=("cpp", "python")),
    "1x2gpes": Shape(1, 2, snapshots=True, device="cuda", clients=("python",), early=True),
    "1x2gpo": Shape(1, 2, device="cuda", own_memory=True, clients=("python",)),
    "1x2gtes": Shape(1, 2, snapshots=True, device="cuda", clients=("torch",), early=True),
    "1x2gto": Shape(1, 2, device="cuda", own_memory=True, clients=("torch",)),
    "2x1g": Shape(2, 1, device="cuda"),
    "2x1gs": Shape(2, 1, snapshots=True, device="cuda"),
    "2x1gms": Shape(2, 1, snapshots=True, device="cuda", clients=("cpp", "python")),
    "2x2g": Shape(2, 2, device="cuda"),
    "1x2mn": Shape(1, 2, clients=("cpp", "python"), namespaces=True),
    "1x2mnu": Shape(1, 2, clients=("python", "cpp"), namespaces=True, unseen=True),
    "1x2gnu": Shape(1, 2, device="cuda", namespaces=True, unseen=True),
}
# To make a namespace takes root.
NAMESPACE_GROUPS = tuple(name for name, shape in GROUPS.items() if shape.namespaces)
GPU_GROUPS = tuple(
    name
    for name, shape in GROUPS.items()
    if shape.device == "cuda" and name not in NAMESPACE_GROUPS
)
RAIL_GROUPS = tuple(name for name in GPU_GROUPS if GROUPS[name].nodes > 1)
USUAL_GROUPS = tuple(
    name
    for name, shape in GROUPS.items()
    if "torch" not in shape.clients and name not in GPU_GROUPS + NAMESPACE_GROUPS
)

# Besides, "fail=28" makes the call behind a point of the storage fail with that errno.
KINDS = ("kill", "stop", "cut", "detach", "hang", "wake", "nomem", "nofile", "replace")


@dataclass(frozen=True)
class Fault:
    victim: str  # "trainer", "lane", "coordinator" or "other"
    point: str
    kind: str
    index: int = 0  # rank, node, or lane (those of node 0 first)
    step: int = 1  # from when this step is under way
    passing: int = 0  # so many passings later

    def __str__(self) -> str:
        return f"{self.victim}{self.index}:{self.point}:{self.kind}:{self.step}:{self.passing}"

    @property
    def of_snapshots(self) -> bool:
        return self.point.startswith(("storage.", "lane.snapshot."))

    @staticmethod
    def parse(text: str) -> "Fault":
        victim, point, kind, step, passing = text.split(":")
        name, index = re.fullmatch(r"([a-z]+)(\d+)", victim).groups()
        return Fault(name, point, kind, int(index), int(step), int(passing))


@dataclass(frozen=True)
class Cell:
    """Faults of one run; with `then`, each waits until the one before has been done."""

    group: str
    faults: tuple[Fault, ...]
    stop_s: float = 10.0
    then: bool = False

    def __str__(self) -> str:
        return f"{self.group} " + (" then " if self.then else " ").join(map(str, self.faults))

    @staticmethod
    def parse(text: str, stop_s: float) -> "Cell":
        group, *words = text.split()
        faults = tuple(Fault.parse(word) for word in words if word != "then")
        return Cell(group, faults, stop_s, "then" in words)


@dataclass
class Result:
    cell: Cell
    outcome: str = ""  # COMMITTED, RETRIED, ROLLED_BACK, STOPPED
    next_step_s: float | None = None  # from the fault to a later step of every rank
    unfired: bool = False  # the second of two faults met nobody any more
    wrong: list[str] = field(default_factory=list)
    logs: str = ""

    @property
    def holds(self) -> bool:
        return not self.wrong


@dataclass
class Undisturbed:
    """What each rank's weights are after each step; and the points that each process passes."""

    weights: dict[tuple[int, int], str]
    points: dict[str, dict[str, set[int]]]  # victim -> points -> which of them pass it
    at_start: Counter  # (victim, index, point) -> how often before the first step
    attempts: dict[int, int]  # the newest of each job
