"""A training script that survives: its own death, a lane's, a daemon's, and being set back.

usage: dmuonctl run -- python survivor.py STEPS (with RANK and WORLD_SIZE, as torchrun sets them).
Whatever the run needs to go on from a step travels with that step, as opt.trainer_state.
"""

import hashlib
import io
import sys

import dmuond.torch
import torch
from torch import nn

ROWS, BATCH, WIDTH = 512, 16, 32


def batch(data: torch.Tensor, position: int, rank: int, world: int) -> torch.Tensor:
    """The position-th batch of this rank: a new order of the rows in every epoch."""
    per_epoch = ROWS // (BATCH * world)
    epoch, at = divmod(position, per_epoch)
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
    position = 0

    def remember() -> bytes:
        rates = [group["lr"] for group in opt.param_groups]
        parts = (position, torch.get_rng_state(), rates, schedule.state_dict())
        torch.save(parts, buffer := io.BytesIO())
        return buffer.getvalue()

    def recall(state: bytes) -> None:
        nonlocal position
        position, random_state, rates, schedule_state = torch.load(io.BytesIO(state))
        torch.set_rng_state(random_state)
        for group, rate in zip(opt.param_groups, rates, strict=True):
            group["lr"] = rate
        schedule.load_state_dict(schedule_state)

    beginning = remember()
    while opt.last_committed_step < steps:
        try:
            recall(opt.trainer_state or beginning)
            if opt.trainer_state:
                schedule.step()  # what the loop does after the step that is remembered
            for step in range(opt.last_committed_step + 1, steps + 1):
                rows = batch(data, position, rank, world)
                loss = (model(rows) - rows).square().mean()
                loss.backward()
                position += 1
                opt.trainer_state = remember()
                opt.step()
                schedule.step()
                opt.zero_grad()
                print("step", step, loss.item(), flush=True)
        except dmuond.RolledBack as back:
            print("back to", back.to_step, flush=True)
    weights = b"".join(parameter.detach().numpy().tobytes() for parameter in model.parameters())
    print("weights", hashlib.sha256(weights).hexdigest(), flush=True)
    opt.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
