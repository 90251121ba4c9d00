"""The points of the Python client speak the protocol of base/fault_point.h."""

import errno
import os
import socket
import subprocess
import sys
import threading

import pytest
from dmuond import fault_point


class Driver:
    """Hears reports and gives the same answer to each."""

    def __init__(self, path, answer):
        self.path, self.heard = str(path), []
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.path)
        self._listener.listen()
        self._answer = answer
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # shut by close()
            with connection:
                self.heard.append(connection.recv(256).decode())
                if self._answer is not None:
                    connection.send(self._answer.encode())

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()


@pytest.fixture
def driven(tmp_path, monkeypatch):
    """Connects this process to a driver that gives an answer at the named points."""
    monkeypatch.setattr(fault_point, "_driver", None)
    drivers = []

    def connect(points, answer):
        drivers.append(Driver(tmp_path / f"{len(drivers)}", answer))
        monkeypatch.setenv("DMUOND_FAULT_SOCKET", drivers[-1].path)
        monkeypatch.setenv("DMUOND_FAULT_POINTS", points)
        assert fault_point.connect_driver()
        return drivers[-1]

    yield connect
    for driver in drivers:
        driver.close()


def test_the_environment_alone_connects_no_driver(tmp_path, monkeypatch):
    monkeypatch.setattr(fault_point, "_driver", None)
    monkeypatch.setenv("DMUOND_FAULT_SOCKET", str(tmp_path / "nobody"))
    monkeypatch.setenv("DMUOND_FAULT_POINTS", "*")
    assert fault_point.fault_point("a") == 0


def test_only_what_the_driver_named_is_reported_and_may_fail(driven):
    driver = driven("one,two.three", f"fail {errno.ENOSPC}")
    assert [fault_point.fault_point(name) for name in ("two", "three", "on")] == [0, 0, 0]
    assert fault_point.fault_point("two.three") == errno.ENOSPC
    assert driver.heard == [f"{os.getpid()} two.three"]


@pytest.mark.parametrize("answer", ["go", None])
def test_a_process_goes_on_when_it_is_told_to_and_when_the_driver_ends(driven, answer):
    driver = driven("*", answer)
    assert fault_point.fault_point("anything") == 0
    assert driver.heard == [f"{os.getpid()} anything"]


@pytest.mark.parametrize(
    ("answer", "cut"),
    [("cut unix", {"stream"}), ("cut packets", {"packets"}), ("cut tcp", {"tcp"}), ("go", set())],
)
def test_a_cut_ends_connections_of_the_named_kind_alone(tmp_path, answer, cut):
    """In a new process: a cut would end the tests' own connections, a forked child's too."""
    environment = {"DMUOND_FAULT_SOCKET": str(tmp_path / "driver"), "DMUOND_FAULT_POINTS": "*"}
    subprocess.run(
        [sys.executable, __file__, answer, *cut],
        env=os.environ | environment,
        check=True,
        timeout=60,
    )


def _cut(answer, cut):
    driver = Driver(os.environ["DMUOND_FAULT_SOCKET"], answer)
    assert fault_point.connect_driver()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pairs = {
            "stream": socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM),
            "packets": socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET),
            "tcp": (socket.create_connection(listener.getsockname()), listener.accept()[0]),
        }
        fault_point.fault_point("anything")
        # Connections end; their descriptors stay open.
        for ends in pairs.values():
            for end in ends:
                os.fstat(end.fileno())
        # Neither end of a connection that was cut is told anything but its end.
        for name, (one, other) in pairs.items():
            one.settimeout(0)
            assert (name in cut) == _has_ended(one), name
            one.close(), other.close()
        with socket.create_connection(listener.getsockname(), timeout=10):
            pass  # it still listens
    driver.close()


def _has_ended(connection):
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False


if __name__ == "__main__":
    _cut(sys.argv[1], set(sys.argv[2:]))
