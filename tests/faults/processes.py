"""Real processes of one cell of the fault matrix, and the one loop that hears of all they do."""

import os
import selectors
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pid_namespace
from daemons import free_port, program, secret_file

ROOT = Path(__file__).parents[2]
PYTHON_TRAINERS = {
    "python": Path(__file__).with_name("fault_trainer.py"),
    "torch": Path(__file__).with_name("fault_trainer_torch.py"),
}
PYTHON_TRAINERS_ON_GPUS = PYTHON_TRAINERS | {
    "python": Path(__file__).with_name("fault_trainer_cuda.py")
}
PYTHON_PATH = (ROOT / "client/python/src", ROOT / "tests/python")
BESIDE = "beside"  # the second job's name
BESIDE_STEPS = 5  # it has so many times as many
FAULT_VARIABLES = ("DMUOND_FAULT_SOCKET", "DMUOND_FAULT_POINTS")


@dataclass(frozen=True)
class Shape:
    """Of a group: its daemons, their lanes, and the trainers of its job."""

    nodes: int
    lanes: int  # of each node
    snapshots: bool = False
    clients: tuple[str, ...] = ("cpp",)  # of the ranks, in turn: "cpp", "python" or "torch"
    device: str = "cpu"  # "cuda": GPUs of the fake driver, of lanes and of trainers
    own_memory: bool = False  # arenas lie in the trainers' own memory, on GPUs
    early: bool = False  # buckets are signalled early; on Python weights are waited for late, too
    beside: bool = False  # a second job runs on the same daemons, to which nothing is done
    namespaces: bool = False  # each daemon and trainer is in a PID namespace of its own
    unseen: bool = False  # the kernel does not tell daemons of the end of such a trainer

    @property
    def world(self) -> int:
        return max(2, self.nodes)

    @property
    def jobs(self) -> int:
        return 2 if self.beside else 1


def environment(faults: Path | None, points: str) -> dict[str, str]:
    clean = {key: v for key, v in os.environ.items() if not key.startswith("DMUOND_")}
    clean["DMUOND_CHECKED"] = "1"
    clean["DMUOND_BIN_DIR"] = str(program("dmuond").parent)
    clean["PYTHONPATH"] = os.pathsep.join(map(str, PYTHON_PATH))
    if faults is not None:
        clean |= dict(zip(FAULT_VARIABLES, (str(faults), points), strict=True))
    return clean


def signal_if_alive(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):  # what was to be hurt has ended by itself
        os.kill(pid, number)


def peer_pid(connection: socket.socket) -> int:
    """As it is seen from here: the process says the one that it has in its own namespace."""
    credentials = struct.Struct("3i")
    size = credentials.size
    return credentials.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[0]


@dataclass
class Process:
    """One that the driver has started: a daemon, or a trainer whose lines are read."""

    role: str  # "trainer" or "daemon"
    index: int  # rank, or node
    popen: subprocess.Popen
    lines: list[str] = field(default_factory=list)
    rest: bytes = b""
    at_end: bool = False  # of its lines
    in_namespace: bool = False  # what was started is its parent

    @property
    def pid(self) -> int:
        """-1: it has not begun, or has ended."""
        return pid_namespace.first_process(self.popen) if self.in_namespace else self.popen.pid


