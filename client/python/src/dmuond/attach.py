"""The attach socket, which brings the nonce and descriptors, and shows that the daemon lives."""

from __future__ import annotations

import array
import os
import queue
import select
import socket
import threading
from collections.abc import Callable

from dmuond import environment, socket_owner
from dmuond._proto import attach_pb2
from dmuond.daemon_process import DaemonProcess
from dmuond.errors import DaemonLost, Error, Unreachable

_PACKET_BYTES_MAX = 64 << 10
_DESCRIPTORS_MAX = 253  # SCM_MAX_FD
_WELCOME_TIMEOUT_S = 10.0
# A process that ends closes its sockets first.
_ENDS_WITHIN_S = 0.5


class Frame:
    """One message and the descriptor that came with it. Owns the descriptor."""

    def __init__(self, message: attach_pb2.AttachFrame, descriptors: list[int]) -> None:
        self.message = message
        self._descriptors = descriptors

    @property
    def descriptor(self) -> int:
        if len(self._descriptors) != 1:
            raise Error(f"an attach frame carried {len(self._descriptors)} descriptors, not one")
        return self._descriptors[0]

    def close(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors = []


class AttachSocket:
    """Connects, reads the nonce, and then lets a thread watch the socket for the session's life.

    `on_lost` is called once, by that thread, when the daemon closes its end.
    """

    def __init__(self, path: str, on_lost: Callable[[], None]) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        self._wake_read, self._wake_write = -1, -1
        self._daemon: DaemonProcess | None = None
        address = path.removesuffix(environment.ATTACH_SUFFIX)
        try:
            self._socket.connect(path)
            self._daemon = DaemonProcess(self._socket)
            self.nonce = self._read_welcome()
        except TimeoutError:
            what = str(self._daemon)
            self._close_first()
            raise Unreachable(
                f"{what} at {address} has not answered for {_WELCOME_TIMEOUT_S:g} s, and has not "
                "ended: it is stopped, or gets no processor time",
                code="UNAVAILABLE",
                reason="DAEMON_UNREACHABLE",
            ) from None
        except OSError as error:
            self._close_first()
            raise Unreachable(
                f"no dmuond answers at {address} ({error.strerror or error}); address= or "
                "DMUOND_ADDRESS names another, `dmuonctl run -- COMMAND` starts one, `dmuonctl "
                "doctor` looks for the cause"
            ) from None
        except BaseException:
            self._close_first()
            raise
        self._frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
        self._on_lost = on_lost
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name="dmuond-watcher", daemon=True)
        self._thread.start()

    def next_frame(self, timeout_s: float) -> Frame:
        """The next frame with descriptors. The caller closes it."""
        try:
            frame = self._frames.get(timeout=timeout_s)
        except queue.Empty:
            raise Error(f"no descriptor came over the attach socket in {timeout_s:g} s") from None
        if frame is None:
            raise DaemonLost(self.how_it_ended())
        return frame

    def check_owner(self, path: str, server_uid: int | None) -> None:
        """See socket_owner.check."""
        socket_owner.check(path, self._socket, server_uid)

    def has_hung_up(self) -> bool:
        """Whether the daemon has closed its end, though the watcher may not have run yet."""
        if self._socket.fileno() < 0:
            return False  # it is this end that has closed
        poller = select.poll()
        poller.register(self._socket, select.POLLRDHUP)
        return bool(poller.poll(0))

    def how_it_ended(self) -> str:
        """Says in words why the socket has hung up."""
        assert self._daemon is not None
        if self._daemon.has_ended(_ENDS_WITHIN_S):
            return f"{self._daemon} has ended"
        lives = ", which has not ended," if self._daemon.end_is_seen else " has ended, or"
        return f"{self._daemon}{lives} has closed its connection to this trainer"

    def close(self) -> None:
        """Ends the watcher and closes the socket: to the daemon, this trainer is gone."""
        if self._wake_write < 0:
            return
        os.write(self._wake_write, b"x")
        if self._thread is not threading.current_thread():
            self._thread.join()
        self._close_descriptors()

    def close_in_child(self) -> None:
        """After a fork: the child must not keep the trainer alive in the daemon's eyes."""
        self._close_descriptors()

    def _close_first(self) -> None:
        """Closes a socket that never got a watcher."""
        self._socket.close()
        if self._daemon is not None:
            self._daemon.close()

    def _close_descriptors(self) -> None:
        self._close_first()
        for descriptor in (self._wake_read, self._wake_write):
            if descriptor >= 0:
                os.close(descriptor)
        self._wake_read = self._wake_write = -1
        while not self._frames.empty():
            frame = self._frames.get()
            if frame is not None:
                frame.close()

    def _read_welcome(self) -> bytes:
        self._socket.settimeout(_WELCOME_TIMEOUT_S)
        frame = self._receive()
        self._socket.settimeout(None)
        if frame is None or frame.message.WhichOneof("frame") != "welcome":
            raise Unreachable(
                "the daemon closed the attach socket without a welcome: it refuses this user or "
                "is full"
            )
        return frame.message.welcome.nonce

    def _receive(self) -> Frame | None:
        """One datagram; None when the other end is closed."""
        body, ancillary, flags, _ = self._socket.recvmsg(
            _PACKET_BYTES_MAX, socket.CMSG_SPACE(_DESCRIPTORS_MAX * 4), socket.MSG_CMSG_CLOEXEC
        )
        descriptors = array.array("i")
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
        if not body:
            return None
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise Error("an attach frame was cut: too long, or too many descriptors")
        return Frame(attach_pb2.AttachFrame.FromString(body), list(descriptors))

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while True:
            ready = {descriptor for descriptor, _ in poller.poll()}
            if self._wake_read in ready:
                return
            try:
                frame = self._receive()
            except (OSError, Error):
                frame = None
            self._frames.put(frame)
            if frame is None:
                self._on_lost()
                return
