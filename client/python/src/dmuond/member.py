"""A rank's place in a job: its link to a daemon, what it knows of the job, and how it keeps both.

`Session` builds on it. Here is what happens when the job goes back to a step, or the daemon has
gone and a successor takes over.
"""

from __future__ import annotations

import abc
import atexit
import functools
import itertools
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dmuond import arenas, comeback, errors, fork, places, types, unclosed
from dmuond._proto import trainer_pb2 as pb
from dmuond.device_array import HasMemory
from dmuond.fault_point import fault_point
from dmuond.link import Identity, Link
from dmuond.memory import Arena, Memory, View
from dmuond.places import Place
from dmuond.timeline import Published, Timeline
from dmuond.waiting import WaitNotice

log = logging.getLogger("dmuond")

WAIT_SLACK_S = 60.0  # what a call may take beyond its own wait
# Weights that are late may not come at all: the daemon is asked this often.
_ASK_EVERY_S = 1.0
# Of a daemon that does not say how long weights may take.
_PUBLISHED_WITHIN_S = 600.0
# The end of the attach socket may follow an answer that it explains.
_GLANCE_S = 1.0
# A start that is slower than the daemon's --claim_timeout connects again: so often at least, and as
# long as it may wait for a daemon.
_CLAIMS_MIN = 3
_ROLLED_BACK = "ROLLED_BACK"
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class Registered:
    """What the daemon answered to a registration."""

    routing: tuple[types.RoutingRow, ...]  # every parameter of the job
    parameter_bucket: tuple[int, ...]  # per registered parameter; -1: left to the trainer
    buckets: int
    plan_digest: int
    makespan_us: float
    lower_bound_us: float
    imbalance: float


