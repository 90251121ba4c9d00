"""A loop whose steps go to Weights & Biases, with the daemon's figures.

usage: dmuonctl run -- python log_wandb.py FOLDER STEPS (WANDB_MODE=offline: without their service)
Needs the package wandb.
"""

import argparse

import dmuond.torch
import wandb
from tiny_model import batch, loss_of, make_model


def main(folder: str, steps: int) -> None:
    model = make_model()
    opt = dmuond.torch.Muon(model, lr=1e-2, adamw_lr=1e-3, max_grad_norm=1.0, verbose=False)
    with wandb.init(project="dmuond", dir=folder, config={"explain": opt.explain()}) as run:
        for step in range(1, steps + 1):
            tokens = batch(step)
            loss = loss_of(model(tokens), tokens)
            loss.backward()
            opt.step()
            opt.zero_grad()
            run.log({"loss": loss.item(), **opt.metrics()}, step=step)
    opt.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("steps", type=int)
    main(**vars(parser.parse_args()))
