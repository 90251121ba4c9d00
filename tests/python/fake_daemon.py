"""A daemon of one process for one rank: real sockets, real memfds, real futexes, numpy arithmetic.

What the client does when a daemon misbehaves (dies, aborts, refuses, answers late) is tested with
it; what the optimizer computes is tested with the real one.
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
from reference import AdamW, MuonMatrix

EPOCH = 1 << 32
_DTYPES = {types.ELEMENT_TYPE_FLOAT32: np.float32, types.ELEMENT_TYPE_FLOAT16: np.float16}


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
    """For tests to read or set: submits, ready_at_submit, outcomes; refusals (to answer next)."""

    def __init__(self, path: str):
        self.path = path
        self.submits: list[pb.SubmitStepRequest] = []
        self.pushes: list[pb.PushParametersRequest] = []
        self.states: list[pb.StateChunk] = []
        self.ready_at_submit: list[list[int]] = []
        self.outcomes: list[types.Outcome] = []  # instead of committing, in order
        self.refusals: list[tuple] = []
        self.closed = False
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

    def trainer_is_gone(self, timeout_s: float) -> bool:
        self._client.settimeout(timeout_s)
        try:
            return self._client.recv(1) == b""
        except TimeoutError:
            return False

    # --- calls ---

    def Hello(self, request, context):  # noqa: N802
        return pb.HelloReply(version=1, server="fake", lanes=1, device_type="cpu")

    def OpenSession(self, request, context):  # noqa: N802
        self.opened = request
        return pb.OpenSessionReply(session=7, incarnation=3)

    def RegisterLayout(self, request, context):  # noqa: N802
        self.layout = request
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
        self.arenas = {}
        for arena in request.arenas:
            descriptor = os.memfd_create("arena")
            os.ftruncate(descriptor, arena.size_bytes)
            self.arenas[arena.id] = np.memmap(
                f"/proc/self/fd/{descriptor}", np.uint8, "r+", shape=(arena.size_bytes,)
            )
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
        received = list(requests)
        self.pushes.append(received[0])
        self.states += [message.chunk for message in received[1:]]
        if received[0].all_weights:
            self.units = {}
            for fragment in self.layout.fragments:
                parameter = self.layout.parameters[fragment.parameter]
                if parameter.route == types.ROUTE_TRAINER:
                    continue
                weight = self._view(fragment, fragment.weight)
                muon = parameter.route == types.ROUTE_MUON
                preset = self.layout.groups[parameter.group].preset
                unit = MuonMatrix(weight, preset) if muon else AdamW(weight)
                self.units[fragment.parameter] = (fragment, unit)
        else:
            for name in received[0].weights:
                for index, (fragment, unit) in self.units.items():
                    if self.layout.parameters[index].name == name:
                        unit.weight = np.array(self._view(fragment, fragment.weight), np.float64)
        self._publish()
        return pb.PushParametersReply(next_attempt=self.attempt, last_committed_step=self.step)

    def PullParameters(self, request, context):  # noqa: N802
        for index, (_, unit) in self.units.items():
            name = self.layout.parameters[index].name
            if request.parameters and name not in request.parameters:
                continue
            tensors = {types.STATE_KIND_MASTER: unit.weight}
            if isinstance(unit, MuonMatrix):
                tensors[types.STATE_KIND_MOMENTUM] = unit.buffer
            else:
                tensors[types.STATE_KIND_EXP_AVG] = unit.m
                tensors[types.STATE_KIND_EXP_AVG_SQ] = unit.v
            for kind, values in tensors.items():
                if request.kinds and kind not in request.kinds:
                    continue
                data = values.astype(np.float32).tobytes()
                for at in range(0, len(data), 256):
                    yield pb.PullParametersReply(
                        step=self.step,
                        chunk=pb.StateChunk(
                            parameter=name,
                            kind=kind,
                            first_element=at // 4,
                            data=data[at : at + 256],
                        ),
                    )

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
        if request.withdraw:
            return pb.SubmitStepReply(outcome=self._outcome("ABORTED", "WITHDRAWN", retry=True))
        if self.outcomes:
            outcome = self.outcomes.pop(0)
            outcome.step, outcome.attempt = request.step, self.attempt
            self.attempt += 1
            outcome.next_attempt = self.attempt
            return pb.SubmitStepReply(outcome=outcome)
        if request.absent:
            return pb.SubmitStepReply()  # the outcome comes by WaitStep
        return pb.SubmitStepReply(outcome=self._commit(request))

    def WaitStep(self, request, context):  # noqa: N802
        return pb.WaitStepReply(outcome=self._commit(self.submits[-1]))

    def CloseSession(self, request, context):  # noqa: N802
        self.closed = True
        return pb.CloseSessionReply(last_committed_step=self.step)

    # --- arithmetic ---

    def _ready(self, bucket: int) -> int:
        return ctypes.c_uint64.from_address(self.page._base + 128 + 16 * bucket).value

    def _view(self, fragment, piece):
        parameter = self.layout.parameters[fragment.parameter]
        dtype = np.dtype(_DTYPES[parameter.weight_type])
        shape = [e - b for b, e in zip(fragment.box.begin, fragment.box.end, strict=True)]
        strides = [stride * dtype.itemsize for stride in piece.strides]
        return np.ndarray(shape, dtype, self.arenas[piece.arena], piece.offset_bytes, strides)

    def _outcome(self, kind: str, reason: str = "UNSPECIFIED", **more):
        attempt, self.attempt = self.attempt, self.attempt + 1
        return types.Outcome(
            kind=types.Outcome.Kind.Value(f"KIND_{kind}"),
            reason=types.Outcome.Reason.Value(f"REASON_{reason}"),
            step=self.step + 1,
            attempt=attempt,
            next_attempt=self.attempt,
            **more,
        )

    def _commit(self, request):
        for bucket in {index % self.buckets for index in self.units}:
            assert self._ready(bucket) == self.attempt, f"bucket {bucket} was not signalled"
        scale = request.scalars.loss_scale or 1.0
        gradients = {
            index: self._view(fragment, fragment.gradient) / scale
            for index, (fragment, _) in self.units.items()
            if index not in request.absent
        }
        if not all(np.isfinite(g).all() for g in gradients.values()):
            outcome = self._outcome("SKIPPED", "NON_FINITE")
        else:
            for index, gradient in gradients.items():
                unit = self.units[index][1]
                group = request.scalars.groups[self.layout.parameters[index].group]
                lr, decay = group.learning_rate, group.weight_decay
                if isinstance(unit, MuonMatrix):
                    unit.step(gradient, lr, group.momentum, decay)
                else:
                    unit.step(gradient, lr, (group.beta1, group.beta2), group.eps, decay)
            outcome = self._outcome("COMMITTED", matrices=1)
        self.step += 1
        self._publish(outcome.attempt)
        return outcome

    def _publish(self, attempt=None):
        for fragment, unit in self.units.values():
            self._view(fragment, fragment.weight)[...] = unit.weight
        if attempt is None:
            attempt, self.attempt = self.attempt, self.attempt + 1
        for bucket in range(self.buckets):
            self.page._advance(self.page._published(bucket), attempt)
