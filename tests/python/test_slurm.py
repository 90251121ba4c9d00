"""deploy/slurm/train.sbatch on this machine, with stubs of srun and scontrol: 2 nodes of a rank."""

import os
import random
import re
import signal
import subprocess
import sys
from pathlib import Path

import core_trainer
import pytest
import slurm_trainer
from daemons import HANGS_AFTER_S, program, until

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy/slurm/train.sbatch"
STUBS = ROOT / "tests/deploy/slurm"


@pytest.fixture
def submit(tmp_path):
    """Starts the script with a command as slurmstepd does, for some life of the job."""
    started = []
    number = random.randrange(10_000, 1_000_000)  # ports and sockets are made of it

    def submit(*command: str, life: int = 0, **settings: str) -> subprocess.Popen[str]:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("DMUOND_")}
        environment |= {
            "PATH": os.pathsep.join(
                map(str, (STUBS, program("dmuond").parent, os.environ["PATH"]))
            ),
            "SLURM_JOB_ID": str(number),
            "SLURM_JOB_NODELIST": "node[0-1]",
            "SLURM_JOB_NUM_NODES": "2",
            "SLURM_NTASKS": "2",
            "SLURM_RESTART_COUNT": str(life),
            "STATE": str(tmp_path / "state"),
            "DAEMON_ARGS": "--threads=1",
            **settings,
        }
        started.append(
            subprocess.Popen(
                ["bash", SCRIPT, *command],
                env=environment,
                text=True,
                stdout=(tmp_path / "output").open("a"),
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        )
        return started[-1]

    yield submit
    print((tmp_path / "output").read_text())
    for process in started:
        if process.poll() is None:
            for task in descendants(process.pid):
                os.kill(task, signal.SIGKILL)
            process.kill()


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for child in map(int, children) for each in (*descendants(child), child)]


def training(steps: int, folder: Path) -> list[str]:
    return [sys.executable, slurm_trainer.__file__, str(steps), str(folder)]


def ended(process: subprocess.Popen[str]) -> None:
    assert process.wait(HANGS_AFTER_S) == 0


def said(folder: Path, rank: int) -> str:
    file = folder / f"rank-{rank}"
    return file.read_text() if file.exists() else ""


def test_a_job_that_is_signalled_saves_and_goes_on_where_it_was_when_it_is_requeued(
    submit, tmp_path, address, ranks
):
    first = submit(*training(1_000_000, tmp_path))
    until(lambda: said(tmp_path, 0), "step 5\n")
    os.kill(first.pid, signal.SIGUSR1)
    ended(first)
    assert (tmp_path / "state/requeued").exists()
    reached = max(
        int(step) for rank in (0, 1) for step in re.findall(r"step (\d+)\n", said(tmp_path, rank))
    )

    steps = reached + 6
    ended(submit(*training(steps, tmp_path), life=1))
    for rank in (0, 1):
        (again,) = re.findall(r"begins after (\d+)\n", said(tmp_path, rank))[1:]
        assert int(again) >= reached  # a rank may not have said its last step
    undisturbed = ranks.run(core_trainer.train, 2, [address], slurm_trainer.job(steps, "whole"))
    for rank, (weights, _, _) in enumerate(undisturbed):
        whole = b"".join(weight.tobytes() for weight in weights)
        assert (tmp_path / f"weights-{rank}").read_bytes() == whole


def test_a_command_that_fails_time_and_again_gives_the_job_its_status(submit, tmp_path):
    """Rank 0 alone, when the other has ended: srun says the largest status of all."""
    script = """cd "$0"
    if [ "$RANK" = 1 ]; then touch ended; exit; fi
    until [ -e ended ]; do sleep 0.1; done
    echo >> tries
    exit 7"""
    assert submit("sh", "-c", script, str(tmp_path), RESTARTS="1").wait(HANGS_AFTER_S) == 7
    assert (tmp_path / "tries").read_text() == "\n\n"


def test_a_script_without_a_command_is_refused():
    done = subprocess.run(["bash", SCRIPT], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no command to run" in done.stderr
