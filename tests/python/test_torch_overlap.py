"""overlap_forward: step() returns when the step is decided, and modules wait for their weights."""

import copy
import pickle

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

ONE_FOR_EACH = 1  # bucket bytes: every parameter has a bucket of its own


def test_training_equals_torch(muon):
    def loop(model, optimizer):
        plain_loop(model, optimizer)
        if isinstance(optimizer, dmuond.torch.Muon):
            optimizer.wait()  # for what reads the weights next

    run_both(muon, loop, overlap_forward=True, bucket_bytes=ONE_FOR_EACH)


def slow(width=768):
    """Two layers; an update of theirs takes a tenth of a second each."""
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(2)])


def unpublished(optimizer):
    """Buckets that have not arrived; sets nothing right."""
    session = optimizer.session
    return [b for b, a in session._unpublished.items() if session._link.timeline.published(b) < a]


def after_a_step(muon):
    model = slow()
    options = {"overlap_forward": True, "bucket_bytes": ONE_FOR_EACH, "route": [("*", "muon")]}
    optimizer = muon(model, **options)
    for p in model.parameters():
        p.grad = torch.randn(p.shape)
    optimizer.step()
    assert unpublished(optimizer) != []  # step() did not wait
    return model, optimizer


def test_a_module_waits_for_its_own_weights_before_it_runs(muon):
    model, optimizer = after_a_step(muon)
    x = torch.ones(1, 768)
    for index, layer in enumerate(model):
        x = layer(x)
        assert x.isfinite().all()
        assert optimizer.registered.parameter_bucket[index] not in unpublished(optimizer)


@pytest.mark.parametrize(
    "use",
    [
        lambda model, optimizer: optimizer.wait(),
        lambda model, optimizer: model.state_dict(),
        lambda model, optimizer: model[0].state_dict() and model[1].state_dict(),
        lambda model, optimizer: optimizer.state_dict(),
        lambda model, optimizer: optimizer.push_parameters(),
        lambda model, optimizer: optimizer.close(),
    ],
    ids=["wait", "state_dict", "parts", "optimizer", "push", "close"],
)
def test_whatever_needs_all_weights_waits_for_them(muon, use):
    model, optimizer = after_a_step(muon)
    use(model, optimizer)
    assert unpublished(optimizer) == []
    assert all(p.isfinite().all() for p in model.parameters())


def test_the_next_step_waits_for_the_weights_of_the_last(muon):
    model, optimizer = after_a_step(muon)
    attempts = set(optimizer.session._unpublished.values())
    optimizer.step()
    assert attempts.isdisjoint(optimizer.session._unpublished.values())
    assert optimizer.last_committed_step == 2


def test_modules_of_torch_wait_for_the_children_that_they_do_not_call(muon):
    def build():
        torch.manual_seed(0)
        return nn.MultiheadAttention(32, 4, bias=False)

    def loop(model, optimizer):
        for step in range(STEPS):
            x = torch.randn(5, 2, 32, generator=torch.Generator().manual_seed(step))
            model(x, x, x)[0].square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    model, reference = build(), build()
    start = weights(reference)
    options = {"overlap_forward": True, "bucket_bytes": ONE_FOR_EACH, "route": [("*", "muon")]}
    optimizer = muon(model, **options)
    loop(model, optimizer)
    optimizer.wait()
    loop(reference, torch.optim.Muon(reference.parameters(), lr=0.02, momentum=0.95))
    assert_same_training(model, reference, start)


def test_a_tied_weight_is_waited_for_under_both_names(muon):
    def tie(model):
        model.head.weight = model.embed.weight
        return model

    model, reference = tie(make_model()), tie(make_model())
    start = weights(reference)
    optimizer = muon(model, overlap_forward=True, bucket_bytes=ONE_FOR_EACH)
    plain_loop(model, optimizer)
    plain_loop(reference, TorchOptimizers(reference))
    optimizer.wait()
    assert_same_training(model, reference, start)


def test_a_copied_or_saved_model_does_not_wait(muon):
    model = make_model()
    optimizer = muon(model, overlap_forward=True)
    plain_loop(model, optimizer, range(1))
    optimizer.wait()
    copied, loaded = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    optimizer.close()
    for other in (copied, loaded):
        assert torch.equal(loss_of(other, 0), loss_of(model, 0))


def test_where_it_cannot_be_right_it_is_refused(muon):
    model = make_model()
    with pytest.raises(dmuond.InvalidArgumentError, match="needs the model"):
        muon(model.named_parameters(), overlap_forward=True)
    with pytest.raises(dmuond.InvalidArgumentError, match="compile its blocks"):
        muon(torch.compile(model, backend="aot_eager"), overlap_forward=True)
