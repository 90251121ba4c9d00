"""Whole jobs: daemons, their lanes, and trainers whose every line has their weights' hash."""

import copy
import dataclasses
import os
import secrets
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path

from machine import PATIENCE_S, Machine, Program, until
from rows import WrongError

Weights = dict[tuple[int, int], str]  # hash, by rank and step
RELAUNCHES_MAX = 12


@dataclasses.dataclass(frozen=True)
class Setup:
    nodes: int
    lanes: int  # of each node, each on a GPU of its own
    own: bool = False  # arenas are the trainers' own memory
    flags: tuple[str, ...] = ()  # of daemons
    lanes_can_fault: bool = False  # at SIGUSR1

    def __str__(self) -> str:
        return (
            f"{self.nodes}x{self.lanes}"
            + " own" * self.own
            + "".join(f" {flag}" for flag in self.flags)
        )


class Trainer(Program):
    def steps(self) -> list[tuple[int, str, int]]:
        """(step, hash of the weights, nanoseconds)."""
        words = [line.split() for line in list(self.lines) if line.startswith("step ")]
        return [(int(w[1]), w[5], int(w[7])) for w in words]

    @property
    def last_step(self) -> int:
        steps = self.steps()
        return steps[-1][0] if steps else 0

    @property
    def has_snapshot(self) -> bool:
        return any(
            line.startswith("step ") and int(line.split()[9]) > 0 for line in list(self.lines)
        )


class Assassin:
    """Kills a lane where it stands at a point of its step (base/fault_point.h)."""

    def __init__(self, folder: Path, point: str):
        path = folder / "faults"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen(64)
        self._due = threading.Event()
        self.has_killed = threading.Event()
        self.environment = {"DMUOND_FAULT_SOCKET": str(path), "DMUOND_FAULT_POINTS": point}
        threading.Thread(target=self._serve, daemon=True).start()

    def kill_the_next(self) -> None:
        self._due.set()

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, suppress(OSError):
            pid = int(connection.recv(256).split()[0])
            if self._due.is_set() and not self.has_killed.is_set():
                self.has_killed.set()
                os.kill(pid, signal.SIGKILL)
            connection.send(b"go")


