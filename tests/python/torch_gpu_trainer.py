"""What trainers do with dmuond.torch on GPUs of the fake driver (see gpu_tensors)."""

import os
import signal
import unittest.mock
import warnings

import dmuond
import dmuond.torch.fsdp
import fsdp_trainer
import gpu_tensors
import gpus
import pytest
import torch
from habits import loss_of, make_model, make_optimizer, weights
from torch.distributed.device_mesh import init_device_mesh


def on_cpu(rank, world, function, arguments, options):
    return function(rank, world, *arguments, **options)


def on_gpu(rank, world, function, arguments, options, own, answers_late):
    """The same, with its optimizers on the rank's GPU; and how many looks at bytes it took.

    own: with arenas in memory of the trainer.
    """
    with gpu_tensors.in_their_place(rank, own) as device:
        device.answers_late = answers_late
        return function(rank, world, *arguments, **options, **_arenas(own)), device.looks


def _arenas(own):
    return {"arenas": "trainer" if own else "daemon"}


def _step(model, optimizer, number):
    loss_of(model, number).backward()
    optimizer.step()
    optimizer.zero_grad()


def train_shards(rank, world, folder, waits, **options):
    """Weights, and how often a stream waited that stands, where `waits`, for FSDP2's own."""
    stands_for, waited = gpus.make_stream(rank), []
    known = {stands_for} if waits else set()

    def wait_published(session, buckets=None, stream=None):
        waited.append(stream)
        return original(session, buckets, stream)

    original = gpu_tensors.Session.wait_published
    with (
        unittest.mock.patch.object(dmuond.torch.fsdp, "streams", return_value=known),
        unittest.mock.patch.object(gpu_tensors.Session, "wait_published", wait_published),
    ):
        trained = fsdp_trainer.train(rank, world, folder, fsdp_trainer.plain, **options)
    return trained, waited.count(stands_for)


def be_killed(rank, world, own, seen):
    """In the third step. What its arenas were then, and its weights, are in a file."""
    with gpu_tensors.in_their_place(rank, own):
        model = make_model()
        optimizer = make_optimizer(model, **_arenas(own))
        for number in range(2):
            _step(model, optimizer, number)
        torch.save((_identities(optimizer), weights(model)), seen)
        loss_of(model, 2).backward()
        os.kill(os.getpid(), signal.SIGKILL)


def go_on(rank, world, own, steps):
    """What its arenas are, the weights that it finds there, and those after so many steps."""
    with gpu_tensors.in_their_place(rank, own):
        model = make_model(seed=5)
        optimizer = make_optimizer(model, resume="require", **_arenas(own))
        found = _identities(optimizer), weights(model)
        for number in range(optimizer.last_committed_step, steps):
            _step(model, optimizer, number)
        optimizer.close()
        return *found, weights(model)


def _identities(optimizer) -> list[int]:
    arenas = optimizer.session.arenas
    return [gpus.identity_of(arenas[key].address) for key in sorted(arenas)]


def make_gradients_in_two_streams(rank, world, steps):
    """The head's in one that is late in the last step.

    Whether the only bucket was signalled then, and whether that was done before that stream had
    come so far; the weights.
    """
    with gpu_tensors.in_their_place(rank) as device:
        model, on_time, late = make_model(), device.current, gpus.make_stream(rank)

        def choose(parameter):
            device.current = late if parameter is model.head.weight else on_time

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(choose)
        optimizer = make_optimizer(model)
        for number in range(steps - 1):
            _step(model, optimizer, number)
        let_go = gpus.hold_up(late)
        loss_of(model, steps - 1).backward()
        device.current = on_time
        signalled = optimizer.session.is_signalled(0)
        done_early = gpus.is_done(optimizer.session._link.timeline._words._page.stores)
        let_go()
        optimizer.step()
        optimizer.close()
        return signalled, done_early, weights(model)


