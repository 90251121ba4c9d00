"""Hooks on the model's modules: checkpoints that are loaded, weights that are about to be used."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from dmuond.torch.muon import Muon
    from dmuond.torch.slots import Slot

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class _Hook:
    """Knows its optimizer, if that lives. A copied or saved model takes an inert one along."""

    def __init__(self, optimizer: Muon | None = None) -> None:
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None

    def __deepcopy__(self, memo: dict) -> _Hook:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class LoadHook(_Hook):
    """Post-hook of load_state_dict."""

    def __call__(self, module: nn.Module, incompatible_keys: object) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._on_loaded(module)


class WaitHook(_Hook):
    """Pre-hook of forward and of state_dict: the module's weights have arrived when it returns."""

    def __init__(self, optimizer: Muon | None = None, buckets: Iterable[int] = ()) -> None:
        super().__init__(optimizer)
        self._buckets = tuple(buckets)

    def __call__(self, module: nn.Module, *_: object) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer.session.wait_published(self._buckets)


def buckets_of(module: nn.Module, slots: Mapping[int, Slot]) -> set[int]:
    """Buckets of the weights that the module's own forward reads. `slots`: by id of the parameter.

    Modules of torch.nn may read their children's weights without calling them, as
    MultiheadAttention does.
    """
    of_torch = type(module).__module__.startswith("torch.nn.")
    recurse = of_torch and not isinstance(module, _CONTAINERS)
    found = (slots.get(id(p)) for p in module.parameters(recurse=recurse))
    return {slot.bucket for slot in found if slot is not None}
