"""Hooks of parameters, which hear of each gradient when autograd has made it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dmuond.torch.early import EarlySignals
from dmuond.torch.slots import ShardedSlot, Slot


class GradientHooks:
    """Keeps a hook on each parameter whose gradient has to be heard of during the backward pass.

    A parameter keeps its hooks, and hooks keep nothing of the optimizer: without it they do
    nothing.
    """

    def __init__(self, slots: Sequence[Slot], early: EarlySignals) -> None:
        """Registers the hooks that are needed at first."""
        self._slots, self._early = slots, early
        self._handles: dict[int, Any] = {}  # by index of the slot
        self._stage: tuple[bool, bool] | None = None
        self.follow()

    def follow(self) -> None:
        """Registers and removes hooks, where others are needed than at the last call."""
        if self._early.stage == self._stage:
            return
        self._stage = self._early.stage
        for slot in self._slots:
            if not self._early.needs_hook(slot):
                handle = self._handles.pop(slot.index, None)
                if handle is not None:
                    handle.remove()
            elif slot.index not in self._handles:
                self._handles[slot.index] = self._registered(slot)

    def remove(self) -> None:
        """Removes all. Nothing follows."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()

    def _registered(self, slot: Slot) -> Any:
        hook = _gradient_hook(weakref.ref(self._early), self._early, slot)
        trains = slot.parameter.requires_grad
        slot.parameter.requires_grad_(True)  # torch wants that for a hook; it stays
        handle = slot.parameter.register_post_accumulate_grad_hook(hook)
        slot.parameter.requires_grad_(trains)
        return handle


def _gradient_hook(
    reference: weakref.ref[EarlySignals], early: EarlySignals, slot: Slot
) -> Callable[[Tensor], None]:
    def on_gradient(parameter: Tensor | None = None) -> None:
        early = reference()
        if early is not None:
            _adopt(early, slot)

    def on_bucket(bucket: int) -> None:
        early = reference()
        if early is not None:
            with torch.no_grad():
                early.on_bucket(bucket)

    hook = early.hook(slot, on_gradient, on_bucket) if early.is_small(slot) else on_gradient
    # torch.compile of a function with the backward pass in it would trace what the hook does.
    return torch.compiler.disable(hook)


def _adopt(early: EarlySignals, slot: Slot) -> None:
    if isinstance(slot, ShardedSlot) and not early.watches(slot):
        return  # step() copies it
    if not slot.fits():
        return  # step() says so
    if isinstance(slot, ShardedSlot) and not slot.gradient_is_placed():
        return  # likewise, when it has been put there
    if slot.is_viewed() or slot.is_the_scripts():
        return  # what is viewed, or of the script's own, stays as it is: step() copies it
    slot.adopt_gradient()
    early.on_gradient(slot)
