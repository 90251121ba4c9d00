"""Trains a matrix with the dmuond that is installed; prints where it lies, and the weights' bytes.

python wheel_trainer.py ADDRESS
"""

import sys

import core_trainer
import dmuond
from core_trainer import Job, Tensor, Trainer, whole

TENSORS = (Tensor("matrix", (24, 40)), Tensor("bias", (33,), route="adamw"))
JOB = Job(tensors=TENSORS, held=(tuple(whole(t) for t in TENSORS),))


def main(address: str) -> None:
    trainer = Trainer(0, 1, JOB, address=address, on_error="end")
    print(dmuond.__file__, dmuond.__version__, trainer.session.server)
    weights, _, _ = core_trainer.run(trainer)
    print(*(weight.tobytes().hex() for weight in weights))


if __name__ == "__main__":
    main(sys.argv[1])
