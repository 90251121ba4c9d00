"""A job that goes back to the very step at which a trainer stands: the trainer need not know."""

import os

import dmuond
import numpy as np
import pytest
import torch
from dmuond import arenas, types
from dmuond._proto import trainer_pb2 as pb
from dmuond.host_memory import HostArena
from test_core_client import open_session, scalars, two_matrices
from test_going_back import run_to, successors, weights  # noqa: F401 (a fixture)
from test_torch_going_back import all_are, backward, make, outlive, train_to  # noqa: F401

SOON_S = 5.0


def gradients(arena: np.ndarray) -> np.ndarray:
    return arena.view(np.float32)


# --- a successor ---


def test_with_a_successor_at_its_own_step_a_session_goes_on_in_the_memory_that_it_has(
    fake,
    successors,  # noqa: F811
):
    with open_session(fake, reconnect_for_s=SOON_S) as session:
        two_matrices(session)
        run_to(session, 2)
        held = dict(session.arenas)
        gradients(held[2])[...] = 5
        successor = successors(step=2, epoch=3)
        outcome = session.step(scalars(), trainer_state=b"three")
        assert (outcome.kind, outcome.step) == (types.Outcome.KIND_COMMITTED, 3)
        submit = successor.submits[-1]
        assert (submit.step, submit.trainer_state) == (3, b"three")
        assert successor.ready_at_submit[-1] == [submit.attempt] * 2
        assert (gradients(successor.arenas[2]) == 5).all()
        # What the caller holds is the successor's memory now.
        assert all(session.arenas[identity] is arena for identity, arena in held.items())
        assert (weights(session)[:16] == 2).all()  # the fake publishes them, and computes none
        gradients(successor.arenas[1])[:16] = 3
        assert (weights(session)[:16] == 3).all()
        gradients(held[2])[...] = 6
        session.step(scalars())
        assert (gradients(successor.arenas[2]) == 6).all()


def test_nobody_hears_of_a_successor_between_two_steps(fake, successors):  # noqa: F811
    with open_session(fake, reconnect_for_s=SOON_S) as session:
        two_matrices(session)
        run_to(session, 2)
        fake.stored[("a", types.STATE_KIND_MASTER)] = np.arange(256.0)
        reader = session.pull(["a"], [types.STATE_KIND_MASTER])
        successor = successors(step=2, epoch=3)
        successor.stored = fake.stored
        (tensor,) = list(reader)
        assert (np.array(tensor.values).ravel() == np.arange(256.0)).all()
        assert session.save_snapshot()[0] == 2
        session.step(scalars())


def test_a_rank_that_stands_elsewhere_is_set_back(fake, successors):  # noqa: F811
    with open_session(fake, reconnect_for_s=SOON_S) as session:
        two_matrices(session)
        run_to(session, 3)
        successors(step=2, epoch=3)
        with pytest.raises(dmuond.RolledBack, match="step 2"):
            session.step(scalars())


def test_what_was_pushed_after_the_step_may_not_be_in_its_snapshot(fake, successors):  # noqa: F811
    with open_session(fake, reconnect_for_s=SOON_S) as session:
        two_matrices(session)
        run_to(session, 2)
        session.push()
        successors(step=2, epoch=3)
        with pytest.raises(dmuond.RolledBack) as caught:
            session.step(scalars())
        assert caught.value.fresh_arenas


def test_a_rank_that_has_seen_no_step_cannot_know_what_its_weights_are(fake, successors):  # noqa: F811
    with open_session(fake, reconnect_for_s=SOON_S) as session:
        two_matrices(session)
        run_to(session, 2)
        second = successors(step=1, epoch=3)
        with pytest.raises(dmuond.RolledBack):
            session.step(scalars())
        layout, sizes = session._layout, session._wanted_arenas
    with open_session(fake, resume=types.RESUME_REQUIRE, reconnect_for_s=SOON_S) as session:
        session.register(layout.parameters, layout.fragments, layout.groups)
        session.attach(sizes)
        second.die()
        successors(step=1, epoch=5)
        with pytest.raises(dmuond.RolledBack):
            session.step(scalars())


