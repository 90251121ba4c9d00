"""A daemon of one process for one rank, which computes nothing: real sockets, memfds, futexes.

What the client does when a daemon misbehaves (dies, aborts, refuses, answers late) is tested with
it; everything else with the real one.
"""

import ctypes
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import grpc
import numpy as np
from dmuond import _proto, atomics, layout_parts, timeline, types
from dmuond._proto import attach_pb2
from dmuond._proto import trainer_pb2 as pb

EPOCH = 1 << 32


def error_details(reason: str, metadata: dict[str, str]) -> bytes:
    """A serialised google.rpc.Status with one ErrorInfo."""

    def field(number: int, value: bytes) -> bytes:
        size, length = len(value), b""
        while True:
            length += bytes([size & 0x7F | (0x80 if size > 0x7F else 0)])
            size >>= 7
            if not size:
                return bytes([number << 3 | 2]) + length + value

    info = field(1, reason.encode()) + field(2, b"dmuond")
    for key, value in metadata.items():
        info += field(3, field(1, key.encode()) + field(2, value.encode()))
    packed = field(1, b"type.googleapis.com/google.rpc.ErrorInfo") + field(2, info)
    return b"\x08\x03" + field(2, b"message") + field(3, packed)


def abort(context, code, message, reason, **metadata):
    details = (("grpc-status-details-bin", error_details(reason, metadata)),)
    context.set_trailing_metadata(details)
    context.abort(code, message)


def handlers(service: str, served: object) -> grpc.GenericRpcHandler:
    """Each call is the method of its name of `served`; those that it lacks are unimplemented."""
    return grpc.method_handlers_generic_handler(
        _proto.full_name(service),
        {
            name: getattr(grpc, f"{kind}_rpc_method_handler")(
                getattr(served, name),
                request_deserializer=request.FromString,
                response_serializer=answer.SerializeToString,
            )
            for name, (kind, request, answer) in _proto.calls(service).items()
            if hasattr(served, name)
        },
    )


