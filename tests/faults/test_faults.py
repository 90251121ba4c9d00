"""The fault matrix in every test run: a seeded sample of it, all of it with DMUOND_FAULTS=all.

A cell that fails prints itself; `tests/faults/matrix.py --cell "…"` runs it again. Which ones are
sampled DMUOND_FIRST_SEED says; in continuous integration each commit has its own.
"""

import os
import re
from pathlib import Path

import matrix
import mutations
import pytest
import soak
import table

SAMPLE = {"trainer": 24, "lane": 48, "coordinator": 48, "other": 24}  # cells of each victim
ALL_TAKES_S = 4 * 3600  # at most, of each test; the sample takes minutes
TWO_AT_ONCE = 40
RECOVERING = 40
ROOT = Path(__file__).parents[2]
SEED = os.environ.get("DMUOND_FIRST_SEED", "1")
LOGS = ROOT / "build/test-logs/faults"


@pytest.mark.timeout(ALL_TAKES_S)
@pytest.mark.parametrize("victim", SAMPLE)
def test_what_befalls_a_process_costs_no_step_or_is_named(victim):
    arguments = [f"--victim={victim}", f"--seed={SEED}", f"--logs={LOGS}"]
    if os.environ.get("DMUOND_FAULTS") != "all":
        arguments += [f"--sample={SAMPLE[victim]}", "--stop-seconds=6"]
    assert matrix.main(arguments) == 0


@pytest.mark.timeout(ALL_TAKES_S)
def test_two_faults_at_once_are_no_worse():
    all_of_them = os.environ.get("DMUOND_FAULTS") == "all"
    count, stop_s = (10 * TWO_AT_ONCE, 10) if all_of_them else (TWO_AT_ONCE, 6)
    arguments = [f"--two={count}", f"--stop-seconds={stop_s}", f"--seed={SEED}", f"--logs={LOGS}"]
    assert matrix.main(arguments) == 0


@pytest.mark.timeout(ALL_TAKES_S)
def test_what_befalls_who_recovers_is_no_worse():
    count, stop_s = (0, 10) if os.environ.get("DMUOND_FAULTS") == "all" else (RECOVERING, 6)
    arguments = [f"--then={count}", f"--stop-seconds={stop_s}", f"--seed={SEED}", f"--logs={LOGS}"]
    assert matrix.main(arguments) == 0


@pytest.mark.timeout(600)
def test_the_last_weights_arrive_though_another_rank_has_closed_its_session():
    faults = [
        # Late, for longer than a client waits before it asks why.
        "lane0:lane.publish.announced:stop:8:0",
        "lane0:lane.publish.copy:stop:8:2",
        "lane1:lane.publish.bucket:stop:8:2",
        "lane1:lane.publish.go:stop:8:0",
        # By a lane's successor.
        "lane0:lane.publish.announced:kill:8:2",
        "lane1:lane.publish.announced:hang:8:2",
        "lane1:lane.publish.bucket:kill:8:2",
        "lane1:lane.publish.copy:kill:8:2",
    ]
    arguments = [f"--cell=2x1 {fault}" for fault in faults]
    assert matrix.main([*arguments, "--stop-seconds=3", f"--logs={LOGS}"]) == 0


@pytest.mark.timeout(600)
def test_a_full_or_failing_disk_costs_no_step():
    no_space, io_error = 28, 5
    faults = [
        f"coordinator0:storage.write:fail={no_space}:3:0",
        f"coordinator0:storage.fsync:fail={io_error}:3:1",
        f"other1:storage.write:fail={no_space}:3:0",
        f"other1:storage.rename:fail={io_error}:3:0",
    ]
    arguments = [f"--cell=2x1s {fault}" for fault in faults]
    assert matrix.main([*arguments, f"--logs={LOGS}"]) == 0


def test_the_table_has_the_points_that_the_programs_name():
    named = set()
    for folder in ("client/cpp", "server", "kernels", "proto"):
        for source in (ROOT / folder).rglob("*.cc"):
            named |= set(re.findall(r'FaultPoint\("([a-z_.]+)"\)', source.read_text()))
    page = (ROOT / "bench/results/faults/README.md").read_text()
    generated = page[page.index(table.BEGIN) : page.index(table.END)]
    assert set(re.findall(r"^\| `([a-z_.]+)` \|", generated, re.MULTILINE)) == named, (
        "write it anew: tests/faults/matrix.py --help"
    )


def test_the_lines_that_mutations_disable_are_there():
    assert mutations.main(["--check"]) == 0


@pytest.mark.timeout(ALL_TAKES_S)
@pytest.mark.parametrize(
    ("group", "victims", "share"),
    [
        ("1x2", ("trainer", "lane"), 1),
        ("2x1s", ("trainer", "lane", "coordinator", "other"), 5),  # each goes back by a snapshot
    ],
)
def test_many_faults_leave_weights_descriptors_and_memory_as_they_were(group, victims, share):
    steps = (20_000 if os.environ.get("DMUOND_SOAK") else 1_500) // share
    arguments = [f"--group={group}", f"--steps={steps}", f"--seed={SEED}"]
    arguments += [f"--victim={victim}" for victim in victims]
    assert soak.main([*arguments, f"--logs={LOGS / f'soak-{group}.log'}"]) == 0
