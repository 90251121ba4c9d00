"""Layers that come into a model after its optimizer was made: replaced ones, and additional ones.

Registrations with a module are heard of; what is written into `_modules` past them (as
nn.ModuleList.insert does) is found within some steps. Only then is the whole model walked through.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn.modules import module as registrations
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from dmuond.errors import Error
from dmuond.torch import fsdp

_TURNS = 8  # steps in which the children of every module are looked at once


class ModelTree:
    """Not for several threads. `close` ends what is registered with torch."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        self._models = models
        self._heard = _Heard()
        self._turn = 0
        self._strangers: list[tuple[str, Tensor]] = []
        self._places: set[tuple[int, str]] = set()  # that had a parameter: model and name
        self._known: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for place, parameter in self._walk():
            self._places.add(place)
            self._known[parameter] = None
        register = (
            registrations.register_module_module_registration_hook,
            registrations.register_module_parameter_registration_hook,
        )
        handles = [each(self._heard.hear) for each in register] if models else []
        self.close = weakref.finalize(self, _remove, handles)

    def check(self) -> None:
        """Raises where a parameter of the model is trained by nobody, although it seems to be."""
        if not self._models:
            return
        self._turn = (self._turn + 1) % _TURNS
        if self._heard.something or any(
            tuple(module._modules.values()) != children
            for module, children in self._nodes[self._turn :: _TURNS]
        ):
            self._find_strangers()
        for name, parameter in self._strangers:
            if parameter.requires_grad and parameter.grad is not None:
                raise Error(
                    f"'{name}' came into the model after the optimizer was made, and nobody applies"
                    " its gradient: close() this optimizer and make one after it, or "
                    "requires_grad_(False). What another optimizer trains must be there before, on "
                    "route 'trainer'"
                )

    def _find_strangers(self) -> None:
        gathered = fsdp.gathered()  # in the place of shards
        strangers = []
        for place, parameter in self._walk():
            if parameter in self._known or id(parameter) in gathered:
                continue
            if place in self._places and parameter.requires_grad:
                raise replaced(place[1])
            strangers.append((place[1], parameter))
        self._strangers = strangers

    def _walk(self) -> Iterator[tuple[tuple[int, str], Tensor]]:
        """All parameters with their places. From here on changes of these modules are heard of."""
        nodes = []
        for index, model in enumerate(self._models):
            for path, module in model.named_modules():
                nodes.append((module, tuple(module._modules.values())))
                for attribute, parameter in module._parameters.items():
                    if parameter is not None:
                        yield (index, f"{path}.{attribute}" if path else attribute), parameter
        self._nodes = nodes
        self._heard.begin(nodes)


class _Heard:
    """Whether something was registered with one of these modules."""

    def __init__(self) -> None:
        self.something = False
        self._modules: set[int] = set()

    def begin(self, nodes: Sequence[tuple[nn.Module, object]]) -> None:
        """REQUIRES: they live until the next call."""
        self._modules = {id(module) for module, _ in nodes}
        self.something = False

    def hear(self, module: nn.Module, name: str, member: object) -> None:
        if id(module) in self._modules:
            self.something = True


def replaced(name: str) -> Error:
    return Error(
        f"'{name}' of the model is no longer the parameter that was registered (a layer that was "
        "replaced, load_state_dict(assign=True), or a wrapper applied later): make the optimizer "
        "after it, and close() this one"
    )


def _remove(handles: Sequence[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
