"""The core client when the job goes back to a step: told by its daemon, or by its successor."""

import gc
import signal
import threading
import time
import weakref

import dmuond
import grpc
import numpy as np
import pytest
from dmuond import member, types, unclosed
from dmuond._proto import trainer_pb2 as pb
from fake_daemon import EPOCH, FakeDaemon, abort
from test_core_client import layout_of_two_matrices, open_session, scalars, two_matrices

SOON_S = 5.0


def weights(session):
    return session.arenas[1].view(np.float32)


def run_to(session, step, **more):
    while session.last_committed_step < step:
        session.step(scalars(), **more)


@pytest.fixture
def successors(fake):
    """Lets the daemon die, and another take its place."""
    started = []

    def take_over(after_s: float = 0.0, **state):
        fake.die()

        def start():
            time.sleep(after_s)
            started.append(FakeDaemon(fake.path, **state))

        if not after_s:
            start()
            return started[-1]
        threading.Thread(target=start, daemon=True).start()
        return None

    yield take_over
    for daemon in started:
        daemon.die()


# --- told by the daemon ---


def test_a_rollback_is_acknowledged_and_raised_with_its_step_and_state(fake):
    with open_session(fake) as session:
        two_matrices(session)
        run_to(session, 3)
        fake.roll_back(1, b"position 1")
        with pytest.raises(dmuond.RolledBack, match="step 1") as caught:
            session.step(scalars(), trainer_state=b"position 4")
        assert (caught.value.to_step, caught.value.trainer_state) == (1, b"position 1")
        assert not caught.value.fresh_arenas
        assert fake.acknowledged == [1]
        assert (session.last_committed_step, session.trainer_state) == (1, b"position 1")
        assert (weights(session) == 1).all()
        assert session.next_attempt > 2 * EPOCH
        session.step(scalars())
        assert fake.submits[-1].step == 2
        assert fake.ready_at_submit[-1] == [fake.submits[-1].attempt] * 2


def test_a_rollback_ends_a_wait_for_weights_that_nobody_publishes_any_more(fake):
    with open_session(fake) as session:
        two_matrices(session)
        run_to(session, 2)
        publish, fake._publish = fake._publish, lambda attempt: None

        def go_back():
            fake._publish = publish
            fake.roll_back(2)

        timer = threading.Timer(0.3, go_back)
        timer.start()
        with pytest.raises(dmuond.RolledBack) as caught:
            session.step(scalars())
        assert caught.value.to_step == 2
        assert (weights(session) == 2).all()
        timer.join()


def test_a_trainer_that_attaches_meanwhile_begins_where_the_job_has_gone_back_to(tmp_path):
    class GoesBack(FakeDaemon):
        def _publish(self, attempt):
            if self.goes_back_to is None and not self.acknowledged:
                self.roll_back(2, b"position 2", asked=False)  # before these weights come
            else:
                super()._publish(attempt)

    fake = GoesBack(str(tmp_path / "d.sock"), step=3, trainer_state=b"position 3")
    with open_session(fake, resume="require") as session:
        layout_of_two_matrices(session)
        session.attach({1: 512, 2: 512})
        assert fake.acknowledged == [2]
        assert session.last_committed_step == 2
        assert session.trainer_state == b"position 2"
        assert (weights(session)[:16] == 2).all()
        session.step(scalars())
        assert session.last_committed_step == 3
    fake.die()


def test_weights_that_nobody_publishes_are_not_waited_for_for_ever(fake):
    fake.published_timeout_ms = 1500
    with open_session(fake) as session:
        two_matrices(session)
        run_to(session, 2)
        fake._publish = lambda attempt: None
        with pytest.raises(dmuond.Error) as caught:
            session.step(scalars())
        assert caught.value.reason == "NOT_PUBLISHED"
        assert "1.5 s" in str(caught.value)


def ended(context) -> threading.Event:
    """Set when the call has ended, by its deadline or with its connection."""
    event = threading.Event()
    if not context.add_callback(event.set):
        event.set()
    return event


def test_a_daemon_that_is_stopped_is_asked_again(fake, monkeypatch):
    monkeypatch.setattr(member, "WAIT_SLACK_S", 0.3)
    with open_session(fake) as session:
        two_matrices(session)
        run_to(session, 2)
        publish, fake._publish = fake._publish, lambda attempt: None
        asked = []

        def silent(request, context):
            asked.append(request)
            if len(asked) > 1:
                publish(fake.attempt - 1)
            ended(context).wait(10)  # the call's deadline passes
            return pb.WaitStepReply()

        fake.on_wait = silent
        session.step(scalars())
        assert len(asked) > 1


