"""GradScaler: the scale travels with the step, and every rank's scaler learns the common result."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.amp.grad_scaler import OptState

from dmuond.errors import InvalidArgumentError

if TYPE_CHECKING:
    from torch.amp import GradScaler

# torch warns at each step of an optimizer that takes the scaler itself. The other way it offers
# does not let the optimizer report what the ranks found together.
warnings.filterwarnings(
    "ignore", message="GradScaler is going to stop passing itself", category=FutureWarning
)


_PASSED_ON = inspect.Parameter.VAR_KEYWORD  # always the last


@dataclass(frozen=True)
class Scale:
    loss_scale: float  # that the gradients still carry
    divided_by: torch.Tensor | None  # by unscale_(), in place

    @property
    def unscaled(self) -> bool:
        return self.divided_by is not None


def let_through(wrapper: Callable[..., Any]) -> None:
    """Has GradScaler hand itself to a wrapper of step() that passes on whatever it is given.

    GradScaler looks for `grad_scaler` in the signature, where `**kwargs` of a wrapper without
    functools.wraps (accelerate's, say) do not show it.
    """
    function = getattr(wrapper, "__func__", wrapper)
    signature = inspect.signature(function)
    taken = list(signature.parameters.values())
    if "grad_scaler" in signature.parameters or not taken or taken[-1].kind is not _PASSED_ON:
        return
    scaler = inspect.Parameter("grad_scaler", inspect.Parameter.KEYWORD_ONLY, default=None)
    function.__signature__ = signature.replace(parameters=[*taken[:-1], scaler, taken[-1]])


def read(scaler: GradScaler | None, optimizer: torch.optim.Optimizer) -> Scale:
    """Raises where GradScaler could not hand itself over, and left its scale as an attribute."""
    if scaler is None:
        if vars(optimizer).pop("found_inf", None) is not None:
            vars(optimizer).pop("grad_scale", None)
            raise InvalidArgumentError(
                f"step() is wrapped by {vars(optimizer).get('step')}, which takes no "
                "'grad_scaler', so that GradScaler cannot hand itself to the optimizer: let the "
                "wrapper take **kwargs, and pass them on"
            )
        return Scale(1.0, None)
    stage = scaler._per_optimizer_states[id(optimizer)]["stage"]
    if stage is OptState.UNSCALED:
        return Scale(1.0, scaler._scale)
    return Scale(float(scaler.get_scale()), None)


def forget(scaler: GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    """The step did not happen: the next one may be unscaled again."""
    if scaler is not None:
        scaler._per_optimizer_states.pop(id(optimizer), None)


def replay(scaler: GradScaler, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
    """Makes the scaler what it is after a step of which it has seen nothing, before update()."""
    forget(scaler, optimizer)
    if scaler.is_enabled():
        scaler.scale(torch.zeros((), device=scaler._device))  # makes its tensors, as a loss does
        write_back(scaler, optimizer, skipped)


def write_back(scaler: GradScaler | None, optimizer: torch.optim.Optimizer, skipped: bool) -> None:
    """Writes what `update()` reads: whether any gradient in the world was not finite."""
    if scaler is not None:
        device = scaler._scale.device if scaler._scale is not None else torch.device("cpu")
        found = torch.full((), float(skipped), dtype=torch.float32, device=device)
        scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {device: found}
