"""What the optimizer's client costs a training process, beside what copying gradients must cost.

One daemon with one lane, one trainer, models of many tensors of one size. Per step, in CPU time of
the training thread (its waits for the daemon cost none): the backward pass with the optimizer's
hooks and step(), and, in turn with them, the same backward pass with an empty hook on each
parameter and one foreach copy of all gradients. Both without what the backward pass itself costs.
`fixed` is the same of an optimizer with one tensor of 8 x 8: what a step costs whatever the model,
most of which is the call of the daemon. `ratio` is hooks and step over the floor, and `beyond` that
without what is fixed.
`construct` is the CPU time of the constructor, of all threads, without imports.

usage: client_bench.py [-J FILE] [--steps N] [--profile SIZE]
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import platform
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import dmuond.torch
import torch
from control_bench import cpu_name, daemon
from torch import nn

TENSORS = 224  # as a model of 28 layers has
SIZES = (8, 64, 256)  # rows and columns of each tensor
WARMUP = 20


class Model(nn.Module):
    """Each weight is used once, in a way that costs little."""

    def __init__(self, size: int, tensors: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size, bias=False) for _ in range(tensors))
        self.input = torch.ones(1, size)

    def forward(self) -> torch.Tensor:
        x = self.input
        for layer in self.layers:
            x = layer(x).tanh()
        return x.sum()


def cpu_of(function: Callable[[], object]) -> float:
    begin = time.thread_time()
    function()
    return time.thread_time() - begin


def measure(address: str, size: int, tensors: int, steps: int, profile: bool) -> dict[str, float]:
    """Microseconds of a step, medians; and seconds of the constructor."""
    plain, hooked, ours = (Model(size, tensors) for _ in range(3))
    for parameter in hooked.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: None)
    slots = [torch.empty_like(p) for p in hooked.parameters()]
    torch.optim.SGD(plain.parameters(), lr=0.0)  # torch imports more for the first optimizer
    begin = time.process_time()
    route = [("*", "muon")]
    optimizer = dmuond.torch.Muon(ours, lr=1e-3, route=route, address=address, verbose=False)
    construct_s = time.process_time() - begin

    def copy() -> None:
        torch._foreach_copy_(slots, [p.grad for p in hooked.parameters()])

    profiler = cProfile.Profile()
    times: dict[str, list[float]] = {"backward": [], "floor": [], "hooks": [], "step": []}
    for index in range(WARMUP + steps):
        losses = plain(), hooked(), ours()
        found = {"backward": cpu_of(losses[0].backward)}
        found["floor"] = cpu_of(losses[1].backward) + cpu_of(copy)
        if profile and index >= WARMUP:
            profiler.enable()
        found["hooks"] = cpu_of(losses[2].backward)
        found["step"] = cpu_of(optimizer.step)
        profiler.disable()
        for model in (plain, hooked, ours):
            model.zero_grad()
        if index >= WARMUP:
            for name, value in found.items():
                times[name].append(value)
    optimizer.close()
    if profile:
        pstats.Stats(profiler).sort_stats("tottime").print_stats(25)
    us = {name: 1e6 * statistics.median(values) for name, values in times.items()}
    return {
        "floor": us["floor"] - us["backward"],
        "hooks": us["hooks"] - us["backward"],
        "step": us["step"],
        "construct_s": construct_s,
    }


def measure_anew(size: int, tensors: int, steps: int, profile: bool = False) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="dm-") as folder, daemon(folder) as path:
        return measure(f"unix:{path}", size, tensors, steps, profile)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-J", "--json", help="write the results to this file, too")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--profile", type=int, help="profile tensors of this size alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    machine = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_before": os.getloadavg()[0],
    }
    print(f"# client_bench, {TENSORS} tensors, CPU time of the training thread")
    print("# " + ", ".join(f"{key} {value}" for key, value in machine.items()))
    one = measure_anew(SIZES[0], 1, arguments.steps)
    fixed = one["hooks"] + one["step"]
    print(f"# fixed: {fixed:.0f} us a step")
    print(f"#{'size':>9} {'floor':>8} {'hooks':>8} {'step':>8} {'ratio':>7} {'beyond':>7}", end="")
    print(f" {'construct':>10}")
    print(f"#{'':>9} {'us/tensor':>8} {'':>8} {'':>8} {'':>7} {'':>7} {'(s)':>10}", flush=True)
    rows = []
    for size in [arguments.profile] if arguments.profile else SIZES:
        row = measure_anew(size, TENSORS, arguments.steps, bool(arguments.profile))
        ours = row["hooks"] + row["step"]
        row |= {"ratio": ours / row["floor"], "beyond": (ours - fixed) / row["floor"]}
        print(f"{f'{size}x{size}':>10}", end="")
        for part in ("floor", "hooks", "step"):
            row[part] /= TENSORS
            print(f" {row[part]:>8.1f}", end="")
        print(
            f" {row['ratio']:>7.2f} {row['beyond']:>7.2f} {row['construct_s']:>10.2f}", flush=True
        )
        rows.append({"size": size, "fixed": fixed, **row})
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"machine": machine, "rows": rows}, indent=2))


if __name__ == "__main__":
    main()
