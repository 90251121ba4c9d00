"""Starting daemons on this machine for the length of the demo."""

from __future__ import annotations

import contextlib
import os
import shutil
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
    """Asks the standard health service; its two messages are one field each."""
    options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"unix:{path}", options=options) as channel:
        try:
            reply = channel.unary_unary("/grpc.health.v1.Health/Check")(b"\x0a\x05ready", timeout=2)
        except grpc.RpcError:
            return False
        return reply == b"\x08\x01"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _flags(node: int, nodes: int, lanes: int, path: Path, coordinator: str) -> list[str]:
    flags = [f"--devices=cpu:{lanes}", "--threads=1", f"--socket={path}"]
    if nodes > 1:
        listen = coordinator if node == 0 else "127.0.0.1:0"
        flags += [
            f"--node_rank={node}",
            f"--nodes={nodes}",
            f"--coordinator={coordinator}",
            f"--peer_listen={listen}",
        ]
    return flags


@contextlib.contextmanager
def running(nodes: int, lanes: int, logs: Path) -> Iterator[list[str]]:
    """A group of daemons; yields their addresses. Logs go to `logs`."""
    program = find_program("dmuond")
    coordinator = f"127.0.0.1:{_free_port()}"
    processes: list[subprocess.Popen] = []
    with tempfile.TemporaryDirectory(prefix="dmuond-", dir="/tmp") as folder:
        try:
            paths = [Path(folder, f"{node}.sock") for node in range(nodes)]
            for node, path in enumerate(paths):
                with (logs / f"dmuond-{node}.log").open("wb") as log:
                    flags = _flags(node, nodes, lanes, path, coordinator)
                    processes.append(
                        subprocess.Popen([program, *flags], stdout=log, stderr=subprocess.STDOUT)
                    )
            for path, process in zip(paths, processes, strict=True):
                _wait_ready(path, process, logs)
            yield [f"unix:{path}" for path in paths]
        finally:
            _stop(processes)


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
