"""A training script that survives: its own death, a lane's, a daemon's, and being set back.

usage: dmuonctl run -- python survivor.py STEPS (with RANK and WORLD_SIZE, as torchrun sets them).
Whatever the run needs to go on from a step travels with that step.
"""

import argparse
import hashlib

import dmuond.torch
import torch
from torch import nn

ROWS, BATCH, WIDTH = 512, 16, 32


def batch(data: torch.Tensor, step: int, rank: int, world: int) -> torch.Tensor:
    """The rows of this rank for a step, from 1: a new order of them in every epoch."""
    per_epoch = ROWS // (BATCH * world)
    epoch, at = divmod(step - 1, per_epoch)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(epoch))
    return data[order[(at * world + rank) * BATCH :][:BATCH]]


def main(steps: int) -> None:
    torch.manual_seed(0)
    data = torch.randn(ROWS, WIDTH)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, WIDTH))
    # With DMUOND_RESUME=1 (or after torchrun's restart) it takes a dead trainer's place.
    opt = dmuond.torch.Muon(model, lr=1e-2, adamw_lr=1e-3, verbose=False)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=steps)
    rank, world = opt.session.rank, opt.session.world_size
    torch.manual_seed(rank)  # from here on random numbers are dropout's

    loop = dmuond.torch.LoopState(opt, schedule=schedule, after_step=schedule.step)
    while opt.last_committed_step < steps:
        try:
            for step in loop.steps(steps):
                rows = batch(data, step, rank, world)
                loss = (model(rows) - rows).square().mean()
                loss.backward()
                opt.step()
                opt.zero_grad()
                print("step", step, loss.item(), flush=True)
        except dmuond.RolledBack as back:
            print("back to", back.to_step, flush=True)

    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
    opt.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("steps", type=int)
    main(**vars(parser.parse_args()))
