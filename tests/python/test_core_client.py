"""The core client where a daemon misbehaves, as only a fake one can be made to on demand."""

import socket
import threading

import dmuond
import grpc
import numpy as np
import pytest
from dmuond import types


def open_session(fake, **more):
    return dmuond.Session(fake.path, rank=0, world_size=1, **more)


def layout_of_two_matrices(session, name="w"):
    """Two 4x4 matrices in two buckets."""
    parameters, fragments = [], []
    for index in range(2):
        parameters.append(
            types.Parameter(
                name=f"{name}{index}",
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


def two_matrices(session, name="w"):
    """Two 4x4 matrices in two buckets, and their first weights."""
    layout_of_two_matrices(session, name)
    session.attach({1: 512, 2: 512})
    session.push()


def scalars(**more):
    group = types.GroupScalars(learning_rate=0.1, momentum=0.9, beta1=0.9, beta2=0.99, eps=1e-8)
    return types.StepScalars(groups=[group], **more)


def aborted(retry=True):
    outcome = types.Outcome
    return outcome(
        kind=outcome.KIND_ABORTED, reason=outcome.REASON_LANE_LOST, retry=retry, detail="lane 3"
    )


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
        two_matrices(session)
        attempt = session.next_attempt
        session.step(scalars(), absent=[1])
        assert fake.ready_at_submit[0][0] == attempt
        assert fake.ready_at_submit[0][1] < attempt
        assert fake.ready_at_wait == [[attempt] * 2]


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
        stub_method = session._link.channel._stub.SubmitStep
        failures = [2]

        def flaky(request, timeout=None):
            if failures[0]:
                failures[0] -= 1
                raise _Unavailable()
            return stub_method(request, timeout=timeout)

        session._link.channel._stub.SubmitStep = flaky
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


def decide_and_die(fake, session):
    """A step is decided, and its weights never come."""
    two_matrices(session)
    fake._publish = lambda attempt: None
    session.step(scalars(), wait=False)
    fake.die()


def test_closing_says_once_that_the_weights_never_came(fake):
    session = open_session(fake)
    decide_and_die(fake, session)
    with pytest.raises(dmuond.DaemonLost, match="undefined"):
        session.close()
    assert session.closed
    session.close()


def test_a_failure_ends_as_itself_and_a_warning_says_that_the_weights_never_came(fake, caplog):
    session = open_session(fake)
    decide_and_die(fake, session)
    with pytest.raises(KeyError), session:
        raise KeyError
    assert session.closed
    assert "the weights after step 1" in caplog.text


def test_closing_is_done_when_only_its_answer_is_lost(fake):
    session = open_session(fake)
    two_matrices(session)

    def close_without_an_answer(context):
        fake._client.shutdown(socket.SHUT_RDWR)
        context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")

    fake.first["CloseSession"] = close_without_an_answer
    session.close()
    assert session.closed and fake.closes == 1


def test_nobody_at_the_address_is_an_error_with_the_path(tmp_path):
    path = str(tmp_path / "none.sock")
    with pytest.raises(dmuond.Unreachable, match="none.sock"):
        dmuond.Session(path, connect_for_s=0.1)


def test_an_address_that_is_no_socket_path_is_refused(monkeypatch):
    for address, what in (
        ("localhost:8080", "not the path"),
        ("unix:relative", "not the path"),
        ("unix:/" + "x" * 120, "x.attach' has 128 bytes, at most 107 are possible"),
    ):
        with pytest.raises(dmuond.InvalidArgumentError, match=what):
            dmuond.Session(address)
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(dmuond.InvalidArgumentError, match="WORLD_SIZE"):
        dmuond.Session("unix:/tmp/nowhere.sock")


def test_a_page_of_another_version_is_refused(fake):
    session = open_session(fake)
    session.register([], [], [])
    stub = session._link.channel._stub.AttachBuffers

    def attach_and_spoil(request, timeout=None):
        reply = stub(request)  # descriptors are mapped after the reply
        fake.page._memory[4:8] = b"\x09\0\0\0"
        return reply

    session._link.channel._stub.AttachBuffers = attach_and_spoil
    with pytest.raises(dmuond.Error, match="version 9"):
        session.attach({1: 64})
    session.close()


def test_state_is_pulled_in_pieces_and_pushed_in_pieces(fake):
    kind = types.STATE_KIND_MOMENTUM
    with open_session(fake) as session:
        two_matrices(session)
        fake.stored = {("w0", kind): np.ones(16), ("w1", kind): np.arange(1000.0)}
        pulled = list(session.pull(["w1"], [kind]))
        assert [(t.parameter, t.kind) for t in pulled] == [("w1", kind)]
        assert np.array_equal(pulled[0].values, np.arange(1000.0, dtype=np.float32))

        large = np.arange(600_000, dtype=np.float32)
        step = dmuond.StateTensor("w0", 0, types.STATE_KIND_STEP, np.array([300.0]))
        session.push_state([step, dmuond.StateTensor("w1", 129, kind, large), step])
        assert [len(message) for message in fake.pushed] == [2, 1, 2]  # small ones travel together
        first, *pieces, last = (chunk for message in fake.pushed for chunk in message)
        for each in (first, last):
            assert (each.parameter, each.kind) == ("w0", types.STATE_KIND_STEP)
            assert each.data == np.array([300.0]).tobytes()
        assert b"".join(chunk.data for chunk in pieces) == large.tobytes()
        assert {(c.parameter, c.fragment, c.kind) for c in pieces} == {("w1", 129, kind)}
        assert [chunk.first_element for chunk in pieces] == [0, 262142, 524286]


def test_an_older_daemon_gets_one_piece_of_state_in_a_message(fake):
    fake.features = 0
    with open_session(fake) as session:
        two_matrices(session)
        steps = [
            dmuond.StateTensor(name, 0, types.STATE_KIND_STEP, np.array([300.0]))
            for name in ("w0", "w1")
        ]
        session.push_state(steps)
        assert [[chunk.parameter for chunk in message] for message in fake.pushed] == [
            ["w0"],
            ["w1"],
        ]
