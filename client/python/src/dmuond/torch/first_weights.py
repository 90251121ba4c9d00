"""What a model's weights are before the daemon has them: a digest for each fragment."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from dmuond.torch.slots import Slot
from dmuond.torch.tensor_device import bytes_of

DIGEST_BYTES = 16
# Below this a thread costs more than it saves.
_THREADS_FROM_BYTES = 1 << 22
_THREADS_MAX = 8


def digests(slots: Iterable[Slot], fragments: int) -> list[bytes]:
    """One for each registered fragment; b"" where nothing is held, or the trainer keeps it."""
    found = [b""] * fragments
    held = [slot for slot in slots if slot.holding.elements]
    size = sum(slot.holding.elements * slot.parameter.dtype.itemsize for slot in held)
    threads = min(_THREADS_MAX, len(os.sched_getaffinity(0)))
    if size < _THREADS_FROM_BYTES or threads == 1:
        made = map(_digest, held)
    else:
        # hashlib gives up the interpreter's lock; the largest first, so that no thread is left
        # alone with it.
        held.sort(key=lambda slot: -slot.holding.elements)
        with ThreadPoolExecutor(threads) as pool:
            made = pool.map(_digest, held)
    for slot, digest in zip(held, made, strict=True):
        found[slot.index] = digest
    return found


def _digest(slot: Slot) -> bytes:
    with torch.no_grad():
        flat = bytes_of(slot.value().cpu())
    return hashlib.sha256(flat.numpy()).digest()[:DIGEST_BYTES]
