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
import mmap
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType

import numpy as np

from dmuond import environment, errors, fork, types
from dmuond._proto import trainer_pb2 as pb
from dmuond.attach import AttachSocket
from dmuond.channel import Channel
from dmuond.timeline import Timeline

PROTOCOL_VERSION = 1
TRAINER_STATE_BYTES_MAX = 1 << 20
_CHUNK_BYTES = 1 << 20
_WAIT_MS = 10_000  # of one call; calls are repeated until the outcome is there
_WAIT_SLACK_S = 60.0
_CONNECT_FOR_S = 10.0
_FRAME_TIMEOUT_S = 30.0


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


@dataclass(frozen=True)
class StateTensor:
    """State of one fragment: fp32, row-major over the fragment's box (`step`: one fp64 value)."""

    parameter: str
    fragment: int  # index among this rank's fragments of the parameter
    kind: int  # types.STATE_KIND_*
    values: np.ndarray


class Session:
    """One trainer's session. Not safe for several threads at once.

    Attributes: rank, world_size, job, lanes (of this node), device_type, has_state (the job had
    optimizer state when the session opened), last_committed_step, durable_step (None: a lost daemon
    loses the job), trainer_state (what this rank handed in with last_committed_step), next_attempt,
    last_outcome, last_timing.
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
    ) -> None:
        """Connects and opens the session; what is None comes from the environment.

        Raises: Unreachable when no daemon answers within `connect_for_s`; Error as the daemon says.
        """
        _check_identity(job, rank, world_size, resume)
        self._path = environment.socket_path(address)
        self.job = job or environment.job()
        self.rank = environment.integer("RANK", 0) if rank is None else rank
        self.world_size = environment.integer("WORLD_SIZE", 1) if world_size is None else world_size
        self.next_attempt = 0
        self.last_outcome: types.Outcome | None = None
        self.last_timing: types.StepTiming | None = None
        self._lost = threading.Event()
        self._pid = os.getpid()
        self._closed = False
        self._finalizer: weakref.finalize | None = None
        self._timeline: Timeline | None = None
        self._arenas: dict[int, np.ndarray] = {}
        self._signalled: set[int] = set()
        self._unpublished: dict[int, int] = {}  # bucket → attempt that has not been waited for
        self._contributes: frozenset[int] = frozenset()
        self._receives: tuple[int, ...] = ()
        self._bucket_of: tuple[int, ...] = ()

        self._attach = self._connect(connect_for_s)
        fork.watch(self)
        self._channel = Channel(self._path, self._lost.wait)
        try:
            self._open(
                environment.resume() if resume is None else resume,
                environment.token() if token is None else token,
                home_lane,
                environment.poison() if poison is None else poison,
            )
        except BaseException:
            self._disconnect()
            raise
        # Whoever drops a session without closing it has died, to the daemon.
        self._finalizer = weakref.finalize(self, _let_go, self._channel, self._attach)
        self._finalizer.atexit = False
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
        reply = self._call(
            "RegisterLayout",
            pb.RegisterLayoutRequest(
                key=self._key,
                parameters=parameters,
                fragments=fragments,
                groups=groups,
                bucket_bytes=bucket_bytes,
            ),
        )
        buckets = tuple(reply.parameter_bucket)
        self._bucket_of = buckets
        self._names = [parameter.name for parameter in parameters]
        self._contributes = frozenset(
            buckets[fragment.parameter]
            for fragment in fragments
            if buckets[fragment.parameter] >= 0
        )
        self._receives = tuple(
            sorted({buckets[f.parameter] for f in fragments if _has_elements(f.box)} - {-1})
        )
        return Registered(
            routing=tuple(reply.routing),
            parameter_bucket=buckets,
            buckets=reply.buckets,
            plan_digest=reply.plan_digest,
            makespan_us=reply.makespan_us,
            lower_bound_us=reply.lower_bound_us,
            imbalance=reply.imbalance,
        )

    def attach(self, arenas: Mapping[int, int]) -> dict[int, np.ndarray]:
        """Asks the daemon for arenas (id → bytes); returns them as arrays of bytes, writable.

        An array keeps its mapping: it stays valid after the session has closed.
        """
        request = pb.AttachBuffersRequest(key=self._key)
        for identity, size in arenas.items():
            request.arenas.add(id=identity, size_bytes=size, daemon=pb.Arena.DaemonMemory())
        reply = self._call("AttachBuffers", request)
        self._arenas = {}
        while self._timeline is None or len(self._arenas) < len(arenas):
            self._take_frame()
        self.next_attempt = reply.next_attempt
        if reply.published:
            # The masters of a job with state: under the attempt before the next one, where it is
            # known.
            self._wait_published(max(1, reply.next_attempt - 1))
        return dict(self._arenas)

    def push(self, weights: Iterable[str] | None = None) -> None:
        """The weights in the arenas are the truth: all of them, or those named.

        Collective: returns when every holder has pushed and the weights are published.
        """
        first = pb.PushParametersRequest(
            key=self._key,
            step=self.last_committed_step,
            attempt=self.next_attempt,
            all_weights=weights is None,
        )
        if weights is not None:
            first.weights.extend(weights)
        self._push(first, lambda: ())

    def push_state(self, tensors: Iterable[StateTensor]) -> None:
        """Optimizer state of this rank's fragments. Takes effect when every rank has pushed.

        Collective, as `push` is. State that is not named stays.
        """
        kept = list(tensors)
        first = pb.PushParametersRequest(
            key=self._key,
            step=self.last_committed_step,
            attempt=self.next_attempt,
            state=True,
        )
        self._push(first, lambda: (pb.PushParametersRequest(chunk=c) for c in _chunks(kept)))

    # --- steps ---

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
        DaemonLost.
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
        held_back = frozenset(self._bucket_of[parameter] for parameter in absent)
        while True:
            outcome = self._try_step(scalars, absent, held_back, trainer_state, withdraw)
            withdraw = False
            if outcome.kind in (types.Outcome.KIND_COMMITTED, types.Outcome.KIND_SKIPPED):
                self.last_committed_step = outcome.step
                self.trainer_state = trainer_state
                self._unpublished = dict.fromkeys(self._receives, outcome.attempt)
                if wait:
                    self.wait_published()
                return outcome
            if outcome.kind == types.Outcome.KIND_ROLLED_BACK:
                self._roll_back(outcome)
            if not outcome.retry:
                raise errors.Aborted(outcome, _reason(outcome))

    def wait_published(self, buckets: Iterable[int] | None = None) -> None:
        """Waits for the weights after the last step: all of them, or those of some buckets."""
        if not self._unpublished:
            return
        for bucket in list(self._unpublished) if buckets is None else buckets:
            attempt = self._unpublished.pop(bucket, None)  # a failure is told once
            if attempt is not None:
                self._wait_published(attempt, (bucket,))

    def pull(
        self, parameters: Iterable[str] = (), kinds: Iterable[int] = ()
    ) -> Iterator[StateTensor]:
        """Optimizer state of this rank's fragments (empty arguments: all of it). Not collective."""
        request = pb.PullParametersRequest(
            key=self._key, parameters=list(parameters), kinds=list(kinds)
        )
        self._check_usable()
        self.wait_published()
        current: tuple[str, int, int] | None = None
        parts: list[bytes] = []
        for reply in self._channel.read_stream("PullParameters", request):
            chunk = reply.chunk
            identity = (chunk.parameter, chunk.fragment, chunk.kind)
            if not chunk.parameter:
                continue
            if identity != current:
                if current is not None:
                    yield _assemble(current, parts)
                current, parts = identity, []
            parts.append(chunk.data)
        if current is not None:
            yield _assemble(current, parts)

    def save_snapshot(self) -> tuple[int, str]:
        """Writes a snapshot of the last committed step; returns its step and path once durable."""
        reply = self._call("SaveSnapshot", pb.SaveSnapshotRequest(key=self._key))
        return reply.step, reply.path

    # --- the end ---

    def close(self) -> None:
        """Leaves the job. The job ends when every rank has closed. Arenas stay mapped."""
        if self._closed:
            return
        try:
            if not self._lost.is_set() and not self.in_child:
                try:
                    self.wait_published()
                finally:
                    request = pb.CloseSessionRequest(key=self._key)
                    self._channel.call("CloseSession", request, timeout_s=_WAIT_SLACK_S)
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
        """The daemon has gone: the weights in the arenas are undefined."""
        return self._lost.is_set()

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
        self._attach.close_in_child()

    # --- parts ---

    def _connect(self, connect_for_s: float) -> AttachSocket:
        deadline = time.monotonic() + connect_for_s
        pause_s = 0.02
        while True:
            try:
                return AttachSocket(environment.attach_path(self._path), _lost_callback(self))
            except errors.Unreachable as error:
                # A daemon that is just starting has no socket yet; other errors do not pass.
                cause = error.__cause__
                starting = isinstance(cause, FileNotFoundError | ConnectionRefusedError)
                if not starting or time.monotonic() > deadline:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)

    def _open(self, resume: int, token: bytes, home_lane: int | None, poison: bool) -> None:
        client = f"dmuond-python {socket.gethostname()} pid {os.getpid()}"
        hello = self._channel.call(
            "Hello",
            pb.HelloRequest(
                version_min=PROTOCOL_VERSION, version_max=PROTOCOL_VERSION, client=client
            ),
        )
        self.lanes: int = hello.lanes
        self.device_type: str = hello.device_type
        self.server: str = hello.server
        if home_lane is None:
            local_rank = environment.integer("LOCAL_RANK", 0)
            home_lane = local_rank if local_rank < self.lanes else -1
        reply = self._channel.call(
            "OpenSession",
            pb.OpenSessionRequest(
                nonce=self._attach.nonce,
                job=self.job,
                token=token,
                rank=self.rank,
                world_size=self.world_size,
                resume=resume,
                home_lane=home_lane,
                poison_parameters=poison,
                client=client,
            ),
        )
        self._key = pb.SessionKey(session=reply.session, incarnation=reply.incarnation)
        self.job_incarnation: int = reply.job_incarnation
        self.has_state: bool = reply.has_state
        self.last_committed_step: int = reply.last_committed_step
        self.durable_step: int | None = (
            reply.durable_step if reply.HasField("durable_step") else None
        )
        self.trainer_state: bytes = reply.trainer_state

    def _call(self, name: str, request: object, timeout_s: float | None = None):
        self._check_usable()
        return self._channel.call(name, request, timeout_s)

    def _check_usable(self) -> None:
        if self.in_child:
            raise errors.Error("this session belongs to the process that forked this one")
        if self._closed:
            raise errors.Error("the session is closed")
        if self._lost.is_set():
            raise errors.DaemonLost("the daemon has gone; the weights are undefined")

    def _take_frame(self) -> None:
        frame = self._attach.next_frame(_FRAME_TIMEOUT_S)
        try:
            message = frame.message
            if message.WhichOneof("frame") == "arena":
                memory = mmap.mmap(frame.descriptor, message.arena.size_bytes)
                self._arenas[message.arena.arena] = np.frombuffer(memory, dtype=np.uint8)
            elif message.WhichOneof("frame") == "timeline":
                page = message.timeline
                self._timeline = Timeline(frame.descriptor, page.size_bytes, page.buckets)
        finally:
            frame.close()

    def _require_timeline(self) -> Timeline:
        if self._timeline is None:
            raise errors.Error("call attach() first")
        return self._timeline

    def _push(
        self,
        first: pb.PushParametersRequest,
        rest: Callable[[], Iterable[pb.PushParametersRequest]],
    ) -> None:
        self._check_usable()
        self.wait_published()
        try:
            reply = self._channel.send_stream(
                "PushParameters", lambda: itertools.chain([first], rest())
            )
        except errors.Error as error:
            self._follow(error)
            raise
        self._begin_attempt(reply.next_attempt)
        self.last_committed_step = reply.last_committed_step
        self._wait_published(reply.next_attempt - 1)

    def _try_step(
        self,
        scalars: types.StepScalars,
        absent: Sequence[int],
        held_back: frozenset[int],
        trainer_state: bytes,
        withdraw: bool,
    ) -> types.Outcome:
        """Signals, submits and waits for the outcome of one attempt."""
        self._check_usable()
        self.wait_published()
        step, attempt = self.last_committed_step + 1, self.next_attempt
        timeline = self._require_timeline()
        if not withdraw:
            self._signal_all(self._contributes - held_back)
        timeline.set_submitted(attempt)
        # Lanes learn of absent gradients by the submit: those buckets are signalled after it.
        wait_ms = 0 if held_back and not withdraw else _WAIT_MS
        request = pb.SubmitStepRequest(
            key=self._key,
            step=step,
            attempt=attempt,
            scalars=scalars,
            absent=absent,
            withdraw=withdraw,
            trainer_state=trainer_state,
            wait_ms=wait_ms,
        )
        try:
            reply = self._call("SubmitStep", request, wait_ms / 1e3 + _WAIT_SLACK_S)
            if not withdraw:
                self._signal_all(held_back)
            while reply.outcome.kind == types.Outcome.KIND_UNSPECIFIED:
                wait = pb.WaitStepRequest(
                    key=self._key, step=step, attempt=attempt, wait_ms=_WAIT_MS
                )
                reply = self._call("WaitStep", wait, _WAIT_MS / 1e3 + _WAIT_SLACK_S)
        except errors.Error as error:
            self._follow(error)
            raise
        self.last_outcome, self.last_timing = reply.outcome, reply.timing
        if reply.outcome.HasField("durable_step"):
            self.durable_step = reply.outcome.durable_step
        self._begin_attempt(reply.outcome.next_attempt)
        return reply.outcome

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

    def _roll_back(self, outcome: types.Outcome) -> None:
        reply = self._call(
            "AckRollback", pb.AckRollbackRequest(key=self._key, to_step=outcome.to_step)
        )
        self._begin_attempt(reply.next_attempt)
        self.last_committed_step, self.trainer_state = outcome.to_step, reply.trainer_state
        self._wait_published(reply.next_attempt - 1)
        raise errors.RolledBack(outcome.to_step, reply.trainer_state)

    def _wait_published(self, attempt: int, buckets: Sequence[int] | None = None) -> None:
        waited = self._receives if buckets is None else buckets
        if not self._require_timeline().wait_published(waited, attempt, self._lost.is_set):
            if not self._lost.is_set():
                # The daemon ended the wait: a lane or another node is gone. It says which.
                step = self.last_committed_step + 1
                ask = pb.WaitStepRequest(key=self._key, step=step, attempt=self.next_attempt)
                reply = self._call("WaitStep", ask, _WAIT_SLACK_S)
                if reply.outcome.kind == types.Outcome.KIND_ABORTED:
                    raise errors.Aborted(reply.outcome, _reason(reply.outcome))
            raise errors.DaemonLost(
                f"the daemon has gone before the weights after attempt {attempt} were published; "
                "they are undefined"
            )

    def _on_lost(self) -> None:
        """By the watcher thread: ends every wait."""
        self._lost.set()
        if self._timeline is not None:
            self._timeline.poison()

    def _disconnect(self) -> None:
        self._closed = True
        if self._finalizer is not None:
            self._finalizer.detach()
            atexit.unregister(self._at_exit)
        _let_go(self._channel, self._attach)


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


