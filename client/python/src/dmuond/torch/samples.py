"""Looks at some bytes of every slot in each step, and at others in the next.

A change that leaves no trace (through p.data, by numpy, by a collective) shows in nothing but the
bytes, and to look at all of them costs as much as to copy them. So each slot is cut into stretches,
and one unit of each is looked at: of a stretch of n units another one in each of n steps, beginning
at random. What is changed between two steps is therefore seen at the second one

* for certain, if it is all of a stretch;
* with the probability 1 - (1 - f)^k, if it is a fraction f of a slot's units anywhere, where k is
  the number of the slot's stretches;

and what is changed again in each step, for certain within as many steps as a stretch has units.
Every rank looks at the same places, so that all of them see what all have done.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from dmuond.memory import View
from dmuond.torch.slots import Place, Slot
from dmuond.torch.tensor_device import TensorDevice

_LOOKS_MIN = 2  # at each slot, however many there are
_WORD_BYTES = 8
_Range = tuple[Slot, int, int]  # first unit, units
_Part = tuple[Tensor, Tensor]  # where the units of some rows lie, and what is kept of them


class Look:
    """A comparison of what was noted with what lies there."""

    def __init__(
        self, device: TensorDevice, before: Tensor, now: Tensor, owners: Sequence[Slot]
    ) -> None:
        self._before, self._now, self._owners = before, now, owners
        self._answer = device.unchanged([before], [now])

    def is_known(self) -> bool:
        return self._answer.is_known()

    def changed(self) -> list[Slot]:
        """The slots that were seen to have changed. REQUIRES: is_known."""
        if self._answer.value():
            return []
        rows = (self._before != self._now).any(1).nonzero().flatten().tolist()
        return list(dict.fromkeys(self._owners[row] for row in rows))


class Samples:
    """Of slots in mapped arenas. What the device does is enqueued in the current stream."""

    def __init__(
        self,
        device: TensorDevice,
        arenas: Mapping[int, View],
        places: Iterable[tuple[Slot, Place, int]],
    ) -> None:
        """places: slots, where they lie, and how many bytes. Nothing is noted yet."""
        self._device = device
        ranges: dict[int, list[_Range]] = {}
        for slot, place, size_bytes in sorted(places, key=lambda each: each[0].bucket):
            begin, end = _units(place, size_bytes, device.unit_bytes)
            if begin < end:
                ranges.setdefault(place.arena, []).append((slot, begin, end - begin))
        every = list(itertools.chain.from_iterable(ranges.values()))
        self.slots = [slot for slot, _, _ in every]
        looks = iter(_shares([size for _, _, size in every], device.units))
        generator = torch.Generator("cpu").manual_seed(0)
        self._arenas = []
        for arena, members in ranges.items():
            end = max(begin + size for _, begin, size in members) * device.unit_bytes
            units = device.bytes_at(arenas[arena], 0, end).view(torch.int64)
            units = units.view(-1, device.unit_bytes // _WORD_BYTES)
            counts = list(itertools.islice(looks, len(members)))
            self._arenas.append(_ArenaSamples(units, members, counts, generator))
        self._turns = 0
        self.turn()

    @property
    def has_noted(self) -> bool:
        return any(arena.noted for arena in self._arenas)

    def turn(self) -> None:
        """Goes on to the next places. Nothing is noted there yet."""
        for arena in self._arenas:
            arena.go_to(self._turns)
        self._turns += 1

    def note(self, slots: Iterable[Slot] | None = None) -> None:
        """From here on changes of these are looked for; None: of all."""
        chosen = None if slots is None else list(slots)
        for arena in self._arenas:
            arena.note(chosen)

    def note_bucket(self, bucket: int) -> None:
        """note() of a bucket's slots, unless they are noted already."""
        for arena in self._arenas:
            arena.note_bucket(bucket)

    def forget(self) -> None:
        """Nothing is noted any more."""
        for arena in self._arenas:
            arena.noted.clear()

    def look(self) -> Look | None:
        """Compares what is noted. None: nothing is."""
        found = [arena.compared() for arena in self._arenas if arena.noted]
        if not found:
            return None
        before, now, owners = zip(*found, strict=True)
        return Look(
            self._device,
            torch.cat(before),  # a copy: other bytes may be noted before the device has looked
            torch.cat(now) if len(now) > 1 else now[0],
            list(itertools.chain.from_iterable(owners)),
        )


