"""Signalling buckets during the backward pass, once it has shown that this is safe.

A gradient that changes after its last hook (clipping by hand, a second backward) must not have been
collected before the change. So buckets are signalled early only after two steps in which no
gradient did, and a change seen afterwards withdraws the attempt and ends early signalling for the
session.

FSDP2's gradients can be changed without a trace (torch's clipping does), so that only a look at
all their bytes finds out: they are signalled early where the caller asks for it, or has the daemon
clip.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterable

from dmuond.torch.slots import ShardedSlot, Slot

_OBSERVED_STEPS_MAX = 6  # comparing bytes costs time: a program that is never quiet is left alone
_QUIET_STEPS = 2


class EarlySignals:
    def __init__(
        self,
        slots: Iterable[Slot],
        signal: Callable[[int], None],
        *,
        allowed: bool,
        sharded: bool,
    ) -> None:
        """sharded: buckets with shards of FSDP2, too."""
        self._slots = list(slots)
        self._signal = signal
        self._allowed = allowed
        self._sharded = sharded
        self._held = 0  # depth of no_sync
        self.begin()

    def begin(self) -> None:
        """Forgets what was learnt of the program: it is watched from the beginning again."""
        self._observing = self._allowed
        self._on = False
        self._quiet = 0
        self._observed = 0
        self._calls = [0] * len(self._slots)
        self._expected = [-1] * len(self._slots)
        # At the last hook of a slot: version and, while observing, checksum.
        self._versions = [0] * len(self._slots)
        self._sums = [0] * len(self._slots)
        self._signalled: set[int] = set()
        self._broken = False  # one of them has changed, and no step has withdrawn it
        self._members: dict[int, list[int]] = {}
        for position, slot in enumerate(self._slots):
            self._members.setdefault(slot.bucket, []).append(position)
        shards = () if self._sharded else self._slots
        self._never = {slot.bucket for slot in shards if isinstance(slot, ShardedSlot)}
        self._position = {slot.index: position for position, slot in enumerate(self._slots)}

    @property
    def active(self) -> bool:
        return self._on

    def watches(self, slot: Slot) -> bool:
        """Whether on_gradient() is to hear of this slot."""
        return (self._on or self._observing) and slot.bucket not in self._never

    def has_signalled(self, slot: Slot) -> bool:
        """Whether the slot's bucket was signalled in this step's backward pass."""
        return slot.bucket in self._signalled

    def hold(self) -> None:
        self._held += 1

    def release(self) -> None:
        self._held -= 1

    def on_gradient(self, slot: Slot) -> None:
        """Called by a hook when the gradient lies in the arena."""
        position = self._position[slot.index]
        self._calls[position] += 1
        self._versions[position] = slot.gradient._version
        if self._observing:
            self._sums[position] = zlib.crc32(slot.gradient_as_bytes())
        if self._on and not self._held and slot.bucket not in self._signalled:
            self._signal_if_complete(slot.bucket)

    def before_step(self, gradients_changed: bool) -> bool:
        """Looks at all gradients; True: the attempt must be withdrawn.

        It stays so until a step succeeds: one that fails may not have come to withdrawing it.

        gradients_changed: somebody is known to have changed them (GradScaler.unscale_).
        """
        if self._on:
            self._find_broken(gradients_changed)
        elif self._observing:
            self._observe(gradients_changed)
        return self._broken

    def after_step(self) -> None:
        self._calls = [0] * len(self._slots)
        self._signalled.clear()
        self._broken = False

    def _signal_if_complete(self, bucket: int) -> None:
        if bucket in self._never:
            return
        # A bucket with a gradient that may be absent waits for the submit, which says so.
        if all(self._calls[m] == self._expected[m] > 0 for m in self._members[bucket]):
            self._signalled.add(bucket)
            self._signal(bucket)

    def _unchanged(self, position: int) -> bool:
        slot = self._slots[position]
        if slot.parameter.grad is None:
            return self._calls[position] == 0
        return slot.gradient_unchanged(self._versions[position])

    def _observe(self, gradients_changed: bool) -> None:
        agreed = self._observed == 0 or self._calls == self._expected
        quiet = agreed and not gradients_changed
        for position, slot in enumerate(self._slots):
            if not quiet:
                break
            if slot.bucket in self._never or self._calls[position] == 0:
                continue
            quiet = self._unchanged(position) and (
                zlib.crc32(slot.gradient_as_bytes()) == self._sums[position]
            )
        self._quiet = self._quiet + 1 if quiet else 0
        self._expected = list(self._calls)
        self._observed += 1
        self._on = self._quiet >= _QUIET_STEPS
        self._observing = not self._on and self._observed < _OBSERVED_STEPS_MAX

    def _find_broken(self, gradients_changed: bool) -> None:
        for bucket in self._signalled:
            for position in self._members[bucket]:
                again = self._calls[position] != self._expected[position]
                if again or gradients_changed or not self._unchanged(position):
                    self._broken = True
                    self._stop(self._slots[position].name, again)
                    return

    def _stop(self, name: str, again: bool) -> None:
        self._on = self._observing = self._allowed = False
        what = "was computed again" if again else "was changed"
        warnings.warn(
            f"dmuond: the gradient of '{name}' {what} after it had been signalled; the attempt is "
            "withdrawn and repeated, and gradients are signalled in step() from now on "
            "(early_buckets=False does so from the start; max_grad_norm= clips without this)",
            stacklevel=4,
        )
