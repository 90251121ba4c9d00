"""A script under FSDP2 that lets its launcher start it again: its ranks share a process group.

usage: torchrun --nproc-per-node=2 --max-restarts=3 fsdp_survivor.py STEPS
"""

import datetime
import hashlib
import os
import sys

import dmuond.torch
import torch
from fsdp_trainer import full_weights, sharded_model
from habits import loss_of
from torch import distributed as dist

TIMEOUT_S = 20


def say(text: str) -> None:
    """In one write: a rank may be killed at any time."""
    os.write(1, f"{text}\n".encode())


def main(steps: int) -> None:
    # Ranks that wait for one that is gone end, too.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=TIMEOUT_S))
    rank, world = dist.get_rank(), dist.get_world_size()
    model = sharded_model(world)
    optimizer = dmuond.torch.Muon(model, lr=1e-2, adamw_lr=1e-3, verbose=False)
    say(f"from {optimizer.last_committed_step} rank {rank}")
    for step in range(optimizer.last_committed_step + 1, steps + 1):
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say(f"step {step} rank {rank} {loss.item()!r}")
    whole = full_weights(model)
    optimizer.close()
    digest = hashlib.sha256(b"".join(w.numpy().tobytes() for w in whole.values())).hexdigest()
    say(f"weights rank {rank} {digest}")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]))
