"""FSDP2 (fully_shard) on 2 and 4 ranks equals torch.optim.Muon in one process on all the data."""

import fsdp_trainer
import pytest
import torch
from habits import (
    MATRICES,
    STEPS,
    TorchOptimizers,
    assert_same_weights,
    loss_of_all,
    make_model,
    torch_in_fp32,
    train_torch,
    weights,
)
from torch import nn

AT = 3  # steps before a state is saved


@pytest.fixture
def sharded(ranks, daemons, poison, tmp_path):
    """Runs a function of fsdp_trainer on `world` ranks, on two daemons; results by rank."""
    runs = []

    def run(function, world, *arguments):
        runs.append(tmp_path / f"group{len(runs)}")
        return ranks.run(function, world, daemons.start(2, 1), str(runs[-1]), *arguments)

    with torch_in_fp32():
        yield run


def assert_trained(results, want):
    for result in results:
        for name, value in result.items():
            assert torch.equal(value, results[0][name]), f"ranks differ in {name}"
    assert_same_weights(results[0], want, weights(make_model()))


@pytest.mark.parametrize("world", [2, 4])
def test_training_equals_one_process(sharded, world):
    assert_trained(sharded(fsdp_trainer.train, world, fsdp_trainer.plain), train_torch(world))


@pytest.mark.parametrize(
    "loop",
    [fsdp_trainer.zeroing_in_place, fsdp_trainer.evaluating, fsdp_trainer.with_closure],
    ids=lambda f: f.__name__,
)
def test_habits_that_change_nothing(sharded, loop):
    assert_trained(sharded(fsdp_trainer.train, 2, loop), train_torch(2))


def clip(model, step):
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_late(model, step):
    if step >= 3:
        clip(model, step)


def backward_again(model, step):
    loss_of_all(model, step + 50, 2).backward()


@pytest.mark.parametrize(
    ("loop", "in_torch"),
    [
        (fsdp_trainer.clipping_by_hand, clip),
        (fsdp_trainer.clipping_late, clip_late),
        (fsdp_trainer.two_backwards, backward_again),
        (fsdp_trainer.accumulating, backward_again),
    ],
    ids=lambda f: f.__name__,
)
def test_habits_with_gradients(sharded, loop, in_torch):
    assert_trained(sharded(fsdp_trainer.train, 2, loop), train_torch(2, loop=in_torch))


def test_max_grad_norm_equals_clipping_by_torch(sharded):
    results = sharded(fsdp_trainer.train_clipped, 2)
    assert_trained(results, train_torch(2, loop=clip))


def test_early_signals_on_request(sharded):
    results = sharded(fsdp_trainer.train_signalling_early, 2, fsdp_trainer.signalling_early)
    assert_trained(results, train_torch(2))


def test_what_was_signalled_and_clipped_without_a_trace_is_withdrawn(sharded):
    loop = fsdp_trainer.clipping_what_was_signalled
    results = sharded(fsdp_trainer.train_signalling_early, 2, loop)
    assert_trained(results, train_torch(2, loop=clip_late))


def test_replicas_of_shards(sharded):
    """HSDP: a mesh of two replicas of two shards."""
    options = {"mesh_shape": (2, 2)}
    results = sharded(fsdp_trainer.train, 4, fsdp_trainer.plain, options)
    assert_trained(results, train_torch(4))


def test_parameters_kept_whole_after_the_forward_pass(sharded):
    options = {"reshard_after_forward": False}
    results = sharded(fsdp_trainer.train, 2, fsdp_trainer.plain, options)
    assert_trained(results, train_torch(2))


def test_an_overflow_on_one_rank_skips_the_step_everywhere(sharded):
    results = sharded(fsdp_trainer.scaled, 2)
    assert results[0][1] == results[1][1] == [1024.0, 1024.0, 512.0, 512.0, 512.0, 512.0]

    def without_the_third(model, step):
        if step == 2:
            model.zero_grad()

    assert_trained([r[0] for r in results], train_torch(2, loop=without_the_third))


