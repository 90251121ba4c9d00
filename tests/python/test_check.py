"""dmuonctl check: equal copies are equal, and a flipped bit on one node is named exactly."""

import contextlib
import json
import os
import re
import signal
import threading

import core_trainer
import dmuond
import gpus
import needs
import numpy as np
import pytest
from core_trainer import Held, Job, Tensor, assemble, together, whole
from daemons import dmuonctl, free_port, lane_pids, until
from dmuond import types
from gpu_machine import Machine
from test_metrics import scrape
from trainers import Ranks

HALF = Tensor("half", (32, 16), dtype="bfloat16")
SQUARE = Tensor("square", (16, 16))
BIAS = Tensor("bias", (50,), route="adamw")
TENSORS = (HALF, SQUARE, BIAS)
WHOLE = tuple(whole(tensor) for tensor in TENSORS)


def replicas(world: int, **more) -> Job:
    return Job(TENSORS, (WHOLE,) * world, **more)


def shards_of_pairs() -> Job:
    """Ranks 0 and 2 hold one half of the rows, ranks 1 and 3 the other one."""

    def half(tensor: Tensor, first: bool) -> Held:
        rows, rest = tensor.shape[0] // 2, tensor.shape[1:]
        none = (0,) * len(rest)
        begin, end = ((0, *none), (rows, *rest)) if first else ((rows, *none), tensor.shape)
        return Held(tensor.name, begin, end)

    held = tuple(tuple(half(tensor, rank % 2 == 0) for tensor in TENSORS) for rank in range(4))
    return Job(TENSORS, held)


