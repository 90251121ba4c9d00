"""The fault matrix in every test run: a few cells of three groups.

With --all it is a seeded sample, in which each group, kind and point is, and with DMUOND_FAULTS=all
all of it.

A cell that fails prints itself; `tests/faults/matrix.py --cell "…"` runs it again. Which ones are
sampled DMUOND_FIRST_SEED says; in continuous integration each commit has its own.
"""

import errno
import os
import re
from pathlib import Path

import matrix
import mutations
import needs
import pid_namespace
import pytest
import soak
import table
from cells import GPU_GROUPS, GROUPS, NAMESPACE_GROUPS, RAIL_GROUPS, USUAL_GROUPS, Cell
from daemons import program
from runs import Run, undisturbed

SAMPLE = {"trainer": 24, "lane": 48, "coordinator": 48, "other": 24}  # cells of each victim
ALL_TAKES_S = 4 * 3600  # at most, of each test; the sample takes minutes
TWO_AT_ONCE = 40
RECOVERING = 40
FEW = 4  # cells of each test, or one of each kind and group where these are more
ROOT = Path(__file__).parents[2]
SEED = os.environ.get("DMUOND_FIRST_SEED", "1")
LOGS = ROOT / "build/test-logs/faults"
ALL = os.environ.get("DMUOND_FAULTS") == "all"
SEEDED = [f"--seed={SEED}", f"--logs={LOGS}"]
FEW_GROUPS = dict.fromkeys(("1x2", "2x1s", USUAL_GROUPS[int(SEED) % len(USUAL_GROUPS)]))


@pytest.fixture
def few(request) -> list[str]:
    """What asks the matrix for a few cells; empty in a run that takes samples, or all."""
    if ALL or request.config.option.all:
        return []
    return ["--few", "--stop-seconds=6", *(f"--group={group}" for group in FEW_GROUPS), *SEEDED]


def has_programs_of(group: str) -> bool:
    """Those of GPUs are built with the headers of CUDA."""
    on_gpus = GROUPS[group].device == "cuda"
    return not on_gpus or (program("dmuond").parent / "fault_trainer_cuda").exists()


@pytest.mark.timeout(ALL_TAKES_S)
@pytest.mark.parametrize("victim", SAMPLE)
def test_what_befalls_a_process_costs_no_step_or_is_named(victim, few):
    if few:
        arguments = [*few, f"--sample={FEW}"]
    else:
        arguments = SEEDED + ([] if ALL else [f"--sample={SAMPLE[victim]}", "--stop-seconds=6"])
    assert matrix.main([f"--victim={victim}", *arguments]) == 0


@pytest.mark.timeout(ALL_TAKES_S)
def test_lanes_and_trainers_on_gpus_are_no_worse(few):
    """On the fake driver: trainers whose signals and waits are streams'."""
    needs.fake_gpus()
    if ALL:
        arguments = [f"--group={group}" for group in GPU_GROUPS]
    else:
        alone = [group for group in GPU_GROUPS if group not in RAIL_GROUPS]
        sample = ["--few", f"--sample={FEW}"] if few else ["--sample=24"]
        arguments = [f"--group={alone[int(SEED) % len(alone)]}", *sample, "--stop-seconds=6"]
    assert matrix.main([*arguments, *SEEDED]) == 0


@pytest.mark.timeout(ALL_TAKES_S)
def test_lanes_whose_peers_say_nothing_when_they_die_are_no_worse(few):
    """On the fakes of driver and NCCL; all cells of these groups are the test above's."""
    needs.fake_gpus()
    group = RAIL_GROUPS[int(SEED) % len(RAIL_GROUPS)]
    sample = ["--few", f"--sample={FEW}"] if few else ["--sample=16"]
    assert matrix.main([f"--group={group}", *sample, "--stop-seconds=6", *SEEDED]) == 0


@pytest.mark.timeout(ALL_TAKES_S)
def test_two_faults_at_once_are_no_worse(few):
    count, stop_s = (10 * TWO_AT_ONCE, 10) if ALL else (TWO_AT_ONCE, 6)
    arguments = [*few, f"--two={FEW}"] if few else [f"--two={count}", f"--stop-seconds={stop_s}"]
    assert matrix.main([*arguments, *SEEDED]) == 0