def _let_go(channel: Channel, attach: AttachSocket) -> None:
    channel.close()
    attach.close()


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


def _lost_callback(session: Session) -> Callable[[], None]:
    """The watcher must not keep the session alive."""
    reference = weakref.ref(session)

    def lost() -> None:
        alive = reference()
        if alive is not None:
            alive._on_lost()

    return lost


def _has_elements(box: types.Box) -> bool:
    return all(begin < end for begin, end in zip(box.begin, box.end, strict=True))


def _reason(outcome: types.Outcome) -> str:
    return types.Outcome.Reason.Name(outcome.reason).removeprefix("REASON_")


def _chunks(tensors: Iterable[StateTensor]) -> Iterator[pb.StateChunk]:
    for tensor in tensors:
        dtype = np.float64 if tensor.kind == types.STATE_KIND_STEP else np.float32
        data = np.ascontiguousarray(tensor.values, dtype=dtype).reshape(-1)
        stride = _CHUNK_BYTES // data.itemsize
        for first in range(0, data.size, stride):
            yield pb.StateChunk(
                parameter=tensor.parameter,
                fragment=tensor.fragment,
                kind=tensor.kind,
                first_element=first,
                data=data[first : first + stride].tobytes(),
            )


def _assemble(identity: tuple[str, int, int], parts: list[bytes]) -> StateTensor:
    parameter, fragment, kind = identity
    dtype = np.float64 if kind == types.STATE_KIND_STEP else np.float32
    values = np.frombuffer(b"".join(parts), dtype=dtype)
    return StateTensor(parameter, fragment, kind, values)
