"""A PyTorch trainer that dies is replaced, and the run is the one that nothing disturbed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

STEPS = 40
PATIENCE_S = 120.0
TRAINER = Path(__file__).parents[2] / "client/python/examples/survivor.py"


def start(address: str, rank: int, resume: bool = False) -> subprocess.Popen:
    environment = os.environ | {
        "DMUOND_ADDRESS": address,
        "RANK": str(rank),
        "WORLD_SIZE": "2",
        "DMUOND_RESUME": str(int(resume)),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, str(TRAINER), str(STEPS)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )


def finished(trainer: subprocess.Popen) -> list[str]:
    output, _ = trainer.communicate(timeout=PATIENCE_S)
    assert trainer.returncode == 0
    return output.splitlines()


def read_until_step(trainer: subprocess.Popen, step: int) -> list[str]:
    lines = []
    while not lines or int(lines[-1].split()[1]) < step:
        lines.append(trainer.stdout.readline().rstrip("\n"))
        assert lines[-1].startswith("step "), lines
    return lines


def test_a_killed_trainer_is_replaced_and_the_run_stays_the_same(daemons):
    addresses = daemons.start(2, 1)
    undisturbed = [start(addresses[rank], rank) for rank in range(2)]
    expected = [finished(trainer) for trainer in undisturbed]
    assert expected[0][-1] == expected[1][-1]  # the same weights everywhere

    trainers = [start(addresses[rank], rank) for rank in range(2)]
    before = read_until_step(trainers[1], 10)
    trainers[1].send_signal(signal.SIGKILL)
    trainers[1].communicate()
    after = finished(start(addresses[1], 1, resume=True))
    assert finished(trainers[0]) == expected[0]
    assert before == expected[1][: len(before)]
    assert after == expected[1][-len(after) :]
    assert len(before) + len(after) > STEPS - 5  # a few may have gone unheard
