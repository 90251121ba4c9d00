"""Every preset reproduces its original: fixed gradients, schedules, many shapes."""

import functools

import dmuond.torch
import numpy as np
import originals
import pytest
import reference
import torch
from dmuond.torch import Experts, RowBlocks
from torch import nn

STEPS = 12
SHAPES = {
    "square": (64, 64),
    "wide": (48, 160),
    "tall": (160, 48),
    "row": (1, 96),
    "column": (96, 1),
    "odd": (511, 513),
    "qkv": (96, 64),
    "grouped": (64, 48),  # queries, keys and values of different heights
    "experts": (3, 32, 48),
}
VIEWS = {"qkv": "qkv", "grouped": RowBlocks(32, 16, 16), "experts": Experts()}
BLOCKS = {
    "qkv": [np.s_[:32], np.s_[32:64], np.s_[64:]],
    "grouped": [np.s_[:32], np.s_[32:48], np.s_[48:]],
    "experts": [np.s_[0], np.s_[1], np.s_[2]],
}
OTHERS = {"bias": (33,), "table": (70, 50)}
# The same with gradients of these sizes: 1e-12 is where the originals' eps of 1e-7 decides the
# update, 1e-5 is what gradients are in practice, at 1e5 no eps counts.
SIZES = {"tiny": 1e-12, "little": 1e-5, "huge": 1e5}
SHAPES |= {f"{name}_{size}": SHAPES[name] for name in ("square", "wide", "tall") for size in SIZES}
OTHERS |= {f"bias_{size}": OTHERS["bias"] for size in SIZES}
SMALL = tuple(name for name in SHAPES if name != "odd")
ADAMW_LR, BETAS, EPS = 3e-3, (0.9, 0.98), 1e-8


class Tensors(nn.Module):
    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        for name, shape in {**SHAPES, **OTHERS}.items():
            value = 0.1 * torch.randn(shape, generator=generator)
            if size_of(name) != 1.0:  # so that rounding a weight does not hide a small change
                value.zero_()
            self.register_parameter(name, nn.Parameter(value))


def size_of(name: str) -> float:
    return SIZES.get(name.rpartition("_")[2], 1.0)


def gradients(step: int, name: str, shape) -> torch.Tensor:
    """Of sizes that differ from step to step by 100."""
    generator = torch.Generator().manual_seed(1000 * step + sum(name.encode()))
    return torch.randn(shape, generator=generator) * (0.01 if step % 2 else 1.0) * size_of(name)


def adamw_lr_at(step: int) -> float:
    return ADAMW_LR * (1 - step / (2 * STEPS))


def lr_at(step: int) -> float:
    return 0.02 * (1.0 - step / (2 * STEPS))


def momentum_at(step: int) -> float:
    return 0.85 + 0.1 * step / STEPS


def train(address: str, preset: str, **options):
    """Start, and weights after all steps, by name; the optimizer, closed."""
    model = Tensors()
    start = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    optimizer = dmuond.torch.Muon(
        model,
        lr_at(0),
        adamw_lr=ADAMW_LR,
        preset=preset,
        betas=BETAS,
        eps=EPS,
        views=VIEWS,
        route=lambda name, p: "muon" if p.ndim > 1 and name != "table" else None,
        address=address,
        verbose=False,
        **options,
    )
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["momentum"] = momentum_at(step)
            group["lr"] = lr_at(step) if group["route"] == "muon" else adamw_lr_at(step)
        for name, p in model.named_parameters():
            p.grad = gradients(step, name, p.shape)
        optimizer.step()
    optimizer.close()
    return (
        start,
        {name: p.detach().numpy().copy() for name, p in model.named_parameters()},
        optimizer,
    )


def blocks_of(name: str):
    return BLOCKS.get(name, [np.s_[:]])


ORIGINALS = {"keller": originals.KELLER, "moonlight": originals.MOONLIGHT}


def expected_original(name: str, preset: str, precision, **options) -> np.ndarray:
    """Keller Jordan's or Moonlight's publication, in bf16 as published, or in fp64."""
    start = getattr(Tensors(), name).detach()
    out = np.empty(start.shape)
    for block in blocks_of(name):
        steps = (
            (gradients(step, name, start.shape)[block], lr_at(step), momentum_at(step))
            for step in range(STEPS)
        )
        out[block] = originals.train(ORIGINALS[preset], start[block], steps, precision, **options)
    return out


