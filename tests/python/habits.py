"""What the tests of ordinary PyTorch code share: a model, its data, and torch's own optimizers.

Both sides orthogonalise in fp32 here: in bf16 two correct orders of operation differ by 3e-2, and a
training loop amplifies that. test_conformance.py compares bf16 on fixed gradients.
"""

import contextlib
import unittest.mock

import dmuond.torch
import torch
from torch import nn

LR, ADAMW_LR, STEPS = 0.02, 1e-3, 6
TOLERANCE = 5e-5  # of what training changes; the largest difference that was measured is 1.4e-5
WORDS = 11


def newton_schulz_in_fp32(grad, ns_coefficients, ns_steps, eps):
    x = grad.T if grad.size(0) > grad.size(1) else grad
    x = x / x.norm().clamp(min=eps)
    a, b, c = ns_coefficients
    for _ in range(ns_steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if grad.size(0) > grad.size(1) else x


@contextlib.contextmanager
def torch_in_fp32():
    """torch.optim.Muon orthogonalises in fp32."""
    with unittest.mock.patch.object(
        torch.optim._muon, "_zeropower_via_newtonschulz", newton_schulz_in_fp32
    ):
        yield


class Model(nn.Module):
    """Sizes that no number of ranks divides, and some smaller than that number."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 24)
        self.up = nn.Linear(24, 40)
        self.down = nn.Linear(40, 24, bias=False)
        self.narrow = nn.Linear(24, 5)
        self.wide = nn.Linear(5, 24, bias=False)
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, WORDS, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(torch.relu(self.up(x)))
        return self.head(self.norm(x + self.wide(torch.tanh(self.narrow(x)))))


MATRICES = ("up.weight", "down.weight", "narrow.weight", "wide.weight")


def make_model(seed: int = 0) -> Model:
    """On torch's default device, with values that the CPU has drawn."""
    torch.manual_seed(seed)
    with torch.device("cpu"):
        model = Model()
    return model.to(torch.get_default_device())


def batch(step: int, rank: int = 0):
    generator = torch.Generator("cpu").manual_seed(100 + step + 1000 * rank)
    drawn = torch.randint(0, WORDS, (4, 9), generator=generator, device="cpu")
    return drawn.to(torch.get_default_device())


def loss_of(model, step: int, rank: int = 0):
    tokens = batch(step, rank)
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def loss_of_all(model, step: int, world: int):
    """The mean of all ranks' losses: its gradient is what `world` ranks together compute."""
    return torch.stack([loss_of(model, step, rank) for rank in range(world)]).mean()


class TorchOptimizers:
    """torch.optim.Muon for what dmuond routes to muon, AdamW for the rest; steps as one."""

    def __init__(self, model, lr=LR, adamw_lr=ADAMW_LR, matrices=MATRICES):
        named = dict(model.named_parameters())
        rest = [p for name, p in named.items() if name not in matrices]
        self.parts = [
            torch.optim.Muon(
                [named[name] for name in matrices], lr=lr, weight_decay=0.1, momentum=0.95
            ),
            torch.optim.AdamW(rest, lr=adamw_lr, weight_decay=0.1, betas=(0.9, 0.999)),
        ]

    def step(self):
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none=True):
        for part in self.parts:
            part.zero_grad(set_to_none)


def make_optimizer(model, lr=LR, **options) -> dmuond.torch.Muon:
    """With torch's preset, in fp32, unless told otherwise."""
    options = {"adamw_lr": ADAMW_LR, "preset": "torch", "verbose": False} | options
    options.setdefault("ns_dtype", torch.float32)
    return dmuond.torch.Muon(model, lr, **options)


def weights(model) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_weights(got, want, start, tolerance=TOLERANCE):
    """By name: the change of each is the same, relative to its size."""
    assert got.keys() == want.keys()
    for name in want:
        change = (want[name] - start[name]).norm()
        difference = (got[name] - want[name]).norm()
        assert difference <= tolerance * change + 1e-7, f"{name}: {difference / change:.2e}"


def assert_same_training(model, reference, start, tolerance=TOLERANCE):
    assert_same_weights(weights(model), weights(reference), start, tolerance)


def plain_loop(model, optimizer, steps=range(STEPS)):
    for step in steps:
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def run_both(muon, loop, **options):
    """The same script with dmuond and with torch's optimizers."""
    model, reference = make_model(), make_model()
    start = weights(reference)
    optimizer = muon(model, **options)
    loop(model, optimizer)
    loop(reference, TorchOptimizers(reference))
    assert_same_training(model, reference, start)
    return model, optimizer


def train_torch(world: int, steps: int = STEPS, loop=None) -> dict[str, torch.Tensor]:
    """Weights after training on all ranks' data in this process, by torch's optimizers."""
    model = make_model()
    optimizer = TorchOptimizers(model)
    for step in range(steps):
        loss_of_all(model, step, world).backward()
        if loop is not None:
            loop(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)
