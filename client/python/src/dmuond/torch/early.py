"""Signalling buckets during the backward pass, once it has shown that this is safe.

A gradient that changes after its last hook (clipping by hand, a second backward) must not have been
collected before the change. So buckets are signalled early only after two steps in which no
gradient did. A change seen afterwards withdraws the attempt, and the program is watched anew (it
may have left out one step()); the third one ends early signalling for the session. Of changes
without a trace step() compares some bytes of what was signalled (samples.py). A device may answer
after the step: then only the next ones are right, and the program is told which was not.

FSDP2's gradients can be changed without a trace (torch's clipping does), so that only a look at
all their bytes finds out: they are signalled early where the caller asks for it, or has the daemon
clip.

A bucket of small gradients that is the last to be complete is left to step(), which follows: it is
collected in less time than its hooks and looks would take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable

from torch import Tensor

from dmuond.errors import FailedPreconditionError
from dmuond.torch.notices import warn
from dmuond.torch.samples import Look, Samples
from dmuond.torch.slots import ShardedSlot, Slot, adopt, part_views
from dmuond.torch.tensor_device import Answer, Known, TensorDevice
from dmuond.torch.together import SmallGradients

# Gradients of so few elements are copied together. A larger one's memory is better free at once.
SMALL_MAX = 4096
_OBSERVED_STEPS_MAX = 6  # comparing bytes costs time: a program that is never quiet is left alone
_QUIET_STEPS = 2
_CHANGES_MAX = 3  # each costs an attempt: a program that goes on changing gradients is left alone
_LATE_MAX = 8  # looks whose answer is awaited; a device that is further behind is looked at less
_WITHDRAWN = "the attempt is withdrawn and repeated"


class EarlySignals:
    def __init__(
        self,
        slots: Iterable[Slot],
        device: TensorDevice,
        signal: Callable[[int, Iterable[int]], None],
        attempt: Callable[[], int],
        step: Callable[[], int],
        *,
        allowed: bool,
        sharded: bool,
        last: bool,
    ) -> None:
        """sharded: buckets with shards of FSDP2, too. last: one of small gradients at the end, too.

        signal: called with a bucket and the streams in which its gradients were made. attempt,
        step: tell the numbers of those to come.
        """
        self._slots = list(slots)
        self._device = device
        self._signal, self._attempt, self._step = signal, attempt, step
        self._allowed = allowed
        self._changes = 0  # after signals
        self._sharded, self._last = sharded, last
        self._held = 0  # depth of no_sync
        # Hooks count in these: they stay the same objects.
        self._calls = [0] * len(self._slots)
        self._expected = [1] * len(self._slots)
        self._bucket = [slot.bucket for slot in self._slots]
        # By bucket: how many members' hooks have not been called as often as expected.
        self._missing: dict[int, int] = {}
        self._each_alone = [True]
        self._is_small = [
            not isinstance(slot, ShardedSlot) and slot.holding.elements <= SMALL_MAX
            for slot in self._slots
        ]
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
        # At the gradients in the arena that were signalled; made when signals begin.
        self._samples: Samples | None = None
        # Looks that the device has not answered yet, with their step and the buckets signalled.
        self._late: deque[tuple[int, frozenset[int], Look]] = deque()
        # At the last hook of a slot: version and, while observing, checksum.
        self._versions = [0] * len(self._slots)
        self._sums: dict[int, Tensor] = {}
        self._streams: dict[int, set[int]] = {}
        self._signalled_in, self._signalled = 0, set[int]()  # an attempt, and its buckets
        self._broken = False  # one of them has changed, and no step has withdrawn it
        self._members: dict[int, list[int]] = {}
        for position, slot in enumerate(self._slots):
            self._members.setdefault(slot.bucket, []).append(position)
        self._newest = -1  # of the bucket whose gradient was the last to come
        self._small = {
            bucket: SmallGradients(self._slots[m] for m in members if self._is_small[m])
            for bucket, members in self._members.items()
        }
        self._others = {
            bucket: [m for m in members if not self._is_small[m]]
            for bucket, members in self._members.items()
        }
        self._copied: set[int] = set()  # of which buckets a hook has copied the small gradients
        shards = () if self._sharded else self._slots
        self._never = {slot.bucket for slot in shards if isinstance(slot, ShardedSlot)}
        self._position = {slot.index: position for position, slot in enumerate(self._slots)}
        self._await_all()

    @property
    def stage(self) -> tuple[bool, bool]:
        """While it stays the same, so does what needs_hook() says."""
        return self._on, self._observing

    def watches(self, slot: Slot) -> bool:
        """Whether on_gradient() is to hear of this slot."""
        return (self._on or self._observing) and slot.bucket not in self._never

    def needs_hook(self, slot: Slot) -> bool:
        """A large replica's gradient is copied by its hook in any case."""
        small = self._is_small[self._position[slot.index]]
        return self.watches(slot) if small or isinstance(slot, ShardedSlot) else True

    def adopt(self, withdraw: bool) -> list[int]:
        """Copies gradients into the arena, but for those that were signalled; who has none.

        withdraw: those, too. Otherwise lanes may be reading them.
        """
        absent: list[int] = []
        part_views(self._slots)
        signalled = self._signalled_now()
        for bucket, members in self._members.items():
            if bucket in signalled and not withdraw:
                continue
            small = self._small[bucket]
            if small.copy():
                absent += small.absent()
                members = self._others[bucket]
            absent += adopt(self._slots[position] for position in members)
        return sorted(absent)

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
            self._streams.setdefault(position, set()).add(stream)
        if self._samples is not None:
            self._samples.note([slot])
        if self._observing:
            self._newest = slot.bucket
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
        if not self._on or self._held or bucket in self._never:
            return
        signalled = self._signalled_now()
        if bucket in signalled:
            return
        self._copy_together(bucket)
        signalled.add(bucket)
        made_in = (self._streams.get(m, ()) for m in self._members[bucket])
        try:
            self._signal(bucket, set().union(*made_in) if self._streams else ())
        except FailedPreconditionError as error:
            signalled.discard(bucket)
            raise self._refused(bucket, error) from None

    def _refused(self, bucket: int, error: FailedPreconditionError) -> FailedPreconditionError:
        """What to say of a bucket that cannot be signalled in its hooks' stream."""
        name = self._slots[self._members[bucket][0]].name
        return FailedPreconditionError(
            f"a hook cannot signal the gradient of '{name}': {error}. To capture forward and "
            "backward passes, make the optimizer with early_buckets=False: then step() signals, "
            "after the graph's launch",
            code=error.code,
            reason=error.reason,
        )

    def is_small(self, slot: Slot) -> bool:
        return self._is_small[self._position[slot.index]]

    def hook(
        self, slot: Slot, on_gradient: Callable[[], None], on_bucket: Callable[[int], None]
    ) -> Callable[[Tensor], None]:
        """The hook of a small replica, whose gradient is copied with those of its bucket.

        One by one costs several times as much. The hook keeps nothing of this object but
        its counters: it calls on_gradient as long as each gradient is looked at by itself, and
        on_bucket where on_bucket() of this object is to be called.
        """
        position = self._position[slot.index]
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
        small = self._small[bucket]
        if small.copy():
            small.note()
            self._copied.add(bucket)
            return
        for slot in small.slots:
            if slot.adopt_gradient() and self._samples is not None:
                self._samples.note([slot])
            self._versions[self._position[slot.index]] = slot.gradient._version

    @property
    def streams(self) -> set[int]:
        """In which gradients of this step were made."""
        return set().union(*self._streams.values())

    def compared(self) -> list[ShardedSlot]:
        """The slots whose gradient_pair() `before_step` is to know of."""
        positions: Iterable[int] = ()
        if self._on:
            positions = (m for bucket in self._signalled_now() for m in self._others[bucket])
        elif self._observing:
            positions = self._watched()
        slots = (self._slots[position] for position in positions)
        return [slot for slot in slots if isinstance(slot, ShardedSlot)]

    def _signalled_now(self) -> set[int]:
        """The buckets that have been signalled for the attempt to come.

        An interrupted step, or a push, may have ended the one that others were signalled for.
        """
        attempt, nothing = self._attempt(), set[int]()
        if attempt != self._signalled_in:
            self._signalled_in, self._signalled = attempt, nothing
        return self._signalled

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
            self._find_late()
        if self._on:
            self._find_broken(gradients_changed, differing)
        elif self._observing:
            self._observe(gradients_changed, differing)
        if self._answers and not self._on:
            self._learn()
        return self._broken

    def after_step(self) -> None:
        self._calls[:] = [0] * len(self._slots)
        self._streams.clear()
        self._sums.clear()
        self._await_all()
        if self._samples is not None and self._samples.has_noted:
            self._samples.turn()
        if self._broken:
            self.begin()

    def _await_all(self) -> None:
        for small in self._small.values():
            small.forget()
        self._copied.clear()
        # No bucket is ever without its number, wherever Ctrl-C comes: hooks count in it.
        self._missing |= {bucket: len(each) for bucket, each in self._members.items()}
        # Gradients that a stream makes are looked at in that stream, by a hook of their own.
        self._each_alone[0] = self._observing or self._device.stream() is not None

    def _unchanged(self, position: int, differing: Container[int]) -> bool:
        slot = self._slots[position]
        gradient = slot.parameter.grad
        if gradient is None:
            return self._calls[position] == 0
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
            self._quiet = self._quiet + 1 if self._answers.popleft().value() else 0
        if self._quiet >= _QUIET_STEPS:
            self._on, self._observing = True, False
            self._answers.clear()
            self._leave_last()
            looked_at = (slot for slot in self._slots if self.watches(slot))
            self._samples = _samples(self._device, looked_at)

    def _leave_last(self) -> None:
        """Leaves the bucket to step() whose gradients come last, where all of them are small."""
        members = self._members.get(self._newest, [])
        # A stream is behind the host: what it signals is early whenever it is enqueued.
        if self._last or self._others.get(self._newest) or self._device.stream() is not None:
            return
        self._never.add(self._newest)
        for position in members:
            self._expected[position] = 0

    def _find_broken(self, gradients_changed: bool, differing: Container[int]) -> None:
        signalled = self._signalled_now()
        look = self._samples.look() if signalled and self._samples is not None else None
        sampled: set[int] = set()
        if look is not None and look.is_known():
            sampled, look = {slot.index for slot in look.changed()}, None
        for bucket in signalled:
            looked_at = self._members[bucket]
            changed: list[Slot] = []
            if bucket in self._copied:
                looked_at, changed = self._others[bucket], self._small[bucket].changed()
            again = self._again(bucket)
            if not (again or changed or gradients_changed):
                slots = [self._slots[m] for m in looked_at if not self._unchanged(m, differing)]
                changed = slots or [
                    self._slots[m] for m in looked_at if self._slots[m].index in sampled
                ]
            if again or changed or gradients_changed:
                position = self._members[bucket][0]
                slot = again[0] if again else changed[0] if changed else self._slots[position]
                self._broken = True
                what = "was computed again" if again else "was changed"
                self._stop(slot.name, f"{what} after it had been signalled; {_WITHDRAWN}")
                return
        if look is not None and len(self._late) < _LATE_MAX:
            self._late.append((self._step(), frozenset(signalled), look))

    def _find_late(self) -> None:
        """What the device has seen at former steps. They are made; this one is withdrawn."""
        while self._late and self._late[0][2].is_known():
            step, signalled, look = self._late.popleft()
            changed = [slot for slot in look.changed() if slot.bucket in signalled]
            if changed:
                self._broken = True
                what = f"was changed after it had been signalled, in step {step} already, which"
                self._stop(
                    changed[0].name, f"{what} may have used what it was before; {_WITHDRAWN}"
                )
                return

    def _again(self, bucket: int) -> list[Slot]:
        """Whose hooks have been called more or less often than expected."""
        if self._calls == self._expected:
            return []
        members = self._members[bucket]
        return [self._slots[m] for m in members if self._calls[m] != self._expected[m]]

    def _stop(self, name: str, what: str) -> None:
        self._on = self._observing = False
        self._changes += 1
        self._allowed = self._changes < _CHANGES_MAX
        after = "until steps without such changes follow" if self._allowed else "from now on"
        warn(
            f"dmuond: the gradient of '{name}' {what}, and gradients are signalled in step() "
            f"{after} (early_buckets=False does so from the start; max_grad_norm= clips without "
            "this)"
        )


def _samples(device: TensorDevice, slots: Iterable[Slot]) -> Samples | None:
    """At gradients in the arena; those of shards are compared with all their bytes."""
    places = [
        (slot, slot.gradient_at, slot.gradient_bytes.nbytes)
        for slot in slots
        if not isinstance(slot, ShardedSlot)
    ]
    return Samples(device, places[0][0].arenas, places) if places else None
