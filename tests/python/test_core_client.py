"""The core client against a fake daemon: words, retries, refusals, losses, forks."""

import gc
import os
import threading

import dmuond
import grpc
import numpy as np
import pytest
from dmuond import types


def open_session(fake, **more):
    return dmuond.Session(fake.path, rank=0, world_size=1, **more)


def two_matrices(session):
    """Two 4x4 matrices in two buckets; returns weights and gradients."""
    parameters, fragments = [], []
    for index in range(2):
        parameters.append(
            types.Parameter(
                name=f"w{index}",
                shape=[4, 4],
                weight_type=types.ELEMENT_TYPE_FLOAT32,
                gradient_type=types.ELEMENT_TYPE_FLOAT32,
                route=types.ROUTE_MUON,
                reduce_factor=1.0,
            )
        )
        piece = {"offset_bytes": 256 * index, "strides": [4, 1]}
        fragments.append(
            types.Fragment(
                parameter=index,
                box=types.Box(begin=[0, 0], end=[4, 4]),
                contribution=types.CONTRIBUTION_SUM,
                weight=types.Slice(arena=1, **piece),
                gradient=types.Slice(arena=2, **piece),
            )
        )
    session.register(parameters, fragments, [types.GroupConfig(preset="keller")])
    arenas = session.attach({1: 512, 2: 512})

    def views(arena):
        return [np.ndarray((4, 4), np.float32, arenas[arena], 256 * i) for i in range(2)]

    weights, gradients = views(1), views(2)
    rng = np.random.default_rng(0)
    for tensor in weights + gradients:
        tensor[...] = rng.standard_normal((4, 4))
    session.push()
    return weights, gradients


def scalars(**more):
    group = types.GroupScalars(learning_rate=0.1, momentum=0.9, beta1=0.9, beta2=0.99, eps=1e-8)
    return types.StepScalars(groups=[group], **more)


def aborted(retry=True):
    outcome = types.Outcome
    return outcome(
        kind=outcome.KIND_ABORTED, reason=outcome.REASON_LANE_LOST, retry=retry, detail="lane 3"
    )


def test_a_step_changes_the_weights_in_the_arena(fake):
    with open_session(fake) as session:
        weights, _ = two_matrices(session)
        before = [weight.copy() for weight in weights]
        outcome = session.step(scalars())
        assert outcome.kind == types.Outcome.KIND_COMMITTED
        assert session.last_committed_step == 1
        for weight, old in zip(weights, before, strict=True):
            assert not np.array_equal(weight, old)


def test_an_aborted_attempt_is_signalled_and_submitted_again_under_the_next(fake):
    with open_session(fake) as session:
        two_matrices(session)
        fake.outcomes = [aborted(), aborted()]
        session.step(scalars())
        attempts = [request.attempt for request in fake.submits]
        assert attempts == [attempts[0], attempts[0] + 1, attempts[0] + 2]
        assert [request.step for request in fake.submits] == [1, 1, 1]
        assert fake.ready_at_submit == [[attempt] * 2 for attempt in attempts]


def test_an_abort_that_no_retry_can_help_is_raised_with_its_reason(fake):
    with open_session(fake) as session:
        two_matrices(session)
        fake.outcomes = [aborted(retry=False)]
        with pytest.raises(dmuond.Aborted, match="lane 3") as caught:
            session.step(scalars())
        assert caught.value.reason == "LANE_LOST"
        session.step(scalars())
        assert session.last_committed_step == 1


def test_buckets_with_absent_gradients_are_signalled_after_the_submit(fake):
    with open_session(fake) as session:
        weights, _ = two_matrices(session)
        before = weights[1].copy()
        attempt = session.next_attempt
        session.step(scalars(), absent=[1])
        assert fake.ready_at_submit[0][0] == attempt
        assert fake.ready_at_submit[0][1] < attempt
        assert np.array_equal(weights[1], before)


def test_a_refused_submit_has_reason_and_metadata_and_leaves_the_step_open(fake):
    with open_session(fake) as session:
        two_matrices(session)
        code = grpc.StatusCode.INVALID_ARGUMENT
        fake.refusals = [(code, "groups[0].learning_rate of ranks 0 and 1", "SCALARS_DIFFER")]
        with pytest.raises(dmuond.InvalidArgumentError, match="learning_rate") as caught:
            session.step(scalars())
        assert caught.value.reason == "SCALARS_DIFFER"
        assert caught.value.code == "INVALID_ARGUMENT"
        session.step(scalars())


