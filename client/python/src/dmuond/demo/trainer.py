"""One trainer of the demo, as a process: python -m dmuond.demo.trainer. Reports JSON lines.

With --optimizer=muon the ranks of RANK and WORLD_SIZE share each batch and dmuond averages their
gradients; --optimizer=adamw is torch's own, in one process, on the same batches.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from typing import Any

import torch

from dmuond.demo import model as models
from dmuond.demo import text

BATCH = 8  # of all trainers together
EVALUATED_BATCHES = 8
EVALUATE_EVERY = 20
WARMUP = 10
SEED = 1234


def report(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def schedule(step: int, steps: int) -> float:
    """Factor of the learning rate: linear warm-up, then a cosine down to a tenth."""
    if step < WARMUP:
        return (step + 1) / WARMUP
    along = (step - WARMUP) / max(1, steps - WARMUP)
    return 0.1 + 0.45 * (1 + math.cos(math.pi * along))


@torch.no_grad()
def evaluate(model: torch.nn.Module, validation: torch.Tensor) -> float:
    losses = [
        models.loss_of(model, text.batch(validation, 10_000_000 + k, BATCH, models.LENGTH)).item()
        for k in range(EVALUATED_BATCHES)
    ]
    return sum(losses) / len(losses)


def make_optimizer(arguments: argparse.Namespace, model: torch.nn.Module) -> torch.optim.Optimizer:
    if arguments.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), arguments.adamw_lr, (0.9, 0.95))
    import dmuond.torch

    optimizer = dmuond.torch.Muon(
        model,
        arguments.lr,
        adamw_lr=arguments.adamw_lr,
        betas=(0.9, 0.95),
        weight_decay=0.01,
        views={"blocks.*.qkv.weight": "qkv"},
        verbose=False,
    )
    owners = [owner for row in optimizer.routing for owner in row.owners]
    report(
        event="registered",
        table=optimizer.routing_table(),
        lanes=len(set(owners)),
        imbalance=optimizer.registered.imbalance,
        makespan_us=optimizer.registered.makespan_us,
        lower_bound_us=optimizer.registered.lower_bound_us,
    )
    return optimizer


def train(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    alone = arguments.optimizer == "adamw"
    rank = 0 if alone else int(os.environ.get("RANK", "0"))
    world = 1 if alone else int(os.environ.get("WORLD_SIZE", "1"))
    training, validation = text.load()
    model = models.Transformer(SEED)
    report(
        event="model",
        parameters=sum(p.numel() for p in model.parameters()),
        training_bytes=training.numel(),
    )
    optimizer = make_optimizer(arguments, model)
    rates = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: schedule(step, arguments.steps)
    )
    course = Course(arguments, optimizer, rates, model, (training, validation), rank, world)
    begin = time.perf_counter()
    if alone:
        course.run(0)
    else:
        follow(course, optimizer)
    seconds = time.perf_counter() - begin - course.evaluating_s
    report(event="end", steps_per_second=arguments.steps / seconds)
    if not alone:
        optimizer.close()


def follow(course: Course, optimizer: Any) -> None:
    """From wherever the daemon is, and again from wherever a daemon's death sets it back to."""
    import dmuond

    beginning = course.remember()
    while optimizer.last_committed_step < course.steps:
        course.recall(optimizer.trainer_state or beginning)
        try:
            course.run(optimizer.last_committed_step)
        except dmuond.RolledBack as back:
            report(event="rolled_back", to_step=back.to_step)


class Course:
    """The training loop, and what it needs besides the optimizer's state to begin anywhere."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        optimizer: Any,
        rates: torch.optim.lr_scheduler.LambdaLR,
        model: torch.nn.Module,
        texts: tuple[torch.Tensor, torch.Tensor],
        rank: int,
        world: int,
    ) -> None:
        self.steps = arguments.steps
        self.evaluating_s = 0.0
        self._alone = arguments.optimizer == "adamw"
        self._optimizer, self._rates, self._model = optimizer, rates, model
        self._training, self._validation = texts
        self._rank = rank
        self._share = slice(rank * BATCH // world, (rank + 1) * BATCH // world)

    def remember(self) -> bytes:
        # Batches are a function of the step's number; learning rates are what else moves.
        rates = [group["lr"] for group in self._optimizer.param_groups]
        return json.dumps([rates, self._rates.last_epoch]).encode()

    def recall(self, state: bytes) -> None:
        rates, self._rates.last_epoch = json.loads(state)
        for group, rate in zip(self._optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        if self._rates.last_epoch < self._optimizer.last_committed_step:
            self._rates.step()  # as the loop does after the step that is remembered

    def run(self, done: int) -> None:
        for step in range(done, self.steps):
            tokens = text.batch(self._training, step, BATCH, models.LENGTH)[self._share]
            began_s = time.monotonic()  # on the clock of all processes of this machine
            started = time.perf_counter()
            loss = models.loss_of(self._model, tokens)
            loss.backward()
            computed = time.perf_counter()
            if not self._alone:
                self._optimizer.trainer_state = self.remember()
            self._optimizer.step()
            self._optimizer.zero_grad()
            stepped = time.perf_counter()
            self._rates.step()
            event: dict[str, Any] = {
                "step": step + 1,
                "loss": loss.item(),
                "forward_backward_us": (computed - started) * 1e6,
                "step_us": (stepped - computed) * 1e6,
                "began_s": began_s,
                "ended_s": began_s + stepped - started,
            }
            if not self._alone:
                event |= self._measured()
            if self._rank == 0 and ((step + 1) % EVALUATE_EVERY == 0 or step + 1 == self.steps):
                paused = time.perf_counter()
                event["validation_loss"] = evaluate(self._model, self._validation)
                self.evaluating_s += time.perf_counter() - paused
            report(event="step", **event)

    def _measured(self) -> dict[str, Any]:
        metrics = self._optimizer.metrics()
        phases = ("collect", "decide", "update", "publish", "quiet")
        return {
            "phases_us": {phase: metrics[f"{phase}_us"] for phase in phases},
            "matrices": int(metrics["matrices"]),
            "gradient_norm": metrics["gradient_norm"],
            "durable_step": self._optimizer.durable_step,
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--optimizer", choices=["muon", "adamw"], required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, default=0.0)
    parser.add_argument("--adamw_lr", type=float, required=True)
    train(parser.parse_args())


if __name__ == "__main__":
    sys.exit(main())
