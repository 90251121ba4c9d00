"""A loop whose batch is the same however many ranks share it, for torchrun.

usage: world_trainer.py FILE STEPS [FATAL_STEP]
The last rank kills itself in FATAL_STEP. At the end rank 0 writes what it has into FILE.
"""

import os
import signal
import sys

import dmuond.torch
import torch
from torch import nn

ROWS, WIDTH = 12, 16  # rows of all ranks


def main(file: str, steps: int, fatal_step: int = 0) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))
    options = {"ns_dtype": "float32", "route": [("*.weight", "muon")], "verbose": False}
    opt = dmuond.torch.Muon(model, lr=1e-2, adamw_lr=1e-3, **options)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, total_iters=steps)
    loop = dmuond.torch.LoopState(opt, schedule=schedule, after_step=schedule.step)
    rank, world = opt.session.rank, opt.session.world_size
    first = opt.last_committed_step + 1
    for step in loop.steps(steps):
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))[rank::world]
        (model(rows) - rows).square().mean().backward()
        if step == fatal_step and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        opt.step()
        opt.zero_grad()
    found = {"first": first, "weights": model.state_dict(), "optimizer": opt.state_dict()}
    if rank == 0:
        torch.save(found, file)
    opt.close()


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
