"""LoopState: a loop goes on after kill -9 as if nothing had been."""

import contextlib
import os
import random
import subprocess
import sys
from pathlib import Path

import dmuond
import numpy as np
import pytest
import torch
from daemons import HANGS_AFTER_S
from dmuond.torch import LoopState
from habits import ADAMW_LR, LR, STEPS, loss_of, make_model, make_optimizer, weights
from torch.optim import lr_scheduler

SCRIPT = Path(__file__).parent / "loop_trainer.py"


def lives(address: str, *deaths: str) -> dict[str, str]:
    """What the loop has said of each step in the end, and of the end."""
    output = subprocess.run(
        [sys.executable, str(SCRIPT), "12", *deaths],
        env=os.environ | {"DMUOND_ADDRESS": address, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=HANGS_AFTER_S,
        text=True,
        check=True,
    ).stdout
    return {" ".join(line.split()[:2]): line for line in output.splitlines()}


def test_losses_rates_scale_and_random_numbers_are_those_of_the_undisturbed_run(daemons):
    (address,) = daemons.start(1, 1)
    undisturbed = lives(address)
    assert len(undisturbed) == 13
    # Before and after a step, after one that was skipped, and at the last.
    deaths = ("1:before", "4:after", "5:after", "6:before", "12:after")
    assert lives(address, *deaths) == undisturbed


# One of each of torch's schedulers, over an optimizer with two learning rates.
SCHEDULES = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 7),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 2), lr_scheduler.ExponentialLR(o, 0.9)], o
    ),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, [LR / 9, ADAMW_LR / 9], [LR, ADAMW_LR], 3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [LR, ADAMW_LR], total_steps=9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 7),
}
WITHOUT_LOOP = {"LRScheduler"}  # what the others are made of


def train_with_schedule(model, optimizer, name, carried):
    """The options of all groups in each step."""
    schedule = SCHEDULES[name](optimizer)
    steps, seen = range(1, STEPS + 1), []

    def after_step():
        schedule.step(*([1.0] if name == "ReduceLROnPlateau" else []))

    if carried:
        steps = LoopState(optimizer, schedule=schedule, after_step=after_step).steps(STEPS)
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append([(g["lr"], g["momentum"], g["betas"]) for g in optimizer.param_groups])
        if not carried:
            after_step()
    return seen


def test_a_loop_that_is_carried_is_the_plain_loop_under_every_schedule(address):
    assert SCHEDULES.keys() | WITHOUT_LOOP == set(lr_scheduler.__all__)
    for name in SCHEDULES:
        ends = []
        for carried in (False, True):
            model = make_model()
            with contextlib.closing(make_optimizer(model, address=address)) as optimizer:
                seen = train_with_schedule(model, optimizer, name, carried)
            ends.append((seen, {n: w.numpy().tobytes() for n, w in weights(model).items()}))
        assert ends[0] == ends[1], name


def test_each_group_goes_on_with_the_options_of_its_parameters(address):
    """Whatever the order of the patterns that make the groups."""
    patterns = {"up.weight": {"lr": 0.5}, "down.weight": {"lr": 0.25, "weight_decay": 0.0}}
    turned = dict(reversed(patterns.items()))
    model, carried = make_model(), b""
    for groups in (patterns, turned, {"[ud]*[pn].weight": {}, "wide.weight": {}}):
        with contextlib.closing(make_optimizer(model, address=address, groups=groups)) as optimizer:
            loop = LoopState(optimizer)
            if not carried:
                loss_of(model, 0).backward()
                optimizer.step()
                carried = optimizer.trainer_state
                continue
            for group in optimizer.param_groups:
                group["lr"] = 77.0
            optimizer.trainer_state = carried
            if groups is turned:
                loop.restore()
                found = {name: g for g in optimizer.param_groups for name in g["param_names"]}
                assert [found[name]["lr"] for name in patterns] == [0.5, 0.25]
                assert [found[name]["weight_decay"] for name in patterns] == [0.1, 0.0]
                continue
            with pytest.raises(dmuond.InvalidArgumentError, match="groups 0 and 1, whose options"):
                loop.restore()


class Counter:
    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_the_loop_begins_again_where_the_job_has_gone_back_to_its_beginning(muon):
    """As after a rollback to before the first step, where nothing is carried yet."""
    optimizer = muon(make_model())
    counter = Counter()
    loop = LoopState(optimizer, counter=counter)
    torch.manual_seed(7)
    random.seed(7)
    np.random.seed(7)
    counter.count = 5
    loop.restore()
    assert counter.count == 0
    assert torch.initial_seed() != 7


def test_what_follows_a_step_runs_once_for_each_and_not_without_one(muon):
    model = make_model()
    optimizer = muon(model)
    seen = []
    loop = LoopState(optimizer, after_step=lambda: seen.append(optimizer.last_committed_step))
    for number, step in enumerate(loop.steps(STEPS)):
        loss_of(model, step).backward()
        if number % 2:  # the gradients of two iterations add up
            optimizer.step()
            optimizer.zero_grad()
    assert seen == list(range(1, STEPS + 1))


def test_a_replayed_step_is_followed_by_the_same_as_before(muon):
    """restore() after a step gives what the loop had after it."""
    model = make_model()
    optimizer = muon(model)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    loop = LoopState(optimizer, schedule=schedule, after_step=schedule.step)
    for step in loop.steps(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.rand(3)
    rates, epoch = [g["lr"] for g in optimizer.param_groups], schedule.last_epoch
    before = weights(model)
    for group in optimizer.param_groups:
        group["lr"] = 77.0
    schedule.last_epoch = 99
    loop.restore()
    assert ([g["lr"] for g in optimizer.param_groups], schedule.last_epoch) == (rates, epoch)
    assert all(torch.equal(before[name], w) for name, w in weights(model).items())


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (3, "position= is of type int, which has no state_dict"),
        (type("Odd", (Counter,), {"state_dict": lambda self: {"x": self}})(), "cannot be carried"),
        (type("Big", (Counter,), {"state_dict": lambda self: b"x" * (1 << 21)})(), "1 MiB"),
    ],
)
def test_a_part_that_cannot_be_carried_is_refused_at_once(muon, part, words):
    optimizer = muon(make_model())
    with pytest.raises(dmuond.InvalidArgumentError, match=words):
        LoopState(optimizer, position=part)
    assert optimizer.trainer_state == b""


def test_other_parts_than_those_that_were_carried_are_named(muon):
    model = make_model()
    optimizer = muon(model)
    LoopState(optimizer, first=Counter())
    loss_of(model, 0).backward()
    optimizer.step()
    with pytest.raises(dmuond.Error, match="different parts: first, second"):
        LoopState(optimizer, second=Counter()).restore()


def test_a_function_as_trainer_state_is_asked_in_each_step_after_the_closure(muon):
    model = make_model()
    optimizer = muon(model)
    calls = []
    optimizer.trainer_state = lambda: b"after %d" % len(calls)

    def closure():
        calls.append(1)
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss

    for number in (1, 2):
        optimizer.step(closure)
        assert optimizer.trainer_state == b"after %d" % number
    optimizer.trainer_state = b"mine"
    optimizer.step(closure)
    assert optimizer.trainer_state == b"mine"