def test_a_cut_call_is_repeated(fake):
    with open_session(fake) as session:
        two_matrices(session)
        stub_method = session._channel._stub.SubmitStep
        failures = [2]

        def flaky(request, timeout=None):
            if failures[0]:
                failures[0] -= 1
                raise _Unavailable()
            return stub_method(request, timeout=timeout)

        session._channel._stub.SubmitStep = flaky
        session.step(scalars())
        assert failures == [0]
        assert session.last_committed_step == 1


class _Unavailable(grpc.RpcError):
    def code(self):
        return grpc.StatusCode.UNAVAILABLE

    def details(self):
        return "connection reset"

    def trailing_metadata(self):
        return ()


def test_the_daemons_death_ends_a_wait_and_names_itself(fake):
    session = open_session(fake)
    two_matrices(session)
    fake._publish = lambda attempt=None: None  # decided, and never published
    timer = threading.Timer(0.3, fake.die)
    timer.start()
    with pytest.raises(dmuond.DaemonLost):
        session.step(scalars())
    assert session.lost
    with pytest.raises(dmuond.DaemonLost):
        session.step(scalars())
    session.close()
    timer.join()


def test_nobody_at_the_address_is_an_error_with_the_path(tmp_path):
    path = str(tmp_path / "none.sock")
    with pytest.raises(dmuond.Unreachable, match="none.sock"):
        dmuond.Session(path, connect_for_s=0.1)


def test_an_address_that_is_no_socket_path_is_refused(monkeypatch):
    for address in ("localhost:8080", "unix:relative", "unix:/" + "x" * 120):
        with pytest.raises(dmuond.InvalidArgumentError):
            dmuond.Session(address)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(dmuond.InvalidArgumentError, match="WORLD_SIZE"):
        dmuond.Session("unix:/tmp/nowhere.sock")


def test_a_page_of_another_version_is_refused(fake):
    session = open_session(fake)
    session.register([], [], [])
    stub = session._channel._stub.AttachBuffers

    def attach_and_spoil(request, timeout=None):
        reply = stub(request)  # descriptors are mapped after the reply
        fake.page._memory[4:8] = b"\x09\0\0\0"
        return reply

    session._channel._stub.AttachBuffers = attach_and_spoil
    with pytest.raises(dmuond.Error, match="version 9"):
        session.attach({1: 64})
    session.close()


def test_state_is_pulled_in_pieces_and_pushed_in_pieces(fake):
    with open_session(fake) as session:
        two_matrices(session)
        session.step(scalars())
        kinds = [types.STATE_KIND_MOMENTUM]
        pulled = list(session.pull(["w1"], kinds))
        assert [(t.parameter, t.kind, t.values.size) for t in pulled] == [("w1", kinds[0], 16)]
        buffer = next(unit for index, (_, unit) in fake.units.items() if index == 1).buffer
        assert np.array_equal(pulled[0].values.reshape(4, 4), buffer.astype(np.float32))

        large = np.arange(600_000, dtype=np.float32)
        session.push_state([dmuond.StateTensor("w0", 0, kinds[0], large)])
        received = b"".join(chunk.data for chunk in fake.states)
        assert received == large.tobytes()
        assert [chunk.first_element for chunk in fake.states] == [0, 262144, 524288]


def test_a_forked_child_lets_go_of_the_session(fake):
    session = open_session(fake)
    two_matrices(session)
    release, hold = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(hold)
        code = 1
        try:
            session.step(scalars())
        except dmuond.Error:
            code = 0
        os.read(release, 1)  # lives on until the parent has looked
        os._exit(code)
    os.close(release)
    session._disconnect()  # the parent dies, to the daemon
    assert fake.trainer_is_gone(5.0)
    os.close(hold)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_dropped_session_has_died(fake):
    session = open_session(fake)
    del session
    gc.collect()
    assert fake.trainer_is_gone(5.0)
    assert not fake.closed


def test_arenas_outlive_their_session(fake):
    session = open_session(fake)
    weights, _ = two_matrices(session)
    session.close()
    assert fake.closed
    gc.collect()
    weights[0][...] = 1.0
    assert weights[0].sum() == 16.0


def test_sessions_leave_nothing_behind(fake):
    def cycle():
        with open_session(fake) as session:
            two_matrices(session)
            session.step(scalars())
        fake.step, fake.attempt = 0, fake.attempt + 1

    def holdings():
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    for _ in range(3):
        cycle()
    fake_side = 4  # sockets and pools that the fake, in this process, has opened meanwhile
    before = holdings()
    for _ in range(20):
        cycle()
    after = holdings()
    assert after[0] <= before[0] + fake_side
    assert after[1] <= before[1] + fake_side
