"""Ordinary PyTorch code on two ranks, each on its own data: as one process on all of it."""

import functools
import warnings

import dmuond
import pytest
import torch
from habits import (
    LR,
    STEPS,
    assert_same_weights,
    loss_of,
    make_model,
    make_optimizer,
    torch_in_fp32,
    train_torch,
    weights,
)
from torch import nn

WORLD = 2


@pytest.fixture
def pair(ranks, daemons, poison):
    """Runs a function on two ranks with a daemon each; results by rank."""

    def run(function, *arguments):
        return ranks.run(function, WORLD, daemons.start(2, 1), *arguments)

    return run


def train(rank, world, loop, steps=STEPS, seed=0, **options):
    """Weights after `loop` for each step; the loop computes gradients and calls step()."""
    model = make_model(seed)
    optimizer = make_optimizer(model, **options)
    for step in range(steps):
        loop(model, optimizer, step, rank)
        optimizer.zero_grad()
    optimizer.close()
    return weights(model)


def assert_trained(results, want):
    first = results[0]
    for other in results[1:]:
        for name in first:
            assert torch.equal(first[name], other[name]), f"replicas of {name}"
    assert_same_weights(first, want, weights(make_model()))


def plain(model, optimizer, step, rank):
    loss_of(model, step, rank).backward()
    optimizer.step()


def test_the_ranks_gradients_are_averaged(pair):
    results = pair(train, plain)
    with torch_in_fp32():
        assert_trained(results, train_torch(WORLD))


def warned_of_statistics(rank, world, normalisation):
    """What the optimizer warns of when a model has such a layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), normalisation(8), nn.Linear(8, 2))
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        make_optimizer(model).close()
    return [str(each.message) for each in heard if "statistics" in str(each.message)]


def test_running_statistics_that_no_rank_shares_are_warned_of(ranks, daemons):
    addresses = daemons.start(1, 1)
    for told in ranks.run(warned_of_statistics, WORLD, addresses, nn.BatchNorm1d):
        assert len(told) == 1
        assert "'1'" in told[0]
    for silent in (nn.SyncBatchNorm, nn.LayerNorm):
        assert ranks.run(warned_of_statistics, WORLD, addresses, silent) == [[], []]
    assert ranks.run(warned_of_statistics, 1, addresses, nn.BatchNorm1d) == [[]]


def beginning_unequal(rank, world, **options):
    """What the optimizer says, and the model's weights before and after."""
    model = make_model()
    if rank == 1:
        with torch.no_grad():
            model.up.weight[3, 4] += 1e-3
    before = weights(model)
    try:
        make_optimizer(model, **options).close()
    except dmuond.FailedPreconditionError as error:
        return f"{error.reason}: {error}", error.metadata, before, weights(model)
    return "", {}, before, weights(model)


def test_ranks_that_begin_with_different_weights_are_told_and_keep_them(pair):
    for told, metadata, before, after in pair(beginning_unequal):
        assert told.startswith("WEIGHTS_DIFFER: ")
        assert "parameter 'up.weight', box [0:40, 0:24]" in told
        assert "of rank 0 and of rank 1 differ" in told and "broadcast=True" in told
        assert (metadata["parameter"], metadata["rank"]) == ("up.weight", "0")
        for name, want in before.items():
            assert torch.equal(after[name], want), name


def broadcasting(rank, world):
    return train(rank, world, plain, seed=rank, broadcast=True)


def test_broadcast_gives_all_ranks_the_lowest_ones_weights(pair):
    results = pair(broadcasting)
    with torch_in_fp32():
        assert_trained(results, train_torch(WORLD))


def accumulating(model, optimizer, step, rank):
    with optimizer.no_sync():
        (loss_of(model, step, rank) / 2).backward()
    (loss_of(model, step + 50, rank) / 2).backward()
    optimizer.step()


def test_accumulation_under_no_sync(pair):
    results = pair(train, accumulating)

    def halve_and_add(model, step):
        for p in model.parameters():
            p.grad /= 2
        (torch.stack([loss_of(model, step + 50, r) for r in range(WORLD)]).mean() / 2).backward()

    with torch_in_fp32():
        assert_trained(results, train_torch(WORLD, loop=halve_and_add))


def clipping_late_on_one_rank(model, optimizer, step, rank):
    loss_of(model, step, rank).backward()
    if rank == 1 and step >= 4:  # gradients have been signalled during the backward pass by then
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer.step()
    withdrawn = [w for w in caught if "the attempt is withdrawn" in str(w.message)]
    assert len(withdrawn) == (rank == 1 and step == 4), step
    assert withdrawn == [w for w in caught if "were clipped" not in str(w.message)]


