"""Thousands of steps of one job with a random fault every few dozen of them.

Afterwards weights, descriptors, mappings, threads, memory and files are what they would be.

    soak.py [--steps 20000] [--every 50] [--group 1x2] [--seed 1] [--victim trainer]

In a group with snapshots (--group 2x1s) daemons may be victims too: --victim coordinator, --victim
other.
"""

import argparse
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

from cells import GROUPS, Cell, Fault
from daemons import files_below, lane_pids
from points import at_setup
from runs import Run, undisturbed

STOP_S = 0.05  # a stopped process only costs time here: the matrix has the long ones
WARM_SHARE = 0.1  # of the run, before its footprint is taken
RESIDENT_SLACK_KIB = 8192  # what allocators keep; a leak of a job's memory at each fault is more
THREAD_SLACK = 6  # gRPC's come and go
MAPPING_SLACK = 6 * THREAD_SLACK
SNAPSHOT_SLACK = 12  # those of one that is being written, and of one that a death has left behind


@dataclass
class Footprint:
    descriptors: int
    threads: int
    mappings: int
    resident_kib: int
    files: int  # temporary ones, of the whole machine's dmuonds
    snapshot_files: int

    @staticmethod
    def of(pid: int, folder: Path) -> "Footprint | None":
        """None: it is gone."""
        try:
            return Footprint._of(pid, folder)
        except (FileNotFoundError, ProcessLookupError):
            return None

    @staticmethod
    def _of(pid: int, folder: Path) -> "Footprint":
        process = Path(f"/proc/{pid}")
        status = (process / "status").read_text()
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        return Footprint(
            len(list((process / "fd").iterdir())),
            len(list((process / "task").iterdir())),
            len((process / "maps").read_text().splitlines()),
            int(resident.split()[1]),
            len(list(folder.iterdir()))
            + sum(path.is_file() for path in Path("/dev/shm").glob("*dmuond*")),
            len(files_below(folder / "snapshots")),
        )

    def excess(self, before: "Footprint") -> list[str]:
        slack = {
            "threads": THREAD_SLACK,
            "mappings": MAPPING_SLACK,
            "resident_kib": RESIDENT_SLACK_KIB,
            "descriptors": THREAD_SLACK,  # a call that is just being answered has one
            "snapshot_files": SNAPSHOT_SLACK,
        }
        return [
            f"{name}: {getattr(before, name)} became {value}"
            for name, value in vars(self).items()
            if value > getattr(before, name) + slack.get(name, 0)
        ]


def faults(group: str, victims: list[str], options: argparse.Namespace) -> tuple[Fault, ...]:
    """One every `every` steps, at a random point of a random victim."""
    chance = random.Random(f"{options.seed} soak {group}")
    points = undisturbed(group).points
    made = []
    for step in range(options.every, options.steps - options.every, options.every):
        victim = chance.choice(victims)
        point = chance.choice(sorted(p for p in points[victim] if not at_setup(victim, p)))
        index = chance.choice(sorted(points[victim][point]))
        kind = chance.choice(["kill", "kill", "stop", "cut"])
        made.append(Fault(victim, point, kind, index, step, chance.randrange(3)))
    return tuple(made)


class Soak:
    def __init__(self, options: argparse.Namespace):
        self.options = options
        # By daemon, and by process of a trainer or lane.
        self.before: dict[str, Footprint] = {}
        self.after: dict[str, Footprint] = {}

    def run(self) -> int:
        options = self.options
        print(f"# seed {options.seed}: {options.steps} steps, undisturbed", flush=True)
        reference = undisturbed(options.group, options.steps)
        hurt = faults(options.group, options.victim, options)
        print(f"# {len(hurt)} faults", flush=True)
        run = Run(Cell(options.group, hurt, STOP_S), options.group, reference, options.steps)
        run.patience_s = options.steps / 20 + 5 * len(hurt) + 60
        run.restarts_max = 2 * len(hurt) + 4
        run.replacements_are_hurt = True
        run.on_step = lambda step: self._on_step(run, step)
        began = time.monotonic()
        result = run.run()
        for who in sorted(self.before.keys() | self.after.keys()):
            before, after = self.before.get(who), self.after.get(who)
            if before is None or after is None:
                if who.startswith("daemon"):
                    result.wrong.append(f"{who}: no footprint {'after' if before else 'before'}")
                continue  # others are no longer who they were
            print(f"# {who} before: {before}\n# {who} after:  {after}")
            result.wrong += [f"{who}: {what}" for what in after.excess(before)]
        if not self.before:
            result.wrong.append("no footprint was taken")
        kinds = Counter(f"{fault.victim} {fault.kind}" for fault in hurt)
        print(f"# {dict(kinds)}, {run.restarts} trainers started again")
        print(f"# {result.outcome} after {time.monotonic() - began:.1f} s")
        for wrong in result.wrong:
            print(wrong)
        if result.wrong:
            options.logs.parent.mkdir(parents=True, exist_ok=True)
            options.logs.write_text(result.logs)
            print(f"logs: {options.logs}")
        return 1 if result.wrong else 0

    def _on_step(self, run: Run, step: int) -> None:
        if step >= self._warm() and not self.before:
            self.before = self._footprints(run)
        if step >= self.options.steps - 1 and not self.after:
            self.after = self._footprints(run)

    def _warm(self) -> int:
        """Halfway between two faults, and the first step of all ranks from there on."""
        every = self.options.every
        return int(self.options.steps * WARM_SHARE) // every * every + every // 2

    def _footprints(self, run: Run) -> dict[str, Footprint]:
        pids = {f"daemon {node}": daemon.pid for node, daemon in run.daemons.items()}
        for rank, trainer in run.ranks.items():
            pids[f"trainer {rank}, {trainer.process.pid}"] = trainer.process.pid
        for daemon in run.daemons.values():
            for lane in lane_pids(daemon.pid):
                pids[f"lane {lane}"] = lane
        taken = {who: Footprint.of(pid, run.loop.folder) for who, pid in pids.items()}
        return {who: footprint for who, footprint in taken.items() if footprint is not None}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--group", choices=list(GROUPS), default="1x2")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--victim", action="append")
    parser.add_argument("--logs", type=Path, default=Path("build/test-logs/soak.log"))
    options = parser.parse_args(arguments)
    options.victim = options.victim or ["trainer", "lane"]
    return Soak(options).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
