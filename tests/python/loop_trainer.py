"""A loop that a LoopState carries, killed at given places; each life goes on where the last ended.

usage: loop_trainer.py STEPS [STEP:before|after ...] (a death in each life, around its opt.step())
"""

import os
import random
import signal
import sys

import dmuond.torch
import numpy as np
import torch
from habits import loss_of, make_model

OVERFLOWS = (5, 9)  # steps that a scaler must skip


def say(text: str) -> None:
    """In one write: the process is killed soon."""
    os.write(1, f"{text}\n".encode())


def main(steps: int, death: str) -> None:
    model = make_model()
    np.random.seed(1)
    random.seed(2)
    optimizer = dmuond.torch.Muon(model, lr=1e-2, adamw_lr=1e-3, verbose=False)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 1e-3], total_steps=steps + 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    generators = [torch.Generator(), np.random.default_rng(3), random.Random(4)]
    older = np.random.Generator(np.random.MT19937(5))

    def after_step() -> None:
        scaler.update()
        schedule.step()

    loop = dmuond.torch.LoopState(
        optimizer,
        after_step=after_step,
        schedule=schedule,
        scaler=scaler,
        torch=generators[0],
        numpy=generators[1],
        python=generators[2],
        older=older,
    )
    for step in loop.steps(steps):
        drawn = [torch.rand(()).item(), np.random.random(), random.random(), older.random()]
        drawn += [torch.rand((), generator=generators[0]).item()]
        drawn += [generator.random() for generator in generators[1:]]
        rates = [group["lr"] for group in optimizer.param_groups]
        betas = [group["betas"] for group in optimizer.param_groups]
        loss = loss_of(model, step) * (1 + drawn[0])
        say(f"step {step} {loss.item()!r} {rates} {betas} {scaler.get_scale()} {drawn}")
        scaler.scale(loss).backward()
        if step in OVERFLOWS:
            model.up.weight.grad.fill_(float("inf"))
        if death == f"{step}:before":
            os.kill(os.getpid(), signal.SIGKILL)
        scaler.step(optimizer)
        if death == f"{step}:after":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
    say(f"end {optimizer.last_committed_step} {[p.sum().item() for p in model.parameters()]}")
    optimizer.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    for number, death in enumerate([*sys.argv[2:], ""]):
        child = os.fork()  # torch is imported once
        if child == 0:
            os.environ["DMUOND_RESUME"] = str(int(number > 0))
            main(int(sys.argv[1]), death)
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        ended = os.waitstatus_to_exitcode(status)
        if ended != (-signal.SIGKILL if death else 0):
            sys.exit(f"life {number} ended with {ended}")
