"""What a step costs when there is nothing to compute, from Python.

One daemon with one lane, and trainers as processes, each with a matrix of one element (`core`: the
core client; `torch`: the optimizer) or with many small tensors (`layers`: the optimizer). A step is
from step() until the new weights lie in the trainer's arena, measured on rank 0; gradients are
there already.

usage: control_bench.py [-J FILE] [--steps N] [--trainers N] [--profile NAME]
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import json
import multiprocessing
import os
import platform
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dmuond
import grpc
import numpy as np
from dmuond import types

ROOT = Path(__file__).parents[2]
WARMUP = 200
READY_TIMEOUT_S = 30.0
SCALARS = types.StepScalars(groups=[types.GroupScalars(learning_rate=0.1, momentum=0.9)])


def core() -> tuple[Callable[[], Any], Callable[[], None]]:
    """The core client with a matrix of one element: a step, and the end."""
    session = dmuond.Session()
    parameter = types.Parameter(
        name="w",
        shape=[1, 1],
        weight_type=types.ELEMENT_TYPE_FLOAT32,
        gradient_type=types.ELEMENT_TYPE_FLOAT32,
        route=types.ROUTE_MUON,
        reduce_factor=1.0 / session.world_size,
    )
    fragment = types.Fragment(
        parameter=0,
        box=types.Box(begin=[0, 0], end=[1, 1]),
        contribution=types.CONTRIBUTION_SUM,
        weight=types.Slice(arena=1, strides=[1, 1]),
        gradient=types.Slice(arena=2, strides=[1, 1]),
    )
    session.register([parameter], [fragment], [types.GroupConfig(preset="keller")])
    arenas = session.attach({1: 4, 2: 4})
    arenas[2].view(np.float32)[0] = 1.0
    session.push()
    return lambda: session.step(SCALARS), session.close


def optimizer_of(model: Any) -> tuple[Callable[[], Any], Callable[[], None]]:
    import dmuond.torch
    import torch

    torch.set_num_threads(1)
    route = [("*weight", "muon")]
    optimizer = dmuond.torch.Muon(model, lr=1e-3, route=route, verbose=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    return optimizer.step, optimizer.close


def torch_one() -> tuple[Callable[[], Any], Callable[[], None]]:
    from torch import nn

    return optimizer_of(nn.Linear(1, 1, bias=False))


def torch_layers() -> tuple[Callable[[], Any], Callable[[], None]]:
    """As many tensors as a model of 28 layers has."""
    from torch import nn

    layers = [nn.Linear(8, 8, bias=index % 7 == 0) for index in range(28 * 7)]
    return optimizer_of(nn.Sequential(*layers))


SCENARIOS = {"core": (core, 1), "torch": (torch_one, 1), "layers": (torch_layers, 224)}


def trainer(connection: Any, name: str, steps: int, environment: dict, profile: bool) -> None:
    os.environ.update(environment)
    step, close = SCENARIOS[name][0]()
    for _ in range(WARMUP):
        step()
    profiler = cProfile.Profile() if profile else contextlib.nullcontext()
    times = np.empty(steps)
    with profiler:
        for index in range(steps):
            begin = time.perf_counter()
            step()
            times[index] = time.perf_counter() - begin
    close()
    if profile and environment["RANK"] == "0":
        pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(25)
    connection.send(times)


@contextlib.contextmanager
def daemon(folder: str) -> Iterator[str]:
    """A daemon with one lane, ready; its socket's path."""
    path = f"{folder}/d.sock"
    program = Path(os.environ.get("DMUOND_BIN_DIR") or ROOT / "build/cpu/bin") / "dmuond"
    process = subprocess.Popen(
        [program, f"--socket={path}", "--devices=cpu:1", "--threads=1"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + READY_TIMEOUT_S
        while not is_ready(path):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("dmuond did not become ready")
            time.sleep(0.02)
        yield path
    finally:
        process.terminate()
        process.wait()


def is_ready(path: str) -> bool:
    options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(f"unix:{path}.admin", options=options) as channel:
        check = channel.unary_unary("/dmuond.v1.Admin/GetReadiness")
        try:
            return check(b"", timeout=2) == b"\x08\x01\x10\x01"
        except grpc.RpcError:
            return False


def measure(name: str, trainers: int, steps: int, profile: bool) -> np.ndarray:
    """Seconds of every step on rank 0."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="dm-") as folder, daemon(folder) as path:
        started = []
        for rank in range(trainers):
            environment = {
                "RANK": str(rank),
                "WORLD_SIZE": str(trainers),
                "LOCAL_RANK": "0",
                "DMUOND_ADDRESS": f"unix:{path}",
            }
            ours, theirs = context.Pipe()
            arguments = (theirs, name, steps, environment, profile)
            process = context.Process(target=trainer, args=arguments)
            process.start()
            theirs.close()
            started.append((process, ours))
        times = [connection.recv() for _, connection in started]
        for process, _ in started:
            process.join()
    return times[0]


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(": ", 1)[1]
    return platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-J", "--json", help="write the results to this file, too")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument("--profile", choices=SCENARIOS, help="profile this one alone, on rank 0")
    arguments = parser.parse_args()
    machine = {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "grpcio": grpc.__version__,
        "load_before": os.getloadavg()[0],
    }
    print("# control_bench, steps from Python")
    print("# " + ", ".join(f"{key} {value}" for key, value in machine.items()))
    print(f"#{'name':>9} {'tensors':>8} {'trainers':>9} {'steps':>7}", end="")
    print(f" {'p50 (us)':>10} {'p99 (us)':>10} {'least (us)':>11}", flush=True)
    rows = []
    for name in [arguments.profile] if arguments.profile else SCENARIOS:
        times = measure(name, arguments.trainers, arguments.steps, bool(arguments.profile))
        p50, p99, least = (float(1e6 * np.percentile(times, q)) for q in (50, 99, 0))
        tensors = SCENARIOS[name][1]
        print(f"{name:>10} {tensors:>8} {arguments.trainers:>9} {arguments.steps:>7}", end="")
        print(f" {p50:>10.0f} {p99:>10.0f} {least:>11.0f}", flush=True)
        row = {"name": name, "tensors": tensors, "trainers": arguments.trainers}
        rows.append(
            row | {"steps": arguments.steps, "p50_us": p50, "p99_us": p99, "least_us": least}
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps({"machine": machine, "steps": rows}, indent=2))


if __name__ == "__main__":
    main()
