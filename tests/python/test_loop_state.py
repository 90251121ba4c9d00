"""LoopState: a loop goes on after kill -9 as if nothing had been."""

import os
import random
import subprocess
import sys
from pathlib import Path

import dmuond
import numpy as np
import pytest
import torch
from dmuond.torch import LoopState
from habits import STEPS, loss_of, make_model, weights

SCRIPT = Path(__file__).parent / "loop_trainer.py"
PATIENCE_S = 120.0


def lives(address: str, *deaths: str) -> dict[str, str]:
    """What the loop has said of each step in the end, and of the end."""
    output = subprocess.run(
        [sys.executable, str(SCRIPT), "12", *deaths],
        env=os.environ | {"DMUOND_ADDRESS": address, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        timeout=PATIENCE_S,
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
