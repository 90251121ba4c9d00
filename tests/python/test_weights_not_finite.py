"""A run that diverges: weights that are no numbers end the job, and no snapshot keeps them."""

import os
import signal

import dmuond
import dmuond.torch
import pytest
import torch
from daemons import lane_pids, until
from dmuond import types
from torch import nn

NO_SCHEDULE = ("--snapshot_every_steps=0", "--snapshot_every=0")
SMALL, HUGE = 1e-3, 1e6  # learning rates; both are in their range


def make(address, **options):
    """Two parameters in fp16, one on each route, in groups of their own."""
    matrix = nn.Parameter(torch.full((4, 8), 0.5, dtype=torch.float16))
    vector = nn.Parameter(torch.full((8,), 0.5, dtype=torch.float16))
    optimizer = dmuond.torch.Muon(
        [("matrix", matrix), ("vector", vector)],
        lr=SMALL,
        adamw_lr=SMALL,
        address=address,
        route=lambda name, parameter: "muon" if name == "matrix" else "adamw",
        verbose=False,
        **options,
    )
    return optimizer, {"matrix": matrix, "vector": vector}


def step(optimizer, parameters):
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def is_finite(parameters):
    return {name: bool(p.detach().isfinite().all()) for name, p in parameters.items()}


@pytest.mark.parametrize("lane_dies", [False, True], ids=["", "new-lane"])
@pytest.mark.parametrize("name", ["matrix", "vector"])
def test_the_job_ends_before_the_next_step_and_goes_on_from_before(
    daemons, tmp_path, name, lane_dies
):
    (address,) = daemons.start(1, 1, f"--snapshot_dir={tmp_path}", *NO_SCHEDULE)
    optimizer, parameters = make(address)
    step(optimizer, parameters)
    assert optimizer.save_snapshot()[0] == 1
    for group in optimizer.param_groups:
        if group["params"][0] is parameters[name]:
            group["lr"] = HUGE
    step(optimizer, parameters)
    assert optimizer.last_outcome.kind == types.Outcome.KIND_COMMITTED
    other = {"matrix": "vector", "vector": "matrix"}[name]
    assert is_finite(parameters) == {name: False, other: True}

    with pytest.raises(dmuond.Error, match=f"parameter '{name}'") as caught:
        optimizer.save_snapshot()
    assert caught.value.reason == "WEIGHTS_NOT_FINITE"
    if lane_dies:
        daemon = daemons.members[0].process.pid
        (lane,) = lane_pids(daemon)
        os.kill(lane, signal.SIGKILL)
        until(lambda: f"{set(lane_pids(daemon)) - {lane}}", r"\d")  # a new one
    with pytest.raises(dmuond.FailedPreconditionError, match="after step 2") as caught:
        step(optimizer, parameters)
    assert caught.value.reason == "WEIGHTS_NOT_FINITE"
    assert (caught.value.metadata["parameter"], caught.value.metadata["step"]) == (name, "2")
    optimizer.close()

    again, parameters = make(address, resume=types.RESUME_REQUIRE)
    assert again.last_committed_step == 1
    step(again, parameters)
    assert again.last_committed_step == 2
    assert all(is_finite(parameters).values())
    again.close()