@contextlib.contextmanager
def trainers(addresses: list[str], job: Job):
    """The job's ranks, as many on each node, after two steps."""
    world = len(job.held)
    of = [addresses[rank * len(addresses) // world] for rank in range(world)]
    ranks = together(
        *(lambda r=r: core_trainer.Trainer(r, world, job, address=of[r]) for r in range(world))
    )
    for _ in range(2):
        together(*(rank.step for rank in ranks))
    yield ranks
    together(*(rank.session.close for rank in ranks))


def check(address: str, *flags: str) -> tuple[int, dict]:
    """Exit status, and what it says."""
    done = dmuonctl(address, "check", "--json", *flags)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def the_difference(address: str) -> dict:
    status, found = check(address)
    assert status == 1 and found["different"] == 1, found
    (difference,) = found["differences"]
    assert difference["digest"] != difference["expected_digest"]
    assert {len(difference[name]) for name in ("digest", "expected_digest")} == {16}
    return difference


def flip(daemons, values: np.ndarray, bit: int) -> int:
    """In the memory of the lanes, of the first of these values, which lie there once.

    Returns the node.
    """
    wanted, found = np.ascontiguousarray(values.flat[:8]).tobytes(), []
    lanes = {
        pid: node
        for node, daemon in enumerate(daemons.members)
        for pid in lane_pids(daemon.process.pid)
    }
    for pid in lanes:
        with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb+", buffering=0) as mem:
            for line in maps:
                span, rights, _, _, _, *name = line.split(maxsplit=5)
                if not rights.startswith("rw-s") or "memfd" not in "".join(name):
                    continue
                begin, end = (int(half, 16) for half in span.split("-"))
                mem.seek(begin)
                memory, at = mem.read(end - begin), -1
                while (at := memory.find(wanted, at + 1)) >= 0:
                    found.append((pid, begin + at))
    ((pid, address),) = found
    with open(f"/proc/{pid}/mem", "rb+", buffering=0) as mem:
        mem.seek(address + bit // 8)
        byte = mem.read(1)[0]
        mem.seek(address + bit // 8)
        mem.write(bytes([byte ^ (1 << bit % 8)]))
    return lanes[pid]


def state_of(trainer, parameter: str, kind: int) -> np.ndarray:
    (tensor,) = trainer.session.pull([parameter], [kind])
    return np.asarray(tensor.values, np.float32)


@pytest.mark.parametrize(
    ("nodes", "job"), [(1, replicas(2)), (2, replicas(2)), (2, shards_of_pairs())]
)
def test_a_flipped_bit_of_a_published_weight_is_named(daemons, nodes, job):
    addresses = daemons.start(nodes, 1)
    with trainers(addresses, job) as ranks:
        status, found = check(addresses[-1])
        assert (status, found["different"], found["ranks"]) == (0, 0, len(ranks))
        assert found["digests"] >= len(ranks) * len(TENSORS)
        at = len(ranks) - 1
        for number, tensor in enumerate(TENSORS):
            bits = ranks[at].weights[number].view(np.uint16)
            bits.flat[3] ^= 1
            difference = the_difference(addresses[0])
            bits.flat[3] ^= 1
            assert difference["parameter"] == tensor.name
            assert (difference["kind"], difference["against"]) == ("published", "master")
            assert (difference["node"], difference["ranks"]) == (nodes - 1, [at])
        assert check(addresses[0])[0] == 0
        together(*(rank.step for rank in ranks))
        assert check(addresses[0])[0] == 0


def test_flipped_bits_of_master_and_slots_are_named(daemons):
    addresses = daemons.start(2, 1)
    with trainers(addresses, replicas(2)) as ranks:
        # A large change shows in what the master is rounded to.
        node = flip(daemons, state_of(ranks[0], "half", types.STATE_KIND_MASTER), 30)
        difference = the_difference(addresses[0])
        assert (difference["parameter"], difference["kind"]) == ("half", "master")
        assert (difference["node"], difference["against"]) == (node, "published")
        # From here on each bit shows: no step comes between two looks.
        assert flip(daemons, state_of(ranks[0], "half", types.STATE_KIND_MASTER), 30) == node
        difference = the_difference(addresses[0])
        assert (difference["kind"], difference["against"]) == ("master", "before")
        assert check(addresses[0])[0] == 0
        for parameter, kind, name in (
            ("half", types.STATE_KIND_MASTER, "master"),
            ("square", types.STATE_KIND_MOMENTUM, "momentum"),
            ("bias", types.STATE_KIND_EXP_AVG, "exp_avg"),
            ("bias", types.STATE_KIND_EXP_AVG_SQ, "exp_avg_sq"),
        ):
            node = flip(daemons, state_of(ranks[0], parameter, kind), 0)
            difference = the_difference(addresses[1])
            assert (difference["parameter"], difference["kind"]) == (parameter, name)
            assert (difference["node"], difference["against"]) == (node, "before")
        text = dmuonctl(addresses[1], "status").stdout
        assert "copies that differ: 1:" in text and "exp_avg_sq" in text


def test_a_run_that_is_checked_all_the_time_has_the_bits_of_another(daemons):
    job = replicas(2, steps=30)
    results = []
    for checked in (False, True):
        addresses = daemons.start(2, 1)
        with trainers(addresses, job) as ranks:
            ended, statuses = threading.Event(), []

            def look(address=addresses[1], ended=ended, statuses=statuses):
                while not ended.is_set():
                    statuses.append(check(address)[0])

            looks = threading.Thread(target=look)
            if checked:
                looks.start()
            while ranks[0].session.last_committed_step < job.steps:
                together(*(rank.step for rank in ranks))
            ended.set()
            if checked:
                looks.join()
                assert len(statuses) > 1 and set(statuses) == {0}
            results.append([(rank.held_weights(), 0, 0) for rank in ranks])
    plain, other = (assemble(job, result) for result in results)
    assert all(np.array_equal(plain[name], other[name]) for name in plain)


def test_who_does_not_answer_is_named_and_jobs_without_state_are_refused(daemons):
    addresses = daemons.start(2, 1)
    assert "NO_PLAN" in dmuonctl(addresses[0], "check").stderr
    with trainers(addresses, replicas(2)):
        (lane,) = lane_pids(daemons.members[1].process.pid)
        os.kill(lane, signal.SIGSTOP)
        refused = dmuonctl(addresses[0], "check", "--check_timeout=1s")
        os.kill(lane, signal.SIGCONT)
        assert refused.returncode == 1 and refused.stdout == ""
        assert "CHECK_UNANSWERED" in refused.stderr and "node 1 has not told" in refused.stderr
        assert check(addresses[0])[0] == 0
        for wrong in ("--check_timeout=0", "--check_timeout=2h"):
            assert "CHECK_INVALID" in dmuonctl(addresses[0], "check", wrong).stderr
        assert dmuonctl(addresses[0], "check", "half").returncode == 2


def test_daemons_check_by_themselves(daemons):
    metrics = f"127.0.0.1:{free_port()}"
    address = daemons.start(1, 1, f"--metrics_address={metrics}", "--check_every=100ms")[0]

    def differences() -> str:
        _, samples = scrape(metrics)
        return str([v for (name, _), v in samples.items() if name.endswith("replica_differences")])

    with trainers([address], replicas(2)) as ranks:
        until(differences, r"^\[0.0\]$")
        ranks[1].weights[1].view(np.uint32).flat[0] ^= 1
        until(differences, r"^\[1.0\]$")
        until(lambda: dmuonctl(address, "status").stdout, "checked .*ago: copies that differ: 1:")
        assert "a copy differs" in daemons.members[0].text()
        together(*(rank.step for rank in ranks))
        until(differences, r"^\[0.0\]$")


def test_what_differed_before_a_check_ended_early_is_told(daemons):
    metrics = f"127.0.0.1:{free_port()}"
    address = daemons.start(1, 1, f"--metrics_address={metrics}")[0]
    large = Tensor("large", (5 << 20,), route="adamw")
    with trainers([address], Job((large,), ((whole(large),),))) as ranks:
        ranks[0].weights[0].view(np.uint32)[:] ^= 1
        # Half a second of doubt for each of five orders.
        ended = dmuonctl(address, "check", "--check_timeout=1500ms")
        assert ended.returncode == 1 and "CHECK_UNANSWERED" in ended.stderr
        count = re.search(r"; (\d+) copies differed until then: dmuonctl status", ended.stderr)[1]
        text = dmuonctl(address, "status").stdout
        assert "copies were not compared: " in text and f"copies that differ: {count}:" in text
        assert "large" in text
        assert "a copy differs" in daemons.members[0].text()
        until(
            lambda: str([v for (n, _), v in scrape(metrics)[1].items() if "replica_diff" in n]),
            rf"^\[{count}.0\]$",
        )


def check_on_gpus(rank: int, world: int, job: Job) -> list[dict]:
    """What checks say after two steps, and after a bit of rank 0's weights was flipped."""
    trainer = gpus.GpuTrainer(rank, world, job)
    trainer.step()
    trainer.step()
    found = [check(os.environ["DMUOND_ADDRESS"])[1]]
    weights = trainer.get(trainer.weights[0])
    flipped = weights.copy()
    flipped.view(np.uint16).flat[0] ^= 1
    trainer.put(trainer.weights[0], flipped)
    gpus.must(gpus.use_device(rank).cuStreamSynchronize(trainer.stream))
    found.append(check(os.environ["DMUOND_ADDRESS"])[1])
    trainer.session.close()
    return found


def test_memory_of_gpus_is_compared(tmp_path, monkeypatch, daemons):
    needs.fake_gpus()
    needs.package("cuda.bindings")
    with Ranks() as ranks:
        machine = Machine(tmp_path, monkeypatch, daemons, ranks)
        machine.start_daemon(1)
        equal, flipped = machine.run_one(check_on_gpus, replicas(1))
    assert (equal["different"], equal["ranks"]) == (0, 1)
    (difference,) = flipped["differences"]
    assert (difference["parameter"], difference["kind"]) == ("half", "published")


def test_deaths_of_lanes_pushes_and_ways_back_are_no_differences(daemons, tmp_path):
    addresses = daemons.start(2, 1, f"--snapshot_dir={tmp_path}")
    with trainers(addresses, replicas(2)) as ranks:
        ended, found = threading.Event(), []

        def look():
            while not ended.is_set():
                found.append(dmuonctl(addresses[1], "check", "--json"))

        def goes_back(rank):
            with pytest.raises(dmuond.RolledBack):
                rank.step()

        looks = threading.Thread(target=look)
        looks.start()
        try:
            for number in range(3):
                os.kill(lane_pids(daemons.members[number % 2].process.pid)[0], signal.SIGKILL)
                together(*(rank.step for rank in ranks))
                for rank in ranks:
                    rank.session.wait_published()
                    rank.weights[1][...] = number
                together(*(rank.session.push for rank in ranks))
            step, _ = ranks[0].session.save_snapshot()
            together(*(rank.step for rank in ranks))
            assert dmuonctl(addresses[0], "snapshot", "load").returncode == 0
            together(*(lambda r=rank: goes_back(r) for rank in ranks))
            assert ranks[0].session.last_committed_step == step
            together(*(rank.step for rank in ranks))
        finally:
            ended.set()
            looks.join()
        assert check(addresses[0])[0] == 0
    for done in found:
        assert done.returncode == 0 or done.stdout == "", done  # while it goes back, say
    assert sum(done.returncode == 0 for done in found) > 1
