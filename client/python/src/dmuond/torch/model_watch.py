"""Parameters that are updated in vain: replaced in the model, or never with a gradient."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

from torch import nn

from dmuond.errors import Error
from dmuond.torch.notices import warn
from dmuond.torch.slots import ShardedSlot, Slot
from dmuond.torch.wrappers import refuse_foreign

_STEPS_WITHOUT_GRADIENT = 10  # of a parameter, before it is told
_NAMED = 3  # parameters that a warning names


class ModelWatch:
    """Not for several threads. `close` ends what is registered with torch."""

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._steps = 0
        self._without_gradient = {slot.index for slot in slots if slot.parameter.requires_grad}
        self._trainable = len(self._without_gradient)
        self._replaced: set[str] = set()
        self.close = lambda: None
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
            self.close = weakref.finalize(self, handle.remove)

    def check(self) -> None:
        """Raises where a parameter is no longer the registered one, or another library's too."""
        for slot in self._slots[:1]:  # DeepSpeed, wherever it comes to, takes all
            refuse_foreign(slot.name, slot.parameter)
        replaced = set(self._replaced)
        replaced |= {
            name
            for module, attribute, parameter, name in self._held
            if module._parameters.get(attribute) is not parameter
        }
        if replaced:
            raise Error(
                f"'{min(replaced)}' of the model is no longer the parameter that was registered "
                "(load_state_dict(assign=True), or a wrapper applied later): make the optimizer "
                "after it"
            )

    def after_step(self, absent: Iterable[int]) -> None:
        """`absent`: indices of the slots without a gradient. Warns, once."""
        if not self._without_gradient:
            return
        self._steps += 1
        self._without_gradient &= set(absent)
        none_at_all = len(self._without_gradient) == self._trainable
        if self._steps < _STEPS_WITHOUT_GRADIENT and not none_at_all:
            return
        names = [slot.name for slot in self._slots if slot.index in self._without_gradient]
        self._without_gradient.clear()
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            steps = "the first step" if self._steps == 1 else f"{self._steps} steps"
            warn(
                f"dmuond: no gradient has come in {steps} of {', '.join(names[:_NAMED])}{more}. "
                "Unused weights, or not the model's own any more: of a model that was copied, or "
                "loaded or wrapped in a way that replaces parameters, the copy is not trained"
            )


def _replacement_hook(name_of: dict[int, str], replaced: set[str]):
    """Of every module's register_parameter. `name_of`: by id of parameters that live as long."""

    def hook(module: nn.Module, attribute: str, parameter: nn.Parameter | None) -> None:
        replaced.discard(name_of.get(id(parameter), ""))  # put back
        before = module._parameters.get(attribute)
        if before is not None and before is not parameter and id(before) in name_of:
            replaced.add(name_of[id(before)])

    return hook