def test_a_rollback_further_back_while_the_first_is_acknowledged_is_the_one_that_counts(fake):
    with open_session(fake) as session:
        two_matrices(session)
        run_to(session, 3)
        fake.roll_back(2, b"position 2")
        fake.first["AckRollback"] = lambda _: fake.roll_back(1, b"position 1")
        with pytest.raises(dmuond.RolledBack) as caught:
            session.step(scalars())
        assert (caught.value.to_step, caught.value.trainer_state) == (1, b"position 1")
        assert fake.acknowledged == [1]


def hold_publishing(daemon):
    """Until the function that it returns is called: then a new epoch publishes."""
    publish, daemon._publish = daemon._publish, lambda attempt: None

    def release():
        daemon._publish = publish
        daemon.begin_epoch()

    return release


def not_published(call):
    with pytest.raises(dmuond.Error) as caught:
        call()
    assert caught.value.reason == "NOT_PUBLISHED"


def test_where_the_weights_do_not_come_the_next_call_says_where_to(fake):
    fake.published_timeout_ms = 300
    with open_session(fake) as session:
        two_matrices(session)
        run_to(session, 3)
        session.on_rolled_back = (told := []).append
        fake.roll_back(1, b"position 1")
        release = hold_publishing(fake)
        not_published(lambda: session.step(scalars()))
        not_published(session.wait_published)
        session.signal(0)  # gradients of a step that will not be
        assert fake._ready(0) < session.next_attempt
        assert (len(fake.submits), told) == (4, [])
        release()
        with pytest.raises(dmuond.RolledBack) as caught:
            session.step(scalars())
        assert (caught.value.to_step, caught.value.trainer_state) == (1, b"position 1")
        assert (fake.acknowledged, told) == ([1], [False])
        session.step(scalars())
        assert fake.submits[-1].step == 2


def test_where_the_acknowledgements_answer_does_not_come_it_is_made_again(fake):
    with open_session(fake) as session:
        two_matrices(session)
        run_to(session, 3)
        fake.roll_back(1, b"position 1")
        fake.lose_acknowledgement = True
        with pytest.raises(dmuond.Error) as caught:
            session.step(scalars())
        assert caught.value.reason == "RANKS_MISSING"
        with pytest.raises(dmuond.RolledBack, match="step 1"):
            session.save_snapshot()
        session.step(scalars())
        assert fake.submits[-1].step == 2


def test_a_push_hears_of_a_rollback_too(fake):
    with open_session(fake) as session:
        two_matrices(session)
        run_to(session, 2)
        fake.roll_back(1)
        with pytest.raises(dmuond.RolledBack):
            session.push()
        session.push()
        assert session.last_committed_step == 1


def go_back_before_the_weights_come(fake, session):
    two_matrices(session)
    run_to(session, 2)
    publish, fake._publish = fake._publish, lambda attempt: None
    session.step(scalars(), wait=False)
    fake._publish = publish
    fake.roll_back(1)


def test_closing_hears_of_a_rollback_and_leaves_the_session_open(fake):
    with open_session(fake) as session:
        go_back_before_the_weights_come(fake, session)
        with pytest.raises(dmuond.RolledBack, match="step 1"):
            session.close()
        assert not session.closed and fake.closes == 0
        run_to(session, 3)
    assert session.closed and fake.closes == 1


def test_a_block_that_ends_in_a_rollback_has_ended_as_one_that_fails(fake):
    with pytest.raises(dmuond.RolledBack), open_session(fake) as session:
        go_back_before_the_weights_come(fake, session)
    assert session.closed and fake.closes == 0


def test_a_session_that_ends_by_itself_in_a_rollback_says_so_and_leaves(fake, capsys):
    session = open_session(fake)
    go_back_before_the_weights_come(fake, session)
    unclosed.end(session)
    assert "back to step 1" in capsys.readouterr().err
    assert session.closed and fake.closes == 1


def test_loading_a_snapshot_sets_the_next_step_back(fake):
    with open_session(fake) as session:
        two_matrices(session)
        run_to(session, 3)
        assert session.load_snapshot(2) == 2
        with pytest.raises(dmuond.RolledBack) as caught:
            session.step(scalars())
        assert caught.value.trainer_state == b"of the snapshot"
        # Each a call of its own to the daemon, which answers a repeated one as the first.
        assert session.load_snapshot(1) == 1
        assert fake.loads == [1, 2]


