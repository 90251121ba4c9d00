"""Short jobs of every preset, layout, route, dtype and option, and digests of what they compute.

Weights and gradients are made of integers, and no backward pass does more than hand a gradient on:
neither torch's version nor the processor has a part in their bits. Functions are for every rank.
"""

import contextlib
import functools
import hashlib
import math
import re
import unittest.mock
import zlib
from collections.abc import Callable, Iterable

import dmuond.torch
import mesh_trainer
import numpy as np
import torch
from dmuond.torch import Experts, Flatten, Heads, RowBlocks
from fsdp_trainer import process_group, sharded_model
from habits import MATRICES
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

STEPS = 3
DIGITS = 12  # of a digest
PRESETS = ("dmuon", "torch", "keller", "moonlight")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OPTIONS = {"lr": 0.02, "adamw_lr": 1e-3, "preset": "torch", "verbose": False}
SHAPE = (20, 12)
JORDAN = (3.4445, -4.7750, 2.0315)


# --- numbers ---


def numbers(seed: str, shape: Iterable[int]) -> torch.Tensor:
    """In fp32, of [-1, 1): multiples of 2^-23, by splitmix64."""
    shape = tuple(shape)
    mixed = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(
        zlib.crc32(seed.encode()) << 24
    )
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    whole = (mixed >> np.uint64(40)).astype(np.int64) - (1 << 23)
    return torch.from_numpy((whole / (1 << 23)).astype(np.float32).reshape(shape))


def weight(name: str, shape: Iterable[int]) -> torch.Tensor:
    """Equal for names that are so before their first comma, as are gradients."""
    return numbers(f"weight of {name.split(',')[0]}", shape) / 8


def gradient(name: str, step: int, data: int, shape: Iterable[int]) -> torch.Tensor:
    """Of sizes that differ from step to step."""
    return numbers(f"gradient of {name.split(',')[0]} in {step} of {data}", shape) / 4**step


def part_of(whole: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    if isinstance(parameter, DTensor):
        place = parameter.device_mesh, parameter.placements
        sizes, begin = compute_local_shape_and_global_offset(parameter.shape, *place)
        whole = whole[tuple(slice(b, b + s) for b, s in zip(begin, sizes, strict=True))]
    return whole.to(parameter.dtype)


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


@torch.no_grad()
def filled(model: nn.Module) -> nn.Module:
    for name, parameter in model.named_parameters():
        local = part_of(weight(name, parameter.shape), parameter)
        local_of(parameter).copy_(local)
    return model


def made(shapes: dict[str, Iterable[int]], dtype=torch.float32) -> list[tuple[str, nn.Parameter]]:
    return [(name, nn.Parameter(weight(name, shape).to(dtype))) for name, shape in shapes.items()]


# --- digests ---


Digests = list[str]  # of weights, state and outcomes


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"".join(parts)).hexdigest()[:DIGITS]


def contents(tensor: torch.Tensor) -> bytes:
    local = local_of(tensor)
    kind = f"{local.dtype} {list(local.shape)} ".encode()
    if local.dtype is torch.bfloat16:  # which numpy does not have
        local = local.view(torch.int16)
    return kind + local.numpy().tobytes()


def route(name: str, parameter: torch.Tensor) -> str:
    """By the first word of names that have one, else as the model's layers are."""
    if name in MATRICES:
        return "muon"
    return re.match(r"(muon|adamw|trainer|)", name)[0] or "adamw"


