"""A daemon that runs a control daemon of MPS for itself (--mps=managed), beside the fake driver.

Instead of nvidia-cuda-mps-control there is a script of that name, which listens as it does.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from daemons import HANGS_AFTER_S, program, until
from gpu_machine import Machine
from test_core_on_gpus import weights_on_gpus
from trainers import Ranks

PROGRAM = "nvidia-cuda-mps-control"
LANE_PROGRAM = program("dmuond-lane-fake")

STAND_IN = f"""#!{sys.executable} -IS
import os, signal, socket, sys
from pathlib import Path

here = Path(__file__).parent
folder = Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
with (here / "starts").open("a") as starts:
    names = ["CUDA_MPS_LOG_DIRECTORY", "CUDA_VISIBLE_DEVICES"]
    print(os.getpid(), *sys.argv[1:], *map(os.environ.get, names), file=starts)
if (here / "fails").exists():
    print("no GPU is here")
    sys.exit(3)
if (here / "deaf").exists():
    signal.pause()
for name in ("control_privileged", "control"):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(str(folder / name))
listener.listen(4)
os.mkfifo(folder / "log")
signal.signal(signal.SIGTERM, lambda *_: (print("bye"), os._exit(0)))
if (here / "stays").exists():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
while True:
    listener.accept()[0].close()
"""


def wait_for(what) -> None:
    deadline = time.monotonic() + HANGS_AFTER_S
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def lives(pid: int) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


class Stand:
    """The folder on PATH that has the stand-in, and what it was started with."""

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir()
        (folder / PROGRAM).write_text(STAND_IN)
        (folder / PROGRAM).chmod(0o700)

    def set(self, what: str) -> None:
        (self.folder / what).touch()

    def starts(self) -> list[list[str]]:
        with contextlib.suppress(FileNotFoundError):
            return [line.split() for line in (self.folder / "starts").read_text().splitlines()]
        return []

    def pids(self) -> list[int]:
        return [int(start[0]) for start in self.starts()]


@pytest.fixture
def stand(tmp_path, monkeypatch):
    stand = Stand(tmp_path / "stand-in")
    monkeypatch.setenv("PATH", f"{stand.folder}{os.pathsep}{os.environ['PATH']}")
    yield stand
    for pid in filter(lives, stand.pids()):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture
def machine(tmp_path, monkeypatch, daemons, stand):
    with Ranks() as ranks:
        made = Machine(tmp_path, monkeypatch, daemons, ranks)
        made.set({"FAKE_CUDA_MPS": "1"})
        yield made


def folder_of(machine) -> Path:
    return Path(f"{machine.daemon.path}.mps")


def restarts(machine) -> list[datetime]:
    """When it was started again, by the daemon's own clock: this process may be late to see it."""
    times = re.findall(r"time=(\S+)Z .*was started again", machine.daemon.text())
    return list(map(datetime.fromisoformat, times))


