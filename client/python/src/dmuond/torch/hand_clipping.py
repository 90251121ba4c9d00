"""Clipping by hand on replicas, which clips each rank's own gradient: told once.

A clipped gradient is what autograd has made times a factor that all parameters have in common, and
the joint norm of all gradients is the same in each step that was clipped, while the factor is not.
So a division by a constant, or by the number of tokens in a batch, is not taken for it.

Some values of a few gradients are kept in their hooks, and looked at in step(): in the first steps
and now and then afterwards. Joint norms are computed where these values have a common factor, in a
few steps at most. The host waits for no device.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dmuond.torch.notices import warn
from dmuond.torch.slots import Slot
from dmuond.torch.tensor_device import Answer, TensorDevice

_PROBES = 8  # gradients
_VALUES = 16  # of each
_VALUES_MIN = 16  # of all, that are not zero
_FIRST, _EVERY = 32, 16  # steps that are looked at
_NORMS_MAX = 8
_NORM_TOLERANCE = 1e-3
# How far factors may be apart that are one, by the bytes of an element: of fp32, of half precision.
_TOLERANCES = {4: 1e-4, 2: 2e-2}


class HandClipping:
    """Not for several threads. `close` removes the hooks."""

    def __init__(
        self, device: TensorDevice, slots: Sequence[Slot], parameters: Sequence[Tensor]
    ) -> None:
        """slots: replicas that train. parameters: all whose gradients may be clipped together."""
        self._device, self._parameters = device, parameters
        chosen = slots[:: -(-len(slots) // _PROBES)]
        self._tolerance = max(_TOLERANCES[slot.grad_dtype.itemsize] for slot in chosen)
        self._kept: dict[int, Tensor] = {}  # values that autograd has made, by place in `probes`
        self._probes = [slot.parameter for slot in chosen]
        self._steps = 0
        self._suspected = False
        self._answers: deque[Answer] = deque()
        self._seen: list[tuple[float, float]] = []  # factors and joint norms
        self._handles = [
            parameter.register_post_accumulate_grad_hook(_hook(weakref.ref(self), index))
            for index, parameter in enumerate(self._probes)
        ]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._kept = [], {}

    def keep(self, index: int) -> None:
        """Called by a hook."""
        if self._looks():
            values = _values(self._probes[index])
            if values is not None:
                self._kept[index] = values.clone()

    def _looks(self) -> bool:
        return self._suspected or self._steps < _FIRST or self._steps % _EVERY == 0

    def before_step(self, scale: Tensor | None) -> None:
        """scale: by which GradScaler.unscale_ has divided all gradients. May warn."""
        kept, self._kept = self._kept, {}
        pairs = [(was, _values(self._probes[index])) for index, was in kept.items()]
        there = [(was, now) for was, now in pairs if now is not None and now.shape == was.shape]
        if there and self._handles:
            was, now = (torch.cat(values).float() for values in zip(*there, strict=True))
            was = was if scale is None else was / scale
            norm = self._joint_norm() if self._suspected else was.new_zeros(())
            self._answers.append(self._device.bring(torch.cat([was, now, norm.view(1)])))
        self._steps += 1
        while self._answers and self._answers[0].is_known():
            self._judge(torch.as_tensor(self._answers.popleft().value()))

    def _joint_norm(self) -> Tensor:
        device = self._probes[0].device
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norms = torch._foreach_norm([each for each in gradients if each.device == device])
        return torch.linalg.vector_norm(torch.stack(norms).float())

    def _judge(self, brought: Tensor) -> None:
        *values, norm = brought.tolist()
        half = len(values) // 2
        pairs = zip(values[:half], values[half:], strict=True)
        factors = sorted(now / was for was, now in pairs if was)
        if len(factors) < _VALUES_MIN or not self._handles:
            return
        low, high, factor = factors[0], factors[-1], factors[len(factors) // 2]
        if not (low > 0 and high - low <= self._tolerance * factor < factor):
            return
        if factor > 1 - self._tolerance:
            return
        self._suspected = True
        if not norm:
            return
        self._seen.append((factor, norm))
        if any(
            abs(norm - other) <= _NORM_TOLERANCE * norm
            and abs(factor - before) > self._tolerance * factor
            for before, other in self._seen[:-1]
        ):
            self.close()
            warn(
                "dmuond: gradients were clipped between the backward pass and step() (all are "
                f"multiplied by one factor, {factor:.3g} now, and their joint norm is {norm:.4g} "
                "each time). On replicas that clips each rank's own gradient before the daemon "
                f"averages them: say max_grad_norm={norm:.4g} to the optimizer instead, which "
                "clips the average"
            )
        elif len(self._seen) == _NORMS_MAX:
            self.close()


def _values(parameter: Tensor) -> Tensor | None:
    """The first of its gradient; None where that does not lie row-major, or there is none."""
    gradient = parameter.grad
    if gradient is None or gradient.layout is not torch.strided or not gradient.is_contiguous():
        return None
    return gradient.detach().view(-1)[:_VALUES]


def _hook(reference: weakref.ref[HandClipping], index: int) -> Callable[[Tensor], None]:
    def hook(_: Tensor) -> None:
        clipping = reference()
        if clipping is not None:
            clipping.keep(index)

    # torch.compile of a function with the backward pass in it would trace what the hook does.
    return torch.compiler.disable(hook)
