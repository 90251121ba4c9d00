"""Real daemons for tests: processes on private sockets, ready when they are handed out."""

import fnmatch
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

import grpc

ROOT = Path(__file__).parents[2]
# What has not happened by then never does: a busy machine fails no test.
HANGS_AFTER_S = 180.0
STOP_TIMEOUT_S = 20.0


def program(name: str) -> Path:
    """A built program; a missing one is an error that says what to do."""
    folder = Path(os.environ.get("DMUOND_BIN_DIR") or ROOT / "build/cpu/bin")
    path = folder / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is not there: run ./dev build, or set DMUOND_BIN_DIR")
    return path


def files_below(folder: Path, name: str = "*") -> list[Path]:
    """Unlike Path.rglob, not troubled by a directory that is renamed or removed meanwhile."""
    return [
        Path(parent, file)
        for parent, _, files in os.walk(folder)
        for file in fnmatch.filter(files, name)
    ]


def lane_pids(daemon: int) -> list[int]:
    """Lanes (dmuond-lane, or the fake driver's) whose parent is the daemon."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        try:
            fields = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if fields["Name"].startswith("dmuond-lane") and int(fields["PPid"]) == daemon:
            found.append(int(fields["Pid"]))
    return found


def until(look, pattern: str) -> str:
    """Looks again until the pattern is there."""
    deadline = time.monotonic() + HANGS_AFTER_S
    while not re.search(pattern, text := look()):
        assert time.monotonic() < deadline, f"{pattern!r} is not in\n{text}"
        time.sleep(0.02)
    return text


def wait_for_snapshot(folder: Path) -> None:
    deadline = time.monotonic() + HANGS_AFTER_S
    while not files_below(folder, "manifest.json"):
        assert time.monotonic() < deadline, "no snapshot was made"
        time.sleep(0.005)


def is_ready(path: str) -> bool:
    """Asks the daemon; its answer is two numbers, for live and ready, and a text if it is not."""
    if not Path(path).exists():
        return False
    options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"unix:{path}.admin", options=options) as channel:
        check = channel.unary_unary("/dmuond.v1.Admin/GetReadiness")
        try:
            return check(b"", timeout=2) == b"\x08\x01\x10\x01"
        except grpc.RpcError:
            return False


def secret_file(folder: Path) -> Path:
    """The secret of the groups of one folder."""
    path = folder / "peer-secret"
    if not path.exists():
        path.touch(0o600)
        path.write_text(secrets.token_hex(32))
    return path


def free_port() -> int:
    """None that the kernel gives to connections: one would have it while its daemon is away."""
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = 10_000 + secrets.randbelow(max(kernels - 10_000, 10_000))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def dmuonctl(address: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [program("dmuonctl"), f"--address={address}", *arguments],
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER_S,
    )


class Daemon:
    def __init__(
        self,
        folder: Path,
        name: str,
        flags: list[str],
        environment: dict[str, str],
        under: Sequence[str] = (),
    ):
        """environment: beside this process's, but for what is dmuond's there.

        under: a command that becomes the daemon.
        """
        self.path = str(folder / f"{name}.sock")
        self.log = folder / f"{name}.log"
        self._output = self.log.open("wb")
        self._flags, self._environment, self._under = flags, environment, under
        self.start()

    def start(self):
        """Again with the same flags, once it has ended: its own successor."""
        environment = {key: v for key, v in os.environ.items() if not key.startswith("DMUOND_")}
        self.process = subprocess.Popen(
            [*self._under, program("dmuond"), f"--socket={self.path}", *self._flags],
            stdout=self._output,
            stderr=subprocess.STDOUT,
            env=environment | self._environment,
        )

    def wait_ready(self):
        deadline = time.monotonic() + HANGS_AFTER_S
        while not is_ready(self.path):
            if self.process.poll() is not None:
                raise RuntimeError(f"dmuond ended with {self.process.returncode}:\n{self.text()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"dmuond was not ready in {HANGS_AFTER_S} s:\n{self.text()}")
            time.sleep(0.02)

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._output.close()


class Daemons:
    """A group of daemons for one test."""

    def __init__(self):
        self._folder = Path(tempfile.mkdtemp(prefix="dm-", dir="/tmp"))
        self.members: list[Daemon] = []

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        for daemon in self.members:
            daemon.stop()
        for daemon in self.members:
            print(f"--- {daemon.log.name}\n{daemon.text()}")
        shutil.rmtree(self._folder, ignore_errors=True)

    def start_alone(
        self,
        *flags: str,
        under: Sequence[str] = (),
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Starts one daemon and does not wait for it: in a group it is not ready alone."""
        name = f"{len(self.members)}"
        self.members.append(Daemon(self._folder, name, list(flags), dict(environment), under))
        return f"unix:{self.members[-1].path}"

    def start(
        self,
        nodes: int = 1,
        lanes: int = 1,
        *flags: str,
        environments: Sequence[dict[str, str]] | None = None,
    ) -> list[str]:
        """Starts a group of `nodes` daemons with `lanes` lanes each; returns their addresses.

        environments: what each has beside this process's.
        """
        common = [f"--devices=cpu:{lanes}", "--threads=1", *flags]
        base = len(self.members)
        coordinator = f"127.0.0.1:{free_port()}"
        for node in range(nodes):
            peers = []
            if nodes > 1:
                listen = coordinator if node == 0 else "127.0.0.1:0"
                peers = [
                    f"--node_rank={node}",
                    f"--nodes={nodes}",
                    f"--coordinator={coordinator}",
                    f"--peer_listen={listen}",
                    f"--peer_secret_file={secret_file(self._folder)}",
                ]
            own = environments[node] if environments else {}
            self.members.append(Daemon(self._folder, f"{base + node}", common + peers, own))
        for daemon in self.members[base:]:
            daemon.wait_ready()
        return [f"unix:{daemon.path}" for daemon in self.members[base:]]
