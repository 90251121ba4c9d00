"""Hooks on the model's modules: checkpoints that are loaded, weights that are about to be used."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import nn

from dmuond.torch.slots import Slot

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


class _Hook:
    """Calls a bound method while its object lives. A copied or saved model has an inert one."""

    def __init__(self, method: Callable[..., None] | None = None) -> None:
        self._method = weakref.WeakMethod(method) if method is not None else lambda: None

    def __deepcopy__(self, memo: dict) -> _Hook:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class LoadHook(_Hook):
    """Post-hook of load_state_dict: calls `method` with the module."""

    def __call__(self, module: nn.Module, incompatible_keys: object) -> None:
        on_loaded = self._method()
        if on_loaded is not None:
            on_loaded(module)


class WaitHook(_Hook):
    """Pre-hook of forward and of state_dict: the module's weights have arrived when it returns.

    `method` waits for the weights of the buckets that it is called with.
    """

    def __init__(
        self, method: Callable[..., None] | None = None, buckets: Iterable[int] = ()
    ) -> None:
        super().__init__(method)
        self._buckets = tuple(buckets)

    def __call__(self, module: nn.Module, *_: object) -> None:
        wait_published = self._method()
        if wait_published is not None:
            wait_published(self._buckets)


def buckets_of(module: nn.Module, slots: Mapping[int, Slot]) -> set[int]:
    """Buckets of the weights that the module's own forward reads. `slots`: by id of the parameter.

    Modules of torch.nn may read their children's weights without calling them, as
    MultiheadAttention does.
    """
    of_torch = type(module).__module__.startswith("torch.nn.")
    recurse = of_torch and not isinstance(module, _CONTAINERS)
    found = (slots.get(id(p)) for p in module.parameters(recurse=recurse))
    return {slot.bucket for slot in found if slot is not None}
