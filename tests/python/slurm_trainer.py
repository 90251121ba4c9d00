"""A rank that trains to a step, from wherever its daemon is: python slurm_trainer.py STEPS FOLDER.

Says each step in FOLDER/rank-N; in the end the weights' bytes are in FOLDER/weights-N.
"""

import os
import sys
from pathlib import Path

from core_trainer import Job, Tensor, Trainer, whole

TENSORS = (Tensor("matrix", (24, 40)), Tensor("bias", (33,), route="adamw"))
WORLD = 2


def job(steps: int, name: str) -> Job:
    return Job(TENSORS, (tuple(whole(t) for t in TENSORS),) * WORLD, steps, name=name)


def main(steps: int, folder: Path) -> None:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with (folder / f"rank-{rank}").open("a", buffering=1) as said:
        trainer = Trainer(rank, world, job(steps, os.environ["DMUOND_JOB"]))
        said.write(f"begins after {trainer.session.last_committed_step}\n")
        while trainer.session.last_committed_step < steps:
            trainer.step()
            said.write(f"step {trainer.session.last_committed_step}\n")
        weights = b"".join(weight.tobytes() for weight in trainer.held_weights())
        (folder / f"weights-{rank}").write_bytes(weights)
        trainer.session.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
