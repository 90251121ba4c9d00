"""FSDP2's ranks share a process group: when one is set back or dies, all start again."""

import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from daemons import free_port, wait_for_snapshot

STEPS, EVERY, WORLD = 40, 10, 2
PATIENCE_S = 180.0
SCRIPT = Path(__file__).parent / "fsdp_survivor.py"


class Launcher:
    """What torchrun does: when one rank ends badly, it ends the others and starts all again."""

    def __init__(self, address: str):
        self.lines: list[str] = []
        self.restarts = 0
        self._address = address
        self._start()

    def _start(self):
        common = {
            "DMUOND_ADDRESS": self._address,
            "DMUOND_RECONNECT_S": "120",
            "DMUOND_RESUME": str(int(self.restarts > 0)),
            "WORLD_SIZE": str(WORLD),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "OMP_NUM_THREADS": "1",
        }
        self.ranks = [
            subprocess.Popen(
                [sys.executable, str(SCRIPT), str(STEPS)],
                env=os.environ | common | {"RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(WORLD)
        ]
        self._readers = [threading.Thread(target=self._read, args=(r,)) for r in self.ranks]
        for reader in self._readers:
            reader.start()

    def _read(self, rank: subprocess.Popen):
        for line in rank.stdout:
            self.lines.append(line.rstrip("\n"))

    def found(self, pattern: str) -> list[str]:
        return [line for line in self.lines if re.match(pattern, line)]

    def wait_for(self, pattern: str):
        deadline = time.monotonic() + PATIENCE_S
        while not self.found(pattern):
            assert time.monotonic() < deadline, self.lines[-20:]
            time.sleep(0.005)

    def finish(self) -> dict[str, str]:
        """What each rank printed last of each step, and the weights."""
        deadline = time.monotonic() + PATIENCE_S
        while (codes := [rank.poll() for rank in self.ranks]) != [0] * WORLD:
            assert time.monotonic() < deadline, self.lines[-20:]
            if any(codes):
                self.end()
                self.restarts += 1
                assert self.restarts < 5, self.lines[-20:]
                self._start()
            time.sleep(0.02)
        self.end()
        return {" ".join(line.split()[:-1]): line for line in self.found("step |weights ")}

    def starts(self) -> list[int]:
        """The steps that rank 0 began after, each time that it was started."""
        return [int(line.split()[1]) for line in self.found("from .* rank 0")]

    def end(self):
        for rank in self.ranks:
            rank.kill()
            rank.wait()
        for reader in self._readers:
            reader.join()


@pytest.fixture
def run(daemons, tmp_path):
    flags = [f"--snapshot_dir={tmp_path}", f"--snapshot_every_steps={EVERY}"]
    started = Launcher(daemons.start(1, 2, *flags)[0])
    yield started
    started.end()


@pytest.fixture(scope="module")
def undisturbed():
    from daemons import Daemons

    with Daemons() as group:
        return Launcher(group.start(1, 2)[0]).finish()


def test_all_ranks_start_again_at_the_snapshot_when_their_daemon_was_killed(
    run, daemons, undisturbed, tmp_path
):
    run.wait_for(f"step {2 * EVERY + 5} ")
    wait_for_snapshot(tmp_path)
    daemons.members[0].kill()
    daemons.members[0].start()
    assert run.finish() == undisturbed
    first, *again = run.starts()
    assert first == 0
    assert again
    assert all(step >= EVERY for step in again)


@pytest.mark.rest("test_all_ranks_start_again_at_the_snapshot_when_their_daemon_was_killed")
def test_all_ranks_start_again_at_the_same_step_when_one_was_killed(run, undisturbed):
    run.wait_for(f"step {2 * EVERY + 5} ")
    run.ranks[1].kill()
    got = run.finish()
    first, *again = run.starts()
    assert first == 0
    assert again
    # It may have been killed between a step's commit and its own line about it.
    silent = undisturbed.keys() - got.keys()
    assert silent <= {f"step {step} rank 1" for step in again}
    assert got == {key: line for key, line in undisturbed.items() if key not in silent}
    assert all(step >= 2 * EVERY + 4 for step in again)
