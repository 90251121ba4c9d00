"""What ties a session to one daemon process: attach socket, calls, shared memory.

A link ends with its daemon; a session that outlives its daemon makes another link to the next one.
"""

from __future__ import annotations

import numbers
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dmuond import environment, errors, launch
from dmuond._proto import trainer_pb2 as pb
from dmuond.attach import AttachSocket
from dmuond.channel import Channel
from dmuond.device_array import HasMemory
from dmuond.fault_point import fault_point
from dmuond.host_memory import HostMemory
from dmuond.memory import Arena, Memory
from dmuond.timeline import Published, Timeline

PROTOCOL_VERSION = 2
# Bits of optional features that this client knows. What an older daemon can do without is a
# feature, used where Hello's answer has its bit; all else is a new protocol version.
FEATURES = pb.FEATURE_NOT_FINITE | pb.FEATURE_CHUNKS
_FRAME_TIMEOUT_S = 30.0
_NEWS_TRAVEL_S = 1.0  # of a daemon's end, which its successor may be faster than


@dataclass(frozen=True)
class Identity:
    """Who opens the session; the same with every daemon that it is opened with."""

    job: str
    token: bytes
    rank: int
    world_size: int
    home_lane: int | None  # None: LOCAL_RANK, where there is such a lane
    poison: bool
    server_uid: int | None = None  # whose daemon gets the token, too


class _Loss:
    """The daemon's end, as the watcher thread tells it: all that this thread keeps of a link.

    So what a link has mapped is freed with the last reference to it, and not by a later collection.
    """

    def __init__(self) -> None:
        self.happened = threading.Event()
        self.timeline: Timeline | None = None

    def happen(self) -> None:
        """Ends every wait."""
        self.happened.set()
        if self.timeline is not None:
            self.timeline.poison()


