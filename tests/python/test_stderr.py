"""A daemon whose stderr nobody reads, and signals of a terminal that ends."""

import fcntl
import json
import os
import signal
import subprocess
import time

import dmuond
import pytest
from daemons import HANGS_AFTER_S, is_ready, lane_pids, program, until
from test_core_client import scalars, two_matrices

PIPE_BYTES = 4096
ENDS_WITHIN_S = 10.0


@pytest.fixture
def full_pipe():
    """A pipe that takes nothing more until it is read."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    assert os.write(writer, b"." * PIPE_BYTES) == PIPE_BYTES
    yield reader, writer
    os.close(reader)


def test_a_daemon_whose_stderr_is_full_serves_its_trainers_and_ends(tmp_path, full_pipe):
    reader, writer = full_pipe
    path = str(tmp_path / "d.sock")
    flags = [f"--socket={path}", "--devices=cpu:1", "--threads=1", "--log_level=debug"]
    with subprocess.Popen([program("dmuond"), *flags], stderr=writer) as daemon:
        try:
            os.close(writer)
            deadline = time.monotonic() + HANGS_AFTER_S
            while not is_ready(path):
                assert time.monotonic() < deadline, "it waits for its log"
                time.sleep(0.02)
            with dmuond.Session(f"unix:{path}", rank=0, world_size=1) as session:
                two_matrices(session)
                for _ in range(5):
                    session.step(scalars())
                status = [program("dmuonctl"), "status", f"--address=unix:{path}"]
                shown = subprocess.run(
                    status, capture_output=True, timeout=HANGS_AFTER_S, check=True
                )
                assert b"step 5" in shown.stdout
            daemon.terminate()
            daemon.wait(ENDS_WITHIN_S)
        finally:
            daemon.kill()
    # What the pipe held is all that its reader would have got: nothing was lost to make room.
    assert os.read(reader, 2 * PIPE_BYTES) == b"." * PIPE_BYTES


def test_a_daemon_and_its_lanes_outlive_their_terminal_and_a_reader_that_goes(daemons):
    address = daemons.start(1, 1)[0]
    daemon = daemons.members[0]
    with dmuond.Session(address, rank=0, world_size=1) as session:
        two_matrices(session)
        session.step(scalars())
        lanes = lane_pids(daemon.process.pid)
        for pid in (daemon.process.pid, *lanes):
            for number in (signal.SIGHUP, signal.SIGPIPE):
                os.kill(pid, number)
        assert 'level=info msg="SIGHUP: ' in until(daemon.text, "SIGHUP")
        session.step(scalars())
        assert lane_pids(daemon.process.pid) == lanes
    assert daemon.process.poll() is None


def test_sighup_opens_the_log_file_again(daemons, tmp_path):
    log = tmp_path / "d.log"
    daemons.start(1, 1, f"--log_file={log}", "--log_format=json")
    daemon = daemons.members[0]
    assert '"msg":"serving"' in until(log.read_text, "serving")
    # As logrotate does it.
    old = log.rename(tmp_path / "d.log.1")
    daemon.process.send_signal(signal.SIGHUP)
    until(lambda: log.read_text() if log.exists() else "", "SIGHUP")
    assert "SIGHUP" not in old.read_text()
    for line in (old.read_text() + log.read_text()).splitlines():
        assert json.loads(line)["level"], line
    assert "level" not in daemon.text(), "stderr"

    # One that cannot be opened changes nothing.
    log.rename(tmp_path / "d.log.2")
    log.mkdir()
    daemon.process.send_signal(signal.SIGHUP)
    until((tmp_path / "d.log.2").read_text, "the log file from before is kept")
    assert daemon.process.poll() is None
