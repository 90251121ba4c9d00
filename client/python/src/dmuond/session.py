"""A trainer's session with the daemon of its node: register, attach, push, step, pull, close.

session = dmuond.Session(rank=0, world_size=1)
registered = session.register(parameters, fragments, groups)
arenas = session.attach({1: weight_bytes, 2: gradient_bytes})   # numpy arrays over shared memory
...                                                             # write the first weights
session.push()                                                  # they become the masters
...                                                             # write gradients
outcome = session.step(scalars)                                 # weights have changed when it
returns session.close()
"""

from __future__ import annotations

import atexit
import functools
import itertools
import logging
import os
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TypeVar

import numpy as np

from dmuond import comeback, environment, errors, fork, state_chunks, types
from dmuond._proto import trainer_pb2 as pb
from dmuond.link import Identity, Link
from dmuond.state_chunks import StateTensor
from dmuond.timeline import POISON, Published, Timeline

log = logging.getLogger("dmuond")

TRAINER_STATE_BYTES_MAX = 1 << 20
_WAIT_MS = 10_000  # of one call; calls are repeated until the outcome is there
_WAIT_SLACK_S = 60.0
_CONNECT_FOR_S = 10.0
# Weights that are late may not come at all: the daemon is asked this often.
_ASK_EVERY_S = 1.0
# The end of the attach socket may follow an answer that it explains.
_GLANCE_S = 1.0
# A group that is forming anew may refuse to read state; it has formed by then.
_REFORMED_WITHIN_S = 30.0
_REFORMING = ("LANE_LOST", "PEER_LOST", "NODE_NOT_READY", "GROUP_NOT_READY")
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


