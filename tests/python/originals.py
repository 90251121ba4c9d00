"""Two published Muons, written anew from their authors' definitions.

Independent on purpose: nothing here is imported from dmuond, tests/python/reference.py or
docs/maths.md, so that a formula which this project misread cannot agree with itself.

Keller Jordan's: https://kellerjordan.github.io/posts/muon/ and KellerJordan/Muon, muon.py. The
momentum is a running average, Nesterov's look-ahead averages the gradient with it once more, X is
cast to bf16 and divided by its norm plus 1e-7, five quintic steps follow, and the update is
multiplied by sqrt(max(1, rows / columns)). Weights decay by lr * weight_decay, which is 0.

Moonlight's: "Muon is Scalable for LLM Training", arXiv:2502.16982, section 2, and
MoonshotAI/Moonlight, examples/toy_train.py. The momentum is a sum, the look-ahead adds momentum
times the sum to the gradient, X is made and orthogonalised as Keller Jordan's, and the update is
multiplied by 0.2 * sqrt(max(rows, columns)), which gives it the RMS of AdamW's. Weights decay by
the unadjusted lr times 0.1.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


def orthogonalise(matrix: Tensor, precision: torch.dtype) -> Tensor:
    """Five quintic Newton-Schulz steps; `precision` is bf16 in both publications."""
    wide = matrix.shape[0] <= matrix.shape[1]
    x = (matrix if wide else matrix.T).to(precision)
    x = x / (torch.linalg.matrix_norm(x) + 1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return x if wide else x.T


class _Average:
    """Keller Jordan's momentum."""

    def __init__(self, like: Tensor):
        self.mean = torch.zeros_like(like)

    def look_ahead(self, gradient: Tensor, beta: float) -> Tensor:
        self.mean = torch.lerp(self.mean, gradient, 1 - beta)
        return torch.lerp(gradient, self.mean, beta)

    def plain(self, gradient: Tensor, beta: float) -> Tensor:
        self.look_ahead(gradient, beta)
        return self.mean


class _Sum:
    """Moonlight's momentum, SGD's."""

    def __init__(self, like: Tensor):
        self.sum = torch.zeros_like(like)

    def look_ahead(self, gradient: Tensor, mu: float) -> Tensor:
        self.sum = mu * self.sum + gradient
        return gradient + mu * self.sum

    def plain(self, gradient: Tensor, mu: float) -> Tensor:
        self.look_ahead(gradient, mu)
        return self.sum


@dataclass(frozen=True)
class Original:
    momentum: type
    scale: Callable[[int, int], float]  # of rows and columns
    weight_decay: float


KELLER = Original(_Average, lambda rows, cols: math.sqrt(max(1, rows / cols)), 0.0)
MOONLIGHT = Original(_Sum, lambda rows, cols: 0.2 * math.sqrt(max(rows, cols)), 0.1)


def train(
    original: Original,
    start: Tensor,
    steps: Iterable[tuple[Tensor, float, float]],
    precision: torch.dtype = torch.bfloat16,
    nesterov: bool = True,
) -> Tensor:
    """The weights after `steps` of gradient, learning rate and momentum, each.

    As published state is fp32 and products are bf16. With `precision` fp64 everything is fp64.
    """
    state = torch.float64 if precision is torch.float64 else torch.float32
    weight = start.to(state)
    momentum = original.momentum(weight)
    for gradient, rate, mu in steps:
        update_of = momentum.look_ahead if nesterov else momentum.plain
        direction = orthogonalise(update_of(gradient.to(state), mu), precision)
        weight = weight * (1 - rate * original.weight_decay)
        weight = weight - rate * original.scale(*weight.shape) * direction.to(state)
    return weight
