"""Starting daemons on this machine for the length of the demo."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import grpc

_READY_TIMEOUT_S = 30.0
_STOP_TIMEOUT_S = 20.0


def find_program(name: str) -> str:
    """From DMUOND_BIN_DIR, else PATH."""
    folder = os.environ.get("DMUOND_BIN_DIR")
    found = shutil.which(name, path=folder) if folder else shutil.which(name)
    if found is None:
        raise FileNotFoundError(
            f"the program {name} is not {'in ' + folder if folder else 'on PATH'}: run ./dev "
            "build and "
            "set DMUOND_BIN_DIR=build/cpu/bin, or start the demo by ./dev demo"
        )
    return found


def _is_ready(path: str) -> bool:
    """Asks the daemon; its answer is two fields, for live and ready, and a text if it is not."""
    options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"unix:{path}.admin", options=options) as channel:
        try:
            reply = channel.unary_unary("/dmuond.v1.Admin/GetReadiness")(b"", timeout=2)
        except grpc.RpcError:
            return False
        return reply == b"\x08\x01\x10\x01"


def _free_port() -> int:
    """None that the kernel gives to connections: one would have it before its daemon."""
    kernels = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while True:
        port = 10_000 + secrets.randbelow(max(kernels - 10_000, 10_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _flags(
    node: int, nodes: int, lanes: int, path: Path, coordinator: str, secret: Path
) -> list[str]:
    flags = [f"--devices=cpu:{lanes}", "--threads=1", f"--socket={path}"]
    if nodes > 1:
        listen = coordinator if node == 0 else "127.0.0.1:0"
        flags += [
            f"--node_rank={node}",
            f"--nodes={nodes}",
            f"--coordinator={coordinator}",
            f"--peer_listen={listen}",
            f"--peer_secret_file={secret}",
        ]
    return flags


class Group:
    """Daemons of one group on this machine, which may be killed and started again."""

    def __init__(
        self, nodes: int, lanes: int, folder: Path, logs: Path, snapshot_every: int
    ) -> None:
        program = find_program("dmuond")
        coordinator = f"127.0.0.1:{_free_port()}"
        secret = folder / "peer-secret"
        secret.touch(0o600)
        secret.write_text(secrets.token_hex(32))
        self._logs = logs
        self._paths = [folder / f"{node}.sock" for node in range(nodes)]
        self._commands = [
            [
                program,
                *_flags(node, nodes, lanes, path, coordinator, secret),
                f"--snapshot_dir={folder / 'snapshots'}",
                f"--snapshot_every_steps={snapshot_every}",
            ]
            for node, path in enumerate(self._paths)
        ]
        (folder / "snapshots").mkdir()
        self._processes: list[subprocess.Popen] = []
        for node in range(nodes):
            self._processes.append(self._popen(node))

    @property
    def addresses(self) -> list[str]:
        return [f"unix:{path}" for path in self._paths]

    def wait_ready(self) -> None:
        for path, process in zip(self._paths, self._processes, strict=True):
            _wait_ready(path, process, self._logs)

    def kill(self, node: int) -> None:
        self._processes[node].kill()
        self._processes[node].wait()

    def start_again(self, node: int) -> None:
        self._processes[node] = self._popen(node)

    def kill_lane(self, node: int, lane: int = 0) -> None:
        """Returns when it is dead."""
        status = subprocess.run(
            [find_program("dmuonctl"), f"--address={self._paths[node]}", "status", "--json"],
            stdout=subprocess.PIPE,
            check=True,
        )
        process = os.pidfd_open(int(json.loads(status.stdout)["lanes"][lane]["pid"]))
        try:
            signal.pidfd_send_signal(process, signal.SIGKILL)
            if not select.select([process], [], [], _STOP_TIMEOUT_S)[0]:
                raise TimeoutError(f"a killed lane did not end in {_STOP_TIMEOUT_S:g} s")
        finally:
            os.close(process)

    def stop(self) -> None:
        _stop(self._processes)

    def _popen(self, node: int) -> subprocess.Popen:
        with (self._logs / f"dmuond-{node}.log").open("ab") as log:
            return subprocess.Popen(self._commands[node], stdout=log, stderr=subprocess.STDOUT)


@contextlib.contextmanager
def running(nodes: int, lanes: int, logs: Path, snapshot_every: int) -> Iterator[Group]:
    """A group that is ready. Logs go to `logs`. `snapshot_every`: so many steps."""
    with tempfile.TemporaryDirectory(prefix="dmuond-", dir="/tmp") as folder:
        for node in range(nodes):
            (logs / f"dmuond-{node}.log").unlink(missing_ok=True)
        group = Group(nodes, lanes, Path(folder), logs, snapshot_every)
        try:
            group.wait_ready()
            yield group
        finally:
            group.stop()


def _wait_ready(path: Path, process: subprocess.Popen, logs: Path) -> None:
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while not (path.exists() and _is_ready(str(path))):
        if process.poll() is not None:
            raise RuntimeError(f"dmuond ended with {process.returncode}; its log is in {logs}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"dmuond was not ready in {_READY_TIMEOUT_S:g} s; see {logs}")
        time.sleep(0.05)


def _stop(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