def lose_the_daemon(rank, world, daemon) -> str:
    """What the next step says."""
    with gpu_tensors.in_their_place(rank):
        model = make_model()
        optimizer = make_optimizer(model, overlap_forward=True)
        _step(model, optimizer, 0)
        optimizer.wait()
        os.kill(daemon, signal.SIGKILL)
        with pytest.raises(dmuond.DaemonLost) as error:
            _step(model, optimizer, 1)
        return str(error.value)


def push_by_hand(rank, world, **options):
    """Weights that are changed and pushed after the first step, and the weights in the end.

    What else lies in the memory of the trainer's arenas stays as it was.
    """
    model = make_model()
    optimizer = make_optimizer(model, **options)
    _step(model, optimizer, 0)
    with torch.no_grad():
        model.up.weight.mul_(0.5)
    optimizer.push_parameters(["up.weight"])
    pushed = weights(model)["up.weight"]
    _step(model, optimizer, 1)
    optimizer.close()
    return weights(model) | {"pushed": pushed}


def change_by_hand(rank, world, **options):
    """What step() says of weights that were changed and not pushed."""
    model = make_model()
    optimizer = make_optimizer(model, **options)
    _step(model, optimizer, 0)
    with torch.no_grad():
        model.up.weight.mul_(0.5)
    with pytest.raises(dmuond.Error) as error:
        _step(model, optimizer, 1)
    return str(error.value)


def change_without_a_trace(rank, world, **options):
    """Which steps say what of weights, and then of gradients, that were changed before the fifth.

    What has no trace is seen by the device alone.
    """
    told = []
    model = make_model()
    optimizer = make_optimizer(model, early_buckets=True, **options)
    for number in range(1, 21):
        loss_of(model, number).backward()
        if number == 5:
            model.up.weight.data.mul_(0.5)
        if number == 15:
            model.up.weight.grad.data.mul_(0.5)
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                optimizer.step()
            except dmuond.Error as error:
                told.append((number, str(error)))
                optimizer.push_parameters()
                optimizer.step()
        told += [(number, str(warning.message)) for warning in heard]
        optimizer.zero_grad()
    optimizer.close()
    return told


def overflow_in_a_replica(rank, world, folder, **options):
    """Which steps were skipped, and why: of equal gradients the last rank's alone has a NaN."""
    told = []
    with fsdp_trainer.process_group(rank, world, folder, backend="gloo"):
        mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        model = make_model()
        optimizer = make_optimizer(model, mesh=mesh, mesh_roles={"tp": "same"}, **options)
        for number in range(1, 5):
            loss_of(model, number).backward()
            if number == 3 and rank == world - 1:
                model.norm.weight.grad[-1] = float("nan")
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.step_was_skipped:
                told.append((number, optimizer.last_outcome.detail))
        optimizer.close()
    return told


def capture_a_backward_pass(rank, world):
    """What is said of gradients that are to be signalled in a stream that is captured."""
    with gpu_tensors.in_their_place(rank) as device:
        told = []
        for early in (True, False):
            model = make_model()
            optimizer = make_optimizer(model, early_buckets=early, job=f"early-{early}")
            for number in range(3):
                _step(model, optimizer, number)
            with gpus.captured(device.current):
                try:
                    loss_of(model, 3).backward()
                except dmuond.FailedPreconditionError as error:
                    told.append((early, error.reason, str(error)))
            optimizer.step()
            assert optimizer.last_committed_step == 4
            optimizer.close()
        return told


def load_a_snapshot(rank, world, **options):
    """Goes back to step 2 after step 3, and to the end again."""
    model = make_model()
    optimizer = make_optimizer(model, **options)
    for number in range(2):
        _step(model, optimizer, number)
    optimizer.save_snapshot()
    there = weights(model)
    _step(model, optimizer, 2)
    optimizer.load_snapshot()
    with pytest.raises(dmuond.RolledBack, match="step 2"):
        _step(model, optimizer, 3)
    for name, value in weights(model).items():
        assert torch.equal(value, there[name]), name
    for number in range(2, 6):
        _step(model, optimizer, number)
    state = optimizer.state_dict()["state"]
    assert {v.device.type for entry in state.values() for v in entry.values()} == {"cpu"}
    optimizer.close()
    return weights(model)