class Member(abc.ABC):
    """See Session for the attributes. Not for several threads."""

    _closed = True  # until it has a link, which another session could take the place of

    def __init__(
        self, path: str, identity: Identity, memory: Memory, reconnect_for_s: float, on_error: str
    ) -> None:
        self.job, self.rank, self.world_size = identity.job, identity.rank, identity.world_size
        self.place = Place(path, identity.job, identity.rank)
        self._on_error = on_error
        self._path, self._identity, self._memory = path, identity, memory
        self.device = memory.device
        self._reconnect_for_s = reconnect_for_s
        # A daemon that is stopped is waited for as long as one that has to be started again.
        self._silent_for_s = WAIT_SLACK_S + reconnect_for_s
        self.next_attempt = 0
        self.last_outcome: types.Outcome | None = None
        self.last_timing: types.StepTiming | None = None
        self.registered: Registered | None = None
        self.arenas: dict[int, View] = {}
        self._mapped: dict[int, Arena] = {}  # the arenas that those are views of
        # Called before RolledBack is raised; True: with fresh arenas.
        self.on_rolled_back: Callable[[bool], None] | None = None
        # Called when another session of this process has taken the place of this one.
        self.on_taken_over: Callable[[], None] | None = None
        self._taken_over = False
        # Whether the caller's weights are those of the last step, as far as the caller can tell:
        # asked before a way back to that very step is kept from it. None: they are.
        self.weights_unchanged: Callable[[], bool] | None = None
        self._pid = os.getpid()
        self._at_exit: Callable[[], None] | None = None
        self._layout = pb.RegisterLayoutRequest()
        self._wanted_arenas: dict[int, int | HasMemory] = {}
        self._fresh_arenas = False  # those that this process had mapped before may be in use
        self._loads = 0  # calls of LoadSnapshot
        self._moved = False  # the arenas are others, and the caller has not been told
        # Where the job has gone back to, and the caller has not been told: the step, and the epoch
        # to acknowledge it with (0: that is done).
        self._going_back: tuple[int, int] | None = None
        # The step whose weights, all of them, this rank has seen arrive, and after which nothing
        # was pushed: its state is what any snapshot of it has. None: not known to be so.
        self._stands_at: int | None = None
        self._state_known = False  # the same, but for the weights' arrival
        self._carried = 0  # ways back that the caller was not told of
        self._arrived_attempt = 0  # whose weights, or newer ones, are known to lie there
        self._signalled: set[int] = set()  # buckets, under next_attempt
        # The attempt that was submitted last, and the parameters that it named absent.
        self._said_absent: tuple[int, list[int]] = (0, [])
        self._unpublished: dict[int, int] = {}  # bucket → attempt that has not been waited for
        self._contributes: frozenset[int] = frozenset()
        self._receives: tuple[int, ...] = ()
        self._bucket_of: tuple[int, ...] = ()

    @property
    def _in_job(self) -> bool:
        return self.place.in_job

    @_in_job.setter
    def _in_job(self, value: bool) -> None:
        self.place.in_job = value

    def _begin(self, resume: int, connect_for_s: float) -> None:
        unclosed.make_room(self.place, goes_on=resume != types.RESUME_NEVER)
        self._fresh_arenas = places.take(self, resume)
        self._resume = resume
        self._open(connect_for_s)

    def _open(self, connect_for_s: float) -> None:
        started = time.monotonic()
        for tries in itertools.count(1):
            left_s = connect_for_s - (time.monotonic() - started)
            self._link = Link(self._path, self._silent_for_s, max(0.0, left_s), memory=self._memory)
            self._closed = False
            fork.watch(self)
            try:
                with WaitNotice(self.rank, "the start").waiting_for(self._what_opening_awaits()):
                    self._link.open(self._identity, self._resume)
                break
            except errors.Error as error:
                if self._begins_again(error):
                    return
                late = error.reason == "CLAIM_EXPIRED"
                if not late or (
                    tries >= _CLAIMS_MIN and time.monotonic() > started + connect_for_s
                ):
                    self._disconnect()
                    raise
                log.info("rank %d connects again: %s", self.rank, error)
                self._disconnect()
            except BaseException:
                self._disconnect()
                raise
        self._adopt_opened()
        self.stay()

    def _begins_again(self, error: errors.Error) -> bool:
        """Whether this rank has begun again, with the successor of a daemon that leaves."""
        if error.reason != "DRAINING" or self._reconnect_for_s <= 0:
            return False
        log.warning(
            "rank %d: the daemon at %s is leaving; waiting up to %g s for its successor",
            self.rank,
            self._path,
            self._reconnect_for_s,
        )
        until = time.monotonic() + self._reconnect_for_s
        ended = self._link.lost.wait(self._reconnect_for_s)
        self._disconnect()
        try:
            if ended:
                self._open(max(0.0, until - time.monotonic()))
                return True
        except errors.Unreachable as unreachable:
            error = unreachable
        raise errors.DaemonLost(
            f"the daemon at {self._path} was leaving when rank {self.rank} came, and no successor "
            f"took over within {self._reconnect_for_s:g} s ({error})"
        ) from None

    def __del__(self) -> None:
        if not self._closed:
            unclosed.collected(self, sys._getframe().f_back)

    def stay(self) -> None:
        """Arranges that a fork and the script's end find it, after its finalizer has run, too."""
        fork.watch(self)
        places.hold(self)
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        self._at_exit = functools.partial(unclosed.end_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    def _what_opening_awaits(self) -> str:
        """For people."""
        return (
            f"the daemon at {self._path} to take it into job '{self.job}': when all daemons of the "
            "group have joined, and nobody is left of a job of this name that ends"
        )

    @abc.abstractmethod
    def close(self) -> None:
        """Leaves the job, unless it raises RolledBack."""

    @property
    def lost(self) -> bool:
        """The daemon has gone: the weights in the arenas are undefined until the next call."""
        return self._link.is_lost()

    @property
    def in_child(self) -> bool:
        """Whether this is a forked child, to which the session does not belong."""
        return self._pid != os.getpid()

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def step_is_open(self) -> bool:
        """Whether gradients have been signalled for a step that has not been decided."""
        return bool(self._signalled)

    def leave_in_child(self) -> None:
        """Called in a forked child: drops the inherited descriptors."""
        if self._closed:
            return
        self._closed = True
        self._link.close_in_child()

    def give_way(self) -> None:
        """Ends the session as if this trainer had died: another one takes its place."""
        self._disconnect()
        self._tell_taken_over()

    def hand_over(self) -> None:
        """Closes the session, unless it is closed: another one begins with what it has made."""
        if not self.closed:
            unclosed.end(self)
            self._tell_taken_over()

    def _tell_taken_over(self) -> None:
        self._taken_over = True
        if self.on_taken_over is not None:
            self.on_taken_over()

    def drop(self) -> None:
        """Ends the session as if this trainer had died, so that its replacement may come."""
        places.leave(self.place)
        self._disconnect()

    def end_by(self, error: BaseException) -> None:
        """Ends the session after an uncaught error in the script or the session's block."""
        if places.has_ended(error) or self.lost:
            self._disconnect()
            return
        if not places.ends_job(error, self._on_error):
            self.drop()
            return
        why = places.describe(error)
        if self.durable_step not in (None, self.last_committed_step):
            self._save_last(why)
        saved = "none" if self.durable_step is None else f"that of step {self.durable_step}"
        places.tell(
            f"{why}: job '{self.job}' ends after step {self.last_committed_step}; its newest "
            f"snapshot: {saved}"
        )
        self._leave(why)

    @abc.abstractmethod
    def _save_last(self, why: str) -> None:
        """Tries to write a snapshot before the job ends, which happens for that reason."""

    @abc.abstractmethod
    def _leave(self, end_job: str = "") -> None:
        """Closes the session; with a reason to end the job, the job ends with it."""

    def _adopt_opened(self) -> None:
        hello, opened = self._link.hello, self._link.opened
        self.lanes: int = hello.lanes
        self.device_type: str = hello.device_type
        self.server: str = hello.server
        self.job_incarnation: int = opened.job_incarnation
        self.has_state: bool = opened.has_state
        self.last_committed_step: int = opened.last_committed_step
        self.durable_step: int | None = (
            opened.durable_step if opened.HasField("durable_step") else None
        )
        self.trainer_state: bytes = opened.trainer_state
        if opened.HasField("session_linger_ms"):
            self.place.linger_ms = opened.session_linger_ms
        within_s = opened.published_timeout_ms / 1000
        self._published_within_s: float = within_s or _PUBLISHED_WITHIN_S

    def _adopt_attached(self, reply: pb.AttachBuffersReply) -> None:
        self.last_committed_step = reply.last_committed_step
        self.trainer_state = reply.trainer_state
        if self.durable_step is not None:
            self.durable_step = min(self.durable_step, self.last_committed_step)

    def _adopt_registered(self, reply: pb.RegisterLayoutReply) -> None:
        buckets = tuple(reply.parameter_bucket)
        fragments = self._layout.fragments
        self._bucket_of = buckets
        self._contributes = frozenset({buckets[f.parameter] for f in fragments} - {-1})
        self._receives = tuple(
            sorted({buckets[f.parameter] for f in fragments if _has_elements(f.box)} - {-1})
        )
        self.registered = Registered(
            routing=tuple(reply.routing),
            parameter_bucket=buckets,
            buckets=reply.buckets,
            plan_digest=reply.plan_digest,
            makespan_us=reply.makespan_us,
            lower_bound_us=reply.lower_bound_us,
            imbalance=reply.imbalance,
        )

    def _show_arenas(self) -> None:
        self._mapped = dict(self._link.arenas)
        self.arenas = {identity: arena.view for identity, arena in self._mapped.items()}

    def _check_usable(self) -> None:
        if self.in_child:
            raise errors.Error("this session belongs to the process that forked this one")
        if self._taken_over:
            raise errors.Error(
                f"another optimizer of this process has taken rank {self.rank} of job "
                f"'{self.job}' over: go on with that one",
                reason="TAKEN_OVER",
            )
        if self._closed:
            raise errors.Error("the session is closed")

    def _check_alive(self) -> None:
        self._check_usable()
        if self.lost:
            raise errors.DaemonLost(f"{self._link.how_it_ended()}; the weights are undefined")

    def _call(self, name: str, request: object, timeout_s: float | None = None):
        self._check_alive()
        return self._link.call(name, request, timeout_s)

    def _require_timeline(self) -> Timeline:
        if self._link.timeline is None:
            raise errors.Error("call attach() first")
        return self._link.timeline

    def _disconnect(self) -> None:
        self._closed = True
        if self._at_exit is not None:
            atexit.unregister(self._at_exit)
        self._link.close()

    # --- deaths and rollbacks ---

    def _surviving(self, call: Callable[[], _Answer]) -> _Answer:
        """Runs `call`. RolledBack where the job goes back, or the daemon goes and has a successor.

        Where it goes back to where this rank stands, there is nothing to tell: `call` runs again.
        Before the job has state there is nothing to come back to: DaemonLost. Where the way back
        has failed, it goes on with that before `call`.
        """
        if self._going_back is not None:
            self._settled(self._go_on_going_back)
        return self._settled(call)

    def _settled(self, call: Callable[[], _Answer]) -> _Answer:
        """Does what `_surviving` does, and also finishes a rollback that is under way."""
        self._check_usable()
        while True:
            cause: errors.Error | None = None
            if not self.lost:
                try:
                    try:
                        return call()
                    except errors.Error as error:
                        if error.reason == "STATE_LOST" and not isinstance(error, errors.StateLost):
                            raise self._state_lost(str(error)) from None
                        if error.reason != _ROLLED_BACK:
                            raise
                        back = _where_to(error)
                    self._roll_back(*back)
                    continue
                except errors.Error as error:
                    if not self._is_the_end(error):
                        raise
                    cause = error
            self._come_back(cause)

    def _is_the_end(self, error: errors.Error) -> bool:
        """Whether an error means that the daemon goes, or has gone."""
        if isinstance(error, errors.RolledBack | errors.StateLost):
            return False
        if error.reason == "DRAINING":  # it finishes what it has begun, and leaves
            return self._link.lost.wait(self._reconnect_for_s if self._in_job else 0.0)
        if error.reason == "INCARNATION_OLD":
            return self._link.lost.wait(_GLANCE_S)
        # Other reasons are the daemon's own words.
        return isinstance(error, errors.DaemonLost) or (self.lost and not error.reason)

    def _state_lost(self, why: str) -> errors.StateLost:
        return errors.StateLost(why, self.last_committed_step, self.durable_step)

    def _come_back(self, cause: errors.Error | None) -> None:
        """Takes this rank's place with the successor. RolledBack unless the job is at its step."""
        if self._unpublished:  # told once, by whatever is raised
            self._unpublished.clear()
            self._state_known = False
        if not self._in_job or self._reconnect_for_s <= 0:
            raise cause or errors.DaemonLost(
                f"{self._link.how_it_ended()}; the weights are undefined"
            )
        known = "none is known" if self.durable_step is None else f"step {self.durable_step}"
        log.warning(
            "rank %d: %s, at %s, after step %d (newest snapshot: %s); waiting up to %g s for its "
            "successor",
            self.rank,
            self._link.how_it_ended(),
            self._path,
            self.last_committed_step,
            known,
            self._reconnect_for_s,
        )
        self._link.lost.set()
        self._link.close()
        try:
            returned = comeback.come_back(
                self._path,
                self._identity,
                self._layout,
                self._wanted_arenas,
                self._memory,
                for_s=self._reconnect_for_s,
                silent_for_s=self._silent_for_s,
            )
        except errors.Error as error:
            if comeback.nothing_left(error):
                raise self._state_lost(str(error)) from None
            if not comeback.passes(error):
                raise
            raise errors.DaemonLost(
                f"the daemon at {self._path} has gone, and no successor took over within "
                f"{self._reconnect_for_s:g} s ({error}); the weights are undefined. Last committed "
                f"step {self.last_committed_step}, newest snapshot: {known}"
            ) from None
        self._link = returned.link
        self._adopt_opened()
        if tuple(returned.registered.parameter_bucket) != self._bucket_of:
            self._stands_at = None  # the caller's buckets are others now
        self._adopt_registered(returned.registered)
        self._adopt_attached(returned.attached)
        self._moved = True
        fault_point("trainer.returned")
        self._go_on_from(returned.attached.next_attempt)

    def _roll_back(self, to_step: int, epoch: int, asked: bool) -> None:
        """Lets the daemon write the weights of `to_step`. RolledBack unless this rank stands there.

        asked: somebody has loaded a snapshot, and all ranks are to hear of it.
        """
        while True:
            self._going_back = to_step, epoch
            if asked:
                self._stands_at = None
            request = pb.AckRollbackRequest(key=self._link.key, to_step=to_step, epoch=epoch)
            fault_point("trainer.rolled_back")
            try:
                reply = self._call("AckRollback", request)
                break
            except errors.Error as error:
                if error.reason != _ROLLED_BACK:
                    raise
                to_step, epoch, asked = _where_to(error)  # back once more meanwhile
        self.last_committed_step, self.trainer_state = to_step, reply.trainer_state
        if self.durable_step is not None:
            self.durable_step = min(self.durable_step, to_step)
        fault_point("trainer.acknowledged")
        self._go_on_from(reply.next_attempt)

    def _go_on_from(self, next_attempt: int) -> None:
        self.next_attempt = next_attempt
        self._signalled.clear()
        self._unpublished.clear()
        self._going_back = self.last_committed_step, 0
        self._arrive()

    def _go_on_going_back(self) -> None:
        assert self._going_back is not None
        to_step, epoch = self._going_back
        if epoch:
            self._roll_back(to_step, epoch, asked=False)
        else:
            self._arrive()

    def _arrive(self) -> None:
        """Waits for the weights. Raises RolledBack unless the caller has them already."""
        arrived = self._arrived_attempt
        # If the job goes back further meanwhile, that is what the caller hears.
        self._settled(lambda: self._wait_published(max(1, self.next_attempt - 1)))
        if self._going_back is None:
            return  # it went back once more meanwhile, and has arrived there
        moved = self._moved
        if self._stands_there():
            if moved:
                arenas.take_over(self._layout, self._mapped, self._link.arenas)
                self._link.arenas = dict(self._mapped)
                log.warning(
                    "rank %d goes on after step %d with the daemon's successor; nothing is lost",
                    self.rank,
                    self.last_committed_step,
                )
            if self.weights_unchanged is None:
                # Weights that the caller has written since, to push them, are not there any more.
                self._arrived_attempt = arrived
            self._carried += 1
            self._going_back, self._moved = None, False
            return
        if moved:
            self._show_arenas()
        self._stands_at, self._state_known = self.last_committed_step, True
        if self.on_rolled_back is not None:
            self.on_rolled_back(moved)
        self._going_back, self._moved = None, False
        raise errors.RolledBack(self.last_committed_step, self.trainer_state, moved)

    def _stands_there(self) -> bool:
        """Whether the job has gone back to where this rank is already."""
        return self._stands_at == self.last_committed_step and (
            self.weights_unchanged is None or self.weights_unchanged()
        )

    def _refuse(self, outcome: types.Outcome) -> None:
        """Raises what the caller is to hear; returns if the attempt may be tried again."""
        if outcome.kind == types.Outcome.KIND_ROLLED_BACK:
            asked = outcome.reason != types.Outcome.REASON_PEER_LOST
            self._roll_back(outcome.to_step, outcome.epoch, asked)
            return
        if outcome.retry:
            return
        if outcome.reason == types.Outcome.REASON_STATE_LOST:
            raise self._state_lost(outcome.detail)
        raise errors.Aborted(outcome, _reason(outcome))

    # --- attempts ---

    def _wait_request(self, wait_ms: int) -> pb.WaitStepRequest:
        step, attempt = self.last_committed_step + 1, self.next_attempt
        return pb.WaitStepRequest(key=self._link.key, step=step, attempt=attempt, wait_ms=wait_ms)

    def _follow(self, error: errors.Error) -> None:
        """Takes over the attempt under which a corrected call may come, which a refusal names."""
        self._begin_attempt(int(error.metadata.get("next_attempt", self.next_attempt)))

    def _begin_attempt(self, attempt: int) -> None:
        if attempt != self.next_attempt:
            self.next_attempt = attempt
            self._signalled.clear()

    # --- weights ---

    def _wait_unpublished(self, buckets: Iterable[int] | None) -> None:
        for bucket in list(self._unpublished) if buckets is None else buckets:
            if bucket not in self._unpublished:
                continue
            try:
                self._wait_published(self._unpublished[bucket], (bucket,))
            except errors.Error as error:
                self._unpublished.pop(bucket, None)  # told once; not what only interrupts the wait
                self._state_known = self._state_known and isinstance(error, errors.RolledBack)
                raise
            self._unpublished.pop(bucket, None)
        if self._state_known and not self._unpublished:
            self._stands_at = self.last_committed_step

    def _enqueue_wait(self, buckets: Iterable[int] | None, stream: int) -> None:
        """Lets the stream wait for weights. The host looks for them in its next call.

        Poison and a rollback end the wait of a stream, too, and that call hears of it.
        """
        self._check_alive()
        timeline = self._require_timeline()
        wanted = self._unpublished if buckets is None else buckets
        awaited = {b: self._unpublished[b] for b in wanted if b in self._unpublished}
        for attempt in sorted(set(awaited.values())):
            waited = [bucket for bucket, of in awaited.items() if of == attempt]
            timeline.enqueue_wait(waited, attempt, stream)
            if buckets is None:  # what the caller enqueues next finds these weights or newer ones
                self._arrived_attempt = max(self._arrived_attempt, attempt)

    def _wait_published(self, attempt: int, buckets: Sequence[int] | None = None) -> None:
        waited = self._receives if buckets is None else buckets
        deadline = time.monotonic() + self._published_within_s
        while True:
            found = self._link.wait_published(waited, attempt, _ASK_EVERY_S)
            if found is Published.YES:
                self._arrived_attempt = min(self._published_attempts(), default=0)
                fault_point("trainer.published")
                return
            self._require_timeline().check_device()
            if not self.lost:
                self._ask_why(found is Published.ENDED)
            if found is Published.ENDED:
                raise errors.DaemonLost(
                    f"{self._link.how_it_ended()} before the weights after attempt {attempt} "
                    "were published; they are undefined"
                )
            if time.monotonic() > deadline:
                # Within that time the daemon replaces who hangs, or ends the job.
                self._unpublished.clear()  # told once
                raise errors.Error(
                    f"the weights after attempt {attempt} are not published after "
                    f"{self._published_within_s:g} s, though the daemon lives",
                    code="DEADLINE_EXCEEDED",
                    reason="NOT_PUBLISHED",
                )

    def _published_attempts(self) -> Iterator[int]:
        timeline = self._require_timeline()
        return (timeline.published(bucket) for bucket in self._receives)

    def _ask_why(self, poisoned: bool) -> None:
        """Asks the daemon why weights do not come: the job may have ended or gone back."""
        try:
            reply = self._call("WaitStep", self._wait_request(0), WAIT_SLACK_S)
        except errors.FailedPreconditionError as error:
            if error.reason in ("STEP_OUT_OF_ORDER", "ATTEMPT_OUT_OF_ORDER"):
                return  # nothing but that no step has been handed in
            raise
        except errors.InvalidArgumentError:
            return  # what others have handed in for the next step was refused
        except errors.Error as error:
            # A daemon that is stopped: its end would be seen by the attach socket.
            if error.code == "DEADLINE_EXCEEDED" and not error.reason:
                return
            raise
        outcome = reply.outcome
        # The next step lacks a rank; what this one has decided is published all the same, while
        # lanes live.
        incomplete = not poisoned and outcome.reason == types.Outcome.REASON_TRAINER_MISSING
        aborted = outcome.kind == types.Outcome.KIND_ABORTED and not incomplete
        if aborted or outcome.kind == types.Outcome.KIND_ROLLED_BACK:
            self._refuse(outcome)


def _where_to(error: errors.Error) -> tuple[int, int, bool]:
    """Step and epoch of an error ROLLED_BACK, and whether somebody has asked for it."""
    asked = error.metadata.get("cause") != "PEER_LOST"
    return int(error.metadata["to_step"]), int(error.metadata["epoch"]), asked


def _has_elements(box: types.Box) -> bool:
    return all(begin < end for begin, end in zip(box.begin, box.end, strict=True))


def _reason(outcome: types.Outcome) -> str:
    return types.Outcome.Reason.Name(outcome.reason).removeprefix("REASON_")
