"""Running the demo's trainers as processes and gathering what they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass
class Run:
    """What rank 0 of a run reported."""

    optimizer: str
    trainers: int
    model: dict[str, Any] = field(default_factory=dict)
    registered: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)

    @property
    def validation(self) -> list[tuple[int, float]]:
        return [(s["step"], s["validation_loss"]) for s in self.steps if "validation_loss" in s]

    @property
    def final_loss(self) -> float:
        return self.validation[-1][1]

    def mean(self, key: str, inner: str | None = None) -> float | None:
        """Over all steps but the first tenth, in which everything is still cold."""
        kept = self.steps[len(self.steps) // 10 :]
        values = [step[key][inner] if inner else step[key] for step in kept if key in step]
        return sum(values) / len(values) if values else None


def execute(
    optimizer: str,
    options: list[str],
    addresses: list[str],
    trainers: int,
    logs: Path,
    on_event: Callable[[dict[str, Any]], None],
) -> Run:
    """Runs the trainers to their end. One that fails ends the others; the error has its log."""
    run = Run(optimizer, trainers)
    processes: list[subprocess.Popen] = []
    for rank in range(trainers):
        environment = dict(os.environ, OMP_NUM_THREADS="1", RANK=str(rank), LOCAL_RANK=str(rank))
        environment["WORLD_SIZE"] = str(trainers)
        if addresses:
            environment["DMUOND_ADDRESS"] = addresses[rank * len(addresses) // trainers]
        command = [
            sys.executable,
            "-m",
            "dmuond.demo.trainer",
            f"--optimizer={optimizer}",
            *options,
        ]
        with (logs / f"{optimizer}-{rank}.log").open("wb") as log:
            output = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
            processes.append(subprocess.Popen(command, stdout=output, stderr=log, env=environment))
    # Whichever fails takes the others along, so that nobody waits for it.
    watchers = [
        threading.Thread(target=_end_all_on_failure, args=(process, processes), daemon=True)
        for process in processes
    ]
    for watcher in watchers:
        watcher.start()
    try:
        for line in processes[0].stdout:
            event = json.loads(line)
            _keep(run, event)
            on_event(event)
    except BaseException:
        for process in processes:
            process.terminate()
        raise
    finally:
        for process in processes:
            process.wait()
    failed = [rank for rank, process in enumerate(processes) if process.returncode > 0]
    if failed or not run.end:
        rank = failed[0] if failed else 0
        path = logs / f"{optimizer}-{rank}.log"
        raise RuntimeError(f"trainer {rank} failed ({path}):\n{path.read_text()[-2000:]}")
    return run


def _end_all_on_failure(process: subprocess.Popen, processes: list[subprocess.Popen]) -> None:
    if process.wait() != 0:
        for other in processes:
            if other.poll() is None:
                other.terminate()


def _keep(run: Run, event: dict[str, Any]) -> None:
    kind = event.pop("event")
    if kind == "step":
        run.steps.append(event)
    elif kind in ("model", "registered", "end"):
        setattr(run, kind, event)
    event["event"] = kind
