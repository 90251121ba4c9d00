"""A trainer's session with the daemon of its node: register, attach, push, step, pull, close.

session = dmuond.Session(rank=0, world_size=1)
registered = session.register(parameters, fragments, groups)
arenas = session.attach({1: weight_bytes, 2: gradient_bytes})   # numpy arrays over shared memory
...                                                             # write the first weights
session.push()                                                  # they become the masters
...                                                             # write gradients
outcome = session.step(scalars)                                 # weights have changed
session.close()

With Session(device="cuda:0") arenas lie on that GPU, and nothing makes the host wait for it:

arenas = session.attach({1: weight_bytes, 2: gradient_bytes})   # of type DeviceArray
w = torch.as_tensor(arenas[1].slot(offset_bytes, (64, 32)), device="cuda:0")  # a view
...                                                             # write the first weights
torch.cuda.synchronize()                                        # there, not only enqueued
session.push()
stream = torch.cuda.current_stream().cuda_stream                # a handle, as an integer
...                                                             # enqueue forward and backward
session.signal(bucket, stream)                                  # as its gradients are enqueued
outcome = session.step(scalars, stream=stream)                  # waits for the decision alone
...                                                             # enqueued: finds the new weights
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType

import numpy as np

from dmuond import arenas, devices, environment, errors, places, state_chunks, types
from dmuond._proto import trainer_pb2 as pb
from dmuond.device_array import HasMemory
from dmuond.fault_point import fault_point
from dmuond.link import Identity
from dmuond.member import WAIT_SLACK_S, Member, Registered
from dmuond.memory import View
from dmuond.state_chunks import StateTensor
from dmuond.timeline import POISON
from dmuond.waiting import WaitNotice

log = logging.getLogger("dmuond")

TRAINER_STATE_BYTES_MAX = 1 << 20
_WAIT_MS = 10_000  # of one call; calls are repeated until the outcome is there
_DEVICE_CHECK_MS = 500  # between two, a device that can fail is asked whether it has
_ASK_FOR_S = 5.0  # who keeps a push waiting
_CONNECT_FOR_S = 10.0
# A group that is forming anew may refuse to read state; it has formed by then.
_REFORMED_WITHIN_S, _REFORM_PAUSE_S = 30.0, 0.25
_REFORMING = ("LANE_LOST", "PEER_LOST", "NODE_NOT_READY", "GROUP_NOT_READY")


class Session(Member):
    """One trainer's session. Not safe for several threads at once.

    It outlives its daemon: the call that finds the daemon gone waits for the successor, takes the
    session's place in the job again, with fresh arenas, and raises RolledBack. Where that cannot
    be, it raises DaemonLost or StateLost.

    A `stream` in the methods below is a cudaStream_t or CUstream of the session's device, as an
    integer; 0 is the default stream. With one, signals are given when the stream has come so far,
    and the stream waits for weights; the host waits for neither. Signals go by a stream of the
    session's own, so that this one is not held up. Without one, a signal is given at once, and the
    host waits for weights; the device is taken to be done with what was enqueued before. Refused
    (FailedPreconditionError, SESSION_STATE) is a stream that is being captured into a CUDA graph,
    which would signal one attempt for ever, and any stream where the arenas lie in host memory.
    Nothing has changed then. A failed call of the driver is an Error that names it (CUDA_FAILED).

    Attributes: rank, world_size, job, device ("cpu", "cuda:0"; of this trainer), lanes (of this
    node), device_type (of the lanes), has_state (the job had
    optimizer state when the session opened), last_committed_step, durable_step (None: a lost daemon
    loses the job), trainer_state (what this rank handed in with last_committed_step), next_attempt,
    last_outcome, last_timing, registered (None before register()), arenas (empty before attach()).
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        device: str = "cpu",
        job: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        resume: str | int | None = None,
        on_error: str = "leave",
        token: bytes | None = None,
        home_lane: int | None = None,
        poison: bool | None = None,
        connect_for_s: float = _CONNECT_FOR_S,
        reconnect_for_s: float | None = None,
        server_uid: int | None = None,
    ) -> None:
        """Connects and opens the session; what is None comes from the environment.

        device: where gradients and weights lie, "cpu" (memory of the host) or "cuda:0", "cuda:1",
        … as CUDA counts the devices of this process; the package cuda-bindings is needed then. The
        daemon's lanes are of the same kind (--devices), and one of them need not be on this device.

        resume: what becomes of the state of a job of this name: "never" (it is an error; the
        default), "if_present" (go on with it where there is any), "require" (none is an error),
        "discard" (the job that there is ends, once for each start of all ranks; refused while a
        rank of another start is attached; snapshots stay, and count no more). on_error: what an
        exception that ends the script, or a `with` block of the session, means for the job:
        "leave" (the rank's place waits for a replacement, --session_linger long) or "end" (the job
        ends on all nodes). Ctrl-C ends it, but under torchrun or in a notebook. A job that ends so
        and has a snapshot gets one of its last step first.

        connect_for_s: how long to wait for a daemon that is just starting. reconnect_for_s: how
        long a call waits for the successor of a daemon that has gone, and the start for that of one
        that is leaving (DMUOND_RECONNECT_S, or 10 minutes); 0: DaemonLost, or DRAINING, at once.
        server_uid: the user whose daemon gets the token, beside root and this process's own
        (DMUOND_SERVER_UID).

        Raises: Unreachable when no daemon answers within `connect_for_s`; InvalidArgumentError
        where there is no such device, or (DEVICE_UNKNOWN) no lane reaches it; Error as the daemon
        says, (CUDA_UNAVAILABLE) without cuda-bindings or a driver, or (SOCKET_OWNER) where the
        socket is somebody else's.
        """
        _check_identity(job, rank, world_size)
        mode = environment.resume(resume)
        if on_error not in ("leave", "end"):
            raise errors.InvalidArgumentError(f"on_error={on_error!r} is neither 'leave' nor 'end'")
        super().__init__(
            environment.socket_path(address),
            Identity(
                job=job or environment.job(),
                token=environment.token() if token is None else token,
                rank=environment.integer("RANK", 0) if rank is None else rank,
                world_size=(
                    environment.integer("WORLD_SIZE", 1) if world_size is None else world_size
                ),
                home_lane=home_lane,
                poison=environment.poison() if poison is None else poison,
                server_uid=environment.server_uid() if server_uid is None else server_uid,
            ),
            devices.memory_of(device),
            environment.reconnect_for_s() if reconnect_for_s is None else reconnect_for_s,
            on_error,
        )
        self._begin(mode, connect_for_s)

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
        others = f"all ranks of job '{self.job}' to register (WORLD_SIZE is {self.world_size})"
        while True:
            try:
                with WaitNotice(self.rank, "the registration").waiting_for(others):
                    registered = self._link.register(self._layout)
                break
            except errors.Error as error:
                if not self._begins_again(error):
                    raise
        self._adopt_registered(registered)
        assert self.registered is not None
        return self.registered

    def attach(
        self,
        arenas: Mapping[int, int | HasMemory],
        *,
        weight_digests: Sequence[bytes] = (),
        broadcast: bool = False,
    ) -> dict[int, View]:
        """Asks the daemon for arenas (id → bytes); returns them as arrays of bytes, writable.

        They are numpy arrays of uint8, or, with a GPU, DeviceArrays, whose slot() makes arrays of
        their fragments.

        With a GPU an arena may also lie in memory that the trainer has: an object with
        __cuda_array_interface__ in the place of the number, dense, beginning at a multiple of 16
        bytes. The client keeps the object; the memory must stay until close() has returned, and
        goes with the process, so that a replacement gets its weights anew. Memory that is not
        cudaMalloc's cannot be exported (cudaMallocAsync, PyTorch's expandable_segments:True).
        Raises InvalidArgumentError or FailedPreconditionError (ARENA_INVALID) then, naming the
        arena and what to set.

        weight_digests: what this rank's first weights are, one for each registered fragment: the
        first 16 bytes of the SHA-256 of its elements, little-endian, row-major; b"" where there is
        nothing to compare. A fresh job fails (WEIGHTS_DIFFER, from this call or from the first
        push) where ranks that hold a box differ, before anything is written to an arena. Without
        them, or in a job with state, nothing is compared. broadcast, on all ranks: the lowest
        rank's weights go to all holders of a box, whatever those have.

        The job may have gone back since the session opened: from here on last_committed_step and
        trainer_state are what the weights in the arenas belong to.

        An array keeps its mapping: it stays valid after the session has closed. After a RolledBack
        with fresh_arenas it is of the past: take `arenas` again.
        """
        self._check_alive()
        self._wanted_arenas = dict(arenas)
        reply = self._link.attach(arenas, weight_digests, broadcast, self._fresh_arenas)
        self._show_arenas()
        self._stands_at, self._state_known = None, False
        self.next_attempt = reply.next_attempt
        if reply.published:
            self._in_job = True
            self._adopt_attached(reply)
            # The masters of a job with state: under the attempt before the next one, where it is
            # known. A caller who has seen none of its steps has nothing to go back from.
            with contextlib.suppress(errors.RolledBack):
                self._surviving(lambda: self._wait_published(max(1, self.next_attempt - 1)))
        return dict(self.arenas)

    def push(self, weights: Iterable[str] | None = None) -> None:
        """The weights in the arenas are the truth: all of them, or those named.

        On a GPU they must be there, not only enqueued.

        Collective: returns when every holder has pushed and the weights are published. A push that
        is aborted without fault of this rank is repeated.
        """
        names = [] if weights is None else list(weights)
        self._stands_at, self._state_known = None, False
        first = pb.PushParametersRequest(all_weights=weights is None, weights=names)
        self._surviving(lambda: self._push(first, lambda: ()))

    def push_state(self, tensors: Iterable[StateTensor]) -> None:
        """Optimizer state of this rank's fragments. Takes effect when every rank has pushed.

        Collective, as `push` is. State that is not named stays.
        """
        kept = list(tensors)
        self._stands_at, self._state_known = None, False
        first = pb.PushParametersRequest(state=True)
        self._surviving(lambda: self._push(first, lambda: self._state_requests(kept)))

    # --- steps ---

    def check_not_republished(self, what: str) -> None:
        """Whether the weights that were changed since the last step still lie in the arenas.

        A group that forms anew between two steps publishes the masters over them. Raises
        FailedPreconditionError (WEIGHTS_REPUBLISHED), once: then they can be changed again.
        """
        newest = max(self._published_attempts(), default=0)
        if self._arrived_attempt < newest < POISON:
            self._wait_published(newest)  # what is written from now on is to stay
            raise errors.FailedPreconditionError(
                f"{what}: the group has formed anew since step {self.last_committed_step}, and its "
                "masters may have been published over them: change the weights again",
                reason="WEIGHTS_REPUBLISHED",
            )

    def signal(self, bucket: int, stream: int | Iterable[int] | None = None) -> None:
        """The gradients of a bucket lie in the arena: they may be collected from now on.

        stream: they lie there when it, or all of several, have done what is enqueued there. They
        must not change until the step is decided. A bucket that is not signalled is, by `step`. One
        with a gradient that may turn out absent is left to it.
        """
        self._check_usable()
        streams = tuple(stream) if isinstance(stream, Iterable) else _as_tuple(stream)
        for each in streams:
            self._memory.check_stream(each)
        timeline = self._require_timeline()
        if not 0 <= bucket < timeline.buckets:
            raise errors.InvalidArgumentError(f"bucket {bucket}; there are {timeline.buckets}")
        if self._going_back is not None:
            return  # the caller will come with other gradients
        self._signal_all([bucket], streams)
        fault_point("trainer.signalled_early")

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
        not_finite: int | None = None,
        wait: bool = True,
        stream: int | None = None,
    ) -> types.Outcome:
        """One step with the gradients in the arenas; returns when the new weights lie there.

        wait=False: returns when the step is decided; `wait_published` waits for the weights.

        stream: when it has done what is enqueued there, the gradients lie in the arena and the old
        weights have been read; no weight is written before. The call returns when the step is
        decided. What is enqueued in the stream afterwards finds the new weights (unless
        wait=False). If the daemon is lost or the job goes back meanwhile, the stream goes on with
        undefined weights, and the next call says so. To look at weights on the host, wait for the
        stream, and then call `wait_published()` without one.

        absent: indices of registered parameters without a gradient, none of a bucket that was
        signalled early. withdraw: such a bucket has changed since it was signalled. An attempt that
        was aborted and may be retried is retried with the same gradients.

        not_finite: the index of a parameter whose gradient here has an infinity or a NaN. All ranks
        skip the step. Lanes see that in gradients that they read. They read none of
        CONTRIBUTION_NONE, and of CONTRIBUTION_SAME the lowest rank's alone: where ranks compute
        those each by itself, a trainer looks at its own. FailedPreconditionError with a daemon that
        is too old for it.

        Returns the outcome, COMMITTED or SKIPPED. Raises Aborted, RolledBack, InvalidArgumentError
        (scalars differ between trainers: the gradients stay valid for a corrected call),
        DaemonLost, StateLost.
        """
        if len(trainer_state) > TRAINER_STATE_BYTES_MAX:
            raise errors.InvalidArgumentError(
                f"trainer_state has {len(trainer_state)} bytes; at most {TRAINER_STATE_BYTES_MAX}"
            )
        self._check_absent(absent, withdraw)
        if not_finite is not None and not 0 <= not_finite < len(self._bucket_of):
            raise errors.InvalidArgumentError(
                f"not_finite names parameter {not_finite}; {len(self._bucket_of)} are registered"
            )
        request = pb.SubmitStepRequest(
            scalars=scalars,
            absent=absent,
            withdraw=withdraw,
            not_finite=not_finite,
            trainer_state=trainer_state,
        )
        self._memory.check_stream(stream)
        notice = WaitNotice(self.rank, f"step {self.last_committed_step + 1}")
        return self._surviving(lambda: self._step(request, wait, stream, notice))

    def wait_published(
        self, buckets: Iterable[int] | None = None, stream: int | None = None
    ) -> None:
        """Waits for the weights after the last step: all of them, or those of some buckets.

        stream: it waits in the place of the host. Raises RolledBack, DaemonLost, StateLost.
        """
        self._memory.check_stream(stream)
        if self._unpublished or self._going_back is not None:
            wanted = None if buckets is None else list(buckets)
            if stream is None:
                self._surviving(lambda: self._wait_unpublished(wanted))
            else:
                self._surviving(lambda: self._enqueue_wait(wanted, stream))

    def pull(
        self, parameters: Iterable[str] = (), kinds: Iterable[int] = ()
    ) -> Iterator[StateTensor]:
        """Optimizer state of this rank's fragments (empty arguments: all of it). Not collective."""
        request = pb.PullParametersRequest(parameters=list(parameters), kinds=list(kinds))
        self.wait_published()
        steps: set[int] = set()
        yielded: set[tuple[str, int, int]] = set()
        give_up: float | None = None
        while True:
            read_next = self._reader(request, steps)
            try:
                while (tensor := self._surviving(read_next)) is not None:
                    identity = (tensor.parameter, tensor.fragment, tensor.kind)
                    if identity not in yielded:
                        yielded.add(identity)
                        yield tensor
                    give_up = None
                return
            except errors.Error as error:
                give_up = give_up or time.monotonic() + _REFORMED_WITHIN_S
                if not _passes(error) or time.monotonic() > give_up:
                    raise
            time.sleep(_REFORM_PAUSE_S)

    def save_snapshot(self) -> tuple[int, str]:
        """Writes a snapshot of the last committed step; returns its step and path once durable."""
        reply = self._surviving(
            lambda: self._call("SaveSnapshot", pb.SaveSnapshotRequest(key=self._link.key))
        )
        self.durable_step = reply.step
        return reply.step, reply.path

    def load_snapshot(self, step: int = 0) -> int:
        """Sets the whole job back to a snapshot (0: the newest); returns its step.

        One rank calls it. Every rank's next step raises RolledBack, this one's too.
        """
        self._loads += 1
        return self._surviving(lambda: self._load(step)).step

    # --- the end ---

    def close(self) -> None:
        """Leaves the job. The job ends when every rank has closed. Arenas stay mapped.

        Returns when every stream has given its signals and has the weights that it waits for, and
        when no lane has memory of the trainer's mapped.

        Waits for weights that are on their way. Raises DaemonLost where they do not come, because
        the daemon has gone. RolledBack: the session is not closed, and goes on from there; another
        call closes it.
        """
        if self._closed:
            return
        try:
            if not self.in_child:
                self._wait_unpublished(None)
                if self._link.timeline is not None:
                    self._link.timeline.finish_streams()
        except errors.RolledBack:
            raise
        except BaseException:
            self._leave()
            raise
        self._leave()

    def _save_last(self, why: str) -> None:
        places.tell(f"{why}: job '{self.job}' is being saved first; Ctrl-C leaves that out")
        try:
            reply = self._link.call("SaveSnapshot", pb.SaveSnapshotRequest(key=self._link.key))
            self.durable_step = reply.step
        except (errors.Error, KeyboardInterrupt) as problem:
            if not places.has_ended(problem):
                places.tell(f"job '{self.job}' is not saved: {places.describe(problem)}")

    def _leave(self, end_job: str = "") -> None:
        try:
            fault_point("trainer.closing")
            if not self.lost and not self.in_child:
                request = pb.CloseSessionRequest(key=self._link.key, end_job=end_job)
                self._link.call("CloseSession", request, timeout_s=WAIT_SLACK_S)
        except errors.DaemonLost:
            # The reply was lost: the daemon has closed this rank's attach socket, or is gone.
            pass
        except errors.Error as error:
            if error.reason != "JOB_ENDED":  # then there is nothing left to leave
                raise
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
        try:
            if error is None:
                self.close()
            elif self._unpublished and self.lost:
                log.warning(
                    "rank %d: %s before the weights after step %d were published; they are "
                    "undefined",
                    self.rank,
                    self._link.how_it_ended(),
                    self.last_committed_step,
                )
        finally:
            if not self._closed:
                if error is None:
                    self.drop()
                else:
                    self.end_by(error)

    # --- pushing and pulling ---

    def _push(
        self,
        first: pb.PushParametersRequest,
        rest: Callable[[], Iterable[bytes]],
    ) -> None:
        self._check_alive()
        self._wait_unpublished(None)
        # A group that forms anew publishes its masters: what is pushed must outlive that.
        pushed: list[tuple[int, int, np.ndarray]] = []
        if self._in_job and not first.state:
            pushed = [
                (identity, begin, self._mapped[identity].read(begin, end - begin))
                for identity, begin, end in arenas.weight_spans(self._layout)
            ]
            self.check_not_republished("the weights to push")
        notice = WaitNotice(self.rank, "a push")
        while True:
            attempt = self.next_attempt
            first.key.CopyFrom(self._link.key)
            first.step, first.attempt = self.last_committed_step, attempt
            ask = functools.partial(self._who_keeps_a_push, first.step, attempt)
            try:
                with notice.asking(ask):
                    reply = self._link.channel.push(
                        lambda: itertools.chain([first.SerializeToString()], rest())
                    )
                notice.end()
                break
            except errors.Error as error:
                self._follow(error)
                if not _may_push_again(error) or self.next_attempt <= attempt:
                    raise
            if pushed and self.next_attempt >> 32 != attempt >> 32:
                self._wait_published(self.next_attempt - 1)
                for identity, begin, contents in pushed:
                    self._mapped[identity].write(contents, begin)
        self._in_job = True
        self._begin_attempt(reply.next_attempt)
        self.last_committed_step = reply.last_committed_step
        self._wait_published(reply.next_attempt - 1)

    def _state_requests(self, tensors: Iterable[StateTensor]) -> Iterator[bytes]:
        together = bool(self._link.hello.features & pb.FEATURE_CHUNKS)
        return state_chunks.requests(tensors, together)

    def _who_keeps_a_push(self, step: int, attempt: int) -> Iterable[types.Awaited]:
        """By another thread. The daemon may have begun a later attempt of the same push."""
        while True:
            request = pb.WaitStepRequest(key=self._link.key, step=step, attempt=attempt)
            reply = self._link.channel.call("WaitStep", request, _ASK_FOR_S)
            if not reply.outcome.retry:
                return reply.awaited
            attempt = reply.outcome.next_attempt

    def _load(self, step: int) -> pb.LoadSnapshotReply:
        request = pb.LoadSnapshotRequest(key=self._link.key, step=step, call=self._loads)
        return self._call("LoadSnapshot", request)

    def _reader(
        self, request: pb.PullParametersRequest, steps: set[int]
    ) -> Callable[[], StateTensor | None]:
        """Reads one after the other. A way back that the caller is not told of cuts the stream."""
        tensors: Iterator[StateTensor] | None = None
        carried = 0

        def read_next() -> StateTensor | None:
            nonlocal tensors, carried
            if tensors is None:
                tensors, carried = self._pull(request, steps), self._carried
            elif self._carried != carried:
                raise errors.Error("PullParameters: the stream was cut", code="UNAVAILABLE")
            return next(tensors, None)

        return read_next

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

    def _step(
        self, request: pb.SubmitStepRequest, wait: bool, stream: int | None, notice: WaitNotice
    ) -> types.Outcome:
        held_back = frozenset(self._bucket_of[parameter] for parameter in request.absent) - {-1}
        while True:
            try:
                outcome = self._try_step(request, held_back, stream, notice)
            except errors.FailedPreconditionError as error:
                # The attempt ended unheard; the step is still the open one.
                overtaken = error.reason == "ATTEMPT_OUT_OF_ORDER"
                if not overtaken or self.next_attempt <= request.attempt:
                    raise
                request.withdraw = False
                continue
            request.withdraw = False
            if outcome.kind in (types.Outcome.KIND_COMMITTED, types.Outcome.KIND_SKIPPED):
                notice.end()
                self._go_on_after(outcome, request.trainer_state)
                if wait and stream is None:
                    self._wait_unpublished(None)
                elif wait:
                    self._enqueue_wait(None, stream)
                return outcome
            self._begin_attempt(outcome.next_attempt)
            self._refuse(outcome)

    def _go_on_after(self, outcome: types.Outcome, trainer_state: bytes) -> None:
        """The next step's attempt begins. Ctrl-C comes before all of it or after all.

        Python looks for signals where something is called: first come the calls, then assignments.
        A step that was interrupted before them is asked for again, and has the same outcome.
        """
        unpublished = dict.fromkeys(self._receives, outcome.attempt)
        step, attempt, nothing = outcome.step, outcome.next_attempt, set[int]()
        self.last_committed_step = step
        self.trainer_state = trainer_state
        self._stands_at, self._state_known = None, True
        self._unpublished = unpublished
        self.next_attempt, self._signalled = attempt, nothing

    def _try_step(
        self,
        request: pb.SubmitStepRequest,
        held_back: frozenset[int],
        stream: int | None,
        notice: WaitNotice,
    ) -> types.Outcome:
        """Signals, submits and waits for the outcome of one attempt."""
        streams = _as_tuple(stream)
        self._check_alive()
        hello = self._link.hello
        if request.HasField("not_finite") and not hello.features & pb.FEATURE_NOT_FINITE:
            raise errors.FailedPreconditionError(
                f"the gradient of parameter {request.not_finite} is not finite on this rank, and "
                f"{hello.server} is too old to skip the step for it: update the daemon",
                reason="VERSION_MISMATCH",
            )
        self._wait_unpublished(None)
        fault_point("trainer.gradients")
        if not request.withdraw:
            self._signal_all(self._contributes - held_back, streams)
        fault_point("trainer.signalled")
        self._require_timeline().set_submitted(self.next_attempt, streams)
        fault_point("trainer.marked")
        request.key.CopyFrom(self._link.key)
        request.step, request.attempt = self.last_committed_step + 1, self.next_attempt
        self._said_absent = self.next_attempt, list(request.absent)
        # Lanes learn of absent gradients by the submit: those buckets are signalled after it.
        held = bool(held_back) and not request.withdraw
        request.wait_ms = 0 if held else self._wait_ms(notice)
        try:
            reply = self._patiently("SubmitStep", request)
            if not request.withdraw:
                self._signal_all(held_back, streams)
            fault_point("trainer.submitted")
            while reply.outcome.kind == types.Outcome.KIND_UNSPECIFIED:
                self._require_timeline().check_device()
                reply = self._patiently("WaitStep", self._wait_request(self._wait_ms(notice)))
                notice.hear(reply.awaited)
        except errors.Error as error:
            self._follow(error)
            raise
        fault_point("trainer.decided")
        self.last_outcome, self.last_timing = reply.outcome, reply.timing
        if reply.outcome.HasField("durable_step"):
            self.durable_step = reply.outcome.durable_step
        return reply.outcome

    def _check_absent(self, absent: Sequence[int], withdraw: bool) -> None:
        """What lanes may have read cannot be called absent, unless by a call that is made again."""
        again = self._said_absent == (self.next_attempt, list(absent))
        for parameter in absent:
            if not 0 <= parameter < len(self._bucket_of):
                raise errors.InvalidArgumentError(
                    f"absent names parameter {parameter}; {len(self._bucket_of)} are registered"
                )
            bucket = self._bucket_of[parameter]
            if bucket in self._signalled and not withdraw and not again:
                raise errors.InvalidArgumentError(
                    f"absent names parameter {parameter}, but its bucket {bucket} has been"
                    " signalled for this step, and lanes may have read it: withdraw=True, or leave"
                    " buckets with gradients that may be absent to step()"
                )

    def _wait_ms(self, notice: WaitNotice) -> int:
        """How long one call may wait."""
        longest = _DEVICE_CHECK_MS if self._require_timeline().can_fail else _WAIT_MS
        return min(longest, int(1e3 * notice.left_s()) + 1)

    def _patiently(self, name: str, request: pb.SubmitStepRequest | pb.WaitStepRequest):
        """A daemon that is stopped does not answer, and goes on where it was when it wakes."""
        give_up = time.monotonic() + self._silent_for_s
        while True:
            try:
                return self._call(name, request, request.wait_ms / 1e3 + WAIT_SLACK_S)
            except errors.Error as error:
                silent = error.code == "DEADLINE_EXCEEDED" and not error.reason
                if not silent or time.monotonic() > give_up:
                    raise

    def _signal_all(self, buckets: Iterable[int], streams: Iterable[int]) -> None:
        unsaid = sorted(self._contributes.intersection(buckets) - self._signalled)
        self._require_timeline().set_ready(unsaid, self.next_attempt, streams)
        self._signalled.update(unsaid)


def _as_tuple(stream: int | None) -> tuple[int, ...]:
    return () if stream is None else (stream,)


def _check_identity(job: object, rank: object, world_size: object) -> None:
    if not isinstance(job, str | None):
        raise errors.InvalidArgumentError(f"job={job!r} is not a name")
    for name, value in (("rank", rank), ("world_size", world_size)):
        if value is not None and (not isinstance(value, int) or abs(value) >= 1 << 31):
            raise errors.InvalidArgumentError(f"{name}={value!r} is not an integer")


def _may_push_again(error: errors.Error) -> bool:
    """Whether a push failed through nobody's mistake."""
    if error.reason == "PUSH_ABORTED":
        return error.metadata.get("retry") == "true"
    return error.reason == "ATTEMPT_OUT_OF_ORDER"


def _passes(error: errors.Error) -> bool:
    """Whether state may be read in a while: the group forms anew, or a call was cut."""
    cut = not error.reason and not isinstance(error, errors.DaemonLost)
    return error.code == "UNAVAILABLE" and (cut or error.reason in _REFORMING)
