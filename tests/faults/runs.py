"""The run of a cell: its processes from start to end, its faults, and a verdict on the end."""

import errno
import functools
import os
import re
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cells import GROUPS, STEPS, Cell, Fault, Result, Undisturbed
from daemons import files_below
from processes import BESIDE, Group, Loop, Process, signal_if_alive

PATIENCE_S = 150.0  # of what hangs: a busy machine fails no cell
TORCH_COMES_S = 150.0  # more, where trainers and their replacements import it
RESTARTS_MAX = 10
GATE = "trainer.gradients"  # where steps wait until the first snapshot is there
SAVED_BY = 2  # steps
SAVE_EVERY = 1  # a snapshot that falls due while one is written is skipped
SNAPSHOT_WITHIN_S = 5.0  # steps wait for the last one's, where a point of it has yet to be passed
# Exit codes of tests/faults/fault_trainer.cc.
REFUSED = 1  # it says what for
LOST = 3  # its job or its daemon; a launcher starts it again
RELAUNCH_S = 0.3  # a launcher's pause before it starts again what has given up
HIDDEN = "daemon.peer_pidfd"  # what older kernels do not tell
# --step_timeout, in cells with a "wake". Who wakes does not come back: it has a replacement.
DEAD_AFTER = "2s"
WAKES = {"DMUOND_RECONNECT_S": "0"}
# A process gets no descriptor for that long: EMFILE of whatever asks the kernel for one.
NO_FILES_S = 1.5
NAMED_ERRORS = {"nomem": errno.ENOMEM, "nofile": errno.EMFILE}
HANGS_ARE_FOUND_S = 8.0  # --step_timeout, in cells with a "hang"; who is stopped is to wake before
PLACE_BITS = 0b111111 << 26  # of an attempt
FLAGS = ["--session_linger=60s", "--register_timeout=30s"]


@dataclass
class Rank:
    process: Process
    step: int = 0
    first_in_process: bool = True
    done: bool = False