def torch_clipping_late_on_one_rank():
    local = make_model()

    def loop(model, step):
        local.load_state_dict(model.state_dict())
        model.zero_grad()
        for rank in range(WORLD):
            local.zero_grad()
            loss_of(local, step, rank).backward()
            if rank == 1 and step >= 4:
                nn.utils.clip_grad_norm_(local.parameters(), 0.1)
            for p, q in zip(model.parameters(), local.parameters(), strict=True):
                p.grad = q.grad / WORLD if p.grad is None else p.grad + q.grad / WORLD

    return train_torch(WORLD, steps=STEPS + 2, loop=loop)


def test_clipping_by_hand_clips_the_local_gradient_and_withdraws_on_all_ranks(pair):
    early = functools.partial(train, early_buckets=True)
    results = pair(early, clipping_late_on_one_rank, STEPS + 2)
    with torch_in_fp32():
        assert_trained(results, torch_clipping_late_on_one_rank())


def scaled(rank, world):
    """An overflow on rank 0 alone, in the third step."""
    model = make_model()
    optimizer = make_optimizer(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
    scales = []
    for step in range(STEPS):
        scaler.scale(loss_of(model, step, rank)).backward()
        if step == 2 and rank == 0:
            model.up.weight.grad[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    committed = optimizer.last_committed_step
    optimizer.close()
    return weights(model), scales, committed


def clipping_by_hand(rank, world, scaled=False, **options):
    """What is warned of while each rank clips its own gradients, and what the norm is then."""

    def clip(model, optimizer, scaler, step):
        if scaled:
            scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    return _told(rank, clip, scaled, **options)


def other_habits(rank, world):
    """What is warned of where gradients are divided by what all ranks have in common."""

    def divide(model, optimizer, scaler, step):
        for p in model.parameters():
            p.grad /= 3 + step % 4

    def unscale(model, optimizer, scaler, step):
        scaler.unscale_(optimizer)

    def clip_values(model, optimizer, scaler, step):
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    def clip_the_head_alone(model, optimizer, scaler, step):
        nn.utils.clip_grad_norm_(model.head.parameters(), 1e-3)

    def clip_what_is_small(model, optimizer, scaler, step):
        nn.utils.clip_grad_norm_(model.parameters(), 1e6)

    return [
        *_told(rank, divide),
        *_told(rank, unscale, scaled=True),
        *_told(rank, clip_values),
        *_told(rank, clip_the_head_alone),
        *_told(rank, clip_what_is_small),
        *_told(rank, lambda *_: None, max_grad_norm=0.1),
    ]


def _told(rank, change, scaled=False, **options):
    model = make_model()
    scaler = torch.amp.GradScaler("cpu", enabled=scaled, init_scale=64.0, growth_interval=2)
    optimizer = make_optimizer(model, early_buckets=False, **options)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(STEPS):
            scaler.scale(loss_of(model, step, rank)).backward()
            change(model, optimizer, scaler, step)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    optimizer.close()
    texts = [str(warning.message) for warning in heard]
    return [text for text in texts if "dmuond" in text]


def test_clipping_by_hand_is_told_once_with_the_option_to_use(ranks, address):
    for options in ({}, {"scaled": True}):
        clip = functools.partial(clipping_by_hand, **options)
        for told in ranks.run(clip, WORLD, [address]):
            assert len(told) == 1, options
            assert "say max_grad_norm=0.1 to the optimizer instead" in told[0]


def test_what_is_no_clipping_of_one_ranks_gradient_is_not_told(ranks, address):
    assert ranks.run(other_habits, WORLD, [address]) == [[], []]
    assert ranks.run(clipping_by_hand, 1, [address]) == [[]]


def test_an_overflow_on_one_rank_skips_the_step_and_backs_off_on_all(pair):
    results = pair(scaled)
    assert results[0][1] == results[1][1] == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]
    assert [committed for _, _, committed in results] == [STEPS, STEPS]

    def without_the_third(model, step):
        if step == 2:
            for p in model.parameters():
                p.grad = None

    with torch_in_fp32():
        want = train_torch(WORLD, loop=without_the_third)
    assert_trained([result[0] for result in results], want)


def unscaled_by_hand(model, optimizer, step, rank):
    scaler = optimizer.__dict__.setdefault("scaler", torch.amp.GradScaler("cpu", init_scale=64.0))
    scaler.scale(loss_of(model, step, rank)).backward()
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()


def test_unscaling_by_hand(pair):
    results = pair(train, unscaled_by_hand)
    with torch_in_fp32():
        assert_trained(results, train_torch(WORLD))


def one_gradient_missing(model, optimizer, step, rank):
    loss_of(model, step, rank).backward()
    if step == 1 and rank == 0:
        model.down.weight.grad = None  # counts as zero: the other rank has one
    if step == 2:
        model.up.weight.grad = None  # nobody has one: stays as it is
    optimizer.step()


def test_gradients_that_one_rank_or_all_do_not_have(pair):
    results = pair(train, one_gradient_missing)

    def loop(model, step):
        if step == 1:
            (model.down.weight.grad,) = torch.autograd.grad(
                loss_of(model, step, 1) / WORLD, [model.down.weight]
            )
        if step == 2:
            model.up.weight.grad = None

    with torch_in_fp32():
        assert_trained(results, train_torch(WORLD, loop=loop))


def saving_on_rank_0(rank, world):
    model = make_model()
    optimizer = make_optimizer(model)
    saved = None
    for step in range(STEPS):
        plain(model, optimizer, step, rank)
        optimizer.zero_grad()
        if step == 2 and rank == 0:
            saved = model.state_dict(), optimizer.state_dict()
            saved = {name: value.clone() for name, value in saved[0].items()}, saved[1]
    optimizer.close()
    return weights(model), saved


def continuing(rank, world, saved):
    model = make_model(seed=3)
    optimizer = make_optimizer(model)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    for step in range(3, STEPS):
        plain(model, optimizer, step, rank)
        optimizer.zero_grad()
    optimizer.close()
    return weights(model)


def test_state_saved_on_rank_0_alone_continues_on_all_bit_for_bit(pair):
    uninterrupted = pair(saving_on_rank_0)
    saved = uninterrupted[0][1]
    assert uninterrupted[1][1] is None
    continued = pair(continuing, saved)
    for rank in range(WORLD):
        for name, want in uninterrupted[rank][0].items():
            assert torch.equal(continued[rank][name], want), name


def evaluating_on_one_rank(model, optimizer, step, rank):
    plain(model, optimizer, step, rank)
    if rank == 0:
        model.eval()
        with torch.no_grad():
            assert loss_of(model, 99).isfinite()
        model.train()


def test_evaluation_on_one_rank_alone(pair):
    results = pair(train, evaluating_on_one_rank)
    with torch_in_fp32():
        assert_trained(results, train_torch(WORLD))


def other_rate_on_one_rank(rank, world):
    model = make_model()
    optimizer = make_optimizer(model)
    for group in optimizer.param_groups:
        group["lr"] *= 1 + rank
    loss_of(model, 0, rank).backward()
    try:
        optimizer.step()
        refused = ""
    except dmuond.InvalidArgumentError as error:
        refused = str(error)
    for group in optimizer.param_groups:
        group["lr"] /= 1 + rank
    optimizer.step()  # the gradients are still there
    optimizer.zero_grad()
    for step in range(1, STEPS):
        plain(model, optimizer, step, rank)
        optimizer.zero_grad()
    optimizer.close()
    return weights(model), refused


def test_a_learning_rate_that_differs_is_refused_and_can_be_corrected(pair):
    results = pair(other_rate_on_one_rank)
    for _, refused in results:
        assert "learning_rate" in refused and "SCALARS_DIFFER" in refused
        assert str(LR) in refused and str(2 * LR) in refused
    with torch_in_fp32():
        assert_trained([result[0] for result in results], train_torch(WORLD))


def loading_on_one_rank_first(rank, world, saved):
    model = make_model()
    optimizer = make_optimizer(model)
    model.load_state_dict(saved[0])
    loss_of(model, 3, rank).backward()
    try:
        if rank == 0:
            optimizer.load_state_dict(saved[1])
        else:
            optimizer.step()
        refused = ""
    except dmuond.Error as error:
        refused = str(error)
    optimizer.load_state_dict(saved[1])
    optimizer.step()  # the gradients are still there
    optimizer.zero_grad()
    for step in range(4, STEPS):
        plain(model, optimizer, step, rank)
        optimizer.zero_grad()
    optimizer.close()
    return weights(model), refused


def test_a_step_before_every_rank_has_loaded_is_refused_by_name(pair):
    uninterrupted = pair(saving_on_rank_0)
    results = pair(loading_on_one_rank_first, uninterrupted[0][1])
    for rank, (continued, refused) in enumerate(results):
        assert "KIND_DIFFERS" in refused and "rank 0" in refused and "rank 1" in refused
        for name, want in uninterrupted[rank][0].items():
            assert torch.equal(continued[name], want), name
