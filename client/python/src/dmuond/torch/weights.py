"""The model's weights and the masters that the daemon has: compared, and brought together."""

from __future__ import annotations

import dataclasses
import logging
from collections import deque
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from dmuond import types
from dmuond.errors import Error
from dmuond.session import Session
from dmuond.state_chunks import StateTensor
from dmuond.torch.samples import Look, Samples
from dmuond.torch.slots import Place, ShardedSlot, Slot, take_shards
from dmuond.torch.tensor_device import TensorDevice, same_bytes
from dmuond.torch.together import Replicas

log = logging.getLogger("dmuond")

_NAMED_MAX = 3
_LATE_MAX = 8  # looks whose answer is awaited; a device that is further behind is looked at less


class Weights:
    """Of one optimizer, whose session has registered the slots.

    Attributes: origin (whose weights the first step begins with, for people), loaded (names whose
    weights a checkpoint has replaced since they were pushed), sharded (the slots of DTensors, whose
    shards lie elsewhere than in the arenas).
    """

    def __init__(self, session: Session, device: TensorDevice, slots: list[Slot]) -> None:
        self._session, self._device, self._slots = session, device, slots
        self.sharded = [slot for slot in slots if isinstance(slot, ShardedSlot)]
        self._replicas = Replicas(slot for slot in slots if not isinstance(slot, ShardedSlot))
        self._buckets = {slot.bucket for slot in slots}
        self._look: Look | None = None  # at this step, where the device has not answered yet
        # Looks at former ones that the device has not answered yet, with the number of the step.
        self._late: deque[tuple[int, Look]] = deque()
        self.loaded: set[str] = set()
        self.origin = ""

    @torch.no_grad()
    def begin(self) -> None:
        """A fresh job starts from the model's weights; a job with state has published its own."""
        if self._session.has_state:
            step = self._session.last_committed_step
            self.origin = f"the job's, after step {step}; {self._told_apart()}"
            log.info("rank %d: weights are %s", self._session.rank, self.origin)
            self.take_published()
        else:
            self.origin = "those that the ranks came with: the job had none"
            self._push(None)

    def _told_apart(self) -> str:
        """Compares what this process came with with what the daemon has published."""
        held = [slot for slot in self._slots if slot.holding.elements]
        apart = [s for s in held if s.value().data_ptr() != s.weight.data_ptr()]
        if len(apart) < len(held):
            return "not compared with what this process came with, which lay in the same memory"
        found = self._device.differing([(slot.value(), slot.weight) for slot in apart])
        if not found:
            return f"all {len(held)} parameters of this process were equal to them"
        names = ", ".join(f"'{apart[index].name}'" for index in sorted(found)[:_NAMED_MAX])
        more = f" and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
        return (
            f"{len(found)} of {len(held)} parameters of this process were others, and have been "
            f"replaced: {names}{more}"
        )

    @torch.no_grad()
    def take_published(self) -> None:
        """The arenas have weights that this optimizer's steps have not brought."""
        for slot in self._slots:
            slot.bind_published()
        self._take(self._slots)

    def before_step(self) -> None:
        """The daemon is about to write weights. REQUIRES: nobody has changed them."""
        if self._look is not None and len(self._late) < _LATE_MAX:
            self._late.append((self._session.last_committed_step + 1, self._look))
        self._look = None
        self._samples.forget()

    def after_step(self, committed: bool, arrived: bool) -> None:
        """A step of this optimizer's has been made. arrived: its weights are there."""
        if committed:
            self._replicas.written()
            take_shards(self.sharded)
        self._samples.turn()
        if arrived:
            self._samples.note()

    def arrived(self, buckets: Iterable[int] | None = None) -> None:
        """The weights of these buckets (None: all) are there after a step."""
        for bucket in self._buckets if buckets is None else buckets:
            self._samples.note_bucket(bucket)

    @torch.no_grad()
    def push(self, names: list[str] | None) -> None:
        """Makes the weights of these parameters the masters; None: all. Collective."""
        self.check_fits()
        self._session.wait_published()
        self._push(names)
        self.loaded -= self.loaded if names is None else set(names)

    @torch.no_grad()
    def push_keeping_masters(self, names: list[str] | None) -> None:
        """push(), after which a master that rounds to its weight is what it was. Collective.

        A weight of half precision has fewer bits than its master: a push alone would undo all
        steps that are smaller than these bits. The weights that count are the lowest rank's, so
        they are compared when they have been published. Raises where others have been changed, too,
        over which the masters would be published.
        """
        chosen = self._chosen(names)
        if names is not None:
            self._refuse_changed_beside(names)
        rounded = [slot for slot in chosen if slot.weight.dtype is not torch.float32]
        masters = list(self._masters(rounded))
        self.push(names)
        if rounded:
            self._push_near(masters, rounded)

    def _chosen(self, names: list[str] | None) -> list[Slot]:
        if names is None:
            return self._slots
        wanted = set(names)
        return [slot for slot in self._slots if slot.name in wanted]

    def _push(self, names: list[str] | None) -> None:
        chosen = self._chosen(names)
        for slot in chosen:
            slot.write_weight()
        self._device.finish()
        self._session.push(names)
        self._take(chosen)

    def _take(self, slots: list[Slot]) -> None:
        """Takes the arenas' weights for the parameters': changes from here on are noticed."""
        replicas = [slot for slot in slots if not isinstance(slot, ShardedSlot)]
        torch.autograd.graph.increment_version([slot.parameter for slot in replicas])
        take_shards(slot for slot in slots if isinstance(slot, ShardedSlot))
        self._replicas.note(replicas)
        if len(slots) < len(self._slots):
            self._samples.note(slots)
            return
        self._late.clear()
        self._look = None
        self._samples = Samples(self._device, self._slots[0].arenas, self._sampled())
        self._samples.note()

    def _sampled(self) -> Iterable[tuple[Slot, Place, int]]:
        """Weights that are not compared with all their bytes: there is no copy of them."""
        for slot in self._slots:
            if not isinstance(slot, ShardedSlot) or slot.weight_pair() is None:
                yield slot, slot.weight_at, slot.weight.nbytes

    def push_loaded(self) -> None:
        """Pushes the weights that a checkpoint brought.

        Where every rank holds all of a parameter, those that are the masters' own need no push. Of
        shards, one rank's may be so and another's not, and all ranks must do the same: they are
        pushed in any case.
        """
        if not self.loaded:
            return
        self._session.wait_published()
        self._session.check_not_republished(f"the loaded weights of '{min(self.loaded)}'")
        loaded = [slot for slot in self._slots if slot.name in self.loaded]
        self._refuse_changed_beside([slot.name for slot in loaded])
        names = self._differing([slot for slot in loaded if not slot.holding.sharded])
        rounded = []  # whose masters have more bits than the weights
        for slot in loaded:
            if not slot.holding.sharded:
                continue
            if slot.weight.dtype is torch.float32:
                names.append(slot.name)
            else:
                rounded.append(slot)
        self.loaded.clear()
        if names:
            everything = len(names) == len(self._slots)
            self.push(None if everything else names)
        if rounded:  # afterwards: it publishes all masters
            self._push_masters(rounded)

    def _push_masters(self, slots: list[Slot]) -> None:
        """Puts the weights' values into the masters; shards that are equal to the masters stay."""
        self._push_near(self._masters(slots), slots)

    def _masters(self, slots: list[Slot]) -> Iterable[StateTensor]:
        if not slots:
            return ()
        return self._session.pull([slot.name for slot in slots], [types.STATE_KIND_MASTER])

    def _push_near(self, masters: Iterable[StateTensor], slots: list[Slot]) -> None:
        """Pushes masters with the weights' values: these, where they round to the weights."""
        by_name = {slot.name: slot for slot in slots}
        pushed = []
        for tensor in masters:
            slot = by_name[tensor.parameter]
            value, master = slot.value().cpu(), _master(tensor, slot)
            if not same_bytes(value, master.to(value.dtype)):
                master = value.float()
            values = slot.holding.as_registered(master).contiguous().numpy()
            pushed.append(dataclasses.replace(tensor, values=values))
        self.push_state(pushed)

    def push_state(self, tensors: Iterable[StateTensor]) -> None:
        """Replaces state that the daemon has; weights are then those of the masters. Collective."""
        self._session.push_state(list(tensors))
        self.take_published()

    def look_at_bytes(
        self, gradients: list[ShardedSlot], wait: bool = True
    ) -> tuple[list[Slot], set[int]]:
        """Slots whose weights somebody has changed; which of these gradients do not lie there.

        The second has slots' indices. All bytes of shards are compared in one go, some of the rest.
        wait: the host waits for the device's answer about the latter, too. Otherwise
        refuse_changed_before() of a later step has it.
        """
        weights = [(slot, pair) for slot in self.sharded if (pair := slot.weight_pair())]
        others = [(slot, pair) for slot in gradients if (pair := slot.gradient_pair())]
        looked_at = weights + others
        found = set(self._device.differing([pair for _, pair in looked_at]))
        differing = [looked_at[index][0] for index in found if index < len(weights)]
        return (
            sorted({*self._touched(wait), *differing}, key=lambda slot: slot.index),
            {looked_at[index][0].index for index in found if index >= len(weights)},
        )

    def _touched(self, wait: bool) -> list[Slot]:
        """Slots in arenas that somebody may have changed.

        If one has been without a trace, any of them may have been.
        """
        touched = self._replicas.changed()
        look, self._look = self._samples.look(), None
        if look is None:
            return touched
        if wait:
            self._device.finish()
        elif not look.is_known():
            self._look = look
            return touched
        traced = self.loaded | {slot.name for slot in touched}
        if all(slot.name in traced for slot in look.changed()):
            return touched
        return touched + self._samples.slots

    def refuse_changed_before(self) -> None:
        """Raises, once, where the device has seen that weights were changed before a former step.

        That step has written over them.
        """
        while self._late and self._late[0][1].is_known():
            step, look = self._late.popleft()
            names = [slot.name for slot in look.changed()]
            if names:
                self._late.clear()
                raise Error(
                    f"{_changed(names)} before step {step}, which has undone that: change them "
                    f"again, and call push_parameters({_few(names)}) on all ranks after it; to go "
                    "on without the change, call step() again"
                )

    def unchanged(self) -> bool:
        """Whether nobody has changed the model's weights since the last step."""
        return not self.loaded and not self.look_at_bytes([])[0]

    def refuse_changed(self, touched: list[Slot], beside: Iterable[str] = ()) -> None:
        """Raises unless the weights that somebody has touched are the masters all the same.

        beside: names of others, which are being pushed.
        """
        names = self._differing(touched)
        if names:
            raise Error(
                f"{_changed(names)} and not pushed: call push_parameters("
                f"{_few([*beside, *names])}) on all ranks after changing them"
            )

    def _refuse_changed_beside(self, names: list[str]) -> None:
        touched, _ = self.look_at_bytes([])
        self.refuse_changed([slot for slot in touched if slot.name not in names], beside=names)

    def check_fits(self) -> None:
        """Raises if somebody has converted or moved the model since the optimizer was made."""
        for slot in (*self._replicas.moved(), *self.sharded):
            slot.check_fits()

    def _differing(self, slots: list[Slot]) -> list[str]:
        """Names of the slots whose value is not the master's; the others are accepted."""
        by_name = {slot.name: slot for slot in slots}
        equal: list[Slot] = []
        for tensor in self._masters(slots):
            slot = by_name[tensor.parameter]
            value = slot.value().cpu()
            if value.shape != slot.holding.local_shape:
                continue
            if same_bytes(value, _master(tensor, slot).to(value.dtype)):
                slot.write_weight()
                equal.append(slot)
        self._replicas.note(slot for slot in equal if not isinstance(slot, ShardedSlot))
        self._samples.note(equal)
        accepted = {slot.name for slot in equal}
        return [slot.name for slot in slots if slot.name not in accepted]


def _changed(names: list[str]) -> str:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the weights of '{names[0]}'{more} were changed by other means than this optimizer"


def _few(names: list[str]) -> str:
    """What push_parameters() is to be called with."""
    return f"{names}" if len(names) <= _NAMED_MAX else ""


def _master(tensor: StateTensor, slot: Slot) -> Tensor:
    return slot.holding.from_registered(torch.from_numpy(np.array(tensor.values)))
