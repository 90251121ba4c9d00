"""Arrays over memory of a device: what they say of themselves to other libraries."""

import numpy as np
import pytest
from dmuond import DeviceArray, InvalidArgumentError

ADDRESS = 0x7000_0000_0000


class Device:
    """Notes what it is asked to copy."""

    def __init__(self):
        self.copies = []

    def copy(self, to, source, size_bytes, stream):
        self.copies.append((to, source, size_bytes, stream))

    def synchronize(self, stream):
        self.copies.append(stream)


def arena(size_bytes=4096, device=None):
    return DeviceArray("cuda:1", device or Device(), object(), ADDRESS, (size_bytes,))


def test_a_slot_is_an_array_at_its_place_in_the_arena():
    slot = arena().slot(256, (4, 8), "float32")
    assert (slot.address, slot.shape, slot.nbytes, slot.device) == (
        ADDRESS + 256,
        (4, 8),
        128,
        "cuda:1",
    )
    assert slot.__cuda_array_interface__ == {
        "version": 3,
        "shape": (4, 8),
        "typestr": "<f4",
        "data": (ADDRESS + 256, False),
        "strides": None,
    }


def test_strides_are_elements_here_and_bytes_for_others():
    slot = arena().slot(64, (4, 2), "int16", strides=(16, 1))
    assert slot.strides == (16, 1)
    assert slot.__cuda_array_interface__["strides"] == (32, 2)
    with pytest.raises(InvalidArgumentError, match="strides"):
        slot.read()


@pytest.mark.parametrize("shape", [(0,), (0, 5)])
def test_an_empty_slot_has_no_address_and_nothing_to_copy(shape):
    device = Device()
    slot = arena(64, device).slot(64, shape)
    assert slot.__cuda_array_interface__["data"] == (0, False)
    slot.write(np.zeros(shape))
    assert device.copies == []


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [
        (4093, (1,), None),
        (-4, (1,), None),
        (0, (1025,), None),
        (4000, (2, 2), (24, 1)),
        (0, (4,), (1, 1)),
        (0, (-1,), None),
        (64, (4,), (-1,)),
    ],
)
def test_a_slot_that_would_not_lie_within_its_arena_is_refused(offset, shape, strides):
    with pytest.raises(InvalidArgumentError):
        arena().slot(offset, shape, "float32", strides)


def test_a_slot_keeps_its_arena_and_copies_in_the_stream_that_is_named():
    device = Device()
    slot = arena(device=device).slot(0, (2, 3))
    slot.write(1.5, stream=7)
    slot.read(stream=9)
    (to, _, size, written), (_, source, _, read), waited = device.copies
    assert (to, size, written) == (ADDRESS, 24, 7)
    assert (source, read, waited) == (ADDRESS, 9, 9)
