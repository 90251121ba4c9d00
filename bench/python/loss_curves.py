#!/usr/bin/env python3
"""Whether a model learns the same by dmuond as by torch.optim.Muon: loss curves in one picture.

    loss_curves.py --programs=PROGRAMS --text=/usr/lib/python3.12 torch 1x2 2x1

A decoder of 150 million parameters is trained on the bytes of text files, by a trainer on each GPU,
from the same weights, with the same pieces of text: matrices of the blocks by Muon, the rest by
AdamW, in fp32 with bf16 products. Ways:

    torch      torch.optim.Muon and torch.optim.AdamW under DDP
    1x2, 2x1   dmuond with preset="torch", which has the same options: daemons x lanes of each
    1x2-dmuon  dmuond with its own preset, more exact polynomials in fp16

Writes every step's loss, the mean over ranks, to --out, and the picture beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import train_bench

if TYPE_CHECKING:
    from torch import nn

LEARNING_RATE, WARM_UP, DECAY, BETAS = 1e-3, 50, 0.1, (0.9, 0.95)
SMOOTHED = 10  # steps, in the picture


def daemons(options: Any, way: str, folder: Path) -> list[train_bench.Daemon]:
    """One for each node of "2x1"."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python"))
    from daemons import free_port, secret_file

    nodes, lanes = map(int, way.split("-")[0].split("x"))
    if nodes == 1:
        return [train_bench.Daemon(options, folder / "0", lanes)]
    coordinator = f"127.0.0.1:{free_port()}"
    group = [f"--nodes={nodes}", f"--coordinator={coordinator}"]
    group += [f"--peer_secret_file={secret_file(folder)}"]
    started = []
    for node in range(nodes):
        listen = coordinator if node == 0 else "127.0.0.1:0"
        own = [f"--node_rank={node}", f"--peer_listen={listen}"]
        visible = ",".join(str(node * lanes + lane) for lane in range(lanes))
        environment = {"CUDA_VISIBLE_DEVICES": visible}
        place = folder / str(node)
        started.append(
            train_bench.Daemon(options, place, lanes, *group, *own, environment=environment)
        )
    return started


def optimizers(way: str, model: nn.Module) -> list[Any]:
    import torch

    if way != "torch":
        import dmuond.torch

        exact = {} if way.endswith("-dmuon") else {"adjust_lr_fn": "match_rms_adamw"}
        return [
            dmuond.torch.Muon(
                model,
                lr=LEARNING_RATE,
                adamw_lr=LEARNING_RATE,
                preset="dmuon" if way.endswith("-dmuon") else "torch",
                weight_decay=DECAY,
                adamw_weight_decay=DECAY,
                betas=BETAS,
                verbose=False,
                **exact,
            )
        ]
    matrices = [p for p in model.blocks.parameters() if p.dim() == 2]
    taken = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in taken]
    muon = torch.optim.Muon(
        matrices, LEARNING_RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, torch.optim.AdamW(rest, LEARNING_RATE, BETAS, weight_decay=DECAY)]


def train(rank: int, options: Any, way: str, rendezvous: str, address: str, answer: Any) -> None:
    os.environ["DMUOND_ADDRESS"] = address
    import muon_spectra
    import torch
    from torch import distributed

    device = train_bench.enter(rank, options, rendezvous)
    model = train_bench.make_model(muon_spectra.SHAPE).to(device).float()
    chosen = optimizers(way, model)
    called = torch.nn.parallel.DistributedDataParallel(model) if way == "torch" else model
    data = muon_spectra.batches(options.text, seed=1 + rank)
    losses = []
    for step in range(options.steps):
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP)
        for group in itertools.chain(*(optimizer.param_groups for optimizer in chosen)):
            group["lr"] = rate
            if "adamw_lr" in group:
                group["adamw_lr"] = rate
        with torch.autocast("cuda", torch.bfloat16):
            loss = called(next(data)[:16])
        loss.backward()
        for optimizer in chosen:
            optimizer.step()
            optimizer.zero_grad()
        loss = loss.detach()
        distributed.all_reduce(loss, distributed.ReduceOp.AVG)
        losses.append(loss)
    if way != "torch":
        chosen[0].close()
    answer.put((rank, [float(loss) for loss in losses]))
    distributed.destroy_process_group()


def run(options: Any, way: str) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="dm-") as name:
        started = [] if way == "torch" else daemons(options, way, Path(name))
        return train_bench.run_ranks(options, way, train, started)[0]


def draw(curves: dict[str, list[float]], path: Path) -> None:
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    for way, losses in curves.items():
        smooth = [
            statistics.fmean(losses[max(0, i - SMOOTHED + 1) : i + 1]) for i in range(len(losses))
        ]
        axes.plot(smooth, label=way, linewidth=1)
    axes.set(xlabel="step", ylabel=f"loss, mean of {SMOOTHED} steps", yscale="log")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("ways", nargs="+")
    parser.add_argument("--programs", required=True)
    parser.add_argument("--libraries", default="", help="LD_LIBRARY_PATH of the daemons")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("curves.json"))
    options = parser.parse_args()
    curves = {}
    for way in options.ways:
        began = time.monotonic()
        curves[way] = losses = run(options, way)
        last = statistics.fmean(losses[-50:])
        print(f"{way:>10} loss {losses[0]:.4f} to {last:.4f} (mean of the last 50)", end="")
        print(f", {time.monotonic() - began:.0f} s", flush=True)
        options.out.write_text(json.dumps(curves) + "\n")
    with contextlib.suppress(ImportError):
        draw(curves, options.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
