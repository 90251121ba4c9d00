"""Accelerate: prepare, accumulate, save_state, load_state; on several ranks its DDP as well.

usage: dmuonctl run -- python accelerate_loop.py FOLDER FIRST LAST (or under accelerate launch)
Needs the package accelerate. It makes the steps FIRST to LAST; after the first it goes on from
FOLDER, and it leaves its state there.
"""

import argparse

import dmuond.torch
import torch
from accelerate import Accelerator
from tiny_model import batch, digest, loss_of, make_model

PARTS = 2  # backward passes in a step


def main(folder: str, first: int, last: int) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=PARTS)
    model = make_model()
    # The optimizer takes the plain model: prepare() wraps it in DistributedDataParallel.
    opt = dmuond.torch.Muon(model, lr=1e-2, adamw_lr=1e-3, max_grad_norm=1.0, verbose=False)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, total_iters=20 * accelerator.num_processes)
    wrapped, prepared, schedule = accelerator.prepare(model, opt, schedule)
    if first > 1:
        accelerator.load_state(folder)
    for step in range(first, last + 1):
        for part in range(PARTS):
            with accelerator.accumulate(wrapped):
                tokens = batch(PARTS * step + part, accelerator.process_index)
                loss = loss_of(wrapped(tokens), tokens)
                accelerator.backward(loss)
                prepared.step()
                schedule.step()
                prepared.zero_grad()
        accelerator.print("step", step, loss.item(), schedule.get_last_lr()[0], flush=True)
    accelerator.save_state(folder)
    accelerator.print("weights", digest(model), flush=True)
    opt.close()
    accelerator.end_training()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("first", type=int)
    parser.add_argument("last", type=int)
    main(**vars(parser.parse_args()))
