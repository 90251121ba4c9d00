"""Steps of each preset on this GPU against the original's mathematics in PyTorch on the same one.

torch.optim.Muon itself; Keller Jordan's and Moonlight's as published (tests/python/originals.py);
DMuon's from the formulas of docs/maths.md with bf16 products; and all four in fp64. With gradients
of several sizes: at 1e-12 the originals' eps decides the update. Prints a row per case.

    preset_steps.py [FOLDER OF preset_steps]
"""

import struct
import subprocess
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "python"))  # in the bundle: beside
import originals

STEPS = 12
LIMIT = 3e-2  # of the accumulated change of weights; bf16 products differ from others by as much
# Of the gradients' entries, beside 1. These begin at zero weights, whose rounding hides nothing.
SIZES = (1e-12, 1e-5, 1e5)
SIZED = ((512, 512), (256, 1024), (1024, 256))
SHAPES = ((512, 512), (256, 1024), (1024, 256), (511, 513), (2048, 1024), (1, 640), (96, 4000))
CASES = [(shape, 1.0) for shape in SHAPES] + [(shape, size) for size in SIZES for shape in SIZED]
JORDAN = [(3.4445, -4.7750, 2.0315)] * 5
SAFETY = 1.05
POLAR_EXPRESS = [
    (a / SAFETY, b / SAFETY**3, c / SAFETY**5)
    for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    )
]
ORIGINALS = {"keller": originals.KELLER, "moonlight": originals.MOONLIGHT}
WEIGHT_DECAY = {"torch": 0.1, "keller": 0.0, "moonlight": 0.1, "dmuon": 0.0}


def rates(step: int) -> tuple[float, float]:
    return 0.02 * (1 - step / 20), 0.85 + 0.01 * step


def direction(update: torch.Tensor, preset: str, dtype: torch.dtype) -> torch.Tensor:
    wide = update.shape[0] <= update.shape[1]
    x = (update if wide else update.T).to(dtype)
    x = x / (x.norm().clamp(min=1e-7) if preset == "torch" else x.norm())
    for a, b, c in JORDAN if preset == "torch" else POLAR_EXPRESS:
        gram = x @ x.T
        x = a * x + (b * gram + c * (gram @ gram)) @ x
    return (x if wide else x.T).to(update.dtype)


def by_formula(preset: str, start, gradients, products: torch.dtype) -> torch.Tensor:
    """By the rules of torch.optim.Muon, or of DMuon; the state is fp64."""
    average = preset == "torch"
    rows, cols = start.shape
    scale = max(1.0, rows / cols) ** 0.5 if average else 0.2 * max(rows, cols) ** 0.5
    weight = start.double()
    buffer = torch.zeros_like(weight)
    for step, gradient in enumerate(gradients):
        rate, mu = rates(step)
        part = 1 - mu if average else 1.0
        buffer = mu * buffer + part * gradient.double()
        update = part * gradient.double() + mu * buffer
        weight = weight * (1 - rate * WEIGHT_DECAY[preset])
        weight = weight - rate * scale * direction(update, preset, products)
    return weight


def as_published(preset: str, start, gradients, products: torch.dtype) -> torch.Tensor:
    if preset not in ORIGINALS:
        return by_formula(preset, start, gradients, products)
    steps = ((gradient, *rates(step)) for step, gradient in enumerate(gradients))
    return originals.train(ORIGINALS[preset], start, steps, products).double()


def by_torch(start, gradients) -> torch.Tensor:
    parameter = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.Muon([parameter], lr=rates(0)[0], weight_decay=WEIGHT_DECAY["torch"])
    for step, gradient in enumerate(gradients):
        rate, mu = rates(step)
        optimizer.param_groups[0].update(lr=rate, momentum=mu)
        parameter.grad = gradient.clone()
        optimizer.step()
    return parameter.detach().double()


def by_dmuond(program: Path, preset: str, start, gradients) -> torch.Tensor:
    parts = [start.cpu().numpy().tobytes()]
    for step, gradient in enumerate(gradients):
        parts.append(struct.pack("<3d", *rates(step), WEIGHT_DECAY[preset]))
        parts.append(gradient.cpu().numpy().tobytes())
    command = [program, preset, *map(str, start.shape), str(len(gradients))]
    done = subprocess.run(command, input=b"".join(parts), stdout=subprocess.PIPE, check=True)
    weights = torch.frombuffer(bytearray(done.stdout), dtype=torch.float32)
    return weights.reshape(start.shape).to(start.device).double()


def main(folder: Path) -> int:
    torch.backends.cuda.matmul.allow_tf32 = False
    wrong = 0
    print(f"# {torch.cuda.get_device_name()}, torch {torch.__version__}, {STEPS} steps")
    print("# difference of the accumulated change of weights, relative (Frobenius)")
    print(f"#{'preset':<10} {'rows':>6} {'cols':>6} {'size':>6} {'fp64':>9} {'original':>9} #wrong")
    for preset in WEIGHT_DECAY:
        for number, (shape, size) in enumerate(CASES):
            generator = torch.Generator("cuda").manual_seed(number)
            normal = [
                torch.randn(shape, generator=generator, device="cuda") for _ in range(STEPS + 2)
            ]
            start, drift = 0.1 * normal[0] * (size == 1), normal[1]
            gradients = [(g + 0.5 * drift) * size for g in normal[2:]]
            got = by_dmuond(folder / "preset_steps", preset, start, gradients)
            exact = as_published(preset, start, gradients, torch.float64)
            original = (
                by_torch(start, gradients)
                if preset == "torch"
                else as_published(preset, start, gradients, torch.bfloat16)
            )
            change = (exact - start.double()).norm()
            errors = [float((got - other).norm() / change) for other in (exact, original)]
            bad = sum(not error <= LIMIT for error in errors)
            wrong += bad
            print(
                f" {preset:<10} {shape[0]:>6} {shape[1]:>6} {size:>6g}"
                f" {errors[0]:9.1e} {errors[1]:9.1e} {bad:>6}"
            )
    print("# all right" if wrong == 0 else "# WRONG RESULTS")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent).resolve()))