class Job:
    """`point`: where a lane can be killed."""

    def __init__(
        self, machine: Machine, options, setup: Setup, name: str, steps: int, point: str = ""
    ):
        self.setup, self.steps, self.world = setup, steps, options.trainers
        self.relaunches = 0
        self.relaunch_allowed = False
        self._machine, self._name = machine, name
        self._trainer = options.trainer.split() or [machine.programs / "fault_trainer_cuda"]
        self._home = machine.make_folder()
        (self._home / "secret").write_text(secrets.token_hex(32))
        (self._home / "secret").chmod(0o600)
        self._coordinator = f"127.0.0.1:{_free_port()}"
        self.assassin = Assassin(self._home, point) if point else None
        self.variables: dict[str, str] = {}  # of trainers' environment
        self._job = "default"
        self._forget_trainers()
        self.daemons = [self._start_daemon(node) for node in range(setup.nodes)]
        for daemon in self.daemons:
            self._wait_serving(daemon)

    def _forget_trainers(self) -> None:
        self.trainers: list[Trainer] = []
        self._all_trainers: list[tuple[int, Trainer]] = []  # the dead ones, too, with their ranks

    def beside(self) -> "Job":
        """A second job, of trainers of its own, on daemons that are this one's to end."""
        other = copy.copy(self)
        other._job = "beside"
        other._name = f"{self._name}-beside"
        other._forget_trainers()
        return other

    def address(self, node: int = 0) -> Path:
        return self._home / f"d{node}.sock"

    def start_trainers(self) -> None:
        self.trainers = [self.start_trainer(rank, "never") for rank in range(self.world)]

    def start_trainer(self, rank: int, resume: str = "if_present") -> Trainer:
        node = rank * self.setup.nodes // self.world
        device = node * self.setup.lanes + rank % self.setup.lanes
        command = [
            *self._trainer,
            f"--address={self.address(node)}",
            f"--job={self._job}",
            f"--rank={rank}",
            f"--world_size={self.world}",
            f"--steps={self.steps}",
            f"--device=cuda:{device}" + ",own" * self.setup.own,
            f"--resume={resume}",
            "--early",
        ]
        log = f"{self._name}-trainer{rank}.log"
        trainer = self._machine.start(command, log, kind=Trainer, **self.variables)
        self._all_trainers.append((rank, trainer))
        return trainer

    def replace_trainer(self, rank: int) -> None:
        self.trainers[rank] = self.start_trainer(rank)

    def replace_daemon(self) -> None:
        """The last node's, from the newest snapshot."""
        self.daemons[-1].kill()
        self.daemons[-1] = self._start_daemon(self.setup.nodes - 1)
        self._wait_serving(self.daemons[-1])

    def lanes(self) -> list[int]:
        """Their pids, of all jobs."""
        found = []
        daemons = {daemon.process.pid for daemon in self.daemons}
        for status in Path("/proc").glob("[0-9]*/status"):
            with suppress(OSError):
                fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
                if int(fields["PPid"]) in daemons and fields["Name"].startswith("dmuond-lane"):
                    found.append(int(fields["Pid"]))
        return found

    def says(self, text: str) -> bool:
        """Whether a daemon's log has it."""
        return any(text in line for daemon in self.daemons for line in list(daemon.lines))

    @property
    def reached(self) -> int:
        return max(trainer.last_step for _, trainer in self._all_trainers)

    def wait_for_step(self, step: int) -> None:
        self.wait(f"step {step}", lambda: self.trainers[0].last_step >= min(step, self.steps))

    def wait(self, what: str, come) -> None:
        """Starts trainers again meanwhile that have ended by a fault, where that is allowed."""

        def come_or_relaunched() -> bool:
            self._look_after_trainers()
            return come()

        until(what, come_or_relaunched)

    def finish(self) -> Weights:
        """Its weights; ends the daemons."""
        weights = self.weights()
        for daemon in self.daemons:
            daemon.process.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            if daemon.wait() != 0:
                raise WrongError(f"a daemon ended badly: {daemon.last_words}")
        if self.assassin is not None:
            self.assassin.close()
        return weights

    def weights(self) -> Weights:
        """All that every trainer has said, when each has made its last step."""
        ended = [0] * self.world
        self.wait("the end", lambda: [t.process.poll() for t in self.trainers] == ended)
        for trainer in self.trainers:
            trainer.wait()
        weights: Weights = {}
        for rank, trainer in self._all_trainers:
            for step, digest, _ in trainer.steps():
                if weights.setdefault((rank, step), digest) != digest:
                    raise WrongError(f"rank {rank} has had step {step} with other bits before")
        return weights

    def _look_after_trainers(self) -> None:
        for rank, trainer in enumerate(self.trainers):
            if trainer.process.poll() in (None, 0):
                continue
            trainer.wait()
            if not self.relaunch_allowed or self.relaunches == RELAUNCHES_MAX:
                raise WrongError(f"rank {rank} has ended: {trainer.last_words}")
            self.relaunches += 1
            self.replace_trainer(rank)

    def _start_daemon(self, node: int) -> Program:
        setup = self.setup
        command = [
            self._machine.programs / "dmuond",
            f"--socket={self.address(node)}",
            f"--devices=cuda:{setup.lanes}",
            f"--lane_binary={self._lane()}",
            f"--snapshot_dir={self._home / 'snapshots'}",
            "--snapshot_every_steps=10",
            *setup.flags,
        ]
        if setup.nodes > 1:
            command += [
                f"--nodes={setup.nodes}",
                f"--node_rank={node}",
                f"--coordinator={self._coordinator}",
                f"--peer_listen={self._coordinator if node == 0 else '127.0.0.1:0'}",
                f"--peer_secret_file={self._home / 'secret'}",
            ]
        devices = range(node * setup.lanes, (node + 1) * setup.lanes)
        return self._machine.start(
            command,
            f"{self._name}-daemon{node}.log",
            CUDA_VISIBLE_DEVICES=",".join(map(str, devices)),
            **(self.assassin.environment if self.assassin else {}),
        )

    def _lane(self) -> Path:
        if not self.setup.lanes_can_fault:
            return self._machine.lane
        script = self._home / "lane-that-can-fault"
        library = self._machine.programs / "lane_fault.so"
        script.write_text(f'#!/bin/sh\nLD_PRELOAD={library} exec {self._machine.lane} "$@"\n')
        script.chmod(0o700)
        return script

    def _wait_serving(self, daemon: Program) -> None:
        def serves() -> bool:
            if daemon.process.poll() is not None:
                raise WrongError(f"the daemon does not serve: {daemon.last_words}")
            return any("serving" in line for line in list(daemon.lines))

        until("the daemon serves", serves, PATIENCE_S)


def _free_port() -> int:
    """None that the kernel gives to connections: one would have it before its daemon."""
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = 10_000 + secrets.randbelow(max(kernels - 10_000, 10_000))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