def run(name: str, *arguments: str) -> subprocess.CompletedProcess:
    command = [program(name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_lanes_and_trainers_use_the_control_daemon_that_goes_with_its_daemon(machine, stand):
    machine.start_daemon(1, "--mps=managed")
    folder = folder_of(machine)
    ((pid, *how),) = stand.starts()
    assert how == ["-f", str(folder), "None"]  # no CUDA_VISIBLE_DEVICES, which the daemon has
    assert folder.stat().st_mode & 0o777 == 0o700
    assert os.getsid(int(pid)) == int(pid)
    assert f"CUDA_MPS_PIPE_DIRECTORY={folder}" in machine.daemon.text()
    machine.set({"CUDA_MPS_PIPE_DIRECTORY": str(folder)})
    weights_on_gpus(machine, 1)

    machine.daemon.process.terminate()
    assert machine.daemon.process.wait(HANGS_AFTER_S) == 0
    assert not lives(int(pid)) and not folder.exists()


def test_doctor_and_status_say_whose_it_is_and_what_trainers_need(machine, stand):
    machine.start_daemon(1, "--mps=managed")
    (pid,) = stand.pids()
    folder = folder_of(machine)
    address = f"--address={machine.daemon.path}"
    findings = json.loads(
        run("dmuonctl", "doctor", "--json", address, f"--lane_binary={LANE_PROGRAM}").stdout
    )
    (mps,) = [finding for finding in findings if finding["what"] == "MPS"]
    assert mps["verdict"] == "ok"
    assert f"runs, a control daemon in {folder} (the daemon's own, pid {pid})" in mps["detail"]
    assert f"CUDA_MPS_PIPE_DIRECTORY={folder}" in run("dmuonctl", "status", address).stdout


def test_a_successor_takes_over_what_a_killed_daemon_has_left(machine, stand):
    machine.start_daemon(1, "--mps=managed")
    folder = folder_of(machine)
    machine.daemon.kill()
    assert all(map(lives, stand.pids()))
    machine.daemon.start()
    machine.daemon.wait_ready()
    machine.set({"CUDA_MPS_PIPE_DIRECTORY": str(folder)})
    weights_on_gpus(machine, 1)
    (pid,) = stand.pids()
    assert lives(pid) and "was taken over" in machine.daemon.text()
    machine.daemon.process.terminate()
    assert machine.daemon.process.wait(HANGS_AFTER_S) == 0
    assert not lives(pid) and not folder.exists()


def test_a_folder_in_which_nobody_listens_is_cleaned(machine, stand):
    machine.start_daemon(1, "--mps=managed")
    machine.daemon.kill()
    os.kill(stand.pids()[0], signal.SIGKILL)
    machine.daemon.start()
    machine.daemon.wait_ready()
    assert len(stand.pids()) == 2


def test_one_that_dies_is_started_again_and_lanes_that_start_later_have_it(machine, stand):
    machine.start_daemon(1, "--mps=managed")
    folder = folder_of(machine)
    os.kill(stand.pids()[0], signal.SIGKILL)
    wait_for(lambda: len(stand.pids()) == 2)
    text = until(machine.daemon.text, "was started again")
    assert re.search("level=warn .*control daemon of MPS has ended.*was ended by signal 9", text)
    machine.set({"CUDA_MPS_PIPE_DIRECTORY": str(folder)})
    wait_for((folder / "control").exists)
    weights_on_gpus(machine, 1)
    # The next pause, from this start, is of 2 s, so that one that always dies is not started all
    # the time.
    stand.set("fails")
    os.kill(stand.pids()[1], signal.SIGKILL)
    until(machine.daemon.text, "has ended with code 3; its last words: no GPU is here")
    assert len(stand.pids()) == 3
    second, third = restarts(machine)
    assert third - second > timedelta(seconds=1.9)


def test_a_lane_has_the_folder_whatever_the_daemons_environment_says(machine, tmp_path):
    lane, said = tmp_path / "lane", tmp_path / "said"
    lane.write_text(f'#!/bin/sh\necho "$CUDA_MPS_PIPE_DIRECTORY" >{said}\nexec {LANE_PROGRAM} "$@"')
    lane.chmod(0o700)
    machine.set({"CUDA_MPS_PIPE_DIRECTORY": str(tmp_path)})
    machine.start_daemon(1, "--mps=managed", f"--lane_binary={lane}")
    assert said.read_text() == f"{folder_of(machine)}\n"


def start_and_fail(machine) -> str:
    with pytest.raises(RuntimeError, match="dmuond ended with 1") as ended:
        machine.start_daemon(1, "--mps=managed")
    return str(ended.value)


def test_a_daemon_does_not_start_without_it_and_says_why(machine, stand):
    stand.set("fails")
    assert f"{PROGRAM} has ended with code 3; its last words: no GPU is here" in start_and_fail(
        machine
    )
    machine.set({"PATH": "/usr/bin:/bin"})
    assert f"{PROGRAM} is not on PATH" in start_and_fail(machine)


def test_a_daemon_that_is_told_to_leave_before_it_listens_ends_it(machine, daemons, stand):
    stand.set("deaf")
    daemons.start_alone("--devices=cuda:1", "--mps=managed", f"--lane_binary={LANE_PROGRAM}")
    (daemon,) = daemons.members
    wait_for(stand.pids)
    daemon.process.terminate()
    assert daemon.process.wait(HANGS_AFTER_S) == 0
    assert not lives(stand.pids()[0]) and not Path(f"{daemon.path}.mps").exists()


def test_a_daemon_that_cannot_start_ends_it(machine, stand):
    machine.set({"FAKE_CUDA_DEVICES": "0"})
    start_and_fail(machine)
    (pid,) = stand.pids()
    assert not lives(pid)


def test_one_that_does_not_end_is_killed(machine, stand):
    stand.set("stays")
    machine.start_daemon(1, "--mps=managed")
    machine.daemon.process.terminate()
    assert machine.daemon.process.wait(HANGS_AFTER_S) == 0
    assert "did not end and is killed" in machine.daemon.text()
    assert not lives(stand.pids()[0]) and not folder_of(machine).exists()


@pytest.mark.parametrize("killed", [False, True])
def test_a_command_beside_a_daemon_of_its_own_has_the_folder(machine, stand, killed):
    config = machine.folder / "config"
    config.write_text(f'lane_binary: "{LANE_PROGRAM}"\n')
    script = (
        'test -S "$CUDA_MPS_PIPE_DIRECTORY/control" && '
        'test "$CUDA_MPS_PIPE_DIRECTORY" = "$DMUOND_ADDRESS.mps" && '
        'test "$CUDA_MPS_LOG_DIRECTORY" = "$DMUOND_ADDRESS.mps" && echo has it'
    )
    if killed:
        script += '; kill -9 $(cut -d " " -f 1 "$DMUOND_ADDRESS.lock")'
    flags = ["--devices=cuda:1", "--mps=managed", f"--config={config}"]
    done = run("dmuonctl", "run", *flags, "--", "sh", "-c", script)
    assert done.stdout == "has it\n", done.stderr
    assert not lives(stand.pids()[0])