@functools.cache  # the reference takes longer than what it is compared with
def expected_fp64(name: str, preset: str, **options) -> np.ndarray:
    if preset in ORIGINALS:
        return expected_original(name, preset, torch.float64, **options)
    start = getattr(Tensors(), name).detach().numpy()
    out = np.empty(start.shape)
    decay = reference.PRESETS[preset].weight_decay
    for block in blocks_of(name):
        unit = reference.MuonMatrix(start[block], preset, **options)
        for step in range(STEPS):
            g = gradients(step, name, start.shape).numpy()[block]
            unit.step(g, lr_at(step), momentum_at(step), decay)
        out[block] = unit.weight
    return out


def expected_torch_muon(name: str, start: np.ndarray, **options) -> np.ndarray:
    blocks = blocks_of(name)
    parameters = [nn.Parameter(torch.from_numpy(start[b].copy())) for b in blocks]
    optimizer = torch.optim.Muon(parameters, lr=lr_at(0), weight_decay=0.1, **options)
    for step in range(STEPS):
        optimizer.param_groups[0].update(lr=lr_at(step), momentum=momentum_at(step))
        g = gradients(step, name, start.shape)
        for block, p in zip(blocks, parameters, strict=True):
            p.grad = g[block].clone()
        optimizer.step()
    out = np.empty(start.shape)
    for block, p in zip(blocks, parameters, strict=True):
        out[block] = p.detach().numpy()
    return out


@pytest.fixture
def address(daemons):
    return daemons.start(1, 2)[0]


def worst(start, got, expected, names=tuple(SHAPES)) -> dict[str, float]:
    return {
        name: reference.relative_difference(got[name], expected(name), start[name])
        for name in names
    }


def expect_within(bound, tiny, start, got, expected, names=SMALL) -> None:
    """`tiny`: for gradients of 1e-12, whose products are small, so that less is rounded."""
    differences = worst(start, got, expected, names)
    beyond = {
        name: f"{difference:.1e}"
        for name, difference in differences.items()
        if not difference <= (tiny if size_of(name) == 1e-12 else bound)
    }
    assert not beyond


# Three times the largest difference that was measured: docs/maths.md, section 2, has the figures.
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
def test_torch_preset_equals_torch_optim_muon(address, scale):
    start, got, _ = train(address, "torch", scale=scale)
    expect_within(
        8e-3,
        1.6e-4,
        start,
        got,
        lambda name: expected_torch_muon(name, start[name], adjust_lr_fn=scale),
        # Once is enough for the large one: torch takes 10 s for its bf16 products.
        tuple(SHAPES) if scale == "original" else SMALL,
    )


# These round more often than dmuond and torch do: b A, c A A and their sum, each to bf16.
@pytest.mark.parametrize(("preset", "tiny"), [("keller", 1e-3), ("moonlight", 3e-2)])
def test_presets_equal_what_their_authors_publish(address, preset, tiny):
    start, got, _ = train(address, preset)
    expect_within(
        3e-2, tiny, start, got, lambda name: expected_original(name, preset, torch.bfloat16)
    )


SMALL_STACKS = {"2x2": (24, 2, 2), "3x3": (24, 3, 3), "2x33": (24, 2, 33), "8x8": (24, 8, 8)}


# In what is nearly cancelled rounding is large: docs/maths.md, section 2, has the figures.
@pytest.mark.parametrize("preset", ["keller", "moonlight"])
def test_small_matrices_are_farther_from_what_their_authors_publish(address, preset):
    model = nn.Module()
    for name, shape in SMALL_STACKS.items():
        generator = torch.Generator().manual_seed(1)
        stack = nn.Parameter(0.1 * torch.randn(shape, generator=generator))
        model.register_parameter(name, stack)
    starts = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = dmuond.torch.Muon(
        model, lr_at(0), preset=preset, views={"*": Experts()}, address=address, verbose=False
    )
    for step in range(STEPS):
        optimizer.param_groups[0].update(lr=lr_at(step), momentum=momentum_at(step))
        for name, p in model.named_parameters():
            p.grad = gradients(step, name, p.shape)
        optimizer.step()
    optimizer.close()
    for name, p in model.named_parameters():
        found = [gradients(step, name, p.shape) for step in range(STEPS)]
        differences = []
        for matrix, start in enumerate(starts[name]):
            steps = ((g[matrix], lr_at(s), momentum_at(s)) for s, g in enumerate(found))
            expected = originals.train(ORIGINALS[preset], start, steps).numpy()
            got = p.detach()[matrix].numpy()
            differences.append(reference.relative_difference(got, expected, start.numpy()))
        assert max(differences) <= (4e-2 if name == "8x8" else 0.2), name
        assert np.median(differences) <= 3e-2, name