class Job:
    """An optimizer of parameters with fixed numbers.

    params: as the optimizer takes them. data: which ranks have equal gradients, by a number that is
    theirs; or what says it of a parameter. options: the optimizer's, beside OPTIONS.
    """

    def __init__(self, params, data: int | Callable[[torch.Tensor], int] = 0, **options):
        self.named = dict(params.named_parameters() if isinstance(params, nn.Module) else params)
        self.data = data if callable(data) else lambda _: data
        self.optimizer = dmuond.torch.Muon(params, route=route, **OPTIONS | options)
        self.outcomes: list[bytes] = []

    def backward(self, step: int, without=(), scale=lambda loss: loss):
        """Gives all parameters but those named their gradients."""
        loss = torch.zeros(())
        for name, p in self.named.items():
            p.grad = None
            if name in without or not p.requires_grad:
                continue
            given = part_of(gradient(name, step, self.data(p), p.shape), p)
            if isinstance(p, DTensor):
                place = p.device_mesh, p.placements
                p.grad = DTensor.from_local(given, *place, shape=p.shape, stride=p.stride())
            else:
                loss = loss + (p * given).sum()
        if loss.requires_grad:
            scale(loss).backward()

    def step(self, by=None):
        """by: a GradScaler."""
        (by.step if by else lambda optimizer: optimizer.step())(self.optimizer)
        outcome = self.optimizer.last_outcome
        norms = outcome.gradient_norm.hex(), outcome.clip_coefficient.hex()
        self.outcomes.append(f"{outcome.kind} {norms} {outcome.matrices}\n".encode())

    def train(self, first: int = 0, last: int = STEPS):
        for step in range(first, last):
            self.backward(step)
            self.step()
        return self

    def state(self) -> dict[str, dict[str, torch.Tensor]]:
        saved = self.optimizer.state_dict()
        names = {
            index: name
            for group in saved["param_groups"]
            for index, name in zip(group["params"], group["param_names"], strict=True)
        }
        return {names[index]: entry for index, entry in saved["state"].items()}

    def end(self, of_each: bool = False) -> dict[str, Digests]:
        """Of the job, under the name "", and where asked for of each parameter by its name."""
        state = self.state()
        self.optimizer.close()
        weights = {name: contents(p) for name, p in self.named.items()}
        kept = dict.fromkeys(self.named, b"")
        for name, entry in state.items():
            kept[name] = b"".join(key.encode() + contents(entry[key]) for key in sorted(entry))
        found = {"": [digest(*weights.values()), digest(*kept.values()), digest(*self.outcomes)]}
        if of_each:
            found |= {name: [digest(weights[name]), digest(kept[name])] for name in self.named}
        return found


# --- options of groups, each on a parameter of its own ---

MUON_OPTIONS = {
    "as it is": {},
    "lr": {"lr": 3e-3},
    "weight_decay": {"weight_decay": 0.25},
    "momentum": {"momentum": 0.5},
    "nesterov": {"nesterov": True},
    "no nesterov": {"nesterov": False},
    "no nesterov, sum": {"nesterov": False, "momentum_form": "sum"},
    "no nesterov, ema": {"nesterov": False, "momentum_form": "ema"},
    **{f"momentum_form {form}": {"momentum_form": form} for form in ("sum", "ema")},
    **{
        f"scale {scale}": {"scale": scale}
        for scale in ("match_rms_adamw", "original", "spectral", "none")
    },
    "adjust_lr_fn": {"adjust_lr_fn": "match_rms_adamw"},
    "ns_form standard": {"ns_form": "standard"},
    "ns_form gram": {"ns_form": "gram", "ns_dtype": "float16"},
    "ns_form gram in fp32": {"ns_form": "gram", "ns_dtype": "float32"},
    **{
        f"ns_norm {norm}": {"ns_norm": norm}
        for norm in ("exact", "plus_eps", "clamped_eps", "schatten4")
    },
    "ns_eps": {"ns_eps": 8.0, "ns_norm": "plus_eps"},
    "ns_eps, clamped": {"ns_eps": 8.0, "ns_norm": "clamped_eps"},
    **{
        f"ns_dtype {dtype}": {"ns_dtype": dtype, "ns_form": "standard"}
        for dtype in ("float32", "bfloat16", "float16")
    },
    "ns_coefficients": {"ns_coefficients": [(3.0, -3.2, 1.2), JORDAN, (2.0, -1.5, 0.5)]},
    "ns_steps": {"ns_coefficients": JORDAN, "ns_steps": 3},
    "ns_restarts": {
        "ns_coefficients": [JORDAN] * 5,
        "ns_form": "gram",
        "ns_dtype": "float32",
        "ns_restarts": (2, 4),
    },
    "maximize": {"maximize": True},
}
ADAMW_OPTIONS = {
    "as it is": {},
    "lr": {"lr": 3e-3},
    "adamw_lr": {"adamw_lr": 4e-3},
    "weight_decay": {"weight_decay": 0.25},
    "adamw_weight_decay": {"adamw_weight_decay": 0.5},
    "betas": {"betas": (0.5, 0.75)},
    "eps": {"eps": 0.125},
    "maximize": {"maximize": True},
}
SHAPES = {
    "wide": (12, 20),
    "tall": (20, 12),
    "square": (16, 16),
    "row": (1, 24),
    "column": (24, 1),
    "large": (100, 300),
}


