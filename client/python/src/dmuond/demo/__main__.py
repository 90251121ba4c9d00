"""python -m dmuond.demo: a language model trained by Muon through dmuond and by AdamW, compared.

Starts two daemons of one lane each and two trainers on this machine; in the middle of the run it
kills a trainer, then a lane, then a daemon, starts what must be started, and shows how the run goes
on. Where DMUOND_ADDRESS is set and --daemons is not, that daemon is used instead, and nothing is
killed; nor is it in a run of less than 12 steps. Exits with 1 if Muon's loss is not the lower one,
or the run is not seen to go on after each of the three.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dmuond.demo import daemons, faults, report, runs
from dmuond.errors import Error

console = Console()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dmuond.demo", description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of each run (default: 200)")
    parser.add_argument("--lr", type=float, default=5e-3, help="Muon's (default: 5e-3)")
    parser.add_argument(
        "--adamw_lr", type=float, default=2e-3, help="AdamW's, in both runs (default: 2e-3)"
    )
    parser.add_argument(
        "--daemons", type=int, default=None, help="daemons to start, two lanes in all (default: 2)"
    )
    parser.add_argument("--trainers", type=int, default=None, help="(default: 2)")
    parser.add_argument(
        "--undisturbed", action="store_true", help="kill nothing (needs two trainers otherwise)"
    )
    parser.add_argument("--output", type=Path, default=Path("out/demo"), help="folder for results")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    if arguments.daemons not in (None, 1, 2):
        parser.error("--daemons is 1 or 2")
    if arguments.trainers is not None and not 1 <= arguments.trainers <= 8:
        parser.error("--trainers is 1 to 8")
    return arguments


def run(
    optimizer: str,
    arguments: argparse.Namespace,
    addresses: list[str],
    count: int,
    logs: Path,
    group: daemons.Group | None = None,
) -> tuple[runs.Run, list[str]]:
    """With `group`, its daemons, lanes and trainers are killed on the way.

    The run, and the victims that it was not seen to go on after.
    """
    columns = (
        TextColumn("{task.description:<16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        name = "Muon by dmuond" if optimizer == "muon" else "AdamW by torch"
        task = progress.add_task(name, total=arguments.steps, loss="...")

        def on_event(event: dict[str, Any]) -> None:
            if event["event"] == "registered":
                progress.console.print(
                    event["table"], highlight=False, markup=False, soft_wrap=True
                )
            elif event["event"] == "step":
                progress.update(task, completed=event["step"], loss=f"{event['loss']:.3f}")
            if hurt is not None:
                hurt.on_event(event)

        options = [f"--steps={arguments.steps}", f"--adamw_lr={arguments.adamw_lr}"]
        if optimizer == "muon":
            options.append(f"--lr={arguments.lr}")
        trainers = runs.Trainers(optimizer, options, addresses, count, logs)
        result = runs.Run(optimizer, count)
        hurt = None
        if group is not None:
            hurt = faults.Faults(result, trainers, group, arguments.steps, progress.console.print)
        try:
            runs.execute(result, trainers, on_event)
        finally:
            if hurt is not None:
                hurt.wait()
        return result, hurt.unclosed() if hurt is not None else []


def main() -> int:
    arguments = parse()
    existing = os.environ.get("DMUOND_ADDRESS") if arguments.daemons is None else None
    nodes = arguments.daemons or 2
    trainers = arguments.trainers or (1 if existing else 2)
    logs = arguments.output / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        group = None
        if existing:
            addresses = [existing]
            console.print(f"Using the daemon at {existing}")
        else:
            lanes = 2 // nodes
            console.print(f"Starting {nodes} daemon(s) of {lanes} lane(s), {trainers} trainer(s)")
            every = max(1, arguments.steps // 10)
            group = stack.enter_context(daemons.running(nodes, lanes, logs, every))
            addresses = group.addresses
            if arguments.undisturbed or trainers < 2:
                group = None
            elif arguments.steps < faults.STEPS_MIN:
                console.print(f"Less than {faults.STEPS_MIN} steps: nothing is killed")
                group = None
        muon, unclosed = run("muon", arguments, addresses, trainers, logs, group)
    adamw, _ = run("adamw", arguments, [], 1, logs)

    console.print(report.table(muon, adamw))
    options = {key: str(value) for key, value in vars(arguments).items()}
    report.save_json(muon, adamw, options, arguments.output / "run.json")
    report.save_picture(muon, adamw, arguments.output / "loss.png")
    console.print(f"Loss curves and the whole run: {arguments.output}/loss.png, run.json")
    if unclosed:
        console.print(f"The run was not seen to go on after the death of: {', '.join(unclosed)}")
    if not muon.final_loss < adamw.final_loss:
        console.print(
            f"Muon's loss {muon.final_loss:.4f} is not below AdamW's {adamw.final_loss:.4f}"
        )
        return 1
    return 1 if unclosed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (Error, OSError, RuntimeError) as error:
        console.print(f"[bold]demo:[/bold] {error}", highlight=False)
        sys.exit(2)