class _ArenaSamples:
    """Of one arena. A row of these tensors is a stretch; noted has indices of slots."""

    def __init__(
        self,
        units: Tensor,
        ranges: Sequence[_Range],
        looks: Sequence[int],
        generator: torch.Generator,
    ) -> None:
        self._units = units
        self._owners: list[Slot] = []
        begins: list[int] = []
        sizes: list[int] = []
        rows: dict[int, slice] = {}
        for (slot, first, size), count in zip(ranges, looks, strict=True):
            rows[slot.index] = slice(len(begins), len(begins) + count)
            for begin, end in itertools.pairwise(edges(first, size, count)):
                begins.append(begin)
                sizes.append(end - begin)
                self._owners.append(slot)
        starts = torch.randint(1 << 40, (len(begins),), generator=generator, device="cpu")
        self._begins, self._sizes, self._starts = (
            torch.tensor(values, dtype=torch.int64, device="cpu").to(units.device)
            for values in (begins, sizes, starts.tolist())
        )
        self._at = torch.empty_like(self._begins)
        self._kept = units.new_zeros((len(begins), units.shape[1]))
        self._rows = rows  # by index of the slot
        self._parts = {index: self._part(where) for index, where in rows.items()}
        self._buckets: dict[int, tuple[set[int], _Part]] = {}
        for bucket, slots in itertools.groupby((r[0] for r in ranges), key=lambda s: s.bucket):
            members = [slot.index for slot in slots]
            where = slice(rows[members[0]].start, rows[members[-1]].stop)
            self._buckets[bucket] = set(members), self._part(where)
        self.noted: set[int] = set()
        self._some: tuple[set[int], Tensor, list[Slot]] = set(), self._at, []

    def go_to(self, turn: int) -> None:
        self.noted.clear()
        torch.add(self._starts, turn, out=self._at)
        self._at.remainder_(self._sizes).add_(self._begins)

    def note(self, slots: Sequence[Slot] | None) -> None:
        if slots is None:
            torch.index_select(self._units, 0, self._at, out=self._kept)
            self.noted.update(self._rows)
            return
        for slot in slots:
            part = self._parts.get(slot.index)
            if part is not None:
                torch.index_select(self._units, 0, part[0], out=part[1])
                self.noted.add(slot.index)

    def note_bucket(self, bucket: int) -> None:
        if bucket not in self._buckets:
            return
        members, (at, kept) = self._buckets[bucket]
        if not members <= self.noted:
            torch.index_select(self._units, 0, at, out=kept)
            self.noted |= members

    def _part(self, rows: slice) -> _Part:
        return self._at[rows], self._kept[rows]

    def compared(self) -> tuple[Tensor, Tensor, list[Slot]]:
        """What was noted, what lies there now, and whose each row is."""
        if len(self.noted) == len(self._rows):
            return self._kept, torch.index_select(self._units, 0, self._at), self._owners
        if self._some[0] != self.noted:  # most often they are the same in every step
            chosen = [
                row
                for index, where in self._rows.items()
                if index in self.noted
                for row in range(where.start, where.stop)
            ]
            rows = torch.tensor(chosen, dtype=torch.int64, device="cpu").to(self._at.device)
            self._some = set(self.noted), rows, [self._owners[row] for row in chosen]
        _, rows, owners = self._some
        return self._kept[rows], torch.index_select(self._units, 0, self._at[rows]), owners


def edges(first: int, size: int, count: int) -> list[int]:
    """Where the stretches begin into which so many units are cut, and where the last ends."""
    return [first + size * part // count for part in range(count + 1)]


def _units(place: Place, size_bytes: int, unit_bytes: int) -> tuple[int, int]:
    """Where the units of a slot begin and end. Those that it has alone with nobody count."""
    end = place.offset_bytes + size_bytes
    last = -(-end // unit_bytes) if place.padded else end // unit_bytes
    return -(-place.offset_bytes // unit_bytes), last


def _shares(sizes: Sequence[int], looks: int) -> list[int]:
    """How many looks each gets: all that it has room for, or as many as the other large ones."""
    found = [0] * len(sizes)
    smallest_first = sorted(range(len(sizes)), key=sizes.__getitem__)
    for given, index in enumerate(smallest_first):
        share = max(_LOOKS_MIN, looks // (len(sizes) - given))
        found[index] = min(sizes[index], share)
        looks = max(0, looks - found[index])
    return found