class Loop:
    """Waits for reports of fault points, lines, ends of processes and times, and calls back."""

    def __init__(self, folder: Path, namespaces: bool = False):
        self.folder = folder
        self._namespaces = namespaces
        self.path = folder / "faults"
        self._selector = selectors.DefaultSelector()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(self.path))
        self._listener.listen(128)
        self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._held: list[socket.socket] = []
        self._gated: list[socket.socket] = []  # go on at release()
        self.processes: list[Process] = []
        self.on_report: Callable[[int, str], str | None] = lambda pid, point: "go"
        self.on_line: Callable[[Process, str], None] = lambda process, line: None
        self.on_end: Callable[[Process, int], None] = lambda process, code: None

    def start(
        self, role: str, index: int, command: list, points: str, output=None, more=None
    ) -> Process:
        popen = subprocess.Popen(
            [*(pid_namespace.under() if self._namespaces else ()), *command],
            env=environment(self.path if points else None, points) | (more or {}),
            stdout=output or subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        process = Process(role, index, popen, in_namespace=self._namespaces)
        self.processes.append(process)
        if popen.stdout is not None:
            os.set_blocking(popen.stdout.fileno(), False)
            self._selector.register(popen.stdout, selectors.EVENT_READ, lambda: self._read(process))
        pidfd = os.pidfd_open(popen.pid)
        self._selector.register(pidfd, selectors.EVENT_READ, lambda: self._ended(process, pidfd))
        return process

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        self._timers.append((time.monotonic() + seconds, call))

    def release(self) -> None:
        for connection in self._gated:
            with suppress(OSError):
                connection.send(b"go")
            connection.close()
        self._gated.clear()

    def run(self, done: Callable[[], bool], timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not done():
            now = time.monotonic()
            if now >= deadline:
                return False
            due = [timer for timer in self._timers if timer[0] <= now]
            self._timers = [timer for timer in self._timers if timer[0] > now]
            for _, call in due:
                call()
            if due:
                continue
            until = min([deadline] + [at for at, _ in self._timers])
            for key, _ in self._selector.select(max(0.0, until - time.monotonic())):
                key.data()
        return True

    def close(self) -> None:
        for process in self.processes:
            if process.popen.poll() is None:
                process.popen.kill()
                process.popen.wait()
            if process.popen.stdout is not None:
                process.popen.stdout.close()
        for held in self._held + self._gated:
            held.close()
        for key in list(self._selector.get_map().values()):
            if isinstance(key.fileobj, int):
                os.close(key.fileobj)
            elif isinstance(key.fileobj, socket.socket):
                key.fileobj.close()
        self._selector.close()

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        self._selector.register(
            connection, selectors.EVENT_READ, lambda: self._reported(connection)
        )

    def _reported(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        text = connection.recv(256).decode()
        if not text:
            connection.close()
            return
        answer = self.on_report(peer_pid(connection), text.split(" ", 1)[1])
        if answer == "later":
            self._gated.append(connection)
            return
        if answer is None:
            self._held.append(connection)  # until its process ends
            return
        with suppress(OSError):  # it has been killed meanwhile
            connection.send(answer.encode())
        connection.close()

    def _read(self, process: Process) -> None:
        if process.at_end:
            return
        read = process.popen.stdout.read()
        if read is None:
            return
        if not read:
            process.at_end = True
            self._selector.unregister(process.popen.stdout)
            return
        *lines, process.rest = (process.rest + read).split(b"\n")
        for line in lines:
            process.lines.append(line.decode(errors="replace"))
            self.on_line(process, process.lines[-1])

    def _ended(self, process: Process, pidfd: int) -> None:
        self._selector.unregister(pidfd)
        os.close(pidfd)
        if process.popen.stdout is not None:
            self._read(process)
        self.on_end(process, process.popen.wait())


class Group:
    """The daemons and trainers of a cell, and how each is started and started again."""

    def __init__(self, loop: Loop, shape: Shape, steps: int, flags: list[str]):
        self.loop = loop
        self.shape = shape
        self.nodes = shape.nodes
        self.lanes = shape.lanes
        self.steps = steps
        self.flags = flags
        self.coordinator = f"127.0.0.1:{free_port()}"
        self.machine = {}  # in the environment of every process
        self.of_trainers: dict[str, str] = {}  # in that of trainers
        self._whole_program = program(
            "dmuond-lane-fake" if shape.device == "cuda" else "dmuond-lane"
        )
        self.lane_program = self._whole_program
        if shape.device == "cuda":
            self.machine = {
                "LD_LIBRARY_PATH": str(program("dmuond").parents[1] / "fake_cuda"),
                "FAKE_CUDA_DEVICES": str(shape.nodes * shape.lanes),
                "FAKE_CUDA_MACHINE": str(zlib.crc32(str(loop.folder).encode()) >> 1),
                "FAKE_CUDA_NO_CONTEXT": "dmuond",
            }

    def copy_lane_program(self) -> None:
        """Daemons that start from now on have a program for lanes that can be replaced."""
        folder = Path(tempfile.mkdtemp(prefix="lane-", dir=self.loop.folder))
        self.lane_program = Path(shutil.copy(self._whole_program, folder))

    def replace_lane_program(self) -> None:
        """As an upgrade does it, by one that does nothing.

        Daemons that start later have a whole one: else no successor starts.
        """
        other = self.lane_program.with_suffix(".new")
        other.write_text("#!/bin/sh\nexit 7\n")
        other.chmod(0o755)
        other.rename(self.lane_program)
        self.copy_lane_program()

    def machine_of(self, node: int) -> dict[str, str]:
        """A node sees GPUs of its own, as in a container."""
        if not self.machine:
            return {}
        own = range(node * self.lanes, (node + 1) * self.lanes)
        return self.machine | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, own))}

    def start_daemon(self, node: int, points: str = "") -> Process:
        command = [
            program("dmuond"),
            f"--socket={self.loop.folder}/{node}.sock",
            f"--devices={self.shape.device}:{self.lanes}",
            "--threads=1",
            f"--lane_binary={self.lane_program}",
            *self.flags,
        ]
        if self.nodes > 1:
            listen = self.coordinator if node == 0 else "127.0.0.1:0"
            command += [
                f"--node_rank={node}",
                f"--nodes={self.nodes}",
                f"--coordinator={self.coordinator}",
                f"--peer_listen={listen}",
                f"--peer_secret_file={secret_file(self.loop.folder)}",
            ]
        with (self.loop.folder / f"daemon{node}.log").open("ab") as log:
            return self.loop.start("daemon", node, command, points, log, self.machine_of(node))

    def start_trainer(self, index: int, resume: str = "never", points: str = "") -> Process:
        """Of the first job's ranks, and then of the second's."""
        beside, rank = divmod(index, self.shape.world)
        command = [
            *self.trainer(self.shape.clients[rank % len(self.shape.clients)]),
            f"--address={self.loop.folder}/{rank % self.nodes}.sock",
            f"--rank={rank}",
            f"--world_size={self.shape.world}",
            f"--steps={self.steps_of(index)}",
            *([f"--job={BESIDE}"] if beside else []),
            f"--resume={resume}",
            *(["--early"] if self.shape.early else []),
        ]
        if self.shape.device == "cuda":
            own = ",own" if self.shape.own_memory else ""
            command.append(f"--device=cuda:{rank // self.nodes % self.lanes}{own}")
        machine = self.machine_of(rank % self.nodes)
        return self.loop.start("trainer", index, command, points, more=machine | self.of_trainers)

    def steps_of(self, index: int) -> int:
        """The second job has more: it is to be there whatever befalls the first."""
        return self.steps * (BESIDE_STEPS if index >= self.shape.world else 1)

    def trainer(self, client: str) -> list:
        on_gpus = self.shape.device == "cuda"
        if client == "cpp":
            return [program("fault_trainer_cuda" if on_gpus else "fault_trainer")]
        return [sys.executable, (PYTHON_TRAINERS_ON_GPUS if on_gpus else PYTHON_TRAINERS)[client]]

    def status(self) -> str:
        """What the daemons that live say of the job, and what each of their trainers is in."""
        text = []
        for node in range(self.nodes):
            command = [program("dmuonctl"), "status", f"--address={self.loop.folder}/{node}.sock"]
            told = subprocess.run(
                [*command, "--json"], capture_output=True, text=True, timeout=20, check=False
            )
            text.append(f"--- status of node {node}\n{told.stdout}{told.stderr}")
        for process in self.loop.processes:
            if process.popen.poll() is None and process.popen.stdout is not None:
                called = Path(f"/proc/{process.pid}/syscall").read_text()
                text.append(f"--- {process.role} {process.index}, pid {process.pid}: {called}")
        return "\n".join(text) + "\n"

    def logs(self) -> str:
        text = [
            f"--- {path.name}\n{path.read_text(errors='replace')}"
            for path in sorted(self.loop.folder.glob("*.log"))
        ]
        for process in self.loop.processes:
            if process.role == "trainer":
                lines = "\n".join(process.lines)
                text.append(f"--- trainer of rank {process.index}, pid {process.pid}\n{lines}")
        return "\n".join(text)
