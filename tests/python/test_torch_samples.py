"""Looks at some bytes of every slot in each step: what they find, and how many they are."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from dmuond.torch.host_tensors import HostTensors
from dmuond.torch.samples import Samples
from dmuond.torch.slots import Place

UNIT, UNITS = HostTensors.unit_bytes, HostTensors.units


@dataclass(eq=False)
class Slot:
    index: int
    bucket: int


class Memory:
    """An arena with slots of so many units, one after the other, and samples of them."""

    def __init__(self, sizes: Sequence[int], per_bucket: int = 1):
        self.arena = np.zeros(sum(sizes) * UNIT, np.uint8)
        self.parts = np.split(self.arena, np.cumsum(sizes)[:-1] * UNIT)
        self.slots = [Slot(index, index // per_bucket) for index in range(len(sizes))]
        begins = (part.ctypes.data - self.arena.ctypes.data for part in self.parts)
        places = [
            (slot, Place(1, begin), part.nbytes)
            for slot, begin, part in zip(self.slots, begins, self.parts, strict=True)
        ]
        self.samples = Samples(HostTensors(), {1: self.arena}, places)

    def changed(self) -> list[int]:
        look = self.samples.look()
        return [] if look is None else [slot.index for slot in look.changed()]

    def next_step(self):
        self.samples.turn()
        self.samples.note()


def change(part: np.ndarray, units):
    part.reshape(-1, UNIT)[units] += 1


def test_what_is_changed_in_every_step_is_found_within_as_many_as_a_stretch_has_units():
    sizes = (20 * UNITS, UNITS, 3)
    memory = Memory(sizes)
    stretch = max(-(-size // (UNITS // len(sizes))) for size in sizes)
    for unit in (0, 1, 777, 20 * UNITS - 1):
        for _ in range(stretch):
            memory.next_step()
            change(memory.parts[0], unit)
            if memory.changed():
                break
        assert memory.changed() == [0], unit


def test_a_change_of_two_stretches_in_one_place_is_found_at_once():
    memory = Memory((1000, 1000))
    looks = UNITS // 2
    for begin in range(0, 990, 7):
        memory.next_step()
        change(memory.parts[1], slice(begin, begin + 2 * -(-1000 // looks)))
        assert memory.changed() == [1], begin


def test_a_slot_of_which_a_part_has_changed_is_found_as_often_as_the_page_says():
    """docs/python.md: with the probability 1 - (1 - f)^k."""
    slots, size = UNITS // 2, 50  # two looks at each
    memory = Memory([size] * slots)
    drawn, found, fraction = np.random.default_rng(1), 0, 0.2
    for _ in range(20):
        memory.next_step()
        for part in memory.parts:
            change(part, drawn.choice(size, int(fraction * size), replace=False))
        found += len(memory.changed())
    assert found / (20 * slots) == pytest.approx(1 - (1 - fraction) ** 2, abs=0.02)


@pytest.mark.parametrize(
    "sizes", [(10,), (10**4,), (1, 10**4), (10**4,) * 300, (1,) * 300 + (10**4,)]
)
def test_so_many_units_are_looked_at_as_the_device_takes_or_two_of_each_slot(sizes):
    memory = Memory(sizes)
    memory.next_step()
    looked_at = memory.samples.look()._now.shape[0]
    assert looked_at <= max(UNITS, 2 * len(sizes))
    assert looked_at == sum(sizes) or looked_at >= 0.9 * UNITS


def test_only_what_is_noted_is_compared():
    memory = Memory((100,) * 4, per_bucket=2)
    memory.samples.turn()
    assert memory.samples.look() is None
    memory.samples.note_bucket(1)
    for part in memory.parts:
        change(part, slice(None))
    assert memory.changed() == [2, 3]
    memory.samples.note([memory.slots[0], memory.slots[3]])
    change(memory.parts[0], slice(None))
    assert memory.changed() == [0, 2]
    memory.samples.note_bucket(1)  # that is noted already
    assert memory.changed() == [0, 2]
    memory.samples.forget()
    assert memory.samples.look() is None


def test_bytes_between_slots_that_somebody_else_may_have_are_not_looked_at():
    arena = np.zeros(8 * UNIT, np.uint8)
    slot = Slot(0, 0)
    place = Place(1, UNIT + 16, padded=False)
    samples = Samples(HostTensors(), {1: arena}, [(slot, place, 3 * UNIT)])
    samples.note()
    arena[: UNIT + 16] = arena[4 * UNIT + 16 :] = 1
    assert samples.look().changed() == []
    arena[3 * UNIT] = 1
    assert samples.look().changed() == [slot]


def test_all_ranks_look_at_the_same_places():
    first, second = Memory((10**4, 3)), Memory((10**4, 3))
    for memory in (first, second):
        memory.next_step()
    assert torch.equal(first.samples._arenas[0]._at, second.samples._arenas[0]._at)
