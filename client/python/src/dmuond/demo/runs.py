"""Running the demo's trainers as processes and gathering what they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
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
    incidents: list[dict[str, Any]] = field(default_factory=list)

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


class Trainers:
    """The processes of a run. One that fails by itself ends the others."""

    def __init__(
        self, optimizer: str, options: list[str], addresses: list[str], count: int, logs: Path
    ) -> None:
        self._optimizer, self._options, self._addresses = optimizer, options, addresses
        self._count, self._logs = count, logs
        self._lock = threading.Lock()
        self._processes: dict[int, subprocess.Popen] = {}
        self._sacrificed: set[int] = set()  # pids that were killed on purpose
        for rank in range(count):
            self._log(rank).unlink(missing_ok=True)
            self.start(rank)

    def start(self, rank: int, *, resume: bool = False) -> None:
        environment = dict(os.environ, OMP_NUM_THREADS="1", RANK=str(rank), LOCAL_RANK=str(rank))
        environment["WORLD_SIZE"] = str(self._count)
        if resume:
            environment["DMUOND_RESUME"] = "1"
        if self._addresses:
            node = rank * len(self._addresses) // self._count
            environment["DMUOND_ADDRESS"] = self._addresses[node]
        command = [sys.executable, "-m", "dmuond.demo.trainer", f"--optimizer={self._optimizer}"]
        with self._log(rank).open("ab") as log:
            process = subprocess.Popen(
                [*command, *self._options],
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=log,
                env=environment,
            )
        with self._lock:
            self._processes[rank] = process
        # Whichever fails takes the others along, so that nobody waits for it.
        threading.Thread(target=self._end_all_on_failure, args=(process,), daemon=True).start()

    def kill(self, rank: int) -> None:
        with self._lock:
            process = self._processes[rank]
            self._sacrificed.add(process.pid)
        process.kill()
        process.wait()

    def events(self) -> Iterator[dict[str, Any]]:
        """What rank 0 reports, to its end."""
        for line in self._processes[0].stdout:
            yield json.loads(line)

    def terminate(self) -> None:
        with self._lock:
            for process in self._processes.values():
                if process.poll() is None:
                    process.terminate()

    def join(self) -> None:
        for process in self._processes.values():
            process.wait()

    def raise_failure(self, *, complete: bool) -> None:
        failed = [rank for rank, process in self._processes.items() if process.returncode > 0]
        if failed or not complete:
            rank = failed[0] if failed else 0
            words = self._log(rank).read_text()[-2000:]
            raise RuntimeError(f"trainer {rank} failed ({self._log(rank)}):\n{words}")

    def _end_all_on_failure(self, process: subprocess.Popen) -> None:
        if process.wait() != 0 and process.pid not in self._sacrificed:
            self.terminate()

    def _log(self, rank: int) -> Path:
        return self._logs / f"{self._optimizer}-{rank}.log"


def execute(run: Run, trainers: Trainers, on_event: Callable[[dict[str, Any]], None]) -> Run:
    """Follows the trainers to their end; a failure's error has the log of the one that failed."""
    try:
        for event in trainers.events():
            _keep(run, event)
            on_event(event)
    except BaseException:
        trainers.terminate()
        raise
    finally:
        trainers.join()
    trainers.raise_failure(complete=bool(run.end))
    return run


def _keep(run: Run, event: dict[str, Any]) -> None:
    kind = event.pop("event")
    if kind == "step":
        # A run that was set back does its steps again.
        while run.steps and run.steps[-1]["step"] >= event["step"]:
            run.steps.pop()
        run.steps.append(event)
    elif kind in ("model", "registered", "end"):
        setattr(run, kind, event)
    event["event"] = kind
