"""The life of a session with a real daemon: its end, its forks, and that it leaves nothing."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import core_trainer
import dmuond
import numpy as np
import pytest
from core_trainer import Job, Tensor, whole
from dmuond import channel, member

SQUARE = Tensor("square", (16, 16))
JOB = Job((SQUARE,), ((whole(SQUARE),),))
NOTICED_WITHIN_S = 10.0
LEAVES_WITHIN_S = 6.0


def trainer_of(address):
    return core_trainer.Trainer(0, 1, JOB, address=address)


def open_when_the_old_one_is_gone(address):
    """A rank's session can be opened again as soon as the daemon has seen the last one end."""
    deadline = time.monotonic() + NOTICED_WITHIN_S
    while True:
        try:
            return dmuond.Session(address, rank=0, world_size=1)
        except dmuond.Error as error:
            if error.reason != "RANK_TWICE" or time.monotonic() > deadline:
                raise


def test_a_step_changes_the_weights_in_the_arena(address):
    trainer = trainer_of(address)
    before = trainer.weights[0].copy()
    trainer.step()
    assert not np.array_equal(trainer.weights[0], before)
    trainer.session.close()


def test_client_and_daemon_are_of_one_version(address):
    with dmuond.Session(address, rank=0, world_size=1) as session:
        assert session.server == f"dmuond {dmuond.__version__}"


def test_arenas_outlive_their_session(address):
    trainer = trainer_of(address)
    weight = trainer.weights[0]
    trainer.step()
    trainer.session.close()
    del trainer
    gc.collect()
    before = weight.copy()
    weight[...] = 1.0
    assert weight.sum() == 256.0 and before.std() > 0


def test_a_forked_child_lets_go_of_the_session(address):
    """A data loader's worker that outlives its trainer does not keep it alive."""
    trainer = trainer_of(address)
    release, hold = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hold)
        refused = 0
        for call in (trainer.step, lambda: trainer.session.signal(0)):
            try:
                call()
            except dmuond.Error:
                refused += 1
        code = 0 if refused == 2 else 1
        os.read(release, 1)  # lives on until the parent has looked
        os._exit(code)
    os.close(release)
    trainer.step()  # the parent's session is as it was
    trainer.session._disconnect()  # the parent dies, to the daemon
    open_when_the_old_one_is_gone(address).close()
    os.close(hold)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_call_to_a_daemon_that_stays_stopped_ends(daemons, monkeypatch):
    (path,) = daemons.start(1, 1)
    daemon = daemons.members[0].process
    monkeypatch.setattr(member, "WAIT_SLACK_S", 3.0)
    monkeypatch.setattr(channel, "_RETRY_FOR_S", 1.0)
    with dmuond.Session(path, rank=0, world_size=1, reconnect_for_s=0) as session:
        daemon.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, daemon.pid, os.WSTOPPED | os.WNOWAIT)  # threads run for a moment longer
        try:
            with pytest.raises(dmuond.Unreachable, match="stopped"):
                session.register([], [], [])
        finally:
            daemon.send_signal(signal.SIGCONT)
        assert not session.lost


def test_a_call_that_waits_longer_than_its_pings_goes_on(daemons, monkeypatch):
    """The other rank is late: the daemon has nothing to say, but answers."""
    (path,) = daemons.start(1, 1)
    monkeypatch.setattr(member, "WAIT_SLACK_S", 1.0)
    job = Job((SQUARE,), ((whole(SQUARE),), (whole(SQUARE),)))
    made = {}

    def begin(rank, after_s):
        time.sleep(after_s)
        made[rank] = core_trainer.Trainer(rank, 2, job, address=path)

    others = [threading.Thread(target=begin, args=(rank, 3.0 * rank)) for rank in range(2)]
    for thread in others:
        thread.start()
    for thread in others:
        thread.join()
    closing = [threading.Thread(target=made[rank].session.close) for rank in range(2)]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join()


def holdings(pid) -> dict[str, int]:
    """What a process holds: descriptors, threads, shared mappings, resident KiB."""
    process = Path(f"/proc/{pid}")
    status = dict(line.split(":\t", 1) for line in (process / "status").read_text().splitlines())
    return {
        "descriptors": len(os.listdir(process / "fd")),
        "threads": int(status["Threads"]),
        "mappings": sum("memfd:" in line for line in (process / "maps").read_text().splitlines()),
        "rss_kib": int(status["VmRSS"].split()[0]),
    }


CYCLES = 200
WARMUP = 20  # pools and caches are full by then
# gRPC's pools of threads, each with a descriptor, may still grow under load; a leak would be 200.
POOL_GROWTH = 8
ALLOWED = {"descriptors": POOL_GROWTH, "threads": POOL_GROWTH, "mappings": 0}
RSS_GROWTH_KIB = 6 << 10  # of 200 cycles: a lost arena of 32 KiB in each would be 6.4 MiB


def test_sessions_that_come_and_go_leave_nothing_behind(daemons):
    address = daemons.start(1, 1)[0]
    large = Tensor("large", (96, 96))  # arenas of 36 KiB
    job = Job((large,), ((whole(large),),))

    def cycle():
        trainer = core_trainer.Trainer(0, 1, job, address=address)
        trainer.step()
        trainer.session.close()

    for _ in range(WARMUP):
        cycle()
    gc.collect()
    pids = {"client": os.getpid(), "daemon": daemons.members[0].process.pid}
    before = {who: holdings(pid) for who, pid in pids.items()}
    for _ in range(CYCLES):
        cycle()
    gc.collect()
    assert threading.active_count() < 10
    for who, pid in pids.items():
        after = settled(pid, before[who])
        told = f"{who}: {before[who]}, then {after}"
        assert not_allowed(before[who], after) == [], told
        assert after["rss_kib"] - before[who]["rss_kib"] <= RSS_GROWTH_KIB, told


def not_allowed(before, now) -> list[str]:
    return [key for key, more in ALLOWED.items() if now[key] > before[key] + more]


def settled(pid, before):
    """Holdings once the daemon has put away what the last session has left, or at a deadline."""
    deadline = time.monotonic() + NOTICED_WITHIN_S
    while True:
        now = holdings(pid)
        if not not_allowed(before, now) or time.monotonic() > deadline:
            return now


def test_a_daemon_that_has_sent_much_state_leaves_at_once(daemons):
    address = daemons.start(1, 1)[0]
    large = Tensor("large", (768, 768))
    trainer = core_trainer.Trainer(0, 1, Job((large,), ((whole(large),),)), address=address)
    trainer.step()
    assert sum(tensor.values.nbytes for tensor in trainer.session.pull()) > 4 << 20
    trainer.session.close()
    daemon = daemons.members[0].process
    daemon.terminate()
    assert daemon.wait(timeout=LEAVES_WITHIN_S) == 0


def test_an_error_stands_alone_where_its_cause_adds_nothing(tmp_path, address):
    """A script prints one traceback, of the call that failed."""
    wrong = [f"unix:{tmp_path}/nobody", address]
    for where in wrong:
        session = (
            f"dmuond.Session({where!r}, world_size=1, rank=0, connect_for_s=0, resume='require')"
        )
        command = [sys.executable, "-c", f"import dmuond; {session}"]
        said = subprocess.run(command, capture_output=True, text=True, check=False).stderr
        assert said.count("Traceback") == 1, said
        assert said.rstrip().splitlines()[-1].startswith("dmuond.errors."), said
