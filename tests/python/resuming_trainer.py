"""A training script that survives: what it needs to go on comes back from the daemon.

usage: resuming_trainer.py STEPS. See test_replacement.py and docs/python.md.
"""

import hashlib
import sys

import dmuond.torch
import torch


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 32, generator=generator)


def main(steps: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
    opt = dmuond.torch.Muon(model, lr=1e-2, adamw_lr=1e-3, verbose=False)
    if opt.trainer_state:
        assert int(opt.trainer_state) == opt.last_committed_step
    rank = opt.session.rank
    for step in range(opt.last_committed_step + 1, steps + 1):
        data = batch(step, rank)
        loss = (model(data) - data).square().mean()
        loss.backward()
        opt.trainer_state = str(step).encode()
        opt.step()
        opt.zero_grad()
        print("step", step, loss.item(), flush=True)
    weights = hashlib.sha256()
    for parameter in model.parameters():
        weights.update(parameter.detach().numpy().tobytes())
    print("weights", weights.hexdigest(), flush=True)
    opt.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
