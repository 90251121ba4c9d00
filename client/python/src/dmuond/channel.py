"""Makes calls of the Trainer service: errors become exceptions, calls that are cut off repeat.

No call is in flight when a method has returned, so that the trainer may fork between steps; one
that Ctrl-C has ended may be.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import grpc

from dmuond import _proto, errors, layout_parts
from dmuond._proto import trainer_pb2 as pb

_MESSAGE_BYTES_MAX = 4 << 20  # the daemon's; what may be larger goes in parts
_RETRY_FOR_S = 10.0
_PINGS = 8  # in the time after which a daemon counts as stopped
_SILENT_FOR_MAX_S = 24 * 3600.0
# Long enough for the attach socket's end to be seen after a call has failed for the same reason.
_LOST_GRACE_S = 1.0


def _keep_for_ever(thing: object) -> None:
    """Beyond the end of Python, which would call what the thing has for its own end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _interrupt_of(error: BaseException) -> BaseException:
    """Ctrl-C, where it has led to the error: a lock that was being taken complains of it."""
    context = error.__context__
    return context if isinstance(context, KeyboardInterrupt) else error


class Channel:
    """Calls may be made by several threads.

    `wait_lost(seconds)` tells whether the daemon has gone, and `how_it_ended()`, for people, what
    became of it. One that has not gone and does not even answer pings for `silent_for_s` (it is
    stopped) is Unreachable.
    """

    def __init__(
        self,
        path: str,
        silent_for_s: float,
        wait_lost: Callable[[float], bool],
        how_it_ended: Callable[[], str],
    ) -> None:
        silent_ms = int(1e3 * min(silent_for_s, _SILENT_FOR_MAX_S))
        ping_ms = silent_ms // _PINGS
        self._path = path
        self._options = [
            ("grpc.default_authority", "localhost"),
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.enable_retries", 0),  # _repeat() does it; each call would cost more
            ("grpc.max_receive_message_length", _MESSAGE_BYTES_MAX),
            ("grpc.max_send_message_length", _MESSAGE_BYTES_MAX),
            # How long a connection may take to stand; and that a call may wait for hours.
            ("grpc.min_reconnect_backoff_ms", 5000),
            ("grpc.keepalive_time_ms", ping_ms),
            ("grpc.keepalive_timeout_ms", silent_ms - ping_ms),
            ("grpc.http2.ping_timeout_ms", silent_ms - ping_ms),
            ("grpc.http2.max_pings_without_data", 0),
        ]
        self._closed = False
        self._connect()
        self._wait_lost, self._how_it_ended = wait_lost, how_it_ended

    def _connect(self) -> None:
        channel = grpc.insecure_channel(f"unix:{self._path}", options=self._options)
        self._channel, self._stub = channel, _proto.stub(channel, "Trainer")
        self._push = channel.stream_unary(
            "/dmuond.v1.Trainer/PushParameters",
            response_deserializer=pb.PushParametersReply.FromString,
        )

    def _renew(self) -> None:
        """After Ctrl-C in a call: gRPC may have been interrupted while it held a lock, for good.

        Whatever uses the old channel might wait for that lock, its end as well, so it has none.
        """
        if self._closed:
            return  # which is what went wrong
        for thing in (self._channel, self._stub, self._push):
            _keep_for_ever(thing)
        self._connect()

    def close(self) -> None:
        self._closed = True
        self._channel.close()

    def call(self, name: str, request: Any, timeout_s: float | None = None) -> Any:
        """Every call may be repeated (the daemon answers as it did the first time)."""
        method = getattr(self._stub, name)
        return self._repeat(name, lambda: method(request, timeout=timeout_s))

    def register_layout(self, request: pb.RegisterLayoutRequest) -> pb.RegisterLayoutReply:
        """In parts both ways, repeated like calls."""
        return self._repeat(
            "RegisterLayout",
            lambda: layout_parts.merge(self._stub.RegisterLayout(layout_parts.split(request))),
        )

    def push(self, requests: Callable[[], Iterable[bytes]]) -> pb.PushParametersReply:
        """PushParameters; requests are serialized already. Repeated like calls."""
        return self._repeat("PushParameters", lambda: self._push(iter(requests())))

    def read_stream(self, name: str, request: Any) -> Iterator[Any]:
        """Yields every message. A stream that is cut off raises."""
        call = None
        try:
            call = getattr(self._stub, name)(request)
            yield from call
        except GeneratorExit:
            call.cancel()
            raise
        except grpc.RpcError as error:
            raise self._translate(name, error) from None
        except BaseException as error:
            _keep_for_ever(call)
            self._renew()
            raise _interrupt_of(error) from None

    def _repeat(self, name: str, attempt: Callable[[], Any]) -> Any:
        give_up: float | None = None
        pause_s = 0.01
        while True:
            start = time.monotonic()
            try:
                return attempt()
            except grpc.RpcError as error:
                now = time.monotonic()
                # From the first failure in a row: while an attempt waited, the connection was good.
                if give_up is None or now - start > _RETRY_FOR_S:
                    give_up = now + _RETRY_FOR_S
                    pause_s = 0.01
                translated = self._translate(name, error)
                # With a reason it is the daemon that says so; without one the connection broke.
                cut = not translated.reason and (
                    error.code() is grpc.StatusCode.UNAVAILABLE or _is_shed(error)
                )
                if not cut or isinstance(translated, errors.DaemonLost):
                    raise translated from None
                if now > give_up:
                    raise errors.Unreachable(
                        f"{translated}; the daemon at {self._path} does not answer, and has not "
                        "ended: is it stopped?",
                        code=translated.code,
                        reason="DAEMON_UNREACHABLE",
                    ) from None
            except BaseException as error:
                self._renew()
                raise _interrupt_of(error) from None
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, 0.5)

    def _translate(self, name: str, error: grpc.RpcError) -> errors.Error:
        translated = errors.from_rpc(error, name)
        broken = error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        if broken and not translated.reason and self._wait_lost(_LOST_GRACE_S):
            return errors.DaemonLost(f"{name}: {self._how_it_ended()}; the weights are undefined")
        return translated


def _is_shed(error: grpc.RpcError) -> bool:
    """Whether the daemon's gRPC has broken the call off because its memory is short."""
    exhausted = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    return exhausted and "RST_STREAM" in (error.details() or "")
