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
from collections import deque
from collections.abc import Callable, Container, Iterable

from torch import Tensor

from dmuond.torch.slots import ShardedSlot, Slot, copy_gradients
from dmuond.torch.tensor_device import Answer, Known, TensorDevice

_OBSERVED_STEPS_MAX = 6  # comparing bytes costs time: a program that is never quiet is left alone
_QUIET_STEPS = 2


class EarlySignals:
    def __init__(
        self,
        slots: Iterable[Slot],
        device: TensorDevice,
        signal: Callable[[int, Iterable[int]], None],
        *,
        allowed: bool,
        sharded: bool,
    ) -> None:
        """sharded: buckets with shards of FSDP2, too.

        signal: called with a bucket and the streams in which its gradients were made.
        """
        self._slots = list(slots)
        self._device = device
        self._signal = signal
        self._allowed = allowed
        self._sharded = sharded
        self._held = 0  # depth of no_sync
        # Hooks count in these: they stay the same objects.
        self._calls = [0] * len(self._slots)
        self._expected = [1] * len(self._slots)
        self._bucket = [slot.bucket for slot in self._slots]
        # By bucket: how many members' hooks have not been called as often as expected.
        self._missing: dict[int, int] = {}
        self._each_alone = [True]
        self._together: set[int] = set()  # positions of slots whose hook is one of hook()
        # Holds p.grad, its version and its address for each gradient that this step has copied.
        self._copied: dict[int, tuple[Tensor, int, int]] = {}
        self.begin()

    def begin(self) -> None:
        """Forgets what was learnt of the program: it is watched from the beginning again."""
        self._observing = self._allowed
        self._on = False
        self._quiet = 0
        self._observed = 0
        self._calls[:] = [0] * len(self._slots)
        self._expected[:] = [-1 if self._observing else 1] * len(self._slots)
        self._bucket[:] = [slot.bucket for slot in self._slots]
        # Each says whether an observed step was quiet. A device's answer may take a while.
        self._answers: deque[Answer] = deque()
        # At the last hook of a slot: version and, while observing, checksum.
        self._versions = [0] * len(self._slots)
        self._sums: dict[int, Tensor] = {}
        self._streams: list[set[int]] = [set() for _ in self._slots]
        self._signalled: set[int] = set()
        self._broken = False  # one of them has changed, and no step has withdrawn it
        self._members: dict[int, list[int]] = {}
        for position, slot in enumerate(self._slots):
            self._members.setdefault(slot.bucket, []).append(position)
        shards = () if self._sharded else self._slots
        self._never = {slot.bucket for slot in shards if isinstance(slot, ShardedSlot)}
        self._position = {slot.index: position for position, slot in enumerate(self._slots)}
        self._await_all()

    @property
    def active(self) -> bool:
        return self._on

    def watches(self, slot: Slot) -> bool:
        """Whether on_gradient() is to hear of this slot."""
        return (self._on or self._observing) and slot.bucket not in self._never

    def not_signalled(self) -> list[Slot]:
        """The slots whose bucket was not signalled in this step's backward pass."""
        return [slot for slot in self._slots if slot.bucket not in self._signalled]

    def hold(self) -> None:
        self._held += 1

    def release(self) -> None:
        self._held -= 1

    def on_gradient(self, slot: Slot) -> None:
        """Called by a hook when the gradient lies in the arena."""
        position = self._position[slot.index]
        self._versions[position] = slot.gradient._version
        stream = self._device.stream()
        if stream is not None:
            self._streams[position].add(stream)
        if self._observing:
            self._sums[position] = slot.gradient_checksum()
        if self._count(position):
            self.on_bucket(slot.bucket)

    def _count(self, position: int) -> bool:
        """Counts a call of a hook; whether the bucket waits for none. hook() has the same in it."""
        bucket = self._bucket[position]
        calls = self._calls[position] = self._calls[position] + 1
        if calls == self._expected[position]:
            self._missing[bucket] -= 1
        elif calls == self._expected[position] + 1:  # once more: it waits for the step
            self._missing[bucket] += 1
        return not self._missing[bucket]

    def on_bucket(self, bucket: int) -> None:
        """All gradients of a bucket have come, as often as they are expected."""
        # A bucket with a gradient that may be absent waits for the submit, which says so.
        if self._on and not self._held and bucket not in self._never | self._signalled:
            self._copy_together(bucket)
            self._signal_once(bucket)

    def hook(
        self, slot: Slot, on_gradient: Callable[[], None], on_bucket: Callable[[int], None]
    ) -> Callable[[Tensor], None]:
        """The hook of a small replica, whose gradient is copied with those of its bucket.

        One by one costs several times as much. p.grad stays the one that autograd has made, until
        step() adopts it, or has found it to be unchanged. The hook keeps nothing of this object but
        its counters: it calls on_gradient as long as each gradient is looked at by itself, and
        on_bucket where on_bucket() of this object is to be called.
        """
        position = self._position[slot.index]
        self._together.add(position)
        calls, expected, buckets = self._calls, self._expected, self._bucket
        missing, each_alone = self._missing, self._each_alone

        def hook(_: Tensor) -> None:
            if each_alone[0]:
                on_gradient()
                return
            now = calls[position] = calls[position] + 1
            if now == expected[position]:
                bucket = buckets[position]
                left = missing[bucket] = missing[bucket] - 1
                if not left:
                    on_bucket(bucket)
            elif now == expected[position] + 1:
                missing[buckets[position]] += 1

        return hook

    def _copy_together(self, bucket: int) -> None:
        found = [m for m in self._members[bucket] if m in self._together]
        given = copy_gradients([self._slots[position] for position in found])
        for position, gradient in zip(found, given, strict=True):
            if gradient is not None:
                self._copied[position] = gradient, gradient._version, gradient.data_ptr()

    @property
    def streams(self) -> set[int]:
        """In which gradients of this step were made."""
        return set().union(*self._streams)

    def compared(self) -> list[Slot]:
        """The slots whose gradient_pair() `before_step` is to know of."""
        positions: Iterable[int] = ()
        if self._on:
            positions = (m for bucket in self._signalled for m in self._members[bucket])
        elif self._observing:
            positions = self._watched()
        return [self._slots[position] for position in positions]

    def _watched(self) -> list[int]:
        """The slots that have got a gradient in this step, and may be signalled early."""
        return [
            position
            for position, slot in enumerate(self._slots)
            if slot.bucket not in self._never and self._calls[position] > 0
        ]

    def before_step(self, gradients_changed: bool, differing: Container[int]) -> bool:
        """Looks at all gradients; True: the attempt must be withdrawn.

        It stays so until a step succeeds: one that fails may not have come to withdrawing it.

        gradients_changed: somebody is known to have changed them (GradScaler.unscale_). differing:
        indices of slots that `compared` has named and whose pairs differ.
        """
        if self._on:
            self._find_broken(gradients_changed, differing)
        elif self._observing:
            self._observe(gradients_changed, differing)
        if self._answers and not self._on:
            self._learn()
        return self._broken

    def after_step(self) -> None:
        self._calls[:] = [0] * len(self._slots)
        self._streams = [set() for _ in self._slots]
        self._sums.clear()
        self._await_all()
        self._signalled.clear()
        self._broken = False

    def _await_all(self) -> None:
        self._copied.clear()
        self._missing.clear()
        self._missing.update({bucket: len(each) for bucket, each in self._members.items()})
        # Gradients that a stream makes are looked at in that stream, by a hook of their own.
        self._each_alone[0] = self._observing or self._device.stream() is not None

    def _signal_once(self, bucket: int) -> None:
        if bucket not in self._never and bucket not in self._signalled:
            self._signalled.add(bucket)
            self._signal(bucket, set().union(*(self._streams[m] for m in self._members[bucket])))

    def _unchanged(self, position: int, differing: Container[int]) -> bool:
        slot = self._slots[position]
        gradient = slot.parameter.grad
        if gradient is None:
            return self._calls[position] == 0
        if position in self._copied:
            given, version, address = self._copied[position]
            unchanged = gradient is given and gradient._version == version
            return unchanged and gradient.data_ptr() == address
        return slot.index not in differing and slot.gradient_unchanged(self._versions[position])

    def _observe(self, gradients_changed: bool, differing: Container[int]) -> None:
        agreed = self._observed == 0 or self._calls == self._expected
        watched = self._watched()
        quiet = agreed and not gradients_changed
        if quiet and all(self._unchanged(position, differing) for position in watched):
            now = [self._slots[position].gradient_checksum() for position in watched]
            before = [self._sums[position] for position in watched]
            self._answers.append(self._device.unchanged(before, now))
        else:
            self._answers.append(Known(False))
        self._expected[:] = self._calls
        self._observed += 1
        self._observing = self._observed < _OBSERVED_STEPS_MAX

    def _learn(self) -> None:
        """A late answer puts off that signals are given early, and nothing else."""
        while self._answers and self._answers[0].is_known():
            self._quiet = self._quiet + 1 if self._answers.popleft().unchanged() else 0
        if self._quiet >= _QUIET_STEPS:
            self._on, self._observing = True, False
            self._answers.clear()

    def _find_broken(self, gradients_changed: bool, differing: Container[int]) -> None:
        for bucket in self._signalled:
            for position in self._members[bucket]:
                again = self._calls[position] != self._expected[position]
                if again or gradients_changed or not self._unchanged(position, differing):
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
