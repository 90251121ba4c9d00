"""What the demo does to its own run: a trainer, a lane and a daemon are killed in the middle."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dmuond.demo.daemons import Group
from dmuond.demo.runs import Run, Trainers

STEPS_MIN = 12  # of a run that has room for three deaths


@dataclass
class _Death:
    step: int  # due after it
    victim: str
    kill: Callable[[], None]
    revive: Callable[[], None]  # for whom nobody else does
    needs_snapshot: bool = False


class Faults:
    """Kills at a quarter, a half and three quarters of the run, and times how it goes on.

    An incident is closed by the first step that rank 0 began when the victim was dead.
    """

    def __init__(
        self, run: Run, trainers: Trainers, group: Group, steps: int, say: Callable[[str], None]
    ) -> None:
        self._run, self._trainers, self._say = run, trainers, say
        node = len(group.addresses) - 1

        def nobody() -> None: ...

        self._plan = [
            _Death(
                steps // 4,
                "trainer",
                lambda: trainers.kill(1),
                lambda: trainers.start(1, resume=True),
            ),
            _Death(steps // 2, "lane", lambda: group.kill_lane(node), nobody),
            _Death(
                3 * steps // 4,
                "daemon",
                lambda: group.kill(node),
                lambda: group.start_again(node),
                needs_snapshot=True,
            ),
        ]
        self._open: dict[str, Any] | None = None
        self._dead_at: float | None = None  # time.monotonic(), of the open incident's victim
        self._thread: threading.Thread | None = None
        self._failure: Exception | None = None

    def on_event(self, event: dict[str, Any]) -> None:
        """REQUIRES: of rank 0, in order."""
        if event["event"] == "rolled_back" and self._open is not None:
            self._open["back_to"] = event["to_step"]
        if event["event"] != "step":
            return
        if self._open is None:
            if self._plan and self._is_due(self._plan[0], event):
                self._begin(self._plan.pop(0), event["step"])
        elif self._dead_at is None or event["began_s"] < self._dead_at:
            self._open["step"] = event["step"]  # the victim still had its part in it
        else:
            self._close(event["ended_s"] - self._dead_at)

    def wait(self) -> None:
        """At the end of the run. Raises what went wrong with a death."""
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise RuntimeError(f"the demo could not kill and revive: {self._failure}") from (
                self._failure
            )

    def unclosed(self) -> list[str]:
        """Victims that the run has not been seen to go on after, and those still to come."""
        opened = [i["victim"] for i in self._run.incidents if "seconds" not in i]
        return opened + [death.victim for death in self._plan]

    @staticmethod
    def _is_due(death: _Death, event: dict[str, Any]) -> bool:
        durable = event.get("durable_step") is not None or not death.needs_snapshot
        return event["step"] >= death.step and durable

    def _begin(self, death: _Death, step: int) -> None:
        self._open = {"victim": death.victim, "step": step}
        self._run.incidents.append(self._open)
        self._dead_at = None
        # Beside the run: rank 0's reports are read on.
        self._thread = threading.Thread(target=self._kill, args=(death,), daemon=True)
        self._thread.start()

    def _kill(self, death: _Death) -> None:
        try:
            death.kill()
            self._dead_at = time.monotonic()
            death.revive()
        except Exception as error:  # whatever it is: the run would wait for the victim
            self._failure = error
            self._trainers.terminate()

    def _close(self, seconds: float) -> None:
        incident, self._open = self._open, None
        incident["seconds"] = seconds
        incident.setdefault("back_to", incident["step"])
        incident["steps_lost"] = incident["step"] - incident["back_to"]
        self._say(
            f"killed a {incident['victim']} after step {incident['step']}: the run goes on after "
            f"{incident['seconds']:.1f} s, {incident['steps_lost']} steps lost"
        )
