"""GradScaler: the scale travels with the step, and every rank's scaler learns the common result."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.amp.grad_scaler import OptState

if TYPE_CHECKING:
    from torch.amp import GradScaler

# torch warns at each step of an optimizer that takes the scaler itself. The other way it offers
# does not let the optimizer report what the ranks found together.
warnings.filterwarnings(
    "ignore", message="GradScaler is going to stop passing itself", category=FutureWarning
)


@dataclass(frozen=True)
class Scale:
    loss_scale: float  # that the gradients still carry
    divided_by: torch.Tensor | None  # by unscale_(), in place

    @property
    def unscaled(self) -> bool:
        return self.divided_by is not None


def read(scaler: GradScaler | None, optimizer: torch.optim.Optimizer) -> Scale:
    if scaler is None:
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
