"""What the demo does to its own run: a trainer, a lane and a daemon are killed in the middle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from dmuond.demo.daemons import Group
from dmuond.demo.runs import Run, Trainers

# Steps of rank 0 after a death that the run is said to go on with: the first one may have been
# decided before.
_GOES_ON = 2


class Faults:
    """Kills at a quarter, a half and three quarters of the run, and times how it goes on."""

    def __init__(
        self, run: Run, trainers: Trainers, group: Group, steps: int, say: Callable[[str], None]
    ) -> None:
        self._run, self._trainers, self._group, self._say = run, trainers, group, say
        self._plan = [
            (steps // 4, "trainer", self._kill_trainer),
            (steps // 2, "lane", self._kill_lane),
            (3 * steps // 4, "daemon", self._kill_daemon),
        ]
        self._open: dict[str, Any] | None = None
        self._seen = 0
        self._killed_at = 0.0

    def on_event(self, event: dict[str, Any]) -> None:
        """REQUIRES: of rank 0, in order."""
        if event["event"] == "rolled_back" and self._open is not None:
            self._open["back_to"] = event["to_step"]
            self._seen = 0
        if event["event"] != "step":
            return
        if self._open is not None:
            self._seen += 1
            if self._seen == _GOES_ON:
                self._close()
        elif self._plan and event["step"] >= self._plan[0][0]:
            _, victim, kill = self._plan.pop(0)
            self._open = {"victim": victim, "step": event["step"], "back_to": event["step"]}
            self._run.incidents.append(self._open)
            self._seen = 0
            self._killed_at = time.perf_counter()
            # Beside the run: rank 0's reports are read on.
            threading.Thread(target=kill, daemon=True).start()

    def _close(self) -> None:
        incident, self._open = self._open, None
        incident["seconds"] = time.perf_counter() - self._killed_at
        incident["steps_lost"] = incident["step"] - incident["back_to"]
        self._say(
            f"killed a {incident['victim']} after step {incident['step']}: the run goes on after "
            f"{incident['seconds']:.1f} s, {incident['steps_lost']} steps lost"
        )

    def _kill_trainer(self) -> None:
        self._trainers.kill(1)
        self._trainers.start(1, resume=True)

    def _kill_lane(self) -> None:
        self._group.kill_lane(len(self._group.addresses) - 1)

    def _kill_daemon(self) -> None:
        node = len(self._group.addresses) - 1
        self._group.kill(node)
        self._group.start_again(node)