def of_their_own(shapes: dict[str, tuple[int, ...]], groups, dtype: str, **options) -> dict:
    """Digests of each parameter, with options of its own; rates change in the last step.

    An option that changes nothing shows: weights and gradients of one shape are the same.
    """
    job = Job(made(shapes, DTYPES[dtype]), groups=groups, **options).train(0, 2)
    for group in job.optimizer.param_groups:
        group["lr"] *= 0.5
        group["weight_decay"] *= 0.5
        if group["route"] == "muon":
            group["momentum"] *= 0.75
    return job.train(2, STEPS).end(of_each=True)


def options_of_muon(rank, world, dtype):
    groups = {
        f"muon, {preset}, {what}": {"preset": preset} | options
        for preset in PRESETS
        for what, options in MUON_OPTIONS.items()
    }
    shapes = dict.fromkeys(groups, SHAPE)
    for preset in PRESETS:
        for what, shape in SHAPES.items():
            groups[f"muon, {preset}, {what}"] = {"preset": preset}
            shapes[f"muon, {preset}, {what}"] = shape
    return of_their_own(shapes, groups, dtype)


def options_of_adamw(rank, world, dtype, **options):
    groups = {f"adamw, {what}": own for what, own in ADAMW_OPTIONS.items()}
    shapes = dict.fromkeys(groups, (5, 7)) | {"trainer": (3, 4), "muon": SHAPE}
    return of_their_own(shapes, groups, dtype, **options)


VIEWS = {
    "row blocks": ((16, 12), RowBlocks(8, 4, 4)),
    "qkv": ((24, 16), "qkv"),
    "heads": ((24, 16), "heads:4"),
    "experts": ((3, 12, 20), "experts"),
    "row blocks of experts": ((2, 24, 8), RowBlocks(6, 10, 8)),
    "flatten": ((6, 3, 2, 3), "flatten"),
    "as heads of a class": ((24, 16), Heads(3)),
    "as experts of a class": ((2, 8, 8), Experts()),
    "as flattened by a class": ((4, 2, 3), Flatten()),
}


def views(rank, world, preset):
    shapes = {f"muon, {what}": shape for what, (shape, _) in VIEWS.items()}
    given = {f"muon, {what}": view for what, (_, view) in VIEWS.items()}
    return of_their_own(shapes, None, "fp32", views=given, preset=preset)


# --- one process ---

FEW = {"muon wide": (12, 20), "muon tall": SHAPE, "adamw": (5, 7)}


def few(dtype="fp32", data=0, shapes=FEW, **options) -> Job:
    return Job(made(shapes, DTYPES[dtype]), data, **options)


def plain(rank, world, **options):
    return few(data=rank, **options).train().end()


