"""What a daemon tells the service manager that has started it ($NOTIFY_SOCKET)."""

import contextlib
import os
import signal
import socket
import subprocess
import threading
from pathlib import Path

import dmuond
import pytest
from daemons import HANGS_AFTER_S, lane_pids, program
from test_core_client import scalars, two_matrices

WATCHDOG_S = 0.3


class Manager:
    """Hears what is sent to its socket: a path, or an abstract address."""

    def __init__(self, name: str):
        self.name = name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + name[1:] if name.startswith("@") else name)

    def hear(self, timeout_s: float = HANGS_AFTER_S) -> str | None:
        """None: nothing came."""
        self._socket.settimeout(timeout_s)
        with contextlib.suppress(TimeoutError, BlockingIOError):
            return self._socket.recv(4096).decode()
        return None

    def hears(self, state: str) -> None:
        """After whatever it is told before."""
        while (told := self.hear()) != state:
            assert told is not None, f"{state} did not come"

    def drain(self) -> None:
        self._socket.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while self._socket.recv(4096):
                pass

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def manager(request, tmp_path):
    manager = Manager(str(tmp_path / "notify") if request.param == "path" else f"@{tmp_path}")
    yield manager
    manager.close()


class Holder:
    """Holds a daemon at a fault point (base/fault_point.h) while it is told to."""

    def __init__(self, folder: Path, point: str):
        self.environment = {
            "DMUOND_FAULT_SOCKET": str(folder / "points"),
            "DMUOND_FAULT_POINTS": point,
        }
        self.hold, self.held = threading.Event(), threading.Event()
        self.released = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.environment["DMUOND_FAULT_SOCKET"])
        self._listener.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):  # shut by close()
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    connection.recv(256)
                    if self.hold.is_set():
                        self.held.set()
                        self.released.wait()
                    connection.send(b"go")

    def release(self) -> None:
        self.hold.clear()
        self.released.set()

    def close(self) -> None:
        self.release()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def environment_of(pid: int) -> set[str]:
    entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    return {entry.split(b"=")[0].decode() for entry in entries}


def test_it_is_told_that_the_daemon_serves_and_that_it_leaves(daemons, manager) -> None:
    address = daemons.start_alone(environment={"NOTIFY_SOCKET": manager.name})
    daemon = daemons.members[0]
    assert manager.hear() == "READY=1"
    with dmuond.Session(address, rank=0, world_size=1) as session:
        two_matrices(session)
        (lane,) = lane_pids(daemon.process.pid)
        # Nothing that the daemon starts can speak in its place.
        assert "NOTIFY_SOCKET" not in environment_of(lane)
    daemon.process.send_signal(signal.SIGTERM)
    assert manager.hear() == "STOPPING=1"
    assert daemon.process.wait(HANGS_AFTER_S) == 0
    assert manager.hear(0) is None  # no word for a watchdog that there is not


@pytest.mark.parametrize("manager", ["path"], indirect=True)
def test_the_watchdog_hears_of_a_daemon_whose_core_turns_alone(daemons, manager, tmp_path) -> None:
    holder = Holder(tmp_path, "daemon.open")
    watched = {"NOTIFY_SOCKET": manager.name, "WATCHDOG_USEC": str(int(WATCHDOG_S * 1e6))}
    address = daemons.start_alone(environment=watched | holder.environment)
    manager.hears("READY=1")
    with contextlib.closing(holder), dmuond.Session(address, rank=0, world_size=1) as session:
        two_matrices(session)
        session.step(scalars())
        manager.hears("WATCHDOG=1")
        holder.hold.set()  # at the next attempt, under the core's lock
        stepping = threading.Thread(target=session.step, args=(scalars(),))
        stepping.start()
        assert holder.held.wait(HANGS_AFTER_S)
        manager.hear(WATCHDOG_S)  # one may have been on its way
        manager.drain()
        assert manager.hear(3 * WATCHDOG_S) is None
        holder.release()
        manager.hears("WATCHDOG=1")
        stepping.join()


@pytest.mark.parametrize("manager", ["path"], indirect=True)
def test_a_watchdog_of_another_process_hears_nothing(daemons, manager) -> None:
    watched = {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": str(os.getpid())}
    daemons.start_alone(environment={"NOTIFY_SOCKET": manager.name} | watched)
    assert manager.hear() == "READY=1"
    assert manager.hear(WATCHDOG_S) is None


@pytest.mark.parametrize("manager", ["path"], indirect=True)
def test_a_daemon_that_dmuonctl_has_started_tells_its_manager_nothing(manager) -> None:
    ended = subprocess.run(
        [program("dmuonctl"), "run", "--", "printenv", "NOTIFY_SOCKET"],
        env={**os.environ, "NOTIFY_SOCKET": manager.name},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (ended.returncode, ended.stdout.strip()) == (0, manager.name), ended.stderr
    assert manager.hear(0) is None


def test_a_manager_that_is_not_there_is_named_and_the_daemon_serves(daemons, tmp_path) -> None:
    nobody = str(tmp_path / "nobody")
    daemons.start(1, 1, environments=[{"NOTIFY_SOCKET": nobody}])
    assert nobody in daemons.members[0].text()
