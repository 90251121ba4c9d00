"""Noticing that a checkpoint was loaded into the model after the optimizer was made."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from dmuond.torch.muon import Muon


class LoadHook:
    """Post-hook of load_state_dict. A copied or saved model takes an inert one along."""

    def __init__(self, optimizer: Muon | None = None) -> None:
        self._optimizer = weakref.ref(optimizer) if optimizer is not None else lambda: None

    def __call__(self, module: nn.Module, incompatible_keys: object) -> None:
        optimizer = self._optimizer()
        if optimizer is not None:
            optimizer._on_loaded(module)

    def __deepcopy__(self, memo: dict) -> LoadHook:
        return LoadHook()

    def __reduce__(self) -> tuple[Any, ...]:
        return LoadHook, ()
