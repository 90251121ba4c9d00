"""dmuonctl trace: a file by the rules of Chrome's trace events, of a real run."""

import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import dmuond
import pytest
from daemons import Daemon, program
from test_core_client import scalars, two_matrices
from test_metrics import group
from test_programs import run

PHASES = ["collect", "decide", "update", "publish"]


class Steps:
    """One rank that steps until the block ends."""

    def __init__(self, address: str):
        self._address, self._over = address, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.begun = threading.Event()

    def _run(self) -> None:
        with dmuond.Session(self._address, rank=0, world_size=1) as session:
            two_matrices(session)
            while not self._over.is_set():
                session.step(scalars())
                self.begun.set()

    def __enter__(self) -> "Steps":
        self._thread.start()
        assert self.begun.wait(30)
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join()


def traced(daemon: Daemon, file: Path, steps: int, *flags: str) -> list[dict]:
    address = f"--address=unix:{daemon.path}"
    trace = "dmuonctl", "trace", address, f"--steps={steps}", "-o", str(file)
    done = run(*trace, "--json", *flags)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["file"], told["steps"]) == (str(file), steps)
    return json.loads(file.read_text())["traceEvents"]


def check_rules(events: list[dict]) -> None:
    """What a viewer relies on: fields by kind, and spans of a thread that nest."""
    spans = defaultdict(list)
    open_ids = set()
    for event in events:
        assert {"ph", "name", "pid", "tid"} <= event.keys(), event
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "thread_name")
                assert isinstance(event["args"]["name"], str)
            case "X":
                assert isinstance(event["ts"], int) and event["dur"] >= 0
                spans[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
            case "i":
                assert event["s"] == "t"
            case "b":
                assert event["id"] not in open_ids
                open_ids.add(event["id"])
            case "e":
                open_ids.remove(event["id"])
            case kind:
                pytest.fail(f"an event of kind {kind}")
    assert open_ids == set()
    for of_thread in spans.values():
        ends = 0
        for begin, end in sorted(of_thread):
            assert begin >= ends, "they follow one another"
            ends = end


def test_steps_have_all_their_phases_in_order_and_batches_within(daemons, tmp_path) -> None:
    daemons.start(1, 2)
    daemon = daemons.members[0]
    before = time.time()
    with Steps(f"unix:{daemon.path}"):
        events = traced(daemon, tmp_path / "trace.json", 5)
    check_rules(events)
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"node 0, job default", "lane 0", "lane 1", "lane 1, batches"} <= names
    of_step = defaultdict(list)
    for event in events:
        if event["ph"] == "X" and event["name"] in PHASES:
            assert before <= event["ts"] / 1e6 <= time.time()
            of_step[event["tid"], event["args"]["step"]].append(event)
    assert len(of_step) == 2 * 5
    steps = sorted({step for _, step in of_step})
    assert steps == list(range(steps[0], steps[0] + 5))
    for phases in of_step.values():
        assert [phase["name"] for phase in phases] == PHASES
        for phase, following in zip(phases, phases[1:], strict=False):
            assert phase["ts"] + phase["dur"] == following["ts"]
    batches = [e for e in events if e["ph"] == "X" and " x " in e["name"]]
    assert len(batches) == 2 * 5, "a matrix for each lane"


def test_what_crosses_a_rail_is_shown(daemons, tmp_path) -> None:
    with group(daemons, tmp_path) as members, Steps(f"unix:{members[0][0].path}"):
        for node, (daemon, _) in enumerate(members):
            events = traced(daemon, tmp_path / "trace.json", 3, "--this_node")
            check_rules(events)
            rail = [e for e in events if e["ph"] == "b"]
            assert {e["name"].split(",")[0] for e in rail} == {"sums", "weights"}
            assert {e["pid"] for e in events} == {node}


def test_all_nodes_are_shown_on_one_clock(daemons, tmp_path) -> None:
    # The second node's monotonic clock is ahead by more than this machine has been up.
    ahead = ("unshare", "--time", "--monotonic=1000000")
    clock = (sys.executable, "-c", "import time; print(time.monotonic())")
    told = subprocess.run([*ahead, *clock], capture_output=True, text=True)
    if told.returncode != 0 or float(told.stdout) < 1e6:
        pytest.skip("no other clock may be made here")
    with (
        group(daemons, tmp_path, second_under=ahead) as members,
        Steps(f"unix:{members[0][0].path}"),
    ):
        for daemon, _ in members:
            before = time.time()
            events = traced(daemon, tmp_path / "trace.json", 20)
            check_rules(events)
            decided = defaultdict(dict)  # by step and node
            for event in events:
                if event["ph"] == "X" and event["name"] == "decide":
                    decided[event["args"]["step"]][event["pid"]] = event["ts"] + event["dur"]
            both = [moments for moments in decided.values() if len(moments) == 2]
            assert len(both) >= 5, "the nodes trace the same steps"
            for moments in both:
                assert abs(moments[0] - moments[1]) < 1e5, "a decision comes to both at once"
                assert before <= moments[0] / 1e6 <= time.time()


def test_a_node_that_tells_nothing_is_named(daemons, tmp_path) -> None:
    with group(daemons, tmp_path) as members:
        addresses = [f"--address=unix:{daemon.path}" for daemon, _ in members]
        trace = ["trace", "-o", str(tmp_path / "trace.json")]
        with dmuond.Session(f"unix:{members[0][0].path}", rank=0, world_size=1) as session:
            two_matrices(session)
            # It waits for steps, which do not come. Begun while the other traces, it is refused.
            waiting = [program("dmuonctl"), *trace, addresses[1], "--this_node"]
            other = subprocess.Popen(waiting)
            said = ""
            while "node 1 tells nothing: another trace is under way" not in said:
                if other.poll() is not None:
                    assert other.returncode == 1
                    other = subprocess.Popen(waiting)
                said = run("dmuonctl", *trace, addresses[0], "--trace_timeout=100ms").stderr
            other.terminate()
            other.wait()


def test_what_cannot_be_traced_is_said(daemons, tmp_path) -> None:
    daemons.start(1, 1)
    address = f"--address=unix:{daemons.members[0].path}"
    file = tmp_path / "trace.json"
    nothing = run("dmuonctl", "trace", address, "-o", str(file))
    assert nothing.returncode == 1 and "NO_PLAN" in nothing.stderr
    for wrong in ("--steps=0", "--steps=1001", "--trace_timeout=0"):
        refused = run("dmuonctl", "trace", address, "-o", str(file), wrong)
        assert refused.returncode == 1 and "TRACE_INVALID" in refused.stderr
    assert run("dmuonctl", "trace", address).returncode == 2
    with dmuond.Session(f"unix:{daemons.members[0].path}", rank=0, world_size=1) as session:
        two_matrices(session)
        late = run("dmuonctl", "trace", address, "-o", str(file), "--trace_timeout=100ms")
        assert late.returncode == 1 and "no step was published in time" in late.stderr
        session.step(scalars())
    assert not file.exists()
