#!/usr/bin/env python3
"""The optimizer's phase alone: from the last gradient to the new weights, on replicas in bf16.

    phase_bench.py --gpus=4 --programs=PROGRAMS [--json=FILE] [MODEL...]

A step computes for --busy_ms, as a backward pass does, and hands over random gradients of the sizes
of a model of bench/shapes/models.json meanwhile, a twelfth of them at a time; then it hands over
the last gradients, of 64 x 64, and steps. "phase" is the time on the GPU from there until weights
can be used, of the rank that is there last: others wait for it. "whole" is a step without the
computing, whose gradients come at once, of the slowest rank. The model "little" has a matrix of
4096 x 4096 for each lane beside its last gradients, and computes for 3 ms: what its phase has more
than the lanes' own time ("quiet", from a lane's last gradient and submission to its last weight) is
the hand-off, signals there and back. That matrix is there because the host asks for the weights
when it has heard the decision, which takes half a millisecond and is hidden behind the update.
Medians over steps. With MPS: start its control daemon first.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import train_bench

MODELS = ("little", "llama3-8b:8", "qwen3-1.7b", "wall-x")
PRODUCT, PRODUCT_MS = 8192, 1.7
PIECES = 12


def sizes(model: str, gpus: int) -> list[tuple[int, int]]:
    """Of matrices. NAME:LAYERS has so many of the model's layers."""
    if model == "little":
        return [(4096, 4096)] * gpus
    name, _, layers = model.partition(":")
    shapes = json.loads((Path(__file__).parents[1] / "shapes" / "models.json").read_text())[name]
    share = int(layers) / shapes["layers"] if layers else 1
    return [
        (matrix["rows"], matrix["cols"])
        for matrix in shapes["muon"]
        for _ in range(round(matrix["count"] * share))
    ]


def train(
    rank: int, options: Any, models: list[str], rendezvous: str, _address: str, answer: Any
) -> None:
    import torch
    from torch import distributed

    device = train_bench.enter(rank, options, rendezvous)
    rows = []
    for model in models:
        with train_bench.daemon_of_rank_0(options, rank):
            found = measure(rank, options, model, device)
        torch.cuda.empty_cache()
        found["ms"] = over_ranks(found["ms"], device)
        quiet = found["ms"].pop("quiet")
        if model == "little":
            found["ms"] |= {"quiet": quiet, "hand-off": found["ms"]["phase"] - quiet}
        rows.append({"model": model, "gpus": options.gpus} | found)
        if rank == 0:
            tell(options, rows)
    answer.put((rank, rows))
    distributed.destroy_process_group()


def over_ranks(steps: dict[str, list[float]], device: Any) -> dict[str, float]:
    """Medians of what each step took the rank that waits for no other, and the slowest one."""
    import torch
    from torch import distributed

    result = {}
    for what, ms in steps.items():
        every = torch.tensor(ms, device=device)
        reduction = distributed.ReduceOp.MIN if what == "phase" else distributed.ReduceOp.MAX
        distributed.all_reduce(every, reduction)
        result[what] = statistics.median(every.tolist())
    return result


def measure(rank: int, options: Any, name: str, device: Any) -> dict:
    import dmuond.torch
    import torch
    from torch import nn

    class Given(torch.autograd.Function):
        """Something whose gradient is the given one."""

        @staticmethod
        def forward(context: Any, parameter: Any, gradient: Any) -> Any:
            context.save_for_backward(gradient)
            return parameter.new_zeros(())

        @staticmethod
        def backward(context: Any, _above: Any) -> Any:
            return context.saved_tensors[0].clone(), None

    class Busy(torch.autograd.Function):
        """The given, whose gradient comes when something has been computed for a while."""

        @staticmethod
        def forward(context: Any, given: Any, least_ms: float) -> Any:
            context.least_ms = least_ms
            return given.clone()

        @staticmethod
        def backward(context: Any, above: Any) -> Any:
            busy(context.least_ms)
            return above, None

    torch.manual_seed(0)  # all ranks begin with the same weights
    lasts = 2 * options.gpus
    busy_ms = 2 * PRODUCT_MS if name == "little" else options.busy_ms
    shapes = [(64, 64)] * lasts + sizes(name, options.gpus)
    model = nn.Module()
    random = {}
    with device:
        for i, shape in enumerate(shapes):
            weight = torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)
            model.register_parameter(f"p{i}", nn.Parameter(weight))
            if shape not in random:
                random[shape] = torch.randn(shape, dtype=torch.bfloat16)
        left, right, out = (torch.randn(PRODUCT, PRODUCT, dtype=torch.bfloat16) for _ in range(3))
    route = [("*", "muon")]
    optimizer = dmuond.torch.Muon(model, lr=1e-3, adamw_lr=1e-4, route=route, verbose=False)

    def busy(least_ms: float) -> None:
        for _ in range(round(least_ms / PRODUCT_MS)):
            torch.mm(left, right, out=out)

    def given(parameter: Any) -> Any:
        return Given.apply(parameter, random[tuple(parameter.shape)])

    def step(busy_ms: float) -> tuple[Any, Any, Any]:
        begin = train_bench.mark()
        # A backward pass begins with what was computed last.
        parameters = list(model.parameters())
        sum_of_all = torch.stack([given(parameter) for parameter in parameters[:lasts]]).sum()
        pieces = 1 if name == "little" else PIECES
        ends = [lasts + (len(shapes) - lasts) * piece // pieces for piece in range(pieces + 1)]
        for first, end in itertools.pairwise(ends):
            computed = Busy.apply(sum_of_all, busy_ms / pieces)
            gradients = [given(parameter) for parameter in parameters[first:end]]
            sum_of_all = torch.stack([computed, *gradients]).sum()
        sum_of_all.backward()
        submitted = train_bench.mark()
        optimizer.step()
        optimizer.zero_grad()
        return begin, submitted, train_bench.mark()

    # Only the last half of each kind of step counts: the first half heats the chip.
    quiet, seen = [], {}
    steps = []
    for index in range(2 * options.steps):
        steps.append(step(busy_ms if index < options.steps else 0.0))
        if options.steps // 2 <= index < options.steps:
            optimizer.wait()
            quiet.append(optimizer.metrics()["quiet_us"] / 1e3)
        if rank == 0 and index == options.steps - 1:
            busy(100.0)
            seen = train_bench.look_at_gpu()
    torch.cuda.synchronize()
    hidden = steps[options.steps // 2 : options.steps]
    at_once = steps[options.steps + options.steps // 2 :]
    phases = [submitted.elapsed_time(end) for _, submitted, end in hidden]
    metrics = dict(optimizer.metrics())
    optimizer.close()
    whole = [begin.elapsed_time(end) for begin, _, end in at_once]
    return {
        "ms": {"phase": phases, "quiet": quiet, "whole": whole},
        "matrices": len(shapes),
        "steps": len(phases),
        "last step": metrics,
        **seen,
    }


def tell(options: Any, rows: list[dict]) -> None:
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    last = rows[-1]
    times = "  ".join(f"{what} {ms:.3f}" for what, ms in last["ms"].items())
    print(f"{last['model']:12} {times} ms  {last['sm_mhz']} MHz  {last['watts']:.0f} W", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS), metavar="MODEL")
    parser.add_argument("--steps", type=int, default=24, help="of each of the two kinds")
    parser.add_argument("--busy_ms", type=float, default=60.0)
    train_bench.add_run_options(parser)
    options = parser.parse_args()
    train_bench.run_ranks(options, options.models, train, [])


if __name__ == "__main__":
    main()
