"""A loop whose steps go to tensorboard, with the daemon's figures.

usage: dmuonctl run -- python log_tensorboard.py FOLDER STEPS (then tensorboard --logdir FOLDER)
Needs the package tensorboard.
"""

import argparse

import dmuond.torch
from tiny_model import batch, loss_of, make_model
from torch.utils.tensorboard import SummaryWriter


def main(folder: str, steps: int) -> None:
    model = make_model()
    opt = dmuond.torch.Muon(model, lr=1e-2, adamw_lr=1e-3, max_grad_norm=1.0, verbose=False)
    with SummaryWriter(folder) as writer:
        writer.add_text("dmuond", opt.explain())
        for step in range(1, steps + 1):
            tokens = batch(step)
            loss = loss_of(model(tokens), tokens)
            loss.backward()
            opt.step()
            opt.zero_grad()
            writer.add_scalar("loss", loss.item(), step)
            for name, value in opt.metrics().items():
                writer.add_scalar(f"dmuond/{name}", value, step)
    opt.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("steps", type=int)
    main(**vars(parser.parse_args()))