class Session:
    """One trainer's session. Not safe for several threads at once.

    It outlives its daemon: the call that finds the daemon gone waits for the successor, takes the
    session's place in the job again, with fresh arenas, and raises RolledBack. Where that cannot
    be, it raises DaemonLost or StateLost.

    Attributes: rank, world_size, job, lanes (of this node), device_type, has_state (the job had
    optimizer state when the session opened), last_committed_step, durable_step (None: a lost daemon
    loses the job), trainer_state (what this rank handed in with last_committed_step), next_attempt,
    last_outcome, last_timing, registered (None before register()), arenas (empty before attach()).
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        job: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        resume: int | None = None,
        token: bytes | None = None,
        home_lane: int | None = None,
        poison: bool | None = None,
        connect_for_s: float = _CONNECT_FOR_S,
        reconnect_for_s: float | None = None,
    ) -> None:
        """Connects and opens the session; what is None comes from the environment.

        connect_for_s: how long to wait for a daemon that is just starting. reconnect_for_s: how
        long a call waits for the successor of a daemon that has gone (DMUOND_RECONNECT_S, or 10
        minutes); 0: DaemonLost at once.

        Raises: Unreachable when no daemon answers within `connect_for_s`; Error as the daemon says.
        """
        _check_identity(job, rank, world_size, resume)
        self._path = environment.socket_path(address)
        self.job = job or environment.job()
        self.rank = environment.integer("RANK", 0) if rank is None else rank
        self.world_size = environment.integer("WORLD_SIZE", 1) if world_size is None else world_size
        self._identity = Identity(
            job=self.job,
            token=environment.token() if token is None else token,
            rank=self.rank,
            world_size=self.world_size,
            home_lane=home_lane,
            poison=environment.poison() if poison is None else poison,
        )
        self._reconnect_for_s = (
            environment.reconnect_for_s() if reconnect_for_s is None else reconnect_for_s
        )
        self.next_attempt = 0
        self.last_outcome: types.Outcome | None = None
        self.last_timing: types.StepTiming | None = None
        self.registered: Registered | None = None
        self.arenas: dict[int, np.ndarray] = {}
        # Called before RolledBack is raised; True: with fresh arenas.
        self.on_rolled_back: Callable[[bool], None] | None = None
        self._pid = os.getpid()
        self._closed = False
        self._finalizer: weakref.finalize | None = None
        self._layout = pb.RegisterLayoutRequest()
        self._arena_bytes: dict[int, int] = {}
        self._in_job = False  # the job has state, and this rank its place in it
        self._moved = False  # the arenas are others, and the caller has not been told
        self._published_attempt = 0  # newest whose weights this rank has waited for
        self._signalled: set[int] = set()
        self._unpublished: dict[int, int] = {}  # bucket → attempt that has not been waited for
        self._contributes: frozenset[int] = frozenset()
        self._receives: tuple[int, ...] = ()
        self._bucket_of: tuple[int, ...] = ()

        resume = environment.resume() if resume is None else resume
        self._link = Link(self._path, connect_for_s)
        fork.watch(self)
        try:
            self._link.open(self._identity, resume)
        except BaseException:
            self._disconnect()
            raise
        self._adopt_opened()
        self._watch_for_the_end()
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self))
        atexit.register(self._at_exit)

    # --- before the first step ---

    def register(
        self,
        parameters: Sequence[types.Parameter],
        fragments: Sequence[types.Fragment],
        groups: Sequence[types.GroupConfig],
        *,
        bucket_bytes: int = 0,
    ) -> Registered:
        """Says what this rank holds; returns when the whole world has registered."""
        self._layout = pb.RegisterLayoutRequest(
            parameters=parameters, fragments=fragments, groups=groups, bucket_bytes=bucket_bytes
        )
        self._check_alive()
        self._adopt_registered(self._link.register(self._layout))
        assert self.registered is not None
        return self.registered

    def attach(self, arenas: Mapping[int, int]) -> dict[int, np.ndarray]:
        """Asks the daemon for arenas (id → bytes); returns them as arrays of bytes, writable.

        An array keeps its mapping: it stays valid after the session has closed. After a RolledBack
        with fresh_arenas it is of the past: take `arenas` again.
        """
        self._check_alive()
        self._arena_bytes = dict(arenas)
        reply = self._link.attach(arenas)
        self.arenas = dict(self._link.arenas)
        self.next_attempt = reply.next_attempt
        if reply.published:
            self._in_job = True
            # The masters of a job with state: under the attempt before the next one, where it is
            # known.
            self._wait_published(max(1, reply.next_attempt - 1))
        return dict(self.arenas)

    def push(self, weights: Iterable[str] | None = None) -> None:
        """The weights in the arenas are the truth: all of them, or those named.

        Collective: returns when every holder has pushed and the weights are published. A push that
        is aborted without fault of this rank is repeated.
        """
        names = [] if weights is None else list(weights)
        first = pb.PushParametersRequest(all_weights=weights is None, weights=names)
        self._surviving(lambda: self._push(first, lambda: ()))

    def push_state(self, tensors: Iterable[StateTensor]) -> None:
        """Optimizer state of this rank's fragments. Takes effect when every rank has pushed.

        Collective, as `push` is. State that is not named stays.
        """
        kept = list(tensors)
        first = pb.PushParametersRequest(state=True)
        rest = lambda: (pb.PushParametersRequest(chunk=c) for c in state_chunks.cut(kept))  # noqa: E731
        self._surviving(lambda: self._push(first, rest))

    # --- steps ---

    def check_not_republished(self, what: str) -> None:
        """Whether the weights that were changed since the last step still lie in the arenas.

        A group that forms anew between two steps publishes the masters over them. Raises
        FailedPreconditionError (WEIGHTS_REPUBLISHED), once: then they can be changed again.
        """
        newest = self._newest_published()
        if self._published_attempt < newest < POISON:
            self._published_attempt = newest
            raise errors.FailedPreconditionError(
                f"{what}: the group has formed anew since step {self.last_committed_step}, and its "
                "masters may have been published over them: change the weights again",
                reason="WEIGHTS_REPUBLISHED",
            )

    def signal(self, bucket: int) -> None:
        """The gradients of a bucket lie in the arena: they may be collected from now on.

        They must not change until the step is decided. A bucket that is not signalled is, by
        `step`.
        """
        timeline = self._require_timeline()
        if not 0 <= bucket < timeline.buckets:
            raise errors.InvalidArgumentError(f"bucket {bucket}; there are {timeline.buckets}")
        if bucket in self._contributes and bucket not in self._signalled:
            self._signalled.add(bucket)
            timeline.set_ready(bucket, self.next_attempt)

    def is_signalled(self, bucket: int) -> bool:
        """Whether the bucket has been signalled for the step to come."""
        return bucket in self._signalled

    def step(
        self,
        scalars: types.StepScalars,
        *,
        absent: Sequence[int] = (),
        trainer_state: bytes = b"",
        withdraw: bool = False,
        wait: bool = True,
    ) -> types.Outcome:
        """One step with the gradients in the arenas; returns when the new weights lie there.

        wait=False: returns when the step is decided; `wait_published` waits for the weights.

        absent: indices of registered parameters without a gradient. withdraw: a bucket that was
        signalled early has changed since. An attempt that was aborted and may be retried is retried
        with the same gradients.

        Returns the outcome, COMMITTED or SKIPPED. Raises Aborted, RolledBack, InvalidArgumentError
        (scalars differ between trainers: the gradients stay valid for a corrected call),
        DaemonLost, StateLost.
        """
        if len(trainer_state) > TRAINER_STATE_BYTES_MAX:
            raise errors.InvalidArgumentError(
                f"trainer_state has {len(trainer_state)} bytes; at most {TRAINER_STATE_BYTES_MAX}"
            )
        for parameter in absent:
            if not 0 <= parameter < len(self._bucket_of):
                raise errors.InvalidArgumentError(
                    f"absent names parameter {parameter}; {len(self._bucket_of)} are registered"
                )
        request = pb.SubmitStepRequest(
            scalars=scalars, absent=absent, withdraw=withdraw, trainer_state=trainer_state
        )
        return self._surviving(lambda: self._step(request, wait))

    def wait_published(self, buckets: Iterable[int] | None = None) -> None:
        """Waits for the weights after the last step: all of them, or those of some buckets.

        Raises RolledBack, DaemonLost, StateLost.
        """
        if self._unpublished:
            wanted = None if buckets is None else list(buckets)
            self._surviving(lambda: self._wait_unpublished(wanted))

    def pull(
        self, parameters: Iterable[str] = (), kinds: Iterable[int] = ()
    ) -> Iterator[StateTensor]:
        """Optimizer state of this rank's fragments (empty arguments: all of it). Not collective."""
        request = pb.PullParametersRequest(parameters=list(parameters), kinds=list(kinds))
        self.wait_published()
        steps: set[int] = set()
        yielded: set[tuple[str, int, int]] = set()
        give_up = time.monotonic() + _REFORMED_WITHIN_S
        while True:
            read_next = functools.partial(next, self._pull(request, steps), None)
            try:
                while (tensor := self._surviving(read_next)) is not None:
                    identity = (tensor.parameter, tensor.fragment, tensor.kind)
                    if identity not in yielded:
                        yielded.add(identity)
                        yield tensor
                return
            except errors.Error as error:
                if not _is_reforming(error) or time.monotonic() > give_up:
                    raise
            time.sleep(_ASK_EVERY_S / 4)

    def save_snapshot(self) -> tuple[int, str]:
        """Writes a snapshot of the last committed step; returns its step and path once durable."""
        reply = self._surviving(
            lambda: self._call("SaveSnapshot", pb.SaveSnapshotRequest(key=self._link.key))
        )
        return reply.step, reply.path

    def load_snapshot(self, step: int = 0) -> int:
        """Sets the whole job back to a snapshot (0: the newest); returns its step.

        One rank calls it. Every rank's next step raises RolledBack, this one's too.
        """
        reply = self._surviving(
            lambda: self._call(
                "LoadSnapshot", pb.LoadSnapshotRequest(key=self._link.key, step=step)
            )
        )
        return reply.step

    # --- the end ---

    def close(self) -> None:
        """Leaves the job. The job ends when every rank has closed. Arenas stay mapped."""
        if self._closed:
            return
        try:
            if not self.lost and not self.in_child:
                try:
                    self._wait_unpublished(None)
                finally:
                    request = pb.CloseSessionRequest(key=self._link.key)
                    self._link.call("CloseSession", request, timeout_s=_WAIT_SLACK_S)
        finally:
            self._disconnect()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        else:
            self._disconnect()  # to the daemon this trainer has died: its replacement may come

    @property
    def lost(self) -> bool:
        """The daemon has gone: the weights in the arenas are undefined until the next call."""
        return self._link.lost.is_set()

    @property
    def in_child(self) -> bool:
        """Whether this is a forked child, to which the session does not belong."""
        return self._pid != os.getpid()

    @property
    def closed(self) -> bool:
        return self._closed

    def leave_in_child(self) -> None:
        """Called in a forked child: drops the inherited descriptors."""
        if self._finalizer is not None:
            self._finalizer.detach()
        if self._closed:
            return
        self._closed = True
        self._link.close_in_child()

    # --- parts ---

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

    def _watch_for_the_end(self) -> None:
        """Whoever drops a session without closing it has died, to the daemon."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, self._link.close)
        self._finalizer.atexit = False

    def _check_usable(self) -> None:
        if self.in_child:
            raise errors.Error("this session belongs to the process that forked this one")
        if self._closed:
            raise errors.Error("the session is closed")

    def _check_alive(self) -> None:
        self._check_usable()
        if self.lost:
            raise errors.DaemonLost("the daemon has gone; the weights are undefined")

    def _call(self, name: str, request: object, timeout_s: float | None = None):
        self._check_alive()
        return self._link.call(name, request, timeout_s)

    def _require_timeline(self) -> Timeline:
        if self._link.timeline is None:
            raise errors.Error("call attach() first")
        return self._link.timeline

    # --- deaths and rollbacks ---

    def _surviving(self, call: Callable[[], _Answer]) -> _Answer:
        """Runs `call`. RolledBack where the job goes back, or the daemon goes and has a successor.

        Before the job has state there is nothing to come back to: DaemonLost.
        """
        self._check_usable()
        cause: errors.Error | None = None
        if not self.lost:
            try:
                try:
                    return call()
                except errors.Error as error:
                    if error.reason == _ROLLED_BACK:
                        raise self._roll_back(int(error.metadata["to_step"])) from None
                    if error.reason == "STATE_LOST" and not isinstance(error, errors.StateLost):
                        raise self._state_lost(str(error)) from error
                    raise
            except errors.Error as error:
                if not self._is_the_end(error):
                    raise
                cause = error
        raise self._come_back(cause) from None

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

    def _come_back(self, cause: errors.Error | None) -> errors.RolledBack:
        """Takes this rank's place with the daemon's successor. Returns what to raise."""
        if not self._in_job or self._reconnect_for_s <= 0:
            raise cause or errors.DaemonLost("the daemon has gone; the weights are undefined")
        known = "none is known" if self.durable_step is None else f"step {self.durable_step}"
        log.warning(
            "rank %d: the daemon at %s has gone after step %d (newest snapshot: %s); waiting up to "
            "%g s for its successor",
            self.rank,
            self._path,
            self.last_committed_step,
            known,
            self._reconnect_for_s,
        )
        self._link.lost.set()
        self._link.close()
        try:
            returned = comeback.come_back(
                self._path, self._identity, self._layout, self._arena_bytes, self._reconnect_for_s
            )
        except errors.Error as error:
            if comeback.nothing_left(error):
                raise self._state_lost(str(error)) from error
            if not comeback.passes(error):
                raise
            raise errors.DaemonLost(
                f"the daemon at {self._path} has gone, and no successor took over within "
                f"{self._reconnect_for_s:g} s ({error}); the weights are undefined. Last committed "
                f"step {self.last_committed_step}, newest snapshot: {known}"
            ) from error
        self._link = returned.link
        self._watch_for_the_end()
        self._adopt_opened()
        self._adopt_registered(returned.registered)
        self.arenas = dict(self._link.arenas)
        self._moved = True
        return self._go_on_from(returned.attached.next_attempt)

    def _roll_back(self, to_step: int) -> errors.RolledBack:
        """Lets the daemon write the weights of `to_step`. Returns what to raise."""
        while True:
            request = pb.AckRollbackRequest(key=self._link.key, to_step=to_step)
            try:
                reply = self._call("AckRollback", request)
                break
            except errors.Error as error:
                if error.reason == _ROLLED_BACK:  # further back meanwhile
                    to_step = int(error.metadata["to_step"])
                elif error.code != "DEADLINE_EXCEEDED":  # another rank has not read it yet
                    raise
        self.last_committed_step, self.trainer_state = to_step, reply.trainer_state
        if self.durable_step is not None:
            self.durable_step = min(self.durable_step, to_step)
        return self._go_on_from(reply.next_attempt)

    def _go_on_from(self, next_attempt: int) -> errors.RolledBack:
        self.next_attempt = next_attempt
        self._signalled.clear()
        self._unpublished.clear()
        # If the job goes back further meanwhile, that is what the caller hears.
        self._surviving(lambda: self._wait_published(max(1, next_attempt - 1)))
        if self.on_rolled_back is not None:
            self.on_rolled_back(self._moved)
        moved, self._moved = self._moved, False
        return errors.RolledBack(self.last_committed_step, self.trainer_state, moved)

    # --- pushing and pulling ---

    def _push(
        self,
        first: pb.PushParametersRequest,
        rest: Callable[[], Iterable[pb.PushParametersRequest]],
    ) -> None:
        self._check_alive()
        self._wait_unpublished(None)
        # A group that forms anew publishes its masters: what is pushed must outlive that.
        pushed: dict[int, np.ndarray] = {}
        if self._in_job and not first.state:
            pushed = {identity: arena.copy() for identity, arena in self.arenas.items()}
            self.check_not_republished("the weights to push")
        while True:
            attempt = self.next_attempt
            first.key.CopyFrom(self._link.key)
            first.step, first.attempt = self.last_committed_step, attempt
            try:
                reply = self._link.channel.send_stream(
                    "PushParameters", lambda: itertools.chain([first], rest())
                )
                break
            except errors.Error as error:
                self._follow(error)
                if not _may_push_again(error) or self.next_attempt <= attempt:
                    raise
            if pushed and self.next_attempt >> 32 != attempt >> 32:
                self._wait_published(self.next_attempt - 1)
                for identity, content in pushed.items():
                    self.arenas[identity][...] = content
        self._in_job = True
        self._begin_attempt(reply.next_attempt)
        self.last_committed_step = reply.last_committed_step
        self._wait_published(reply.next_attempt - 1)

    def _pull(self, request: pb.PullParametersRequest, steps: set[int]) -> Iterator[StateTensor]:
        """One try. `steps` is kept from try to try: all must be of one step."""
        self._check_alive()
        request.key.CopyFrom(self._link.key)

        def chunks() -> Iterator[pb.StateChunk]:
            for reply in self._link.channel.read_stream("PullParameters", request):
                steps.add(reply.step)
                if len(steps) > 1:
                    raise errors.FailedPreconditionError(
                        f"the job went from step to step ({sorted(steps)}) while its state was read"
                    )
                yield reply.chunk

        return state_chunks.assemble(chunks())

    # --- steps ---

    def _step(self, request: pb.SubmitStepRequest, wait: bool) -> types.Outcome:
        held_back = frozenset(self._bucket_of[parameter] for parameter in request.absent)
        while True:
            try:
                outcome = self._try_step(request, held_back)
            except errors.FailedPreconditionError as error:
                # The attempt ended unheard; the step is still the open one.
                overtaken = error.reason == "ATTEMPT_OUT_OF_ORDER"
                if not overtaken or self.next_attempt <= request.attempt:
                    raise
                request.withdraw = False
                continue
            request.withdraw = False
            if outcome.kind in (types.Outcome.KIND_COMMITTED, types.Outcome.KIND_SKIPPED):
                self.last_committed_step = outcome.step
                self.trainer_state = request.trainer_state
                self._unpublished = dict.fromkeys(self._receives, outcome.attempt)
                if wait:
                    self._wait_unpublished(None)
                return outcome
            self._refuse(outcome)

    def _refuse(self, outcome: types.Outcome) -> None:
        """Returns where the attempt may be tried again."""
        if outcome.kind == types.Outcome.KIND_ROLLED_BACK:
            raise self._roll_back(outcome.to_step)
        if outcome.retry:
            return
        if outcome.reason == types.Outcome.REASON_STATE_LOST:
            raise self._state_lost(outcome.detail)
        raise errors.Aborted(outcome, _reason(outcome))

    def _try_step(self, request: pb.SubmitStepRequest, held_back: frozenset[int]) -> types.Outcome:
        """Signals, submits and waits for the outcome of one attempt."""
        self._check_alive()
        self._wait_unpublished(None)
        timeline = self._require_timeline()
        if not request.withdraw:
            self._signal_all(self._contributes - held_back)
        timeline.set_submitted(self.next_attempt)
        request.key.CopyFrom(self._link.key)
        request.step, request.attempt = self.last_committed_step + 1, self.next_attempt
        # Lanes learn of absent gradients by the submit: those buckets are signalled after it.
        request.wait_ms = 0 if held_back and not request.withdraw else _WAIT_MS
        try:
            reply = self._patiently("SubmitStep", request)
            if not request.withdraw:
                self._signal_all(held_back)
            while reply.outcome.kind == types.Outcome.KIND_UNSPECIFIED:
                reply = self._patiently("WaitStep", self._wait_request(_WAIT_MS))
        except errors.Error as error:
            self._follow(error)
            raise
        self.last_outcome, self.last_timing = reply.outcome, reply.timing
        if reply.outcome.HasField("durable_step"):
            self.durable_step = reply.outcome.durable_step
        self._begin_attempt(reply.outcome.next_attempt)
        return reply.outcome

    def _wait_request(self, wait_ms: int) -> pb.WaitStepRequest:
        step, attempt = self.last_committed_step + 1, self.next_attempt
        return pb.WaitStepRequest(key=self._link.key, step=step, attempt=attempt, wait_ms=wait_ms)

    def _patiently(self, name: str, request: pb.SubmitStepRequest | pb.WaitStepRequest):
        """A daemon that is stopped does not answer, and goes on where it was when it wakes."""
        give_up = time.monotonic() + _WAIT_SLACK_S + self._reconnect_for_s
        while True:
            try:
                return self._call(name, request, request.wait_ms / 1e3 + _WAIT_SLACK_S)
            except errors.Error as error:
                silent = error.code == "DEADLINE_EXCEEDED" and not error.reason
                if not silent or time.monotonic() > give_up:
                    raise

    def _signal_all(self, buckets: Iterable[int]) -> None:
        for bucket in sorted(buckets):
            self.signal(bucket)

    def _follow(self, error: errors.Error) -> None:
        """A refusal names the attempt under which a corrected call may come."""
        self._begin_attempt(int(error.metadata.get("next_attempt", self.next_attempt)))

    def _begin_attempt(self, attempt: int) -> None:
        if attempt != self.next_attempt:
            self.next_attempt = attempt
            self._signalled.clear()

    # --- weights ---

    def _wait_unpublished(self, buckets: Iterable[int] | None) -> None:
        for bucket in list(self._unpublished) if buckets is None else buckets:
            attempt = self._unpublished.pop(bucket, None)  # a failure is told once
            if attempt is not None:
                self._wait_published(attempt, (bucket,))

    def _wait_published(self, attempt: int, buckets: Sequence[int] | None = None) -> None:
        waited = self._receives if buckets is None else buckets
        while True:
            found = self._link.wait_published(waited, attempt, _ASK_EVERY_S)
            if found is Published.YES:
                self._published_attempt = self._newest_published()
                return
            if not self.lost:
                self._ask_why()
            if found is Published.ENDED:
                raise errors.DaemonLost(
                    f"the daemon has gone before the weights after attempt {attempt} were "
                    "published; they are undefined"
                )

    def _newest_published(self) -> int:
        timeline = self._require_timeline()
        return max((timeline.published(bucket) for bucket in self._receives), default=0)

    def _ask_why(self) -> None:
        """Weights do not come: the job may have ended or gone back, which the daemon then says."""
        try:
            reply = self._call("WaitStep", self._wait_request(0), _WAIT_SLACK_S)
        except errors.FailedPreconditionError as error:
            if error.reason in ("STEP_OUT_OF_ORDER", "ATTEMPT_OUT_OF_ORDER"):
                return  # nothing but that no step has been handed in
            raise
        if reply.outcome.kind in (types.Outcome.KIND_ABORTED, types.Outcome.KIND_ROLLED_BACK):
            self._refuse(reply.outcome)

    def _disconnect(self) -> None:
        self._closed = True
        if self._finalizer is not None:
            self._finalizer.detach()
            atexit.unregister(self._at_exit)
        self._link.close()


def _check_identity(job: object, rank: object, world_size: object, resume: object) -> None:
    if not isinstance(job, str | None):
        raise errors.InvalidArgumentError(f"job={job!r} is not a name")
    for name, value in (("rank", rank), ("world_size", world_size), ("resume", resume)):
        if value is not None and (not isinstance(value, int) or abs(value) >= 1 << 31):
            raise errors.InvalidArgumentError(f"{name}={value!r} is not an integer")
    if resume is not None and resume not in types.RESUMES:
        raise errors.InvalidArgumentError(
            f"resume={resume} is none of types.RESUME_NEVER, RESUME_IF_PRESENT, RESUME_REQUIRE"
        )


def _close_at_exit(reference: weakref.ref[Session]) -> None:
    """A script that ends leaves the job; one that fails has died, and its replacement may come."""
    session = reference()
    failed = getattr(sys, "last_value", None) is not None
    if session is None or failed or session.closed or session.in_child:
        return
    try:
        session.close()
    except errors.Error as error:
        print(f"dmuond: {error}", file=sys.stderr)


def _has_elements(box: types.Box) -> bool:
    return all(begin < end for begin, end in zip(box.begin, box.end, strict=True))


def _reason(outcome: types.Outcome) -> str:
    return types.Outcome.Reason.Name(outcome.reason).removeprefix("REASON_")


def _may_push_again(error: errors.Error) -> bool:
    """Whether a push failed through nobody's mistake."""
    if error.reason == "PUSH_ABORTED":
        return error.metadata.get("retry") == "true"
    return error.reason == "ATTEMPT_OUT_OF_ORDER"


def _is_reforming(error: errors.Error) -> bool:
    return error.code == "UNAVAILABLE" and error.reason in _REFORMING
