#!/usr/bin/env python3
"""How exact five steps of Newton-Schulz are on a real run's momenta, and whether four would do.

    muon_spectra.py --text=/usr/lib/python3.12 --out=spectra.json

One GPU trains a decoder of 150 million parameters on the bytes of text files, the blocks' matrices
with Muon (docs/maths.md, `dmuon`, in fp32 arithmetic), the rest with AdamW. At some steps it takes
the singular values of what Newton-Schulz is given, in fp64, and applies polynomials to them: those
of `dmuon`, with the Frobenius and with the Schatten-4 norm; Jordan's, of the `torch` preset; and
lists of four steps, derived for the smallest singular value that they are to lift. A row has the
distance from the polar factor, relative to its norm, and what the last of five steps could tell of
it ("residual"), as the median over blocks.

Needs torch and numpy. Takes half a minute on an H200 for each of --at.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
import train_bench

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python"))
from reference import JORDAN, POLAR_EXPRESS, SAFETY

if TYPE_CHECKING:
    from collections.abc import Iterator

SHAPE = train_bench.Shape(1024, 2816, 12, 16, 16, 256)
BATCH, LENGTH = 32, 1024
MOMENTUM, LEARNING_RATE, WARM_UP = 0.95, 1e-3, 50
SMALLEST = (1e-3, 3e-3, 5e-3, 1e-2)  # singular values, of lists of four steps
KINDS = ("query", "key", "value", "out", "gate", "up", "down")

Polynomial = tuple[float, float, float]


def best_quintic(low: float, high: float) -> Polynomial:
    """The odd polynomial a x + b x^3 + c x^5 that stays closest to 1 on [low, high]."""
    if low / high >= 1 - 5e-6:
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    inner = np.array([(3 * low + high) / 4, (low + 3 * high) / 4])
    last = np.inf
    while True:  # Remez: the error alternates at both ends and at two extrema
        points = np.array([low, *inner, high])
        signs = np.array([1, -1, 1, -1])
        a, b, c, error = np.linalg.solve(
            np.stack([points, points**3, points**5, signs], axis=1), np.ones(4)
        )
        if abs(abs(error) - last) < 1e-15:
            return a, b, c
        last = abs(error)
        inner = np.sort(np.sqrt(np.roots([5 * c, 3 * b, a]).real))


def polar_express(low: float, steps: int, cushion: float = 0.02407327424182761) -> list[Polynomial]:
    """Greedy optimal composition on [low, 1] (Amsel et al., arXiv 2505.16932)."""
    high, result = 1.0, []
    for _ in range(steps):
        a, b, c = best_quintic(max(low, cushion * high), high)

        def value(x: float, a: float = a, b: float = b, c: float = c) -> float:
            return a * x + b * x**3 + c * x**5

        centre = 2 / (value(low) + value(high)) if cushion * high > low else 1.0
        result.append((a * centre, b * centre, c * centre))
        low = value(low) * centre
        high = 2 - low
    return result


def scaled(polynomials: list[Polynomial]) -> list[Polynomial]:
    return [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in polynomials]


LISTS = {
    "five": POLAR_EXPRESS,
    "jordan": JORDAN,
    **{f"four from {low:g}": scaled(polar_express(low, 4)) for low in SMALLEST},
}


def after(polynomials: list[Polynomial], values: torch.Tensor) -> torch.Tensor:
    for a, b, c in polynomials:
        values = a * values + b * values**3 + c * values**5
    return values


def distance(polynomials: list[Polynomial], values: torch.Tensor) -> float:
    return (after(polynomials, values) - 1).square().mean().sqrt().item()


def residual(values: torch.Tensor) -> float:
    """Of the Gram matrix R that the last of five steps forms: |I - R|, relative to |I|."""
    return (after(POLAR_EXPRESS[:-1], values).square() - 1).square().mean().sqrt().item()


def figures(matrix: torch.Tensor) -> dict[str, float]:
    values = torch.linalg.svdvals(matrix.double())
    values = values / values.norm()
    tight = values.pow(4).sum().pow(0.25)
    result = {
        "gain": 1 / tight.item(),
        "smallest": (values.min() / tight).item(),
        "residual": residual(values / tight),
        "five, frobenius": distance(LISTS["five"], values),
        "jordan, frobenius": distance(LISTS["jordan"], values),
    }
    return result | {name: distance(steps, values / tight) for name, steps in LISTS.items()}


def orthogonalised(u: torch.Tensor) -> torch.Tensor:
    x = u / u.norm().clamp(min=1e-30)
    x = x.T if u.shape[0] > u.shape[1] else x
    for a, b, c in LISTS["five"]:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if u.shape[0] > u.shape[1] else x


def batches(folder: Path, seed: int = 1) -> Iterator[torch.Tensor]:
    """Random pieces of the bytes of all text in a folder."""
    files = sorted(itertools.chain(folder.rglob("*.py"), folder.rglob("*.txt")))
    data = b"\n".join(path.read_bytes() for path in files if path.is_file())
    print(f"# {len(data) / 1e6:.1f} MB of {len(files)} files in {folder}")
    if len(data) < 1000 * LENGTH:
        raise SystemExit(f"muon_spectra: {folder} has too little text")
    text = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    chance = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(text) - LENGTH, (BATCH,), generator=chance)
        yield torch.stack([text[s : s + LENGTH] for s in starts]).long().cuda()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--at", type=int, nargs="*", default=[0, 60, 200, 500, 1000])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(1)
    torch.backends.cuda.matmul.allow_tf32 = True
    model = train_bench.make_model(SHAPE).cuda().float()
    matrices = {
        f"{number}.{kind}": getattr(block, kind).weight
        for number, block in enumerate(model.blocks)
        for kind in KINDS
    }
    buffers = {name: torch.zeros_like(weight) for name, weight in matrices.items()}
    by_muon = {id(weight) for weight in matrices.values()}
    rest = [p for p in model.parameters() if id(p) not in by_muon]
    optimizer = torch.optim.AdamW(rest, LEARNING_RATE, (0.9, 0.95))
    results: dict[str, dict] = {}
    columns = ["gain", "smallest", "residual", "five, frobenius", "jordan, frobenius", *LISTS]
    print("# " + " ".join(f"{name:>17}" for name in ["step", "loss", "matrices", *columns]))
    data = batches(options.text)
    for step in range(max(options.at) + 1):
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP)
        tokens = next(data)
        model.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        given = {}
        with torch.no_grad():
            for name, weight in matrices.items():
                buffers[name].mul_(MOMENTUM).add_(weight.grad)
                given[name] = weight.grad + MOMENTUM * buffers[name]
                scale = 0.2 * max(weight.shape) ** 0.5
                weight.sub_(rate * scale * orthogonalised(given[name]))
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()
        if step not in options.at:
            continue
        found = {name: figures(matrix) for name, matrix in given.items()}
        results[str(step)] = {"loss": loss.item(), "matrices": found}
        for kind in KINDS:
            of_kind = [found[name] for name in found if name.endswith("." + kind)]
            row = [statistics.median(entry[column] for entry in of_kind) for column in columns]
            cells = [f"{step:>17}", f"{loss.item():>17.3f}", f"{kind:>17}"]
            cells += [f"{value:>17.4f}" for value in row]
            print("  " + " ".join(cells), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
