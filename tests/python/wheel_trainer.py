"""Trains a matrix with the dmuond that is installed; prints where it lies, and the weights' bytes.

python wheel_trainer.py ADDRESS [save]
"""

import sys

import dmuond
from core_trainer import Job, Tensor, Trainer, whole

TENSORS = (Tensor("matrix", (24, 40)), Tensor("bias", (33,), route="adamw"))
JOB = Job(tensors=TENSORS, held=(tuple(whole(t) for t in TENSORS),))


def main(address: str, what: str = "") -> None:
    trainer = Trainer(0, 1, JOB, address=address, on_error="end")
    print(dmuond.__file__, dmuond.__version__, trainer.session.server)
    while trainer.session.last_committed_step < JOB.steps:
        trainer.step()
    if what == "save":
        print("saved at step", trainer.session.save_snapshot()[0])
    weights = trainer.held_weights()
    trainer.session.close()
    print(*(weight.tobytes().hex() for weight in weights))


if __name__ == "__main__":
    main(*sys.argv[1:])