def test_a_matrix_without_a_gradient_of_one_shard_has_zeros_there(sharded):
    results = sharded(fsdp_trainer.train, 2, fsdp_trainer.without_a_shard)

    def with_zeros(model, step):
        if step == STEPS - 1:
            model.down.weight.grad[: len(model.down.weight) // 2] = 0

    assert_trained(results, train_torch(2, loop=with_zeros))


def test_a_state_moves_to_another_number_of_ranks(sharded, tmp_path):
    """Saved on two ranks, continued on four, as torch.optim.Muon continues from it.

    On four, one rank has nothing of some parameters.
    """
    checkpoint = str(tmp_path / "checkpoint")
    results = sharded(fsdp_trainer.saved_and_uninterrupted, 2, AT, checkpoint)
    saved, _ = results[0]
    on_four = sharded(fsdp_trainer.continued, 4, saved, AT)
    from_files = sharded(fsdp_trainer.continued_from_checkpoint, 4, checkpoint, AT)

    assert_same_weights(on_four[0], continue_in_torch(saved, 4), saved[0])
    for name, value in on_four[0].items():
        assert torch.equal(from_files[0][name], value), name


def continue_in_torch(saved, world):
    """torch.optim.Muon and AdamW from the state that dmuond saved."""
    model = make_model()
    model.load_state_dict(saved[0])
    optimizer = TorchOptimizers(model)
    state = {name: saved[1]["state"][at] for at, name in fsdp_trainer.names_of(saved[1])}
    for name, p in model.named_parameters():
        keys = ("momentum_buffer",) if name in MATRICES else ("exp_avg", "exp_avg_sq", "step")
        part = optimizer.parts[0 if name in MATRICES else 1]
        part.state[p] = {key: state[name][key].clone() for key in keys}
    for step in range(AT, STEPS):
        loss_of_all(model, step, world).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def test_the_same_number_of_ranks_continues_bit_for_bit(sharded):
    results = sharded(fsdp_trainer.saved_and_uninterrupted, 2, AT)
    continued = sharded(fsdp_trainer.continued, 2, results[0][0], AT)
    for name, want in results[0][1].items():
        assert torch.equal(continued[0][name], want), name


def test_torchs_distributed_checkpoints_continue_bit_for_bit(sharded):
    for want, got in sharded(fsdp_trainer.through_torchs_checkpoints, 2, AT):
        for name, value in want.items():
            assert torch.equal(got[name], value), name


def test_a_checkpoint_loaded_after_the_optimizer_was_made_is_trained(sharded):
    """One of the four ranks has nothing of some parameters."""
    checkpoint = weights(make_model())
    results = sharded(fsdp_trainer.loaded_late, 4, checkpoint)
    assert_trained(results, train_torch(4))


def test_loading_the_weights_that_a_model_has_changes_no_bit_of_the_masters(sharded):
    for uninterrupted, loaded in sharded(fsdp_trainer.own_weights_loaded, 4, AT):
        for name, value in uninterrupted.items():
            assert torch.equal(loaded[name], value), name


def test_weights_changed_without_a_trace_are_refused_by_name(sharded):
    for words, committed in sharded(fsdp_trainer.changed_by_hand, 4):
        assert "'up.weight'" in words and "push_parameters" in words
        assert committed == 2


def test_mixed_precision_learns(sharded):
    for losses in sharded(fsdp_trainer.in_mixed_precision, 2):
        assert losses[-1] < losses[0] and all(loss == loss for loss in losses)


def test_a_model_wrapped_in_ddp_is_refused_and_runs_without_the_wrapper(sharded):
    results = sharded(fsdp_trainer.wrapped_in_ddp, 2)
    for words, _ in results:
        assert "Take the wrapper away" in words
    assert_trained([trained for _, trained in results], train_torch(2))


@pytest.mark.parametrize("as_view", [False, True])
def test_wrapping_in_ddp_afterwards_is_needless_and_right(sharded, as_view):
    """The mean of gradients that are the mean already."""
    assert_trained(sharded(fsdp_trainer.inside_ddp, 2, as_view), train_torch(2))
