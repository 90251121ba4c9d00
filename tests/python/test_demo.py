"""The demo: a short run of it all, and what it makes of deaths."""

import json
import subprocess
import sys
import threading
import time

import pytest
from dmuond.demo import report
from dmuond.demo.faults import Faults
from dmuond.demo.runs import Run

STEPS = 12


@pytest.mark.rest("./dev demo")
def test_a_short_demo_survives_its_three_deaths(tmp_path, monkeypatch):
    monkeypatch.delenv("DMUOND_RECONNECT_S")  # conftest's: here a daemon has a successor
    ended = subprocess.run(
        [sys.executable, "-m", "dmuond.demo", f"--steps={STEPS}", f"--output={tmp_path}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    # Which loss is lower after so few steps, it says by itself.
    assert ended.returncode in (0, 1), ended.stdout
    assert "not seen to go on" not in ended.stdout, ended.stdout
    run = json.loads((tmp_path / "run.json").read_text())
    assert (tmp_path / "loss.png").stat().st_size > 0
    muon, adamw = run["muon"], run["adamw"]
    assert [incident["victim"] for incident in muon["incidents"]] == ["trainer", "lane", "daemon"]
    assert all(incident["seconds"] > 0 for incident in muon["incidents"])
    assert [i["steps_lost"] for i in muon["incidents"][:2]] == [0, 0]
    assert 0 <= muon["incidents"][2]["steps_lost"] <= 3
    for side in (muon, adamw):
        assert [step["step"] for step in side["steps"]] == list(range(1, STEPS + 1))
    assert (ended.returncode == 0) == (muon["validation_loss"] < adamw["validation_loss"])


class Scene:
    """A run without processes. A kill takes effect when `deliver` is set."""

    def __init__(self, error: Exception | None = None):
        self.run, self.done, self.addresses = Run("muon", 2), [], ["a", "b"]
        self.deliver = threading.Event()
        self.killed = threading.Event()
        self._error = error
        self.faults = Faults(self.run, self, self, 16, lambda _: None)

    def kill(self, which):
        self.deliver.wait(30)
        if self._error is not None:
            raise self._error
        self.done.append(("kill", which))
        self.killed.set()

    def kill_lane(self, node):
        self.kill(node)

    def start(self, rank, *, resume):
        self.done.append(("start", rank))

    def start_again(self, node):
        self.done.append(("start", node))

    def terminate(self):
        self.done.append(("terminate",))

    def step(self, number: int, **more):
        now = time.monotonic()
        event = {"event": "step", "step": number, "began_s": now, "ended_s": now + 1}
        self.faults.on_event(event | more)


def test_steps_before_the_death_do_not_count_as_going_on_after_it():
    scene = Scene()
    began = time.monotonic()
    for number in range(1, 7):  # due after step 4; nobody is dead yet
        scene.step(number)
    assert scene.faults.unclosed() == ["trainer", "lane", "daemon"]
    scene.deliver.set()
    assert scene.killed.wait(30)
    scene.faults.wait()
    scene.step(7, began_s=began)  # reported after the death, and begun before it
    assert scene.faults.unclosed() == ["trainer", "lane", "daemon"]
    scene.step(8)
    assert scene.faults.unclosed() == ["lane", "daemon"]
    (incident,) = scene.run.incidents
    assert incident["step"] == 7
    assert incident["steps_lost"] == 0
    assert 1 <= incident["seconds"] < 30
    assert scene.done == [("kill", 1), ("start", 1)]


def test_a_death_that_the_run_does_not_go_on_after_is_in_the_table_and_unclosed():
    scene = Scene()
    scene.deliver.set()
    for number in range(1, 5):
        scene.step(number)
    scene.faults.wait()
    assert scene.faults.unclosed() == ["trainer", "lane", "daemon"]
    assert report._outcome(scene.run.incidents[0]) == "not seen to go on"


def test_a_kill_that_fails_ends_the_run_and_is_its_failure():
    scene = Scene(OSError("no such lane"))
    scene.deliver.set()
    for number in range(1, 5):
        scene.step(number)
    with pytest.raises(RuntimeError, match="could not kill and revive: no such lane"):
        scene.faults.wait()
    assert scene.done == [("terminate",)]


def test_a_daemon_is_killed_when_there_is_a_snapshot_to_go_back_to():
    scene = Scene()
    scene.deliver.set()
    number = 0
    while len(scene.run.incidents) < 2 or scene.faults.unclosed() != ["daemon"]:
        number += 1
        scene.step(number)
        scene.faults.wait()
    for number in range(12, 15):
        scene.step(number)
    assert len(scene.run.incidents) == 2
    scene.step(15, durable_step=14)
    scene.faults.wait()
    scene.faults.on_event({"event": "rolled_back", "to_step": 14})
    scene.step(15)
    assert scene.faults.unclosed() == []
    assert scene.run.incidents[2]["steps_lost"] == 1