def test_weights_come_from_the_successor_and_everything_else_from_the_caller():
    """The predecessor may have died while it wrote the weights of another step."""

    def arena(values):
        descriptor = os.memfd_create("arena")
        os.ftruncate(descriptor, 4096)
        made = HostArena(descriptor, 4096)
        os.close(descriptor)
        made.view[...] = values
        return made

    layout = pb.RegisterLayoutRequest()
    layout.parameters.add(weight_type=types.ELEMENT_TYPE_BFLOAT16, route=types.ROUTE_MUON)
    layout.fragments.add(
        parameter=0,
        box=types.Box(begin=[0, 2], end=[3, 4]),
        weight=types.Slice(arena=1, offset_bytes=64, strides=[8, 1]),
        gradient=types.Slice(arena=1, offset_bytes=1024, strides=[2, 1]),
    )
    kept, fresh = {1: arena(1)}, {1: arena(2)}
    successors_own = fresh[1].view
    arenas.take_over(layout, kept, fresh)
    expected = np.full(4096, 1, np.uint8)
    for row in range(3):
        expected[64 + 16 * row :][:4] = 2
    assert (kept[1].view == expected).all()
    successors_own[...] = 9
    assert (kept[1].view == 9).all(), "they are one memory"


# --- another node's daemon is lost: this one's tells ---


def test_the_loss_of_another_nodes_memory_at_this_step_is_acknowledged_and_not_told(fake):
    with open_session(fake) as session:
        two_matrices(session)
        run_to(session, 2)
        fake.roll_back(2, b"two", asked=False)
        outcome = session.step(scalars())
        assert (outcome.kind, outcome.step) == (types.Outcome.KIND_COMMITTED, 3)
        assert fake.acknowledged == [2]
        assert fake.ready_at_submit[-1] == [fake.submits[-1].attempt] * 2


def test_a_snapshot_that_somebody_loads_is_told_whatever_its_step(fake):
    with open_session(fake) as session:
        two_matrices(session)
        run_to(session, 2)
        session.load_snapshot(2)
        with pytest.raises(dmuond.RolledBack, match="step 2"):
            session.step(scalars())


def test_weights_written_before_and_pushed_after_were_overwritten(fake):
    with open_session(fake) as session:
        two_matrices(session)
        run_to(session, 2)
        weights(session)[...] = 7
        fake.roll_back(2, asked=False)
        session.save_snapshot()  # the fake has nothing to say of it
        with pytest.raises(dmuond.RolledBack):
            session.push()


# --- the optimizer ---


def test_the_optimizer_goes_on_with_its_gradients_and_its_signals(fake, outlive):  # noqa: F811
    model, opt = make(fake)
    train_to(model, opt, 4)
    assert opt._early.stage[0]
    opt.zero_grad()
    backward(model)
    gradient = model[0].weight.grad.clone()
    successor = outlive(step=4, epoch=3)
    opt.trainer_state = b"five"
    opt.step()
    assert opt._early.stage[0]
    assert (opt.last_committed_step, opt.session.trainer_state) == (5, b"five")
    assert not successor.submits[-1].withdraw
    found = [a for a in successor.arenas.values() if gradient.numpy().tobytes() in a.tobytes()]
    assert len(found) == 1
    assert all_are(model, 4)  # the fake publishes them, and computes none
    train_to(model, opt, 7)
    assert successor.step == 7
    opt.close()


def test_the_optimizer_does_not_lose_a_checkpoint_that_was_loaded_meanwhile(fake, outlive):  # noqa: F811
    model, opt = make(fake)
    train_to(model, opt, 2)
    model.load_state_dict({name: torch.ones_like(v) for name, v in model.state_dict().items()})
    outlive(step=2, epoch=3)
    with pytest.raises(dmuond.RolledBack):
        opt.step()
    assert all_are(model, 2)
    opt.close()


def test_a_scaler_steps_as_if_nothing_had_been(fake, outlive):  # noqa: F811
    model, opt = make(fake)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

    def step():
        scaler.scale(model(torch.ones(2, 4)).sum()).backward()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

    step()
    outlive(step=1, epoch=3)
    step()
    assert opt.last_committed_step == 2
    opt.close()
