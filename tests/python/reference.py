"""The mathematics of dmuon and torch in fp64, written from the formulas of docs/maths.md alone.

Independent of the client and the daemon: nothing here is imported from dmuond. The other presets
are compared with their authors' publications: originals.py.
"""

from dataclasses import dataclass

import numpy as np

JORDAN = [(3.4445, -4.7750, 2.0315)] * 5
_POLAR_EXPRESS = [
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
]
SAFETY = 1.05
POLAR_EXPRESS = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in _POLAR_EXPRESS]


@dataclass(frozen=True)
class Preset:
    momentum_form: str
    scale: str
    coefficients: tuple
    norm: str  # "exact", "schatten4", "clamped_eps"
    weight_decay: float


PRESETS = {
    "dmuon": Preset("sum", "match_rms_adamw", tuple(POLAR_EXPRESS), "exact", 0.0),
    "torch": Preset("ema", "original", tuple(JORDAN), "clamped_eps", 0.1),
}


def scale_of(name: str, rows: int, cols: int) -> float:
    return {
        "match_rms_adamw": 0.2 * max(rows, cols) ** 0.5,
        "original": max(1.0, rows / cols) ** 0.5,
        "spectral": (rows / cols) ** 0.5,
        "none": 1.0,
    }[name]


def newton_schulz(u: np.ndarray, coefficients, norm: str, eps: float = 1e-7) -> np.ndarray:
    """Standard form; the Gram form is the same polynomial."""
    x = u if u.shape[0] <= u.shape[1] else u.T
    size = np.linalg.norm(x)
    if norm in ("exact", "schatten4"):
        if size == 0:
            return np.zeros_like(u)
        x = x / size
        if norm == "schatten4":
            x = x / np.linalg.norm(x @ x.T) ** 0.5
    else:
        x = x / max(size, eps)
    for a, b, c in coefficients:
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return x if u.shape[0] <= u.shape[1] else x.T


class MuonMatrix:
    """One matrix under Muon, in fp64."""

    def __init__(
        self,
        weight,
        preset: str,
        nesterov: bool = True,
        scale: str | None = None,
        norm: str | None = None,
    ):
        self.weight = np.array(weight, dtype=np.float64)
        self.preset = PRESETS[preset]
        self.nesterov = nesterov
        self.scale = scale or self.preset.scale
        self.norm = norm or self.preset.norm
        self.buffer = np.zeros_like(self.weight)

    def step(self, gradient, lr: float, momentum: float, weight_decay: float) -> None:
        g = np.array(gradient, dtype=np.float64)
        mu = momentum
        if self.preset.momentum_form == "sum":
            self.buffer = mu * self.buffer + g
            update = g + mu * self.buffer if self.nesterov else self.buffer
        else:
            self.buffer = mu * self.buffer + (1 - mu) * g
            update = (1 - mu) * g + mu * self.buffer if self.nesterov else self.buffer
        direction = newton_schulz(update, self.preset.coefficients, self.norm)
        self.weight *= 1 - lr * weight_decay
        self.weight -= lr * scale_of(self.scale, *self.weight.shape) * direction


class AdamW:
    """One tensor under AdamW, in fp64."""

    def __init__(self, weight):
        self.weight = np.array(weight, dtype=np.float64)
        self.m = np.zeros_like(self.weight)
        self.v = np.zeros_like(self.weight)
        self.t = 0

    def step(self, gradient, lr, betas, eps, weight_decay) -> None:
        g = np.array(gradient, dtype=np.float64)
        self.t += 1
        self.weight *= 1 - lr * weight_decay
        self.m = betas[0] * self.m + (1 - betas[0]) * g
        self.v = betas[1] * self.v + (1 - betas[1]) * g * g
        m_hat = self.m / (1 - betas[0] ** self.t)
        v_hat = self.v / (1 - betas[1] ** self.t)
        self.weight -= lr * m_hat / (np.sqrt(v_hat) + eps)


def relative_difference(got, want, start) -> float:
    """Frobenius difference of the accumulated weight changes."""
    change = np.asarray(want, np.float64) - np.asarray(start, np.float64)
    difference = np.asarray(got, np.float64) - np.asarray(want, np.float64)
    return float(np.linalg.norm(difference) / max(np.linalg.norm(change), 1e-300))
