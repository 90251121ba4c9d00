"""A rank that may stand before its fourth step, until a line comes.

With --scribbles it then writes into its arenas, as a long backward pass does, and asks its daemon
for nothing until a second line comes. Prints each step with a digest of the weights, and its end.
"""

import hashlib
import os
import select
import sys

import dmuond
import numpy as np
from core_trainer import Job, Tensor, Trainer, whole

TENSORS = (Tensor("matrix", (96, 64)), Tensor("bias", (64,), route="adamw"))
JOB = Job(TENSORS, (tuple(map(whole, TENSORS)),) * 2, steps=8)
STANDS_BEFORE = 4


def scribble(trainer: Trainer) -> None:
    print("scribbles", flush=True)
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        for fragment in trainer.gradients + trainer.weights:
            fragment[...] = np.float32(7)
    sys.stdin.readline()


def run(trainer: Trainer) -> None:
    while trainer.session.last_committed_step < JOB.steps:
        if trainer.session.last_committed_step == STANDS_BEFORE - 1 and len(sys.argv) > 1:
            print("stands", flush=True)
            sys.stdin.readline()
            if "--scribbles" in sys.argv:
                scribble(trainer)
        trainer.step()
        digest = hashlib.sha256(b"".join(weight.tobytes() for weight in trainer.held_weights()))
        print(f"step {trainer.session.last_committed_step} {digest.hexdigest()[:16]}", flush=True)
    trainer.session.close()


if __name__ == "__main__":
    try:
        run(Trainer(int(os.environ["RANK"]), 2, JOB))
    except dmuond.Error as error:
        print(f"ended {error.reason or type(error).__name__}: {error}", flush=True)
        os._exit(1)  # as a trainer that dies