def scaled(rank, world, unscales=False, **options):
    """The first gradient of the last rank is infinite in the second step."""
    job = few(data=rank, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    for step in range(STEPS):
        job.backward(step, scale=scaler.scale)
        if step == 1 and rank == world - 1:
            job.named["muon wide"].grad[0, 0] = float("inf")
        if unscales:
            scaler.unscale_(job.optimizer)
        job.step(scaler)
        scaler.update()
        job.outcomes.append(str(scaler.get_scale()).encode())
    return job.end()


def not_finite(rank, world):
    """Without a scaler the second step is skipped."""
    job = few(data=rank)
    for step in range(STEPS):
        job.backward(step)
        if step == 1 and rank == world - 1:
            job.named["adamw"].grad[0, 0] = float("nan")
        job.step()
    return job.end()


def absent(rank, world):
    """One gradient is absent on the first rank alone, another one on all."""
    job = few(data=rank)
    for step in range(STEPS):
        without = {1: ["muon tall"] if rank == 0 else [], 2: ["muon wide", "adamw"]}
        job.backward(step, without.get(step, ()))
        job.step()
    return job.end()


def frozen(rank, world):
    parameters = dict(made(FEW))
    parameters["muon tall"].requires_grad_(False)
    job = Job(list(parameters.items()), include_frozen=True).train(0, 2)
    parameters["muon tall"].requires_grad_(True)
    return job.train(2).end()


def loaded(rank, world, before, after):
    """State that is saved in a group of one momentum and form, and goes on in one of others."""
    first = few(dtype="bf16", **before).train(0, 2)
    saved = first.optimizer.state_dict()
    first.optimizer.close()
    second = Job(list(first.named.items()), **after)
    second.optimizer.load_state_dict(saved)
    return second.train(2).end()


def loaded_from_torch(rank, world, **options):
    """The states of torch.optim.Muon and of torch.optim.AdamW, which have no names."""
    job = few(**options)
    muon = [(name, p) for name, p in job.named.items() if name != "adamw"]
    moments = [("adamw", job.named["adamw"])]
    kinds = (muon, ("momentum_buffer",)), (moments, ("exp_avg", "exp_avg_sq"))
    for members, keys in kinds:
        entries = {
            index: {key: numbers(f"{key} of {name}", p.shape).abs() / 64 for key in keys}
            | {"step": torch.tensor(5.0)}
            for index, (name, p) in enumerate(members)
        }
        group = {"params": list(entries), "lr": 0.5, "momentum": 0.875}
        job.optimizer.load_state_dict({"state": entries, "param_groups": [group]})
    return job.train().end()


# --- several ranks ---


def by_route(model: nn.Module, data=0, **options):
    return Job(filled(model), data, **options).train().end()


def stages(rank, world):
    """Two ranks have the first half of a model, and two the second."""
    shapes = ({"muon one": SHAPE, "adamw one": (5,)}, {"muon two": (9, 9), "adamw two": (3, 4)})
    return (
        few(data=rank % 2, shapes=shapes[rank // 2], data_parallel_size=2, max_grad_norm=0.5)
        .train()
        .end()
    )


def shards(rank, world, shape=None, dtype="fp32", **options):
    """FSDP2 has reduced the gradients: they are equal on all ranks."""
    model = sharded_model(world, mesh_shape=shape, dtype=DTYPES[dtype])
    return by_route(model, **options)


def on_a_mesh(rank, world, kind):
    """On 2 x 2 ranks."""
    mesh = mesh_trainer.mesh_of("dp", "tp")
    dp, _ = mesh.get_coordinate()
    same = {"mesh": mesh, "mesh_roles": {"dp": "mean", "tp": "same"}}
    sums = {"mesh": mesh, "mesh_roles": {"dp": "mean", "tp": "sum"}}
    means = {"mesh": mesh, "mesh_roles": {"dp": "mean", "tp": "mean"}}
    tensor_parallel = mesh_trainer.tensor_parallel
    if kind == "tensor parallel":
        return by_route(tensor_parallel(mesh["tp"]), dp, **same)
    if kind == "sequence parallel":
        model = mesh_trainer.sequence_parallel(mesh["tp"])
        return by_route(model, lambda p: dp if isinstance(p, DTensor) else rank, **sums)
    if kind == "shards of tensor parallel":
        return by_route(mesh_trainer.shards_of(tensor_parallel, mesh), **same, max_grad_norm=0.5)
    if kind == "shards with replicas":
        return by_route(mesh_trainer.shards_on(mesh["tp"]), dp, **means)
    if kind == "shards with equal ones":
        return by_route(mesh_trainer.shards_on(mesh["dp"]), **same)
    assert kind == "shards over what is the same, too"
    flat = mesh["dp", "tp"]._flatten("all")
    return by_route(mesh_trainer.shards_on(flat), **same)


def stages_on_a_mesh(rank, world):
    mesh = mesh_trainer.mesh_of("pp", "dp")
    stage, data = mesh.get_coordinate()
    model = (mesh_trainer.First, mesh_trainer.Second)[stage]()
    roles = {"pp": "stages", "dp": "mean"}
    return by_route(model, data, mesh=mesh, mesh_roles=roles, max_grad_norm=0.5)


# --- all of them ---


_with = functools.partial
SUM_TO_EMA = {"preset": "dmuon", "momentum": 0.75}, {"preset": "torch", "momentum": 0.95}
LAYOUTS = (
    "tensor parallel",
    "sequence parallel",
    "shards of tensor parallel",
    "shards with replicas",
    "shards with equal ones",
    "shards over what is the same, too",
)
ON_ONE_RANK = {
    **{f"muon in {dtype}": _with(options_of_muon, dtype=dtype) for dtype in DTYPES},
    **{f"adamw in {dtype}": _with(options_of_adamw, dtype=dtype) for dtype in DTYPES},
    "adamw after muon's options": _with(
        options_of_adamw, dtype="fp32", preset="dmuon", adamw_lr=None, weight_decay=0.125
    ),
    "adamw with a decay of its own": _with(
        options_of_adamw, dtype="fp32", weight_decay=0.125, adamw_weight_decay=0.25
    ),
    "views, dmuon": _with(views, preset="dmuon"),
    "views, torch": _with(views, preset="torch"),
    "clipped": _with(plain, max_grad_norm=0.5),
    "clipped, not muon": _with(plain, max_grad_norm=0.5, clip_muon=False),
    "sum of one": _with(plain, reduction="sum"),
    "scaled": scaled,
    "scaled, clipped": _with(scaled, max_grad_norm=0.5, dtype="fp16"),
    "unscaled by hand": _with(scaled, unscales=True),
    "not finite": not_finite,
    "absent": absent,
    "frozen": frozen,
    "loaded, sum to ema": _with(loaded, before=SUM_TO_EMA[0], after=SUM_TO_EMA[1]),
    "loaded, ema to sum": _with(loaded, before=SUM_TO_EMA[1], after=SUM_TO_EMA[0]),
    "loaded from torch, to ema": loaded_from_torch,
    "loaded from torch, to sum": _with(loaded_from_torch, preset="dmuon"),
}
ON_FOUR_RANKS = {
    "mean": plain,
    "sum": _with(plain, reduction="sum"),
    "mean in bf16, clipped": _with(plain, dtype="bf16", max_grad_norm=0.5),
    "mean in fp16, clipped, not muon": _with(
        plain, dtype="fp16", max_grad_norm=0.5, clip_muon=False
    ),
    "scaled": scaled,
    "absent": absent,
    "not finite": not_finite,
    "data_parallel_size": stages,
    "shards": shards,
    "shards, summed": _with(shards, reduction="sum", max_grad_norm=0.5),
    "shards in bf16": _with(shards, dtype="bf16", preset="dmuon"),
    "shards and replicas of them": _with(shards, shape=(2, 2)),
    **{kind: _with(on_a_mesh, kind=kind) for kind in LAYOUTS},
    "stages": stages_on_a_mesh,
}


def run(rank, world, folder, jobs: Iterable[str], **options) -> dict[str, Digests]:
    """Of jobs on one rank or four, by job and parameter. options: of all optimizers."""
    known = ON_ONE_RANK if world == 1 else ON_FOUR_RANKS
    ranks = process_group(rank, world, folder) if world > 1 else contextlib.nullcontext()
    with ranks, unittest.mock.patch.dict(OPTIONS, options):
        return {
            ": ".join(filter(None, (job, name))): digests
            for job in jobs
            for name, digests in known[job](rank, world).items()
        }


def of_all(ranks: list[dict[str, Digests]]) -> dict[str, Digests]:
    """What `run` has returned to each rank, as digests of all ranks."""
    return {
        f"{len(ranks)} x {job}": [
            digest(*(part.encode() for part in parts))
            for parts in zip(*(rank[job] for rank in ranks), strict=True)
        ]
        for job in ranks[0]
    }