@pytest.mark.timeout(ALL_TAKES_S)
def test_what_befalls_who_recovers_is_no_worse(few):
    count, stop_s = (0, 10) if ALL else (RECOVERING, 6)
    arguments = [*few, f"--then={FEW}"] if few else [f"--then={count}", f"--stop-seconds={stop_s}"]
    assert matrix.main([*arguments, *SEEDED]) == 0


@pytest.mark.timeout(600)
def test_the_last_weights_arrive_though_another_rank_has_closed_its_session():
    faults = [
        # Late, for longer than a client waits before it asks why.
        "lane0:lane.publish.announced:stop:8:0",
        "lane0:lane.publish.copy:stop:8:1",
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
@pytest.mark.skipif(not pid_namespace.allowed, reason="only root can make a PID namespace")
def test_a_trainer_that_wakes_beside_its_replacement_changes_nothing():
    """The daemon sees its pid as 0, and all others' too."""
    groups = [name for name in NAMESPACE_GROUPS if has_programs_of(name)]
    arguments = [f"--cell={group} trainer1:trainer.published:wake:3:0" for group in groups]
    assert matrix.main([*arguments, f"--logs={LOGS}"]) == 0


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


@pytest.mark.timeout(ALL_TAKES_S)
def test_everything_at_once_is_no_worse(few):
    count, stop_s = (200, 10) if ALL else (len(USUAL_GROUPS), 6)
    arguments = [f"--all-at-once={count}", f"--stop-seconds={stop_s}"]
    assert matrix.main([*few, f"--all-at-once={FEW}"] if few else [*arguments, *SEEDED]) == 0


@pytest.mark.timeout(600)
def test_a_process_that_gets_no_memory_or_no_descriptors_goes_on_or_names_it():
    faults = [
        # A lane's command carries descriptors, of which its daemon has none left.
        "2x1ps coordinator0:daemon.attach:nofile:1:0",
        # Lanes' memory, and a lane of which the kernel makes no process.
        "1x2 coordinator0:memory.create:nofile:1:0",
        "1x2 coordinator0:memory.allocate:nomem:1:0",
        "1x2 lane1:memory.map:nomem:1:0",
        "2x2 other1:daemon.spawn:nomem:1:0",
        # While a daemon starts: what its libraries need is there already.
        "2x2s other1:daemon.spawn:nofile:1:0",
        # While lanes come back.
        "1x2 lane0:lane.gathered:kill:2:0 then coordinator0:daemon.spawn:nomem:1:0",
        "1x2p lane1:lane.gathered:kill:2:0 then coordinator0:daemon.new_lanes:nofile:1:0",
        f"1x2 lane0:lane.gathered:kill:2:0 then coordinator0:daemon.spawn:fail={errno.EAGAIN}:1:0",
        # Files of snapshots.
        "2x1s other1:storage.create:nofile:3:0",
    ]
    arguments = [f"--cell={fault}" for fault in faults]
    assert matrix.main([*arguments, f"--logs={LOGS}"]) == 0


@pytest.mark.timeout(600)
def test_a_lane_whose_program_was_replaced_on_disk_is_followed_by_one_of_the_old():
    arguments = [f"--cell={group} lane0:lane.gathered:replace:3:0" for group in ("1x2", "2x1")]
    assert matrix.main([*arguments, f"--logs={LOGS}"]) == 0


@pytest.mark.timeout(600)
def test_a_job_that_lost_its_lanes_says_so_to_a_rank_that_is_just_coming_back():
    # Three lanes end in one step, no rank has handed it in, and one waits for its arenas.
    fault = (
        "lane1:lane.collect.reduced:kill:3:1 coordinator0:coordinator.decided:cut:3:0 "
        "lane0:lane.decision:hang:2:1 trainer0:trainer.signalled:stop:2:1 "
        "trainer1:trainer.decided:detach:2:2"
    )
    assert matrix.main([f"--cell=1x2m {fault}", f"--logs={LOGS}"]) == 0


@pytest.mark.timeout(600)
def test_torch_with_overlap_and_early_signals_loses_nothing():
    faults = ["trainer0:trainer.signalled_early:kill:5:0", "lane1:lane.publish.bucket:kill:6:0"]
    arguments = [f"--cell=1x2te {fault}" for fault in faults]
    assert matrix.main([*arguments, f"--logs={LOGS}"]) == 0


@pytest.mark.timeout(600)
def test_torch_trainers_on_gpus_recover_from_each_death():
    needs.fake_gpus()
    faults = [
        "1x2gtes trainer0:trainer.signalled_early:kill:5:0",
        "1x2gtes coordinator0:daemon.decision:kill:4:0",
        "1x2gto lane1:lane.publish.bucket:kill:3:0",
    ]
    arguments = [f"--cell={fault}" for fault in faults]
    assert matrix.main([*arguments, f"--logs={LOGS}"]) == 0


def test_trainers_of_all_clients_compute_the_same_bits():
    weights = undisturbed("1x2").weights
    for group in ("1x2e", "1x2p", "1x2m", "2x1pes"):
        assert undisturbed(group).weights == weights, group


def test_trainers_of_all_clients_compute_the_same_bits_on_gpus():
    needs.fake_gpus()
    weights = undisturbed("1x2g").weights
    for group in ("1x2gp", "1x2gm", "1x2gpes", "1x2gpo"):
        assert undisturbed(group).weights == weights, group


def test_python_trainers_on_gpus_recover_from_each_death():
    needs.fake_gpus()
    faults = [
        "1x2gp trainer1:trainer.submitted:kill:2:0",  # its replacement maps the same arenas
        "1x2gp lane0:lane.gathered:kill:2:0",  # buckets are signalled again, in stream order
        "1x2gpo trainer0:trainer.decided:kill:2:0",
        "1x2gpo lane1:lane.publish.bucket:kill:3:0",
        "1x2gpes coordinator0:daemon.decision:kill:3:0",  # streams' waits end by poison
    ]
    arguments = [f"--cell={fault}" for fault in faults]
    assert matrix.main([*arguments, f"--logs={LOGS}"]) == 0


def test_a_cell_names_the_lane_that_dies():
    """Both lanes of a node pass the point; each cell hurts its own."""
    for lane in (0, 1, 2, 3):
        cell = Cell.parse(f"2x2 lane{lane}:lane.gathered:kill:2:0", stop_s=1)
        hurt = []
        run = Run(cell, cell.group, undisturbed(cell.group))
        run.on_fault = lambda pid, fault, run=run, hurt=hurt: hurt.append(run.lane_of(pid))
        assert run.run().holds
        assert hurt == [lane]


def test_the_table_has_the_points_that_the_programs_name():
    named = set()
    for folder in ("base", "client", "server", "kernels", "proto"):
        for source in (*(ROOT / folder).rglob("*.cc"), *(ROOT / folder).rglob("*.py")):
            call = r'(?:FaultPoint|fault_point)\("([a-z_.]+)"\)'
            named |= set(re.findall(call, source.read_text()))
    page = (ROOT / "bench/results/faults/README.md").read_text()
    generated = page[page.index(table.BEGIN) : page.index(table.END)]
    assert set(re.findall(r"^\| `([a-z_.]+)` \|", generated, re.MULTILINE)) == named, (
        "write it anew: tests/faults/matrix.py --help"
    )


def test_both_clients_name_the_same_points():
    def named(pattern, call):
        texts = (source.read_text() for source in (ROOT / "client").rglob(pattern))
        return {name for text in texts for name in re.findall(call, text)}

    python = named("*.py", r'fault_point\("([a-z_.]+)"\)')
    assert python == named("*.cc", r'FaultPoint\("([a-z_.]+)"\)')


def test_the_lines_that_mutations_disable_are_there():
    assert mutations.main(["--check"]) == 0


@pytest.mark.rest("test_the_lines_that_mutations_disable_are_there")
@pytest.mark.timeout(1800)
def test_a_handful_of_mutations_is_noticed():
    assert mutations.main([f"--handful={SEED}"]) == 0


@pytest.mark.timeout(ALL_TAKES_S)
@pytest.mark.parametrize(
    ("group", "victims", "share"),
    [
        ("1x2", ("trainer", "lane"), 1),
        ("2x1s", ("trainer", "lane", "coordinator", "other"), 5),  # each goes back by a snapshot
    ],
)
def test_many_faults_leave_weights_descriptors_and_memory_as_they_were(group, victims, share, few):
    steps = (20_000 if os.environ.get("DMUOND_SOAK") else 1_000 if few else 1_500) // share
    arguments = [f"--group={group}", f"--steps={steps}", f"--seed={SEED}"]
    arguments += [f"--victim={victim}" for victim in victims]
    assert soak.main([*arguments, f"--logs={LOGS / f'soak-{group}.log'}"]) == 0
