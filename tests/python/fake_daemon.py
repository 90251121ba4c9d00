"""A daemon of one process for one rank, which computes nothing: real sockets, memfds, futexes.

What the client does when a daemon misbehaves (dies, aborts, refuses, answers late) is tested with
it; everything else with the real one.
"""

import ctypes
import os
import socket
import struct
import threading
from concurrent import futures

import grpc
import numpy as np
from dmuond import timeline, types
from dmuond._proto import attach_pb2, trainer_pb2_grpc
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


class FakeDaemon(trainer_pb2_grpc.TrainerServicer):
    """For tests to read: submits, pushed, ready_at_submit, ready_at_wait (words of the page).

    To set: outcomes and refusals (to answer next), stored (state by name and kind).
    """

    def __init__(self, path: str):
        self.path = path
        self.submits: list[pb.SubmitStepRequest] = []
        self.pushed: list[pb.StateChunk] = []
        self.stored: dict[tuple[str, int], np.ndarray] = {}
        self.ready_at_submit: list[list[int]] = []
        self.ready_at_wait: list[list[int]] = []
        self.outcomes: list[types.Outcome] = []  # instead of committing, in order
        self.refusals: list[tuple] = []
        self.step = 0
        self.attempt = EPOCH + 1
        self.buckets = 2
        self._client: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(path + ".attach")
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trainer_pb2_grpc.add_TrainerServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{path}")
        self._server.start()

    def _accept(self):
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            frame = attach_pb2.AttachFrame(welcome={"nonce": b"0123456789abcdef"})
            client.send(frame.SerializeToString())
            self._client = client

    def die(self):
        """As if killed: every socket closes."""
        if self._listener.fileno() < 0:
            return
        if self._client is not None:
            self._client.close()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._server.stop(0).wait()

    # --- calls ---

    def Hello(self, request, context):  # noqa: N802
        return pb.HelloReply(version=1, server="fake", lanes=1, device_type="cpu")

    def OpenSession(self, request, context):  # noqa: N802
        return pb.OpenSessionReply(session=7, incarnation=3)

    def RegisterLayout(self, request, context):  # noqa: N802
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
        return reply

    def AttachBuffers(self, request, context):  # noqa: N802
        for arena in request.arenas:
            descriptor = os.memfd_create("arena")
            os.ftruncate(descriptor, arena.size_bytes)
            self._send_memory(
                descriptor,
                arena={"session": 7, "arena": arena.id, "size_bytes": arena.size_bytes},
            )
        size = timeline.page_bytes(self.buckets)
        descriptor = os.memfd_create("timeline")
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, struct.pack("<3I", 0x4C544D44, 1, self.buckets), 0)
        self.page = timeline.Timeline(descriptor, size, self.buckets)
        self._send_memory(
            descriptor, timeline={"session": 7, "buckets": self.buckets, "size_bytes": size}
        )
        return pb.AttachBuffersReply(timeline_bytes=size, next_attempt=self.attempt)

    def _send_memory(self, descriptor, **frame):
        body = attach_pb2.AttachFrame(**frame).SerializeToString()
        socket.send_fds(self._client, [body], [descriptor])
        os.close(descriptor)

    def PushParameters(self, requests, context):  # noqa: N802
        _, *chunks = requests
        self.pushed += [message.chunk for message in chunks]
        attempt, self.attempt = self.attempt, self.attempt + 1
        self._publish(attempt)
        return pb.PushParametersReply(next_attempt=self.attempt, last_committed_step=self.step)

    def PullParameters(self, request, context):  # noqa: N802
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
        if self.refusals:
            abort(context, *self.refusals.pop(0))
        if request.step != self.step + 1 or request.attempt != self.attempt:
            abort(
                context,
                grpc.StatusCode.FAILED_PRECONDITION,
                f"step {request.step} attempt {request.attempt}; open: {self.step + 1} "
                f"{self.attempt}",
                "STEP_OUT_OF_ORDER",
            )
        if self.outcomes:
            outcome = self.outcomes.pop(0)
            outcome.step, outcome.attempt = request.step, self.attempt
            self.attempt += 1
            outcome.next_attempt = self.attempt
            return pb.SubmitStepReply(outcome=outcome)
        if request.absent:
            return pb.SubmitStepReply()  # the outcome comes by WaitStep
        return pb.SubmitStepReply(outcome=self._commit())

    def WaitStep(self, request, context):  # noqa: N802
        self.ready_at_wait.append([self._ready(b) for b in range(self.buckets)])
        return pb.WaitStepReply(outcome=self._commit())

    def CloseSession(self, request, context):  # noqa: N802
        return pb.CloseSessionReply(last_committed_step=self.step)

    # --- parts ---

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
            self.page._advance(self.page._published(bucket), attempt)
