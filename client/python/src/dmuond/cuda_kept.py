"""What enqueued work may use when its owner has gone. It is kept, and given back later."""

from __future__ import annotations

import abc
import contextlib
import weakref

from dmuond import errors
from dmuond.cuda_driver import Device


class Used(abc.ABC):
    """Something of a device that enqueued work uses."""

    device: Device

    @abc.abstractmethod
    def release(self) -> bool:
        """Gives all of it back and returns True, or False where enqueued work uses it.

        Does not wait. Raises Error where the device has failed.
        """


# Their owners have gone, and enqueued work used them when they were last looked at.
kept: list[Used] = []


def release_with(owner: object, used: Used) -> None:
    """Gives it back when `owner` has gone, but not at the end of the process."""
    weakref.finalize(owner, _release, used).atexit = False


def _release(used: Used) -> None:
    """Called by the garbage collector, which must not wait for streams.

    What they use is kept. Whenever something else goes, it is looked at again.
    """
    looked_at = [used]
    # The collector may come to call this meanwhile, in this thread or another: each takes its own.
    with contextlib.suppress(IndexError):
        while True:
            looked_at.append(kept.pop())
    kept.extend([one for one in looked_at if not _try_release(one)])


def _try_release(used: Used) -> bool:
    try:
        # A forked child leaves alone what its parent has.
        return not used.device.here or used.release()
    except errors.Error:
        return True  # the device has failed
