"""A PyTorch trainer that dies is replaced, and the run is the one that nothing disturbed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from daemons import HANGS_AFTER_S

STEPS = 40
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
    output, _ = trainer.communicate(timeout=HANGS_AFTER_S)
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


def workers_of(launcher: subprocess.Popen) -> list[int]:
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    commands = {int(pid): Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children}
    return [pid for pid, command in commands.items() if TRAINER.name.encode() in command]


def test_torchrun_starts_all_ranks_again_where_their_job_stands(daemons, tmp_path):
    address, *_ = daemons.start(1, 2)
    undisturbed = [start(address, rank) for rank in range(2)]
    expected = [finished(trainer) for trainer in undisturbed]

    def lines(attempt: int, rank: int) -> list[str]:
        logs = list(tmp_path.glob(f"*/attempt_{attempt}/{rank}/stdout.log"))
        return logs[0].read_text().splitlines() if logs else []

    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    with subprocess.Popen(
        [sys.executable, "-m", *torchrun, f"--log-dir={tmp_path}", "--redirects=1"]
        + [str(TRAINER), str(STEPS)],
        env=os.environ | {"DMUOND_ADDRESS": address, "OMP_NUM_THREADS": "1"},
    ) as launcher:
        try:
            deadline = time.monotonic() + HANGS_AFTER_S
            while len(lines(0, 1)) < 10:
                assert launcher.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.001)
            workers = workers_of(launcher)
            assert len(workers) == 2
            os.kill(workers[1], signal.SIGKILL)
            assert launcher.wait(HANGS_AFTER_S) == 0
        finally:
            launcher.kill()
    for rank in range(2):
        before, after = lines(0, rank), lines(1, rank)
        # The last line may have been cut short, and of a step or two nobody has heard.
        assert before[:-1] == expected[rank][: len(before) - 1]
        assert after == expected[rank][-len(after) :]
        assert len(before) + len(after) > STEPS - 5
        assert len(after) < STEPS