class Run:
    """Runs one cell from its processes' start to their end."""

    def __init__(
        self, cell: Cell | None, group: str, reference: Undisturbed | None, steps: int = STEPS
    ):
        self.cell = cell
        self.steps = steps
        self.patience_s = PATIENCE_S + TORCH_COMES_S * ("torch" in GROUPS[group].clients)
        self.restarts_max = RESTARTS_MAX
        # The second of two faults may befall who has come back from the first.
        self.replacements_are_hurt = cell is not None and len(cell.faults) > 1
        self.on_step = lambda step: None  # every rank has printed it
        self.on_fault = lambda pid, fault: None  # is about to befall that process
        self.reference = reference
        self.shape = GROUPS[group]
        self.world, self.snapshots = self.shape.world, self.shape.snapshots
        self.result = Result(cell)
        self.pending = list(cell.faults) if cell else []
        self.passings: dict[Fault, int] = {}
        self.fired_at: float | None = None
        self.step_at_fault = 0
        self.ranks: dict[int, Rank] = {}
        self.daemons: dict[int, Process] = {}
        self.restarts = 0
        self.killed: set[int] = set()  # by the driver; nobody else may die
        self.daemon_died = False
        self.rolled_back_to: int | None = None
        self.stopped = ""
        self.stopped_rank = 0
        self.durable: dict[int, int] = {}  # by job: newest step that a trainer was told to be
        self.attempts: dict[int, int] = {}  # by job: the newest
        self.restarted: set[int] = set()  # ranks
        self.weights: dict[tuple[int, int], str] = {}
        self.points: dict[str, dict[str, set[int]]] = {}
        # Passed from a fault until all have a later step.
        self.points_after: dict[str, dict[str, set[int]]] = {}
        self.at_start: Counter = Counter()
        self.all_points = cell is None and steps == STEPS
        self.after_fault: dict[int, float] = {}

    def run(self, extra_flags: tuple[str, ...] = ()) -> Result:
        folder = Path(tempfile.mkdtemp(prefix="df-", dir="/tmp"))
        self.loop = Loop(folder, self.shape.namespaces)
        self.loop.on_report = self._on_report
        self.loop.on_line = self._on_line
        self.loop.on_end = self._on_end
        flags = [*FLAGS, *extra_flags]
        kinds = {fault.kind for fault in self.cell.faults} if self.cell else set()
        if "hang" in kinds:
            patience = HANGS_ARE_FOUND_S
            if "stop" in kinds:
                patience = max(patience, self.cell.stop_s + 2)
            flags += ["--lane_timeout=2s", f"--step_timeout={patience:g}s"]
        if "wake" in kinds:
            flags.append(f"--step_timeout={DEAD_AFTER}")
        if self.snapshots:
            flags += [f"--snapshot_dir={folder}/snapshots", f"--snapshot_every_steps={SAVE_EVERY}"]
        self.group = Group(self.loop, self.shape, self.steps, flags)
        if "replace" in kinds:
            self.group.copy_lane_program()
        if "wake" in kinds:
            self.group.of_trainers = WAKES
        try:
            for node in range(self.shape.nodes):
                self.daemons[node] = self.group.start_daemon(node, self._points("daemon", node))
            for rank in range(self.world * self.shape.jobs):
                process = self.group.start_trainer(rank, points=self._points("trainer", rank))
                self.ranks[rank] = Rank(process)
            patience = self.patience_s + (self.cell.stop_s if self.cell else 0) * len(self.pending)
            if not self.loop.run(self._finished, patience):
                self.result.wrong.append(
                    f"not done after {patience:.0f} s: somebody waits for ever"
                )
                self.result.logs = self.group.status()
            self._judge()
            if self.result.wrong:
                self.result.logs += self.group.logs()
        finally:
            self.loop.close()
            shutil.rmtree(folder, ignore_errors=True)
        return self.result

    # ---- faults ----

    def _points(self, role: str, index: int) -> str:
        if self.all_points:
            return "*"
        faults = self.cell.faults if self.cell else ()
        points = [fault.point for fault in faults if self._passes_it(fault, role, index)]
        if role == "trainer" and self.snapshots:
            points.append(GATE)
        if role == "daemon" and self.shape.unseen:
            points.append(HIDDEN)
        return ",".join(dict.fromkeys(points))

    def _passes_it(self, fault: Fault, role: str, index: int) -> bool:
        """Whether the fault befalls that process, or a lane that gets its environment from it."""
        if fault.victim == "trainer" or role == "trainer":
            return fault.victim == role and fault.index == index
        node = fault.index // self.shape.lanes if fault.victim == "lane" else fault.index
        return node == index

    def _victim_of(self, pid: int) -> tuple[str, int]:
        for index, rank in self.ranks.items():
            if rank.process.pid == pid:
                return "trainer", index
        for node, daemon in self.daemons.items():
            if daemon.pid == pid:
                return ("coordinator" if node == 0 else "other"), node
        return "lane", self.lane_of(pid)

    def lane_of(self, pid: int) -> int:
        """-1: it has ended, or its daemon has."""
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text()
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            return -1
        lane = re.search(r"--lane=(\d+)", command)
        if f"--job={BESIDE}" in command:
            return -1
        nodes = [node for node, daemon in self.daemons.items() if daemon.pid == parent]
        return nodes[0] * self.shape.lanes + int(lane[1]) if lane and nodes else -1

    def _first_job(self) -> list[Rank]:
        return [rank for index, rank in self.ranks.items() if index < self.world]

    def _on_report(self, pid: int, point: str) -> str | None:
        if point == HIDDEN and self.shape.unseen:
            return f"fail {errno.ENOPROTOOPT}"
        victim, index = self._victim_of(pid)
        if self.shape.beside and (victim, index) == ("lane", -1):
            return "go"
        if victim == "trainer" and index >= self.world:
            return "go"
        if self.fired_at is None:
            self.points.setdefault(victim, {}).setdefault(point, set()).add(index)
        elif len(self.after_fault) < self.world:
            self.points_after.setdefault(victim, {}).setdefault(point, set()).add(index)
        committed = max((rank.step for rank in self._first_job()), default=0)
        if committed == 0:
            self.at_start[victim, index, point] += 1
        if point == GATE and self.snapshots and committed >= SAVED_BY and not self._saved():
            self.loop.after(0.01, self._open_gate)
            return "later"
        if point == GATE and any(
            fault.of_snapshots and committed >= fault.step - 1 for fault in self.pending
        ):
            by = time.monotonic() + SNAPSHOT_WITHIN_S
            self.loop.after(0, lambda: self._open_when_saved(committed, by))
            return "later"
        for fault in self.pending[:1] if self.cell and self.cell.then else self.pending:
            if (fault.victim, fault.index, fault.point) != (victim, index, point):
                continue
            if committed < fault.step - 1:
                continue
            passed = self.passings.get(fault, 0)
            self.passings[fault] = passed + 1
            if passed < fault.passing:
                continue
            self.pending.remove(fault)
            return self._hurt(pid, fault)
        return "go"

    def _saved(self) -> bool:
        if self.fired_at is not None:
            return True
        jobs = {path.parent.parent.name for path in self._manifests()}
        return len(jobs) == self.shape.jobs

    def _manifests(self) -> list[Path]:
        return files_below(self.loop.folder / "snapshots", "manifest.json")

    def _open_when_saved(self, step: int, deadline: float) -> None:
        """Opens it when the snapshot of the step is there, or is not to be expected."""
        newest = max(
            (
                int(path.parent.name.split(".")[0].removeprefix("step-"))
                for path in self._manifests()
                if path.parent.parent.name != BESIDE
            ),
            default=0,
        )
        if newest >= step or self.fired_at is not None or time.monotonic() > deadline:
            self.loop.release()
        else:
            self.loop.after(0.005, lambda: self._open_when_saved(step, deadline))

    def _open_gate(self) -> None:
        if self._saved():
            self.loop.release()
        else:
            self.loop.after(0.01, self._open_gate)

    def _hurt(self, pid: int, fault: Fault) -> str | None:
        self.on_fault(pid, fault)
        self.fired_at = time.monotonic()
        self.step_at_fault = max(rank.step for rank in self._first_job())
        self.after_fault.clear()
        if fault.kind == "replace":
            self.group.replace_lane_program()
        if fault.kind in ("kill", "replace"):
            self.killed.add(pid)
            signal_if_alive(pid, signal.SIGKILL)
            return None
        if fault.kind == "stop":
            signal_if_alive(pid, signal.SIGSTOP)
            self.loop.after(self.cell.stop_s, lambda: signal_if_alive(pid, signal.SIGCONT))
            return "go"
        if fault.kind == "hang":
            signal_if_alive(pid, signal.SIGSTOP)  # for ever
            return "go"
        if fault.kind == "wake":
            signal_if_alive(pid, signal.SIGSTOP)
            self._replace_when_dead(self.ranks[fault.index].process, pid)
            return "go"
        if fault.kind == "nofile":
            self._starve(pid)
            return "go"
        if fault.kind == "nomem":
            return f"fail {errno.ENOMEM}"
        if fault.kind.startswith("fail"):
            return fault.kind.replace("=", " ")
        if fault.kind == "detach":
            return "cut packets"
        tcp = self.shape.nodes > 1 and fault.victim != "trainer"
        return "cut tcp" if tcp else "cut unix"

    def _replace_when_dead(self, process: Process, pid: int) -> None:
        """And wakes it then: where its end is seen, its replacement waits for that."""
        if f"rank {process.index} (pid not visible) counts as dead" not in self._log_of(
            self.daemons[0]
        ):
            self.loop.after(0.02, lambda: self._replace_when_dead(process, pid))
            return
        rank = self.ranks[process.index]
        self.restarted.add(process.index)
        at = rank.step
        self._replace(process)
        if self.shape.unseen:
            self._wake_after(rank, at + 1, pid)
        else:
            signal_if_alive(pid, signal.SIGCONT)

    def _wake_after(self, rank: Rank, step: int, pid: int) -> None:
        if rank.step > step:
            signal_if_alive(pid, signal.SIGCONT)
        elif not rank.done:
            self.loop.after(0.005, lambda: self._wake_after(rank, step, pid))

    def _starve(self, pid: int) -> None:
        """Only what it has open stays open: the limit is of the numbers that descriptors get."""
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        taken = {int(name) for name in os.listdir(f"/proc/{pid}/fd")}
        if not taken:  # another fault has ended it
            return
        lowest = next(number for number in range(len(taken) + 1) if number not in taken)
        # The last one below it is most probably this very report's.
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest - 1, before[1]))
        self.loop.after(NO_FILES_S, lambda: _allow(pid, before))

    # ---- what the processes do ----

    def _on_line(self, process: Process, line: str) -> None:
        rank = self.ranks.get(process.index)
        if rank is None or rank.process is not process:
            return
        word, *values = line.split()
        if word in ("step", "rolled_back"):
            self._on_weights(process.index, rank, word, values)
        elif word == "state" and values:
            self._on_state(process.index, rank, int(values[0]))
        elif word == "ended" and "WRONG" in line:
            self.result.wrong.append(f"rank {process.index}: {line}")

    def _on_state(self, index: int, rank: Rank, step: int) -> None:
        if rank.first_in_process and step < rank.step:
            self._went_back(index, rank.step, step)
        rank.first_in_process = False
        rank.step = step

    def _on_weights(self, index: int, rank: Rank, word: str, values: list[str]) -> None:
        step, attempt, weights, at = int(values[0]), int(values[2]), values[4], int(values[6])
        if word == "rolled_back":
            self._went_back(index, rank.step, step)
        elif step != rank.step + 1:
            self.result.wrong.append(f"rank {index} commits step {step} after {rank.step}")
        rank.step = step
        job = index // self.world
        # Which place a job has is chance, and a place counts attempts from a base of its own.
        self.attempts[job] = max(self.attempts.get(job, 0), attempt & ~PLACE_BITS)
        durable = int(values[8])
        if durable > step:
            self.result.wrong.append(f"rank {index}: step {durable} is durable at step {step}")
        self.durable[job] = max(self.durable.get(job, -1), durable)
        self.weights[index, step] = weights
        if self.reference is not None and step > 0:
            expected = self.reference.weights[index, step]
            if weights != expected:
                self.result.wrong.append(
                    f"rank {index}, step {step}: weights {weights}, undisturbed {expected}"
                )
        if job > 0 or word != "step":
            return
        if self.fired_at is not None and step > self.step_at_fault:
            self.after_fault.setdefault(index, at / 1e9)
        if all(other.step >= step for other in self._first_job()):
            self.on_step(step)

    def _went_back(self, index: int, before: int, to: int) -> None:
        # With other memory, to where it is, or to the step that it had handed in.
        if to in (before, before + 1):
            return
        if index < self.world:
            self.rolled_back_to = to
        durable = self.durable.get(index // self.world, -1)
        if to < durable:
            self.result.wrong.append(
                f"rank {index} goes back to step {to}, and step {durable} was durable"
            )
        if not self.daemon_died and not self._lanes_died_too_often():
            self.result.wrong.append(
                f"rank {index} goes back from step {before} to {to}, and no daemon has died"
            )

    def _on_end(self, process: Process, code: int) -> None:
        if process.role == "daemon":
            self.daemon_died = True
            if process.pid not in self.killed and not self._could_not_start(process):
                self.result.wrong.append(f"daemon {process.index} ended with {code} by itself")
            self.daemons[process.index] = self.group.start_daemon(
                process.index,
                self._points("daemon", process.index) if self.replacements_are_hurt else "",
            )
            return
        rank = self.ranks[process.index]
        if rank.process is not process:  # it has woken beside its replacement
            if code not in (REFUSED, LOST):
                self.result.wrong.append(f"rank {process.index}, replaced, ended with {code}")
            return
        # To be started again is an outcome for one that was killed, and for one that is not in its
        # job yet.
        begins = rank.first_in_process or not self._has_state(process.index)
        last = next((text for text in process.lines if text.startswith("ended")), "")
        steps = self.group.steps_of(process.index)
        lost = code == LOST and (begins or rank.step == steps)
        # A launcher tries again later, when the machine may have the memory or the descriptors.
        lacks = self._has_state(process.index) and self._names_what_is_lacking(last)
        excused = lacks or lost or self._lanes_died_too_often()
        if not excused and code not in (0, REFUSED) and process.pid not in self.killed:
            self.result.wrong.append(f"rank {process.index} ended with {code} by itself: {last}")
        if rank.step == steps:
            rank.done = True  # it had nothing left to do but to close, and its steps stand
            return
        if code == 0:
            self.result.wrong.append(f"rank {process.index} left after step {rank.step}")
            rank.done = True
            return
        self.restarted.add(process.index)
        # It lacks it for a while, which a cell's own deadline bounds.
        self.restarts += 0 if lacks else 1
        if (code == REFUSED and not lacks) or self.restarts > self.restarts_max:
            if not self.stopped:
                self.stopped = f"rank {process.index} ended with {code}: {last}"
                self.stopped_rank = process.index
            return
        self.loop.after(
            RELAUNCH_S if lacks or code in (LOST, REFUSED) else 0, lambda: self._replace(process)
        )

    def _replace(self, process: Process) -> None:
        """As a launcher does; one that has seen a step does not want to begin from nothing."""
        rank = self.ranks[process.index]
        rank.process = self.group.start_trainer(
            process.index,
            "require" if rank.step > 0 else "if_present",
            self._points("trainer", process.index) if self.replacements_are_hurt else "",
        )
        rank.first_in_process = True

    def _has_state(self, of: int = 0) -> bool:
        """The job of that rank."""
        same = [r for index, r in self.ranks.items() if index // self.world == of // self.world]
        return any(rank.step > 0 for rank in same)

    def _finished(self) -> bool:
        return bool(self.stopped) or all(rank.done for rank in self.ranks.values())

    # ---- the verdict ----

    def _judge(self) -> None:
        result = self.result
        if self.stopped:
            result.outcome = "STOPPED"
            if not self._names_what_is_lost() and not self._names_what_failed():
                result.wrong.append(self.stopped)
        elif self.rolled_back_to is not None:
            result.outcome = f"ROLLED_BACK({self.rolled_back_to})"
        elif self.reference is not None and self._retried(0):
            result.outcome = "RETRIED"
        else:
            result.outcome = "COMMITTED"
        if self.cell is None:
            return
        # A fault of one job's trainers or lanes must not disturb the other job.
        if self.shape.beside and all(f.victim in ("trainer", "lane") for f in self.cell.faults):
            hurt = sorted(index for index in self.restarted if index >= self.world)
            if hurt or self._retried(1):
                result.wrong.append(f"the job beside it was disturbed; begun again: {hurt}")
        # A second fault's process may be gone with the first.
        result.unfired = self.fired_at is not None and bool(self.pending)
        if self.fired_at is None or (self.pending and len(self.cell.faults) == 1 and result.holds):
            result.wrong.append(f"never passed: {self.pending[0]}")
        if not self.stopped and len(self.after_fault) == self.world and self.fired_at is not None:
            result.next_step_s = max(self.after_fault.values()) - self.fired_at

    def _retried(self, job: int) -> bool:
        return self.attempts.get(job, 0) > self.reference.attempts[job]

    def _names_what_is_lost(self) -> bool:
        if self.durable.get(self.stopped_rank // self.world, -1) >= 0:
            return False
        ended = self.daemon_died or self._lanes_died_too_often()
        return ended and ("STATE_LOST" in self.stopped or "NO_STATE" in self.stopped)

    def _lanes_died_too_often(self) -> bool:
        """Three faults that end lanes may befall one step, which the product then gives up.

        A daemon without descriptors ends lanes that it can send nothing. Ranks that come later hear
        of the lost state alone: the daemon says why.
        """
        if self.cell is None:
            return False
        fired = [fault for fault in self.cell.faults if fault not in self.pending]
        ends_lanes = [f for f in fired if f.victim == "lane" or f.kind in ("cut", "nofile")]
        said = any("; lanes have died " in self._log_of(daemon) for daemon in self.daemons.values())
        return said and len(ends_lanes) >= 3

    def _names_what_failed(self) -> bool:
        """What the machine lacks for a while keeps a job from beginning, and ends none."""
        return not self._has_state(self.stopped_rank) and self._names_what_is_lacking(self.stopped)

    def _could_not_start(self, daemon: Process) -> bool:
        """It said so and why, and its service manager starts it again."""
        last = self._log_of(daemon).rstrip().rpartition("\n")[2]
        return "msg=ended" in last and self._names_what_is_lacking(last)

    def _log_of(self, daemon: Process) -> str:
        return (self.loop.folder / f"daemon{daemon.index}.log").read_text(errors="replace")

    def _names_what_is_lacking(self, text: str) -> bool:
        if self.cell is None:
            return False
        fired = {fault.kind for fault in self.cell.faults if fault not in self.pending}
        errors = (NAMED_ERRORS[kind] for kind in fired & NAMED_ERRORS.keys())
        return any(os.strerror(error) in text for error in errors)


def _allow(pid: int, limits: tuple[int, int]) -> None:
    with suppress(ProcessLookupError):  # it has ended meanwhile
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


@functools.cache
def undisturbed(group: str, steps: int = STEPS) -> Undisturbed:
    run = Run(None, group, None, steps)
    run.patience_s += steps / 50
    result = run.run()
    if result.wrong or not all(rank.done for rank in run.ranks.values()):
        raise RuntimeError(f"the undisturbed run of {group} fails: {result.wrong}\n{result.logs}")
    return Undisturbed(run.weights, run.points, run.at_start, run.attempts)


def run_cell(cell: Cell, reference: Undisturbed) -> Result:
    return Run(cell, cell.group, reference).run()