@pytest.mark.parametrize("preset", ["keller", "moonlight", "torch"])
def test_bf16_presets_follow_their_formulas(address, preset):
    start, got, _ = train(address, preset)
    differences = worst(start, got, lambda name: expected_fp64(name, preset))
    assert max(differences.values()) <= 3e-2, differences


def test_dmuon_preset_follows_its_formulas(address):
    start, got, _ = train(address, "dmuon")
    differences = worst(start, got, lambda name: expected_fp64(name, "dmuon"))
    assert max(differences.values()) <= 5e-3, differences


@pytest.mark.parametrize(
    ("preset", "bound"), [("dmuon", 2e-5), ("keller", 5e-5), ("moonlight", 5e-5), ("torch", 5e-5)]
)
def test_in_fp32_every_preset_equals_fp64(address, preset, bound):
    start, got, _ = train(address, preset, ns_dtype=torch.float32)
    differences = worst(start, got, lambda name: expected_fp64(name, preset))
    assert max(differences.values()) <= bound, differences


@pytest.mark.parametrize("scale", ["spectral", "none", "original"])
def test_scale_can_be_overridden(address, scale):
    start, got, _ = train(address, "dmuon", scale=scale, ns_dtype=torch.float32)
    differences = worst(start, got, lambda name: expected_fp64(name, "dmuon", scale=scale), SMALL)
    assert max(differences.values()) <= 2e-5, differences


def test_restarts_can_be_overridden(address):
    # Nearly square matrices restart before steps 2 and 4 in any case, square ones before each.
    start, got, _ = train(address, "dmuon", ns_restarts=(2, 4))
    _, usual, _ = train(address, "dmuon")
    assert not np.array_equal(got["square"], usual["square"])
    assert np.array_equal(got["odd"], usual["odd"])
    assert not np.array_equal(got["wide"], usual["wide"])
    differences = worst(start, got, lambda name: expected_fp64(name, "dmuon"), SMALL)
    assert max(differences.values()) <= 5e-3, differences


@pytest.mark.parametrize(
    ("preset", "dtype", "bound"),
    [("dmuon", None, 5e-3), ("dmuon", torch.float32, 2e-5), ("torch", torch.float32, 5e-5)],
)
def test_schatten4_norm_follows_its_formulas(address, preset, dtype, bound):
    start, got, _ = train(address, preset, ns_norm="schatten4", ns_dtype=dtype)
    differences = worst(
        start, got, lambda name: expected_fp64(name, preset, norm="schatten4"), SMALL
    )
    assert max(differences.values()) <= bound, differences


def test_nesterov_can_be_turned_off(address):
    start, got, _ = train(address, "keller", nesterov=False, ns_dtype=torch.float32)
    differences = worst(
        start, got, lambda name: expected_fp64(name, "keller", nesterov=False), SMALL
    )
    assert max(differences.values()) <= 5e-5, differences


def test_adamw_parameters_equal_torch_optim_adamw(address):
    start, got, _ = train(address, "moonlight")
    for name, shape in OTHERS.items():
        p = nn.Parameter(torch.from_numpy(start[name].copy()))
        optimizer = torch.optim.AdamW([p], lr=ADAMW_LR, betas=BETAS, eps=EPS, weight_decay=0.1)
        for step in range(STEPS):
            optimizer.param_groups[0]["lr"] = adamw_lr_at(step)
            p.grad = gradients(step, name, shape)
            optimizer.step()
        difference = reference.relative_difference(got[name], p.detach().numpy(), start[name])
        assert difference <= 1e-5, name


def test_direction_does_not_depend_on_the_gradients_size(address):
    """For dmuon, norms of 1e-20 and 1e20 give what 1 gives."""
    results = []
    for size in (1.0, 1e-20, 1e20):
        model = nn.Linear(40, 30, bias=False)
        torch.manual_seed(0)
        nn.init.normal_(model.weight)
        start = model.weight.detach().clone()
        optimizer = dmuond.torch.Muon(model, 0.1, address=address, verbose=False)
        for step in range(3):
            model.weight.grad = gradients(step, "x", (30, 40)) * size
            optimizer.step()
        results.append(model.weight.detach() - start)
        optimizer.close()
    for other in results[1:]:
        assert (other - results[0]).norm() <= 5e-3 * results[0].norm()