def test_state_that_is_lost_is_told_with_the_last_step(fake):
    with open_session(fake) as session:
        two_matrices(session)
        run_to(session, 2)
        lost = types.Outcome.REASON_STATE_LOST
        fake.outcomes = [
            types.Outcome(kind=types.Outcome.KIND_ABORTED, reason=lost, detail="node 1")
        ]
        with pytest.raises(dmuond.StateLost, match="node 1") as caught:
            session.step(scalars())
        assert (caught.value.last_committed_step, caught.value.durable_step) == (2, None)
        fake.refusals = [(grpc.StatusCode.DATA_LOSS, "node 1 has lost it", "STATE_LOST")]
        with pytest.raises(dmuond.StateLost, match="node 1"):
            session.step(scalars())


# --- new epochs, nothing lost ---


def test_an_abort_into_a_new_epoch_is_tried_again_there(fake):
    with open_session(fake) as session:
        two_matrices(session)
        session.step(scalars())
        lost = types.Outcome.REASON_PEER_LOST
        fake.outcomes = [types.Outcome(kind=types.Outcome.KIND_ABORTED, reason=lost, retry=True)]
        session.step(scalars())
        first, second = fake.submits[-2:]
        assert second.attempt > EPOCH * 2 > first.attempt
        assert fake.ready_at_submit[-1] == [second.attempt] * 2


def test_an_attempt_that_ended_between_steps_is_overtaken(fake):
    with open_session(fake) as session:
        two_matrices(session)
        session.step(scalars())
        session.signal(0)  # under the attempt that the new epoch ends
        fake.begin_epoch()
        session.step(scalars())
        assert session.last_committed_step == 2
        assert fake.submits[-1].attempt > EPOCH * 2
        assert fake.ready_at_submit[-1] == [fake.submits[-1].attempt] * 2


def test_weights_of_a_push_that_a_new_epoch_aborts_are_pushed_again(fake):
    with open_session(fake) as session:
        two_matrices(session)
        session.step(scalars())
        weights(session)[...] = 42

        def reform(context):
            fake.begin_epoch()
            code = grpc.StatusCode.UNAVAILABLE
            metadata = {"next_attempt": str(fake.attempt), "retry": "true"}
            abort(context, code, "the push was aborted", "PUSH_ABORTED", **metadata)

        fake.first["PushParameters"] = reform
        session.push()
        pushed = fake.pushed_weights.view(np.float32)
        assert (pushed[:16] == 42).all() and (pushed[64:80] == 42).all()
        assert (pushed[16:64] != 42).all(), "what lies between weights is left as it is"


def test_weights_that_a_new_epoch_may_have_overwritten_are_not_pushed_in_silence(fake):
    with open_session(fake) as session:
        two_matrices(session)
        session.step(scalars())
        weights(session)[...] = 42
        fake.begin_epoch()
        with pytest.raises(dmuond.FailedPreconditionError) as caught:
            session.push()
        assert caught.value.reason == "WEIGHTS_REPUBLISHED"
        weights(session)[...] = 43
        session.push()
        assert (fake.pushed_weights.view(np.float32) == 43).all()


