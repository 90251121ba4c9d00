"""The PyTorch optimizer when the job goes back to a step, with a fake daemon to send it there."""

import gc
import warnings
import weakref

import dmuond
import dmuond.torch
import pytest
import torch
from fake_daemon import FakeDaemon


def make(fake, **options):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
    options |= {"route": [("*.weight", "muon")], "verbose": False}
    opt = dmuond.torch.Muon(model, lr=0.1, address=fake.path, rank=0, world_size=1, **options)
    return model, opt


def backward(model):
    model(torch.ones(2, 4)).sum().backward()


def train_to(model, opt, step):
    while opt.last_committed_step < step:
        backward(model)
        opt.trainer_state = str(opt.last_committed_step + 1).encode()
        opt.step()
        opt.zero_grad()


def all_are(model, value):
    return all((parameter == value).all() for parameter in model.parameters())


@pytest.fixture
def outlive(fake, monkeypatch):
    """Replaces the daemon by one with a snapshot of a step."""
    monkeypatch.setenv("DMUOND_RECONNECT_S", "10")
    started = []

    def replace(**state):
        fake.die()
        started.append(FakeDaemon(fake.path, **state))
        return started[-1]

    yield replace
    for daemon in started:
        daemon.die()


def test_after_a_rollback_weights_are_back_gradients_gone_and_the_state_returned(fake):
    model, opt = make(fake)
    train_to(model, opt, 3)
    fake.roll_back(2, b"two")
    backward(model)
    opt.trainer_state = b"four"
    with pytest.raises(dmuond.RolledBack):
        opt.step()
    assert all_are(model, 2)
    assert (opt.last_committed_step, opt.trainer_state) == (2, b"two")
    assert all(parameter.grad is None for parameter in model.parameters())
    train_to(model, opt, 4)  # without "changed by other means"
    opt.close()


def test_parameters_and_gradients_move_into_the_successors_arenas(fake, outlive):
    model, opt = make(fake)
    train_to(model, opt, 3)
    kept = {name: id(parameter) for name, parameter in model.named_parameters()}
    stale = model[0].weight.data
    old = weakref.ref(opt.session.arenas[2])
    successor = outlive(step=1, trainer_state=b"one", epoch=3)
    backward(model)
    with pytest.raises(dmuond.RolledBack) as caught:
        opt.step()
    assert caught.value.fresh_arenas
    assert all_are(model, 1)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == kept
    del caught
    gc.collect()
    assert old() is None  # nothing refers to the old gradients
    stale.add_(5)  # what somebody kept is of the past, and harmless
    assert all_are(model, 1)
    backward(model)
    gradient = model[0].weight.grad
    opt.step()
    assert successor.submits[-1].step == 2
    found = [a for a in successor.arenas.values() if gradient.numpy().tobytes() in a.tobytes()]
    assert len(found) == 1
    successor.arenas[1].view("f4")[...] = 9
    assert all_are(model, 9)
    opt.close()


def test_signals_during_the_backward_pass_begin_anew(fake, outlive):
    model, opt = make(fake)
    train_to(model, opt, 4)
    assert opt._early.stage[0]
    successor = outlive(step=3, epoch=3)
    with pytest.raises(dmuond.RolledBack):
        train_to(model, opt, 5)
    assert not opt._early.stage[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train_to(model, opt, 9)
    assert opt._early.stage[0]
    assert not any(submit.withdraw for submit in successor.submits)
    opt.close()


def test_another_plan_of_the_successor_is_taken_over(fake, outlive, monkeypatch):
    """It may have another number of lanes, and buckets that are cut differently."""
    model, opt = make(fake)
    train_to(model, opt, 4)
    assert opt.registered.buckets == 2
    monkeypatch.setattr(FakeDaemon, "BUCKETS", 3)
    successor = outlive(step=4, epoch=3)
    with pytest.raises(dmuond.RolledBack):
        train_to(model, opt, 5)
    assert opt.registered.buckets == 3
    train_to(model, opt, 8)  # the fake looks whether every bucket was signalled
    assert successor.step == 8
    opt.close()


def test_a_loaded_checkpoint_that_a_new_epoch_overwrote_is_an_error(fake):
    model, opt = make(fake)
    train_to(model, opt, 1)
    checkpoint = {name: torch.full_like(value, 7) for name, value in model.state_dict().items()}
    model.load_state_dict(checkpoint)
    fake.begin_epoch()
    with pytest.raises(dmuond.FailedPreconditionError, match="0.bias': the group has formed anew"):
        opt.step()
    opt.close()


def test_a_scaler_can_unscale_again_after_a_rollback(fake):
    model, opt = make(fake)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step():
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    step()
    fake.roll_back(1)
    with pytest.raises(dmuond.RolledBack):
        step()
    step()
    assert opt.last_committed_step == 2
    opt.close()


def test_closing_before_overlapped_weights_come_hears_of_a_rollback_and_the_loop_goes_on(fake):
    model, opt = make(fake, overlap_forward=True, early_buckets=True)
    train_to(model, opt, 2)
    publish, fake._publish = fake._publish, lambda attempt: None
    backward(model)
    opt.step()
    fake._publish = publish
    fake.roll_back(1, b"one")
    with pytest.raises(dmuond.RolledBack):
        opt.close()
    assert all_are(model, 1)
    train_to(model, opt, 5)
    backward(model)
    assert opt.session.is_signalled(0)  # by a hook of its own
    opt.step()
    opt.close()


def test_overlapped_weights_that_never_come_raise_in_the_forward_pass(fake, outlive):
    model, opt = make(fake, overlap_forward=True)
    train_to(model, opt, 2)
    fake._publish = lambda attempt: None
    backward(model)
    opt.step()  # decided; its weights are on their way
    outlive(step=2, epoch=2)
    with pytest.raises(dmuond.RolledBack):
        model(torch.ones(2, 4))
    assert all_are(model, 2)
    opt.close()
