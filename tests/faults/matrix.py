"""The fault matrix: every victim, at every point, with every kind of fault, in every group.

    matrix.py                     all of it
    matrix.py --sample 60         a seeded sample, the same for the same --seed
    matrix.py --sample 6 --few    of each group and kind, and not of each point
    matrix.py --two 40            two faults at once, sampled
    matrix.py --all-at-once 20    several faults of different kinds in one run, sampled
    matrix.py --then 40           a fault that befalls who recovers from one, sampled (0: all)
    matrix.py --victim trainer    some rows; --group, --kind, --point (a part of its name) likewise
    matrix.py --cell "1x2 lane0:lane.update.flip:kill:3:1"     one cell again, as it was printed
    matrix.py --cell "2x1s coordinator0:storage.write:fail=28:3:0"   a full disk (an errno)
    matrix.py --write bench/results/faults/README.md    the table between the page's marks; all:
              --sample 1000000 --two 400 --all-at-once 200 --then 0

A cell that does not hold prints itself, what was seen, and the logs of all its processes.
"""

import argparse
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import table
from cells import GROUPS, KINDS, USUAL_GROUPS, Cell, Fault, Result, Undisturbed
from points import all_faults, at_setup, recovery_faults
from runs import run_cell, undisturbed

AT_ONCE_MAX = 6  # faults of one run


def single_cells(references: dict[str, Undisturbed], seed: int, stop_s: float) -> list[Cell]:
    return [
        Cell(group, (fault,), stop_s)
        for group, reference in references.items()
        for fault in all_faults(group, reference, seed)
    ]


def double_cells(singles: list[Cell], count: int, seed: int) -> list[Cell]:
    """Two faults of different processes in one run, while the same step is under way."""
    chance = random.Random(f"{seed} two")
    cells = []
    while len(cells) < count:
        first = chance.choice(singles)
        second = chance.choice([cell for cell in singles if cell.group == first.group])
        a, b = first.faults[0], second.faults[0]
        if (a.victim, a.index) == (b.victim, b.index) or a.point == "trainer.closing":
            continue
        if b.point == "trainer.closing":
            continue
        cells.append(Cell(first.group, (a, b), first.stop_s))
    return cells


def storm_cells(singles: list[Cell], count: int, seed: int) -> list[Cell]:
    """Faults of as many kinds and processes as chance brings together, each group in its turn."""
    chance = random.Random(f"{seed} all at once")
    groups = list(dict.fromkeys(cell.group for cell in singles))
    chance.shuffle(groups)
    cells = []
    for number in range(count):
        group = groups[number % len(groups)]
        faults: list[Fault] = []
        candidates = [cell.faults[0] for cell in singles if cell.group == group]
        for fault in chance.sample(candidates, len(candidates)):
            met = {(f.victim, f.index) for f in faults}
            kinds = {f.kind for f in faults}
            fits = (fault.victim, fault.index) not in met and fault.kind not in kinds
            if fits and not at_setup(fault.victim, fault.point):  # a job is to be there, to be hurt
                faults.append(fault)
        cells.append(Cell(group, tuple(faults[:AT_ONCE_MAX]), singles[0].stop_s))
    return cells


def recovery_cells(references: dict[str, Undisturbed], options) -> list[Cell]:
    cells = [
        Cell(group, pair, options.stop_seconds, then=True)
        for group, reference in references.items()
        for pair in recovery_faults(group, reference, options.seed)
    ]
    if options.then and options.then < len(cells):
        cells = sampled(cells, options.then, options.seed, by_point=options.write is not None)
    return cells


def chosen(cells: list[Cell], options: argparse.Namespace) -> list[Cell]:
    def fits(cell: Cell) -> bool:
        fault = cell.faults[0]
        return (
            (not options.victim or fault.victim in options.victim)
            and (not options.kind or fault.kind in options.kind)
            and (not options.group or cell.group in options.group)
            and (not options.point or any(part in fault.point for part in options.point))
        )

    cells = [cell for cell in cells if fits(cell)]
    if options.sample and options.sample < len(cells):
        cells = sampled(cells, options.sample, options.seed, by_point=not options.few)
    return cells


def sampled(cells: list[Cell], count: int, seed: int, by_point: bool = True) -> list[Cell]:
    """Each group, kind and point at least once; more than `count` where that takes more."""

    def shows(cell: Cell) -> set:
        fault = cell.faults[-1]
        return {cell.group, fault.kind} | ({(fault.victim, fault.point)} if by_point else set())

    missing = set().union(*map(shows, cells))
    first, rest = [], []
    for cell in random.Random(seed).sample(cells, len(cells)):
        (first if shows(cell) & missing else rest).append(cell)
        missing -= shows(cell)
    return first + rest[: max(0, count - len(first))]


def show(result: Result, logs: Path | None) -> None:
    time = "" if result.next_step_s is None else f"{result.next_step_s:6.2f} s"
    verdict = "holds" if result.holds else "DOES NOT HOLD"
    alone = ", by the first alone" if result.unfired else ""
    print(f"{verdict:<13} {result.outcome:<16} {time:>9}  {result.cell}{alone}", flush=True)
    for wrong in result.wrong:
        print(f"    {wrong}", flush=True)
    if not result.holds and logs is not None:
        logs.mkdir(parents=True, exist_ok=True)
        path = logs / (str(result.cell).replace(" ", "_").replace(":", ".") + ".log")
        path.write_text("\n".join([str(result.cell), *result.wrong, result.logs]))
        print(f"    logs: {path}", flush=True)


def run_all(cells: list[Cell], references: dict[str, Undisturbed], options) -> list[Result]:
    results = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for result in pool.map(lambda cell: run_cell(cell, references[cell.group]), cells):
            show(result, options.logs)
            results.append(result)
    return results


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--two", type=int, default=0)
    parser.add_argument("--all-at-once", type=int, default=0)
    parser.add_argument("--then", type=int)
    parser.add_argument("--victim", action="append")
    parser.add_argument("--kind", action="append", choices=KINDS)
    parser.add_argument("--group", action="append", choices=list(GROUPS))
    parser.add_argument("--point", action="append")
    parser.add_argument("--cell", action="append")
    parser.add_argument("--stop-seconds", type=float, default=10.0)
    parser.add_argument("--jobs", type=int, default=max(2, 2 * (os.cpu_count() or 1)))
    parser.add_argument("--logs", type=Path, default=Path("build/test-logs/faults"))
    parser.add_argument("--write", type=Path)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.cell:
        cells = [Cell.parse(text, options.stop_seconds) for text in options.cell]
        references = {group: undisturbed(group) for group in {cell.group for cell in cells}}
    else:
        groups = options.group or USUAL_GROUPS
        references = {group: undisturbed(group) for group in groups}
        singles = single_cells(references, options.seed, options.stop_seconds)
        more = options.two or options.all_at_once or options.then is not None
        cells = chosen(singles, options) if options.sample or not more else []
        cells += double_cells(singles, options.two, options.seed)
        cells += storm_cells(singles, options.all_at_once, options.seed)
        if options.then is not None:
            cells += recovery_cells(references, options)
    print(f"# seed {options.seed}, {len(cells)} cells", flush=True)
    results = run_all(cells, references, options)
    if options.write:
        table.write(options.write, results, options.seed)
    broken = [result for result in results if not result.holds]
    print(f"# {len(results) - len(broken)} cells hold, {len(broken)} do not", flush=True)
    for line in table.summary(results):
        print(f"# {line}", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
