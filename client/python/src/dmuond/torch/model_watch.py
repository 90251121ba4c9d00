"""Parameters that are updated in vain: replaced in the model, or never with a gradient."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import nn

from dmuond.torch.model_tree import ModelTree, replaced
from dmuond.torch.notices import warn
from dmuond.torch.slots import ShardedSlot, Slot
from dmuond.torch.wrappers import refuse_foreign

_STEPS_WITHOUT_GRADIENT = 10  # of a parameter, before it is told
_NAMED = 3  # parameters that a warning names


class ModelWatch:
    """Not for several threads. `close` ends what is registered with torch."""

    def __init__(self, slots: Sequence[Slot], models: Sequence[nn.Module]) -> None:
        self._slots = slots
        self._tree = ModelTree(models)
        self._steps = 0
        self._told: set[int] = set()  # indices of those that a warning has named
        self._without_gradient = {slot.index for slot in slots if slot.parameter.requires_grad}
        self._trainable = len(self._without_gradient)
        self._replaced: set[str] = set()
        self._stop_hearing = lambda: None
        # FSDP2 puts other parameters into the modules by itself.
        self._held = [
            (slot.named.module, slot.named.attribute, slot.parameter, slot.name)
            for slot in slots
            if slot.named.module is not None and not isinstance(slot, ShardedSlot)
        ]
        nameless = [s for s in slots if s.named.module is None and not isinstance(s, ShardedSlot)]
        if nameless:
            hook = _replacement_hook({id(s.parameter): s.name for s in nameless}, self._replaced)
            handle = nn.modules.module.register_module_parameter_registration_hook(hook)
            self._stop_hearing = weakref.finalize(self, handle.remove)

    def close(self) -> None:
        self._stop_hearing()
        self._tree.close()

    def check(self) -> None:
        """Raises where a parameter is no longer the registered one, or another library's too."""
        for slot in self._slots[:1]:  # DeepSpeed, wherever it comes to, takes all
            refuse_foreign(slot.name, slot.parameter)
        names = self._replaced | {
            name
            for module, attribute, parameter, name in self._held
            if module._parameters.get(attribute) is not parameter
        }
        if names:
            raise replaced(min(names))
        self._tree.check()

    def after_step(self, absent: Iterable[int], step: int) -> None:
        """`absent`: indices of the slots without a gradient. Warns, once, and takes it back."""
        if self._told:
            self._take_back(self._told - set(absent), step)
        if not self._without_gradient:
            return
        self._steps += 1
        self._without_gradient &= set(absent)
        none_at_all = len(self._without_gradient) == self._trainable
        if self._steps < _STEPS_WITHOUT_GRADIENT and not none_at_all:
            return
        self._told, self._without_gradient = self._without_gradient, set()
        if self._told:
            steps = "the first step" if self._steps == 1 else f"{self._steps} steps"
            warn(
                f"dmuond: no gradient has come in {steps} of {self._names(self._told)}. "
                "Unused weights, or not the model's own any more: of a model that was copied, or "
                "loaded or wrapped in a way that replaces parameters, the copy is not trained"
            )

    def _take_back(self, found: set[int], step: int) -> None:
        if found:
            self._told -= found
            has = "has a gradient" if len(found) == 1 else "have gradients"
            warn(f"dmuond: {self._names(found)} {has} since step {step}: trained after all")

    def _names(self, indices: set[int]) -> str:
        names = [slot.name for slot in self._slots if slot.index in indices]
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        return ", ".join(names[:_NAMED]) + more


def _replacement_hook(name_of: dict[int, str], replaced: set[str]):
    """Of every module's register_parameter. `name_of`: by id of parameters that live as long."""

    def hook(module: nn.Module, attribute: str, parameter: nn.Parameter | None) -> None:
        replaced.discard(name_of.get(id(parameter), ""))  # put back
        before = module._parameters.get(attribute)
        if before is not None and before is not parameter and id(before) in name_of:
            replaced.add(name_of[id(before)])

    return hook