class FakeDaemon:
    """For tests to read: submits, pushed, ready_at_submit, ready_at_wait (words of the page).

    To set: outcomes and refusals (to answer next), first (name of a call → what to do, once, before
    it), stored (state by name and kind). The weights of step n are n, in every element. An abort
    for the loss of a peer begins a new epoch.
    """

    BUCKETS = 2

    def __init__(self, path: str, *, step: int = 0, trainer_state: bytes = b"", epoch: int = 1):
        """With a step: as one that has found a snapshot of it."""
        self.path = path
        self.submits: list[pb.SubmitStepRequest] = []
        self.pushed: list[list[pb.StateChunk]] = []  # of each message
        self.stored: dict[tuple[str, int], np.ndarray] = {}
        self.ready_at_submit: list[list[int]] = []
        self.ready_at_wait: list[list[int]] = []
        self.outcomes: list[types.Outcome] = []  # instead of committing, in order
        self.refusals: list[tuple] = []
        self.first: dict[str, Callable[[grpc.ServicerContext], None]] = {}
        self.acknowledged: list[int] = []
        self.lose_acknowledgement = False  # the answer to the next one
        self.closes = 0
        self.loads: list[int] = []  # LoadSnapshotRequest.call
        self.opened: list[pb.OpenSessionRequest] = []
        self.registered: list[pb.RegisterLayoutRequest] = []
        self.step = step
        self.trainer_state = trainer_state
        self.has_state = step > 0
        self.attempt = epoch * EPOCH + 1 + self.has_state
        self.goes_back_to: int | None = None
        self.asked = True  # somebody wants it to go back
        self._acknowledged: tuple[int, int] | None = None  # step and epoch
        self.back_epoch = 7  # that begins with the next way back, about
        self.buckets = self.BUCKETS
        self.published_timeout_ms = 0
        self.version, self.features = 2, pb.FEATURE_CHUNKS
        self.on_wait = None  # instead of WaitStep
        self.arenas: dict[int, np.ndarray] = {}
        self._client: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        Path(path + ".attach").unlink(missing_ok=True)  # a predecessor's
        self._listener.bind(path + ".attach")
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        self._server.add_generic_rpc_handlers((handlers("Trainer", self),))
        self._server.add_insecure_port(f"unix:{path}")
        self._server.start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            frame = attach_pb2.AttachFrame(welcome={"nonce": b"0123456789abcdef"})
            self._client = client  # before the trainer can ask for what goes over it
            client.send(frame.SerializeToString())

    def die(self):
        """As if killed: every socket closes."""
        if self._listener.fileno() < 0:
            return
        # Nobody finds it any more when its trainer hears of its end.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        if self._client is not None:
            self._client.close()
        self._server.stop(0).wait()

    def roll_back(self, step: int, trainer_state: bytes = b"", asked: bool = True):
        """From now on every call is answered by it, until the trainer has acknowledged.

        asked: as if somebody had loaded a snapshot; else another daemon's memory is lost.
        """
        self.goes_back_to, self.trainer_state = step, trainer_state
        self.asked = asked
        self.back_epoch += 1
        for bucket in range(self.buckets):  # ends waits, and no attempt's weights have come
            self.publish_bucket(bucket, (self.attempt // EPOCH + 1) * EPOCH - 1)

    # --- calls ---

    def Hello(self, request, context):  # noqa: N802
        if not request.version_min <= self.version <= request.version_max:
            code = grpc.StatusCode.FAILED_PRECONDITION
            why = f"the client speaks {request.version_max}, this daemon speaks {self.version}"
            server_version = str(self.version)
            abort(context, code, why, "VERSION_MISMATCH", server_version=server_version)
        return pb.HelloReply(
            version=self.version,
            features=self.features,
            server="fake",
            lanes=1,
            device_type="cpu",
        )

    def OpenSession(self, request, context):  # noqa: N802
        self._first("OpenSession", context)
        self.opened.append(request)
        if request.resume == types.RESUME_REQUIRE and not self.has_state:
            code = grpc.StatusCode.FAILED_PRECONDITION
            abort(context, code, "job 'default' has no state to resume from", "JOB_HAS_NO_STATE")
        return pb.OpenSessionReply(
            session=7,
            incarnation=3,
            has_state=self.has_state,
            last_committed_step=self.step,
            trainer_state=self.trainer_state,
            durable_step=self.step if self.has_state else None,
            published_timeout_ms=self.published_timeout_ms,
        )

    def RegisterLayout(self, requests, context):  # noqa: N802
        request = layout_parts.merge(requests)
        self._first("RegisterLayout", context)
        self.registered.append(request)
        reply = pb.RegisterLayoutReply(buckets=self.buckets)
        for index, parameter in enumerate(request.parameters):
            left_alone = parameter.route == types.ROUTE_TRAINER
            bucket = -1 if left_alone else index % self.buckets
            reply.parameter_bucket.append(bucket)
            reply.routing.add(
                parameter=parameter.name,
                route=parameter.route,
                matrices=int(parameter.route == types.ROUTE_MUON),
                owners=[] if left_alone else [0],
                why=parameter.route_reason,
                bucket=bucket,
            )
        yield from layout_parts.split(reply)

    def AttachBuffers(self, request, context):  # noqa: N802
        self._first("AttachBuffers", context)
        for arena in request.arenas:
            descriptor = os.memfd_create("arena")
            os.ftruncate(descriptor, arena.size_bytes)
            memory = mmap.mmap(descriptor, arena.size_bytes)
            self.arenas[arena.id] = np.frombuffer(memory, dtype=np.uint8)
            self._send_memory(
                descriptor,
                arena={"session": 7, "arena": arena.id, "size_bytes": arena.size_bytes},
            )
        size = timeline.page_bytes(self.buckets)
        descriptor = os.memfd_create("timeline")
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, struct.pack("<3I", 0x4C544D44, 2, self.buckets), 0)
        self.page = timeline.Timeline(descriptor, size, self.buckets)
        self._send_memory(
            descriptor, timeline={"session": 7, "buckets": self.buckets, "size_bytes": size}
        )
        if self.has_state:
            self._write_weights()
            self._publish(self.attempt - 1)
        return pb.AttachBuffersReply(
            timeline_bytes=size,
            next_attempt=self.attempt,
            published=self.has_state,
            last_committed_step=self.step,
            trainer_state=self.trainer_state,
        )

    def _send_memory(self, descriptor, **frame):
        body = attach_pb2.AttachFrame(**frame).SerializeToString()
        socket.send_fds(self._client, [body], [descriptor])
        os.close(descriptor)

    def PushParameters(self, requests, context):  # noqa: N802
        first, *messages = requests
        if self.goes_back_to is not None:
            self._abort_for_rollback(context)
        self._first("PushParameters", context)
        if first.attempt != self.attempt:
            code = grpc.StatusCode.FAILED_PRECONDITION
            metadata = {"next_attempt": str(self.attempt)}
            abort(context, code, "another attempt is open", "ATTEMPT_OUT_OF_ORDER", **metadata)
        self.pushed += [list(message.chunks) for message in messages]
        self.pushed_weights = self.arenas[1].copy()
        self.has_state = True
        attempt, self.attempt = self.attempt, self.attempt + 1
        self._publish(attempt)
        return pb.PushParametersReply(next_attempt=self.attempt, last_committed_step=self.step)

    def PullParameters(self, request, context):  # noqa: N802
        self._first("PullParameters", context)
        for (name, kind), values in self.stored.items():
            if name not in request.parameters or kind not in request.kinds:
                continue
            data = values.astype(np.float32).tobytes()
            for at in range(0, len(data), 256):
                piece = data[at : at + 256]
                chunk = pb.StateChunk(parameter=name, kind=kind, first_element=at // 4, data=piece)
                yield pb.PullParametersReply(step=self.step, chunk=chunk)

    def SubmitStep(self, request, context):  # noqa: N802
        self.submits.append(request)
        self.ready_at_submit.append([self._ready(b) for b in range(self.buckets)])
        if self.goes_back_to is not None:
            return pb.SubmitStepReply(outcome=self._rolled_back())
        if self.refusals:
            abort(context, *self.refusals.pop(0))
        if request.step != self.step + 1 or request.attempt != self.attempt:
            right_step = request.step == self.step + 1
            abort(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"step {request.step} attempt {request.attempt}; open: {self.step + 1} "
                f"{self.attempt}",
                "ATTEMPT_OUT_OF_ORDER" if right_step else "STEP_OUT_OF_ORDER",
                **({"next_attempt": str(self.attempt)} if right_step else {}),
            )
        if self.outcomes:
            outcome = self.outcomes.pop(0)
            outcome.step, outcome.attempt = request.step, self.attempt
            self.attempt += 1
            if outcome.reason == types.Outcome.REASON_PEER_LOST:
                self.begin_epoch()
            outcome.next_attempt = self.attempt
            return pb.SubmitStepReply(outcome=outcome)
        if request.absent:
            return pb.SubmitStepReply()  # the outcome comes by WaitStep
        return pb.SubmitStepReply(outcome=self._commit())

    def WaitStep(self, request, context):  # noqa: N802
        if self.on_wait is not None:
            return self.on_wait(request, context)
        self.ready_at_wait.append([self._ready(b) for b in range(self.buckets)])
        if self.goes_back_to is not None:
            return pb.WaitStepReply(outcome=self._rolled_back())
        submitted = self.submits[-1].step if self.submits else None
        if request.step != submitted or request.attempt != self.attempt:
            code = grpc.StatusCode.FAILED_PRECONDITION
            abort(context, code, f"step {request.step} was not submitted", "STEP_OUT_OF_ORDER")
        return pb.WaitStepReply(outcome=self._commit())

    def AckRollback(self, request, context):  # noqa: N802
        self._first("AckRollback", context)
        told = request.to_step, request.epoch
        if told == (self.goes_back_to, self.back_epoch):
            self.acknowledged.append(request.to_step)
            self._acknowledged = told
            self.step, self.goes_back_to = request.to_step, None
            self.begin_epoch()
        elif self.goes_back_to is not None or told != self._acknowledged:
            self._abort_for_rollback(context)
        if self.lose_acknowledgement:
            self.lose_acknowledgement = False
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            abort(context, code, "rank 1 has not acknowledged", "RANKS_MISSING")
        return pb.AckRollbackReply(trainer_state=self.trainer_state, next_attempt=self.attempt)

    def SaveSnapshot(self, request, context):  # noqa: N802
        return pb.SaveSnapshotReply(step=self.step, path="/snapshots/1")

    def LoadSnapshot(self, request, context):  # noqa: N802
        self.loads.append(request.call)
        self.roll_back(request.step, b"of the snapshot")
        return pb.LoadSnapshotReply(step=request.step)

    def CloseSession(self, request, context):  # noqa: N802
        self.closes += 1
        self._first("CloseSession", context)
        return pb.CloseSessionReply(last_committed_step=self.step)

    def begin_epoch(self):
        """Publishes the masters under an attempt of a new epoch, and opens the next one."""
        self.attempt = (self.attempt // EPOCH + 1) * EPOCH + 2
        self._write_weights()
        self._publish(self.attempt - 1)

    def publish_bucket(self, bucket: int, attempt: int):
        atomics.advance(self.page._published(bucket), attempt)

    # --- parts ---

    def _first(self, call, context):
        self.first.pop(call, lambda _: None)(context)

    def _write_weights(self):
        self.arenas[1].view(np.float32)[...] = self.step

    def _rolled_back(self):
        return types.Outcome(
            kind=types.Outcome.KIND_ROLLED_BACK,
            to_step=self.goes_back_to,
            epoch=self.back_epoch,
            reason=0 if self.asked else types.Outcome.REASON_PEER_LOST,
            durable_step=0,
        )

    def _abort_for_rollback(self, context):
        code = grpc.StatusCode.FAILED_PRECONDITION
        step, epoch = str(self.goes_back_to), str(self.back_epoch)
        why = f"the job went back to step {step}"
        cause = "LOAD_SNAPSHOT" if self.asked else "PEER_LOST"
        abort(context, code, why, "ROLLED_BACK", to_step=step, epoch=epoch, cause=cause)

    def _ready(self, bucket: int) -> int:
        return ctypes.c_uint64.from_address(self.page._base + 128 + 16 * bucket).value

    def _commit(self):
        ready = [self._ready(bucket) for bucket in range(self.buckets)]
        assert ready == [self.attempt] * self.buckets, "not every bucket was signalled"
        attempt, self.attempt = self.attempt, self.attempt + 1
        self.step += 1
        self._publish(attempt)
        return types.Outcome(
            kind=types.Outcome.KIND_COMMITTED,
            step=self.step,
            attempt=attempt,
            next_attempt=self.attempt,
        )

    def _publish(self, attempt):
        for bucket in range(self.buckets):
            self.publish_bucket(bucket, attempt)
