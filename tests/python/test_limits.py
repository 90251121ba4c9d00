"""A machine that has no thread, process or memory left: the daemon lives, and its jobs with it."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import core_trainer
import dmuond
import pytest
from certificates import tls_flags
from cgroups import cgroup
from core_trainer import Job, Tensor, whole
from daemons import (
    HANGS_AFTER_S,
    dmuonctl,
    free_port,
    lane_pids,
    program,
    secret_file,
    until,
)
from dmuond import types
from survivors import STEPS, Survivor

UID = 64_321  # nobody else's: a limit of processes counts all that a user has
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start another user's daemon")
AS_UID = ("setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups")
HOG = Path(__file__).with_name("memory_hog.py")


@contextlib.contextmanager
def daemon_in(controller: str, daemons, *flags: str):
    """A daemon with one lane, in a control group without a limit so far."""
    with cgroup(controller) as group:
        daemons.start(1, 1, *flags)
        (daemon,) = daemons.members
        group.add(daemon.process.pid)
        try:
            yield daemon, group
        finally:
            daemon.stop()


def test_without_threads_and_processes_the_daemon_lives_and_a_dead_lane_comes_when_they_do(
    daemons, undisturbed
):
    with daemon_in("pids", daemons) as (daemon, group):
        address = f"unix:{daemon.path}"
        trainer = Survivor(address, 0, 1, STEPS, hold=10)
        trainer.wait_for(10)
        group.set_limit(1)  # no more than there are
        os.kill(lane_pids(daemon.process.pid)[0], signal.SIGKILL)
        until(daemon.text, "new lanes cannot start and are tried again.*temporarily unavailable")
        # Each is a connection with a call, for which gRPC would have threads.
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda _: dmuonctl(address, "status", "--timeout=2s"), range(32)))
        assert daemon.process.poll() is None, daemon.text()
        group.set_limit("max")
        assert trainer.finish() == undisturbed
        assert dmuonctl(address, "status").returncode == 0
        group.set_limit(1)
        daemon.process.terminate()
        assert daemon.process.wait(HANGS_AFTER_S) == 0


@as_root
def test_a_daemon_that_gets_no_threads_at_its_start_says_so(tmp_path):
    os.chmod(tmp_path, 0o777)
    done = subprocess.run(
        [*AS_UID, "prlimit", "--nproc=1:1", program("dmuond"), f"--socket={tmp_path}/d/d.sock"],
        capture_output=True,
        text=True,
        timeout=HANGS_AFTER_S,
    )
    assert done.returncode == 1
    assert "no thread can be started for the daemon" in done.stderr
    assert "ulimit -u" in done.stderr


def begin(address: str, name: str, all_have: threading.Barrier) -> str:
    """The reason of the refusal; empty: the job has begun, and lasts until all have."""
    matrix = Tensor("w", (4096, 4096))
    job = Job((matrix,), ((whole(matrix),),), name=name)
    parameters, fragments, _, _ = core_trainer.messages(job, 0)
    reason = ""
    with dmuond.Session(address, rank=0, world_size=1, job=name) as session:
        try:
            session.register(parameters, fragments, [types.GroupConfig(preset=job.preset)])
        except dmuond.Error as refused:
            reason = refused.reason
        all_have.wait(HANGS_AFTER_S)
    return reason


def test_jobs_that_begin_at_once_are_refused_what_is_not_there(daemons):
    with daemon_in("memory", daemons, "--jobs_max=4") as (daemon, group):
        group.set_limit(900 << 20)
        all_have = threading.Barrier(4)
        address = f"unix:{daemon.path}"
        with ThreadPoolExecutor(4) as pool:
            reasons = list(pool.map(lambda i: begin(address, f"job{i}", all_have), range(4)))
        assert daemon.process.poll() is None, daemon.text()
        assert "MEMORY_EXHAUSTED" in reasons
        assert set(reasons) <= {"", "MEMORY_EXHAUSTED"}


def test_where_memory_runs_out_a_lane_ends_and_is_replaced(daemons, undisturbed):
    with daemon_in("memory", daemons) as (daemon, group):
        trainer = Survivor(f"unix:{daemon.path}", 0, 1, STEPS, hold=10)
        trainer.wait_for(10)
        (lane,) = lane_pids(daemon.process.pid)
        # Each of them takes less than 5 % of this, the start that a lane has, and the lane.
        group.set_limit(group.used() + (640 << 20))
        hogs = [
            subprocess.Popen(
                [sys.executable, HOG, group.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for _ in range(24)
        ]
        try:
            for hog in itertools.cycle(hogs):
                if not Path(f"/proc/{lane}").exists():
                    break
                hog.stdin.write(b"\n")
                hog.stdin.flush()
                assert hog.stdout.read(1) == b"."
        finally:
            for hog in hogs:
                hog.kill()
                hog.communicate()
        assert trainer.finish() == undisturbed
        assert daemon.process.poll() is None
        assert "killed by signal 9" in daemon.text()


def test_a_limit_of_descriptors_below_all_connections_is_said_with_what_they_take(
    daemons, tmp_path
):
    files = tls_flags(tmp_path)
    group = ["--nodes=64", "--node_rank=0", "--coordinator=127.0.0.1:1"]
    group += [f"--peer_listen=127.0.0.1:{free_port()}"]
    group += [f"--peer_secret_file={secret_file(tmp_path)}"]
    for flags, wanted in (
        (["--connections_per_uid=100"], 512 + 400 + 64),
        ([f"--metrics_address=127.0.0.1:{free_port()}"], 512 + 1024 + 64 + 128),
        (group, 512 + 1024 + 64 + 256 + 21 * 64),
        (group + files, 512 + 1024 + 64 + 640 + 54 * 64),
    ):
        limit = f"--nofile={wanted - 1}:{wanted - 1}"
        daemons.start_alone(*flags, under=("prlimit", limit))
        until(daemons.members[-1].text, f"descriptors={wanted - 1} descriptors_wanted={wanted}")
        daemons.members[-1].stop()
