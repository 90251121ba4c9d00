"""Gradients that no lane may read: whether they are finite is looked at here, on their own rank."""

from __future__ import annotations

from collections.abc import Container, Iterable

import torch

from dmuond.torch.slots import Slot


class UnreadGradients:
    def __init__(self, slots: Iterable[Slot]) -> None:
        """Of mapped slots, in each of which lies this rank's replica of a gradient."""
        self._slots = [slot for slot in slots if slot.holding.elements]

    @torch.no_grad()
    def not_finite(self, absent: Container[int]) -> int | None:
        """The index of a slot whose gradient, as it lies in the arena, has an infinity or a NaN.

        absent: indices of the slots without one. Where there is anything to look at, the host waits
        for the device's answer.
        """
        there = [slot for slot in self._slots if slot.index not in absent]
        if not there:
            return None
        gradients = [slot.gradient_bytes for slot in there]
        found = torch.zeros((), dtype=torch.float32, device=gradients[0].device)
        # GradScaler's own look, several times as fast as others on the CPU. By a scale of 1 it
        # writes what it has read, so that lanes may be reading meanwhile.
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.ones_like(found))
        if not found.item():
            return None
        return next(s.index for s in there if not s.gradient_bytes.isfinite().all())
