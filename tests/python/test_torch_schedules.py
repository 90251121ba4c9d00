"""Torch's schedulers over groups of which one is on Muon and one on AdamW."""

import pytest
import torch
from dmuond import InvalidArgumentError
from dmuond.torch.schedules import Schedules
from habits import ADAMW_LR, LR, loss_of, make_model, make_optimizer, weights
from torch.optim import lr_scheduler, swa_utils

RATES = [LR, ADAMW_LR]


class Groups(torch.optim.Optimizer):
    """What a scheduler sees of dmuond.torch.Muon; no daemon."""

    def __init__(self, rates=RATES):
        options = {"momentum": 0.95, "betas": (0.9, 0.98)}
        groups = [
            {"params": [torch.zeros(2)], "route": route, "lr": rate, **options}
            for route, rate in zip(("muon", "adamw"), rates, strict=True)
        ]
        super().__init__(groups, {"lr": LR, "momentum": 0.95})
        self.schedules = Schedules(self.param_groups)

    def step(self, closure=None):
        self.schedules.check(self.param_groups)
        self.schedules.apply(self.param_groups)


def one_cycle(optimizer, rate, **options):
    return lr_scheduler.OneCycleLR(optimizer, rate, total_steps=9, **options)


def cyclic(optimizer, rate, **options):
    scaled = lambda by: [by * r for r in rate] if isinstance(rate, list) else by * rate  # noqa: E731
    return lr_scheduler.CyclicLR(optimizer, scaled(0.1), rate, step_size_up=3, **options)


def averaging(optimizer, rate):
    return swa_utils.SWALR(optimizer, rate)


@pytest.mark.parametrize("make", [one_cycle, cyclic])
def test_muons_momentum_is_cycled_and_beta1_of_adamw_as_over_torchs_own_optimizers(make):
    both = Groups()
    parts = [
        torch.optim.Muon([torch.zeros(2, 2)], lr=LR, momentum=0.95),
        torch.optim.AdamW([torch.zeros(2)], lr=ADAMW_LR, betas=(0.9, 0.98)),
    ]
    schedules = [make(both, RATES)]
    schedules += [make(part, rate) for part, rate in zip(parts, RATES, strict=True)]
    seen = set()
    for _ in range(8):
        both.step()
        (muon,), (adamw,) = (part.param_groups for part in parts)
        assert both.param_groups[0]["momentum"] == muon["momentum"]
        assert both.param_groups[0]["betas"] == (0.9, 0.98)
        assert both.param_groups[1]["betas"] == adamw["betas"]
        assert [group["lr"] for group in both.param_groups] == [muon["lr"], adamw["lr"]]
        seen.add(muon["momentum"])
        for part in parts:
            part.step()
        for schedule in schedules:
            schedule.step()
    assert len(seen) > 3


def test_betas_set_by_hand_after_a_cycle_stay():
    both = Groups()
    one_cycle(both, RATES)
    both.step()
    both.param_groups[1]["betas"] = (0.7, 0.98)
    both.step()
    assert both.param_groups[1]["betas"] == (0.7, 0.98)


def test_a_cycle_begins_though_options_from_before_it_were_loaded():
    both = Groups()
    saved = [dict(group) for group in both.param_groups]
    one_cycle(both, RATES)
    both.schedules.begin(both.param_groups, saved)
    both.step()
    assert both.param_groups[1]["betas"] == (0.95, 0.98)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
        lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 4),
        lambda o: lr_scheduler.StepLR(o, 2),
        lambda o: lr_scheduler.CosineAnnealingLR(o, 7, eta_min=1e-5),
        lambda o: lr_scheduler.LambdaLR(o, lambda step: step / 3),
        lambda o: one_cycle(o, RATES, cycle_momentum=False),
        lambda o: averaging(o, RATES),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o, 0.1, 1.0, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
        ),
    ],
    ids=range(8),
)
def test_every_other_schedule_is_as_over_any_optimizer(make):
    both = Groups()
    plain = torch.optim.SGD(
        [{"params": [torch.zeros(2)], "lr": rate} for rate in RATES], lr=LR, momentum=0.95
    )
    pair = [make(both), make(plain)]
    for _ in range(8):
        both.step()
        rates = [[group["lr"] for group in o.param_groups] for o in (both, plain)]
        assert rates[0] == rates[1]
        assert all(group["momentum"] == 0.95 for group in both.param_groups)
        assert all(group["betas"] == (0.9, 0.98) for group in both.param_groups)
        plain.step()
        for schedule in pair:
            schedule.step()


@pytest.mark.parametrize("make", [one_cycle, cyclic, averaging])
def test_one_rate_is_right_where_the_optimizer_was_made_with_one(make):
    both = Groups([LR, LR])
    schedule = make(both, LR)
    for _ in range(8):
        both.step()
        schedule.step()


@pytest.mark.parametrize("make", [one_cycle, cyclic, averaging])
def test_one_rate_for_muon_and_adamw_is_refused_with_the_line_to_write(address, make):
    model = make_model()
    optimizer = make_optimizer(model, address=address)
    loss_of(model, 0).backward()
    before = weights(model)
    make(optimizer, LR)
    with pytest.raises(InvalidArgumentError, match=r"0.02 on muon, 0.001 on adamw") as refused:
        optimizer.step()
    assert "OneCycleLR(optimizer, max_lr=[0.02, 0.001], ...)" in str(refused.value)
    for name, value in weights(model).items():
        assert torch.equal(value, before[name])
    # Over any optimizer CyclicLR begins where an earlier scheduler began.
    for group in optimizer.param_groups:
        group.pop("initial_lr", None)
    make(optimizer, RATES)  # the line
    optimizer.step()
    assert optimizer.last_committed_step == 1
    optimizer.close()
