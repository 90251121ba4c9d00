"""Logs who keeps a call waiting, after 5 s, then less and less often."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from dmuond import errors
from dmuond._proto.types_pb2 import Awaited

log = logging.getLogger("dmuond")

_SAID_AFTER_S = (5.0, 30.0, 60.0, 120.0, 240.0)
_SAID_EVERY_S = 300.0  # after those
_LOOK_AGAIN_S = 0.5  # where it is time to say something, and the daemon has not said what
_NAMED_MAX = 4


class WaitNotice:
    """One wait, which may be made of several calls. Not for several threads at once."""

    def __init__(self, rank: int, what: str) -> None:
        """what: that waits, "step 17"."""
        self._rank, self._what = rank, what
        self._began = time.monotonic()
        self._times = iter(_SAID_AFTER_S)
        self._due_s = next(self._times)
        self._said = False

    def left_s(self) -> float:
        """How long a call may wait before it is time to look who is awaited."""
        return max(self._due_s - self._waited_s(), _LOOK_AGAIN_S)

    def hear(self, awaited: Iterable[Awaited]) -> None:
        """What the daemon has said, at whatever time."""
        waited_s = self._waited_s()
        named = [_text(one) for one in awaited]
        if waited_s < self._due_s or not named:
            return
        if len(named) > _NAMED_MAX:
            named[_NAMED_MAX:] = [f"{len(named) - _NAMED_MAX} more"]
        log.warning(
            "rank %d: %s has waited %s so far, for %s",
            self._rank,
            self._what,
            duration(waited_s),
            "; for ".join(named),
        )
        self._said = True
        while self._due_s <= waited_s:
            self._due_s = next(self._times, self._due_s + _SAID_EVERY_S)

    def end(self) -> None:
        """The wait is over."""
        if self._said:
            log.warning(
                "rank %d: %s goes on after %s",
                self._rank,
                self._what,
                duration(self._waited_s()),
            )

    @contextlib.contextmanager
    def asking(self, ask: Callable[[], Iterable[Awaited]]) -> Iterator[None]:
        """Asks now and then in a thread, while the caller waits in a call that does not say."""
        over = threading.Event()

        def run() -> None:
            while not over.wait(self.left_s()):
                with contextlib.suppress(errors.Error):  # the call itself says what is wrong
                    self.hear(ask())

        thread = threading.Thread(target=run, name="dmuond-notice", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    @contextlib.contextmanager
    def waiting_for(self, what: str) -> Iterator[None]:
        """Says so now and then in a thread, where there is nobody to ask."""
        with self.asking(lambda: [Awaited(what=what)]):
            yield
        self.end()

    def _waited_s(self) -> float:
        return time.monotonic() - self._began


def duration(seconds: float) -> str:
    """For people: "5 s", "9 min 55 s", "2 h 5 min"."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole // 60 % 60} min"


def _text(awaited: Awaited) -> str:
    told = []
    if awaited.since_ms:
        told.append(f"awaited for {duration(awaited.since_ms / 1e3)}")
    if awaited.patience_ms:
        told.append(f"in {duration(awaited.patience_ms / 1e3)} {awaited.otherwise}")
    return f"{awaited.what} ({'; '.join(told)})" if told else awaited.what
