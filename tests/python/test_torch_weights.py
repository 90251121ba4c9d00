"""Weights and state: changed, loaded, saved, and continued from, as in torch or refused."""

import io

import dmuond
import dmuond.torch
import pytest
import torch
from habits import (
    STEPS,
    TorchOptimizers,
    assert_same_training,
    loss_of,
    make_model,
    plain_loop,
    run_both,
    weights,
)
from torch import nn


def test_weights_swapped_out_and_back_for_an_evaluation_are_no_change(muon):
    def loop(model, optimizer):
        for step in range(STEPS):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            kept = weights(model)
            with torch.no_grad():
                for p in model.parameters():
                    p.zero_()
                for name, p in model.named_parameters():
                    p.copy_(kept[name])

    run_both(muon, loop)


def test_a_checkpoint_loaded_after_the_optimizer_was_made_is_trained(muon):
    checkpoint = make_model(seed=5).state_dict()

    def loop(model, optimizer):
        model.load_state_dict(checkpoint)
        plain_loop(model, optimizer)

    model, reference = make_model(), make_model()
    optimizer = muon(model)
    loop(model, optimizer)
    loop(reference, TorchOptimizers(reference))
    assert_same_training(model, reference, checkpoint)


def test_weights_changed_by_hand_are_refused_by_name_until_they_are_pushed(muon):
    model = make_model()
    optimizer = muon(model)
    loss_of(model, 0).backward()
    with torch.no_grad():
        model.up.weight.mul_(2.0)
    with pytest.raises(dmuond.Error, match=r"'up.weight'.*push_parameters"):
        optimizer.step()
    changed = model.up.weight.detach().clone()
    optimizer.push_parameters()
    assert torch.equal(model.up.weight, changed)
    optimizer.step()
    assert optimizer.last_committed_step == 1


def test_weights_moved_elsewhere_are_refused_until_they_are_pushed(muon):
    model = make_model()
    optimizer = muon(model)
    vector = nn.utils.parameters_to_vector(model.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 0.5, model.parameters())
    loss_of(model, 0).backward()
    with pytest.raises(dmuond.Error, match="push_parameters"):
        optimizer.step()
    optimizer.push_parameters()
    optimizer.step()


def test_parameters_replaced_by_assignment_are_refused(muon):
    model = make_model()
    optimizer = muon(model)
    model.load_state_dict(make_model(3).state_dict(), assign=True)
    loss_of(model, 0).backward()
    with pytest.raises(dmuond.Error, match="make the optimizer after"):
        optimizer.step()


def test_saved_weights_are_the_weights_alone(muon):
    model = make_model()
    optimizer = muon(model)
    plain_loop(model, optimizer)
    file = io.BytesIO()
    torch.save(model.up.weight.detach(), file)
    assert file.tell() < 4 * model.up.weight.numel() + 4096
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.up.weight, model.up.weight)
    other = make_model(3)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.head.weight, model.head.weight)


def test_tied_weights_are_one_parameter(muon):
    def tie(model):
        model.head.weight = model.embed.weight
        return model

    model, reference = tie(make_model()), tie(make_model())
    start = weights(reference)
    optimizer = muon(model)
    plain_loop(model, optimizer)
    plain_loop(reference, TorchOptimizers(reference))
    assert model.head.weight is model.embed.weight
    assert_same_training(model, reference, start)


def test_bf16_weights_keep_fp32_masters(muon):
    model = make_model().to(torch.bfloat16)
    optimizer = muon(model, lr=1e-5, adamw_lr=1e-6)
    before = {n: p.clone() for n, p in model.named_parameters()}
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    # Steps too small for bf16 are in the masters.
    state = optimizer.state_dict()["state"]
    names = [name for group in optimizer.param_groups for name in group["param_names"]]
    position = names.index("down.weight")
    moved = state[position]["master"] - before["down.weight"].float()
    assert moved.abs().max() > 0
    assert torch.equal(state[position]["master"].to(torch.bfloat16), model.down.weight.detach())