def test_weights_are_not_pushed_over_masters_that_are_still_on_their_way(fake):
    """One bucket of the new epoch came before the last step's wait ended, the other comes later."""
    with open_session(fake) as session:
        two_matrices(session)
        publish = fake._publish

        def publish_first_ahead(attempt):
            fake.publish_bucket(0, (attempt // EPOCH + 1) * EPOCH + 1)
            fake.publish_bucket(1, attempt)

        fake._publish = publish_first_ahead
        session.step(scalars())
        weights(session)[...] = 42

        def publish_late(attempt):
            fake.publish_bucket(0, attempt)
            threading.Timer(0.3, publish, [attempt]).start()

        fake._publish = publish_late
        fake.begin_epoch()
        with pytest.raises(dmuond.FailedPreconditionError) as caught:
            session.push()
        assert caught.value.reason == "WEIGHTS_REPUBLISHED"
        assert set(session._published_attempts()) == {fake.attempt - 1}  # what is written now stays
        fake._publish = publish
        weights(session)[...] = 43
        session.push()
        assert (fake.pushed_weights.view(np.float32) == 43).all()


def complaining(*_, **__):
    """As a lock that was being taken when Ctrl-C came."""
    try:
        raise KeyboardInterrupt
    finally:
        raise RuntimeError("release unlocked lock")


def interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("end", [interrupted, complaining])
def test_a_call_that_ctrl_c_ends_leaves_its_channel_behind(fake, monkeypatch, end):
    """GRPC may hold a lock of it for good."""
    with open_session(fake) as session:
        two_matrices(session)
        channel = session._link.channel
        for name, call in (
            ("SaveSnapshot", session.save_snapshot),
            ("PullParameters", lambda: list(session.pull())),
        ):
            with monkeypatch.context() as patched:
                before = channel._channel
                patched.setattr(channel._stub, name, end)
                with pytest.raises(KeyboardInterrupt):
                    call()
            assert channel._channel is not before
            assert session.save_snapshot()[0] == 0


def test_a_wait_for_weights_that_is_interrupted_is_still_to_be_waited_for(fake, monkeypatch):
    with open_session(fake) as session:
        two_matrices(session)
        publish, published = fake._publish, []
        fake._publish = published.append
        session.step(scalars(), wait=False)

        def interrupt(*_):
            raise KeyboardInterrupt

        previous = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                session.wait_published()
        finally:
            signal.signal(signal.SIGALRM, previous)
        threading.Timer(0.3, publish, published).start()
        session.wait_published()
        assert set(session._published_attempts()) == set(published)
        fake._publish = publish


def test_state_is_read_again_after_a_cut_connection(fake):
    with open_session(fake) as session:
        two_matrices(session)
        session.step(scalars())
        values = np.arange(16, dtype=np.float32)
        fake.stored["w0", types.STATE_KIND_MASTER] = values
        fake.first["PullParameters"] = lambda context: context.abort(
            grpc.StatusCode.UNAVAILABLE, "cut"
        )
        (master,) = session.pull(["w0"], [types.STATE_KIND_MASTER])
        assert np.array_equal(master.values, values)


def test_a_push_that_no_retry_can_help_is_raised(fake):
    with open_session(fake) as session:
        two_matrices(session)

        def refuse(context):
            metadata = {"next_attempt": str(fake.attempt), "retry": "false"}
            abort(context, grpc.StatusCode.UNAVAILABLE, "rank 1", "PUSH_ABORTED", **metadata)

        fake.first["PushParameters"] = refuse
        with pytest.raises(dmuond.Error) as caught:
            session.push()
        assert caught.value.reason == "PUSH_ABORTED"


# --- told by the daemon's successor ---


def test_a_session_outlives_its_daemon(fake, successors):
    with open_session(fake, reconnect_for_s=SOON_S) as session:
        two_matrices(session)
        run_to(session, 5, trainer_state=b"any")
        old = session.arenas[1]
        successor = successors(step=3, trainer_state=b"position 3", epoch=4)
        with pytest.raises(dmuond.RolledBack) as caught:
            session.step(scalars())
        assert (caught.value.to_step, caught.value.trainer_state) == (3, b"position 3")
        assert caught.value.fresh_arenas
        assert session.arenas[1] is not old
        assert (weights(session) == 3).all()
        assert session.durable_step == 3
        assert successor.opened[0].resume == types.RESUME_REQUIRE
        before, after = fake.registered[0], successor.registered[0]
        after.ClearField("key"), before.ClearField("key")
        assert before == after
        assert not session.lost
        run_to(session, 5)
        assert [submit.step for submit in successor.submits] == [4, 5]
        assert successor.submits[0].attempt > 4 * EPOCH


def test_where_a_successors_weights_do_not_come_the_next_call_says_where_to(fake, successors):
    with open_session(fake, reconnect_for_s=SOON_S) as session:
        two_matrices(session)
        run_to(session, 3)
        session.on_rolled_back = (told := []).append
        successor = successors(step=2, trainer_state=b"position 2", epoch=4)
        successor.published_timeout_ms = 300
        release = hold_publishing(successor)
        not_published(lambda: session.step(scalars()))
        release()
        with pytest.raises(dmuond.RolledBack) as caught:
            session.push()
        assert (caught.value.to_step, caught.value.trainer_state) == (2, b"position 2")
        assert caught.value.fresh_arenas and told == [True]
        assert (weights(session) == 2).all()
        session.step(scalars())
        assert session.last_committed_step == 3


def test_the_old_arenas_go_when_nobody_holds_them(fake, successors):
    with open_session(fake, reconnect_for_s=SOON_S) as session:
        two_matrices(session)
        held = session.arenas[1]
        gone = weakref.ref(session.arenas[2])
        successors(step=1)
        with pytest.raises(dmuond.RolledBack):
            session.step(scalars())
        held[...] = 7  # still there
        gc.collect()
        assert gone() is None


def test_a_wait_for_the_decision_ends_with_the_daemon_and_goes_on_with_the_next(fake, successors):
    with open_session(fake, reconnect_for_s=SOON_S) as session:
        two_matrices(session)
        run_to(session, 2)
        fake._publish = lambda attempt: None  # decided, and never published
        timer = threading.Timer(0.2, lambda: successors(after_s=0.5, step=2, epoch=2))
        timer.start()
        with pytest.raises(dmuond.RolledBack) as caught:
            session.step(scalars())
        assert caught.value.to_step == 2
        timer.join()


def test_a_draining_daemon_is_waited_for_and_its_successor_too(fake, successors):
    with open_session(fake, reconnect_for_s=SOON_S) as session:
        two_matrices(session)
        run_to(session, 2)
        fake.refusals = [(grpc.StatusCode.UNAVAILABLE, "it is leaving", "DRAINING")]
        timer = threading.Timer(0.3, lambda: successors(step=2, epoch=2))
        timer.start()
        session.step(scalars())  # from step 2, where it stands, it need not go back
        assert session.last_committed_step == 3
        timer.join()


@pytest.mark.parametrize("call", ["OpenSession", "RegisterLayout"])
def test_a_start_during_a_drain_waits_for_the_successor(fake, successors, call, caplog):
    """Under torchrun each failure of a start costs one of its restarts."""

    def drain(context):
        timer.start()
        abort(context, grpc.StatusCode.UNAVAILABLE, "it is leaving", "DRAINING")

    timer = threading.Timer(0.1, lambda: successors(after_s=0.1))
    fake.first[call] = drain
    with open_session(fake, connect_for_s=0.0, reconnect_for_s=SOON_S) as session:
        two_matrices(session)
        session.step(scalars())
    assert "rank 0: the daemon at" in caplog.text and "is leaving; waiting up to 5 s" in caplog.text
    timer.join()


def test_a_start_during_a_drain_names_a_successor_that_does_not_come(fake):
    def start(reconnect_for_s):
        fake.first["OpenSession"] = lambda context: abort(
            context, grpc.StatusCode.UNAVAILABLE, "it is leaving", "DRAINING"
        )
        with pytest.raises(dmuond.Error) as caught:
            open_session(fake, reconnect_for_s=reconnect_for_s)
        return caught.value

    assert start(0.0).reason == "DRAINING"
    nobody = start(0.1)
    assert isinstance(nobody, dmuond.DaemonLost)
    assert "was leaving when rank 0 came, and no successor took over within 0.1 s" in str(nobody)


def test_a_successor_that_dies_as_well_has_one_itself(fake, successors):
    with open_session(fake, reconnect_for_s=SOON_S) as session:
        two_matrices(session)
        run_to(session, 2)
        first = successors(step=2, epoch=2)
        later = []

        def replace():
            first.die()
            later.append(FakeDaemon(fake.path, step=1, epoch=3))

        replacing = threading.Thread(target=replace)

        def die_instead(context):
            replacing.start()
            ended(context).wait(10)

        first.first["AttachBuffers"] = die_instead
        with pytest.raises(dmuond.RolledBack) as caught:
            session.step(scalars())
        assert caught.value.to_step == 1
        session.step(scalars())
        replacing.join()
        later[0].die()


def test_a_successor_without_the_state_says_what_is_lost(fake, successors):
    with open_session(fake, reconnect_for_s=SOON_S) as session:
        two_matrices(session)
        run_to(session, 3)
        successors()
        with pytest.raises(dmuond.StateLost, match="after step 3") as caught:
            session.step(scalars())
        assert caught.value.durable_step is None


def test_without_a_successor_in_time_the_daemon_is_lost(fake):
    with open_session(fake, reconnect_for_s=0.5) as session:
        two_matrices(session)
        run_to(session, 3)
        fake.die()
        with pytest.raises(dmuond.DaemonLost, match=r"within 0.5 s.*step 3"):
            session.step(scalars())


def test_a_job_without_state_has_nothing_to_come_back_to(fake, successors):
    session = open_session(fake, reconnect_for_s=SOON_S)
    session.register([], [], [])
    successors(step=3)
    with pytest.raises(dmuond.DaemonLost):
        session.attach({1: 64})
    session.close()


def test_the_environment_says_how_long_to_wait(fake, monkeypatch):
    monkeypatch.setenv("DMUOND_RECONNECT_S", "0.25")
    with open_session(fake) as session:
        two_matrices(session)
        fake.die()
        with pytest.raises(dmuond.DaemonLost, match=r"0\.25 s"):
            session.step(scalars())
    monkeypatch.setenv("DMUOND_RECONNECT_S", "soon")
    with pytest.raises(dmuond.InvalidArgumentError, match="DMUOND_RECONNECT_S"):
        open_session(fake)