class Link:
    """Connected when it is made. Not for several threads, but for `lost` and the watcher's poison.

    Attributes: key, hello, opened (the daemon's replies), arenas (by id; each keeps its mapping),
    timeline, lost (set when the daemon has gone).
    """

    def __init__(
        self,
        path: str,
        silent_for_s: float,
        connect_for_s: float = 0.0,
        memory: Memory | None = None,
    ) -> None:
        """Raises Unreachable when no daemon answers within `connect_for_s`.

        For `silent_for_s` see Channel. memory: where arenas lie; None means on the host.
        """
        self._loss = _Loss()
        self.lost = self._loss.happened
        self.arenas: dict[int, Arena] = {}
        self._memory = memory or HostMemory()
        self._refusals = 0  # of registrations, as far as this end has read them
        self._path = path
        self._attach = self._connect(path, connect_for_s)
        self._channel = Channel(path, silent_for_s, self.lost.wait, self._attach.how_it_ended)

    @property
    def timeline(self) -> Timeline | None:
        return self._loss.timeline

    def open(self, identity: Identity, resume: int) -> None:
        client = f"dmuond-python {socket.gethostname()} pid {os.getpid()}"
        self.hello = self._say_hello(client)
        self._attach.check_owner(path=self._path, server_uid=identity.server_uid)
        home_lane = identity.home_lane
        if home_lane is None:
            local_rank = environment.integer("LOCAL_RANK", 0)
            home_lane = local_rank if local_rank < self.hello.lanes else -1
        discards = resume == pb.OpenSessionRequest.RESUME_DISCARD
        request = pb.OpenSessionRequest(
            nonce=self._attach.nonce,
            job=identity.job,
            token=identity.token,
            rank=identity.rank,
            world_size=identity.world_size,
            resume=resume,
            launch=launch.name(identity.world_size) if discards else "",
            home_lane=home_lane,
            device_uuid=self._memory.device_uuid,
            poison_parameters=identity.poison,
            client=client,
        )
        try:
            self.opened: pb.OpenSessionReply = self.call("OpenSession", request)
            fault_point("trainer.opened")
        except errors.Error as error:
            # The nonce was the predecessor's of the daemon that answers.
            if error.reason == "NONCE_UNKNOWN" and self.lost.wait(_NEWS_TRAVEL_S):
                raise errors.DaemonLost(f"OpenSession: {self.how_it_ended()}") from None
            raise
        self.key = pb.SessionKey(
            session=self.opened.session,
            incarnation=self.opened.incarnation,
            secret=self.opened.secret,
        )

    def register(self, layout: pb.RegisterLayoutRequest) -> pb.RegisterLayoutReply:
        """`layout` has no key: it is the same with every daemon."""
        request = pb.RegisterLayoutRequest()
        request.CopyFrom(layout)
        request.key.CopyFrom(self.key)
        request.refusals = self._refusals
        try:
            reply = self._channel.register_layout(request)
        except errors.Error as error:
            self._refusals = int(error.metadata.get("refusals", self._refusals))
            raise
        fault_point("trainer.registered")
        return reply

    def attach(
        self,
        arenas: Mapping[int, int | HasMemory],
        weight_digests: Sequence[bytes] = (),
        broadcast: bool = False,
        fresh: bool = False,
    ) -> pb.AttachBuffersReply:
        """Asks for arenas (id → bytes, or memory of the trainer's) and maps them and the timeline.

        fresh: not those that an earlier session of this rank has mapped.
        """
        request = pb.AttachBuffersRequest(
            key=self.key, weight_digests=weight_digests, broadcast=broadcast, fresh=fresh
        )
        for identity, wanted in arenas.items():
            if isinstance(wanted, numbers.Integral):
                memory = pb.Arena.DaemonMemory()
                request.arenas.add(id=identity, size_bytes=int(wanted), daemon=memory)
            else:
                request.arenas.append(self._exported(identity, wanted))
        reply = self.call("AttachBuffers", request)
        while self.timeline is None or len(self.arenas) < len(arenas):
            self._take_frame()
        fault_point("trainer.attached")
        return reply

    def is_lost(self) -> bool:
        """Whether the daemon has gone.

        The socket knows before the watcher's thread has run; the channel would find a successor,
        which is to hear of this session only when it has come back.
        """
        if not self.lost.is_set() and self._attach.has_hung_up():
            self.lost.set()
        return self.lost.is_set()

    def how_it_ended(self) -> str:
        """For people: "the daemon (pid 4711) has ended", or has closed the connection."""
        return self._attach.how_it_ended()

    def call(self, name: str, request: object, timeout_s: float | None = None) -> Any:
        return self._channel.call(name, request, timeout_s)

    @property
    def channel(self) -> Channel:
        return self._channel

    def wait_published(self, buckets: Iterable[int], attempt: int, for_s: float) -> Published:
        if self.timeline is None:
            raise errors.Error("call attach() first")
        return self.timeline.wait_published(buckets, attempt, self.lost.is_set, for_s)

    def close(self) -> None:
        """To the daemon, this trainer is gone. What is mapped stays mapped; every wait ends."""
        self._channel.close()
        self._attach.close()
        if self.timeline is not None:
            self.timeline.poison()  # nobody publishes to it any more

    def close_in_child(self) -> None:
        self._attach.close_in_child()

    # --- parts ---

    def _say_hello(self, client: str) -> pb.HelloReply:
        request = pb.HelloRequest(
            version_min=PROTOCOL_VERSION,
            version_max=PROTOCOL_VERSION,
            features=FEATURES,
            client=client,
        )
        try:
            hello = self.call("Hello", request)
        except errors.Error as error:
            if error.reason != "VERSION_MISMATCH":
                raise
            # An old daemon cannot know what to do.
            raise _other_version(str(error), error.metadata) from None
        if hello.version != PROTOCOL_VERSION:
            said = f"Hello: {hello.server} answers in protocol version {hello.version}"
            raise _other_version(said, {"server_version": str(hello.version)})
        return hello

    def _connect(self, path: str, connect_for_s: float) -> AttachSocket:
        deadline = time.monotonic() + connect_for_s
        pause_s = 0.02
        while True:
            try:
                return AttachSocket(environment.attach_path(path), self._loss.happen)
            except errors.Unreachable as error:
                # A daemon that is just starting has no socket yet; other errors do not pass.
                cause = error.__context__
                starting = isinstance(cause, FileNotFoundError | ConnectionRefusedError)
                starting = starting or error.reason == "DAEMON_UNREACHABLE"
                if not starting or time.monotonic() > deadline:
                    raise
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)

    def _exported(self, identity: int, memory: HasMemory) -> pb.Arena:
        """What lanes open the trainer's own memory by."""
        try:
            own = self._memory.export(memory)
        except (errors.InvalidArgumentError, errors.FailedPreconditionError) as error:
            raise type(error)(f"arena {identity}: {error}", reason="ARENA_INVALID") from None
        self.arenas[identity] = own.arena
        ipc = pb.Arena.CudaIpc(
            handle=own.handle,
            base_offset=own.base_offset,
            allocation_bytes=own.allocation_bytes,
            device_uuid=self._memory.device_uuid,
            buffer_id=own.buffer_id,
        )
        return pb.Arena(id=identity, size_bytes=own.size_bytes, cuda_ipc=ipc)

    def _take_frame(self) -> None:
        frame = self._attach.next_frame(_FRAME_TIMEOUT_S)
        try:
            message = frame.message
            if message.WhichOneof("frame") == "arena":
                arena = message.arena
                self.arenas[arena.arena] = self._memory.map(frame.descriptor, arena.size_bytes)
            elif message.WhichOneof("frame") == "timeline":
                page = message.timeline
                timeline = Timeline(frame.descriptor, page.size_bytes, page.buckets, self._memory)
                self._loss.timeline = timeline
                if self.lost.is_set():  # before the watcher could see the page
                    timeline.poison()
        finally:
            frame.close()


def _other_version(said: str, metadata: Mapping[str, str]) -> errors.Error:
    newer = int(metadata.get("server_version", 0)) > PROTOCOL_VERSION
    return errors.FailedPreconditionError(
        f"{said}. This client speaks version {PROTOCOL_VERSION}: update "
        f"{'the client' if newer else 'the daemon'}, so that both are of one release",
        code="FAILED_PRECONDITION",
        reason="VERSION_MISMATCH",
        metadata={**metadata, "client_version": str(PROTOCOL_VERSION)},
    )