def orthogonalised(address, preset: str, given: dict[str, torch.Tensor]) -> dict:
    """One orthogonalisation of each matrix: a step without momentum, scale or decay."""
    model = nn.Module()
    for name, matrix in given.items():
        model.register_parameter(name, nn.Parameter(torch.zeros_like(matrix)))
    optimizer = dmuond.torch.Muon(
        model,
        1.0,
        adamw_lr=1.0,
        preset=preset,
        scale="none",
        route=[("*", "muon")],
        momentum=0.0,
        nesterov=False,
        weight_decay=0.0,
        address=address,
        verbose=False,
    )
    for name, p in model.named_parameters():
        p.grad = given[name].clone()
    optimizer.step()
    optimizer.close()
    return {name: -p.detach().double() for name, p in model.named_parameters()}


def by_torch(matrix: torch.Tensor) -> torch.Tensor:
    """As torch.optim.Muon orthogonalises, in bf16."""
    return torch.optim._muon._zeropower_via_newtonschulz(
        matrix, reference.JORDAN[0], len(reference.JORDAN), 1e-7
    ).double()


def in_fp64(matrix: torch.Tensor, preset: str) -> torch.Tensor:
    if preset in ORIGINALS:
        return originals.orthogonalise(matrix, torch.float64)
    made = reference.PRESETS[preset]
    return torch.from_numpy(
        reference.newton_schulz(matrix.double().numpy(), made.coefficients, made.norm)
    )


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def with_spectrum(rows: int, cols: int, sigma, generator) -> torch.Tensor:
    sides = (
        torch.linalg.qr(torch.randn(size, min(rows, cols), generator=generator))[0]
        for size in (rows, cols)
    )
    left, right = sides
    return left @ torch.diag(torch.as_tensor(sigma, dtype=torch.float32)) @ right.T


def test_in_bf16_presets_are_as_far_from_fp64_as_their_original_on_every_spectrum(address):
    """docs/maths.md, section 2."""
    generator = torch.Generator().manual_seed(5)
    given = {}
    for rows, cols in [
        (3, 3),
        (8, 8),
        (8, 32),
        (16, 16),
        (32, 48),
        (48, 160),
        (64, 64),
        (128, 384),
    ]:
        p = min(rows, cols)
        spectra = {
            "uniform": 0.01 + 0.99 * np.random.default_rng(p).random(p),
            "power": 1.0 / np.arange(1, p + 1),
            "exponential": np.exp(-20.0 * np.arange(p) / p),
            "half": np.arange(p) < p // 2,
            "rank1": np.arange(p) < 1,
            "rank2": np.arange(p) < 2,
        }
        given[f"gaussian {rows}x{cols}"] = torch.randn(rows, cols, generator=generator)
        for name, sigma in spectra.items():
            given[f"{name} {rows}x{cols}"] = with_spectrum(rows, cols, sigma, generator)
    ours = orthogonalised(address, "torch", given)
    for name, matrix in given.items():
        original, exact = by_torch(matrix), in_fp64(matrix, "torch")
        bound = 0.02 if name.startswith("gaussian") else 0.1
        assert difference(ours[name], original) <= bound, name
        assert difference(ours[name], exact) <= difference(original, exact) + 0.05, name
    # What no small bound can be: the original itself is that far from its formulas.
    assert difference(by_torch(given["rank1 64x64"]), in_fp64(given["rank1 64x64"], "torch")) > 0.5


@pytest.mark.parametrize("preset", ["dmuon", "keller", "moonlight", "torch"])
def test_entries_of_1e18_give_a_right_update_where_torchs_is_zero(address, preset):
    """The originals' fp32 sum of squares is infinite there: X is zero, and so is the update."""
    matrix = torch.randn(64, 96, generator=torch.Generator().manual_seed(1)) * 1e18
    assert not by_torch(matrix).any()
    ours = orthogonalised(address, preset, {"matrix": matrix})["matrix"]
    assert difference(ours, in_fp64(matrix, preset)) <= (8e-3 if preset == "dmuon" else 3e-2)


def test_a_zero_gradient_gives_no_update(address):
    for preset in ("dmuon", "keller", "torch", "moonlight"):
        model = nn.Linear(8, 8, bias=False)
        start = model.weight.detach().clone()
        optimizer = dmuond.torch.Muon(
            model, 0.1, weight_decay=0.0, preset=preset, address=address, verbose=False
        )
        model.weight.grad = torch.zeros(8, 8)
        optimizer.step()
        assert torch.equal(model.weight.detach(), start), preset
        optimizer.close()
