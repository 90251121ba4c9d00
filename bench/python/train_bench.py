#!/usr/bin/env python3
"""Whole training steps on the GPUs of a machine: what dmuond costs beside AdamW and beside nothing.

    train_bench.py --programs=build/cuda/bin --model=1.5b --batch=8 compute adamw dmuond

One process for each GPU trains a decoder with the sizes of Qwen2.5-1.5B or Llama-3.2-3B on random
tokens, in bf16. A way to train is a run of its own, and has a row:

  compute       forward and backward pass alone: the floor of every step
  adamw         DistributedDataParallel and torch's fused AdamW
  adamw-fsdp2   fully_shard of every block, and the same
  dmuond        replicas; Muon and AdamW by a daemon with a lane on each GPU
  dmuond-overlap  the same; each block's weights are waited for in the next forward pass
  dmuond-fsdp2  fully_shard of every block, and the daemon

A row has the median time of the last steps, by events of the GPU between the ends of steps that the
host does not wait for; then SM clock and power meanwhile, memory of all processes of the first GPU,
and for dmuond what its metrics say of the last step. With MPS: start its control daemon first.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import multiprocessing
import os
import queue
import signal
import socket
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor, nn

SEQUENCE = 2048
READY_TIMEOUT_S, RUN_TIMEOUT_S = 60.0, 600.0


@dataclasses.dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int


SHAPES = {
    "tiny": Shape(256, 512, 2, 4, 2, 1000),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151936),
    "3b": Shape(3072, 8192, 28, 24, 8, 128256),
}


def make_model(shape: Shape) -> nn.Module:
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = shape.hidden // shape.heads
            self.before, self.between = nn.RMSNorm(shape.hidden), nn.RMSNorm(shape.hidden)
            self.query = nn.Linear(shape.hidden, shape.heads * self.head, bias=False)
            self.key = nn.Linear(shape.hidden, shape.key_heads * self.head, bias=False)
            self.value = nn.Linear(shape.hidden, shape.key_heads * self.head, bias=False)
            self.out = nn.Linear(shape.heads * self.head, shape.hidden, bias=False)
            self.gate = nn.Linear(shape.hidden, shape.inner, bias=False)
            self.up = nn.Linear(shape.hidden, shape.inner, bias=False)
            self.down = nn.Linear(shape.inner, shape.hidden, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            seen = self.before(x)
            query, key, value = (
                part(seen).unflatten(-1, (-1, self.head)).transpose(1, 2)
                for part in (self.query, self.key, self.value)
            )
            attended = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, enable_gqa=True
            )
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            seen = self.between(x)
            return x + self.down(functional.silu(self.gate(seen)) * self.up(seen))

    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(shape.vocabulary, shape.hidden)
            self.blocks = nn.ModuleList([Block() for _ in range(shape.layers)])
            self.norm = nn.RMSNorm(shape.hidden)
            self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    torch.manual_seed(0)
    model = Decoder().to(torch.bfloat16)
    for parameter in model.parameters():
        if parameter.dim() == 2:
            nn.init.normal_(parameter, std=0.02)
    return model


def shard(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def make_way(way: str, model: nn.Module) -> tuple[nn.Module, Any]:
    """The model as it is to be called, and the optimizer."""
    import torch

    if way.endswith("fsdp2"):
        model = shard(model)
    if way.startswith("dmuond"):
        import dmuond.torch

        overlap = way == "dmuond-overlap"
        return model, dmuond.torch.Muon(
            model, lr=1e-3, adamw_lr=1e-4, verbose=False, overlap_forward=overlap
        )
    if way == "compute":
        return model, None
    if way == "adamw":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def train(rank: int, options: Any, way: str, rendezvous: str, address: str, answer: Any) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(options.gpus),
        "DMUOND_ADDRESS": address,
    }
    import torch
    from torch import distributed

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl", init_method=rendezvous, rank=rank, world_size=options.gpus, device_id=device
    )
    with device:
        model = make_model(SHAPES[options.model])
    model, optimizer = make_way(way, model)
    generator = torch.Generator(device).manual_seed(rank)
    size = (options.batch, SEQUENCE)
    vocabulary = SHAPES[options.model].vocabulary
    ends, losses, seen = [], [], {}
    for step in range(options.steps):
        tokens = torch.randint(0, vocabulary, size, generator=generator, device=device)
        loss = model(tokens)
        loss.backward()
        if optimizer is None:
            for parameter in model.parameters():
                parameter.grad = None
        else:
            optimizer.step()
            optimizer.zero_grad()
        ends.append(torch.cuda.Event(enable_timing=True))
        ends[-1].record()
        losses.append(loss.detach())
        if rank == 0 and step == options.steps - 2:
            seen = look_at_gpu()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(ends, ends[1:], strict=False)]
    last = times[len(times) // 2 :]
    if way.startswith("dmuond"):
        seen["metrics"] = dict(optimizer.metrics())
        optimizer.close()
    result = {
        "median_ms": statistics.median(last),
        "least_ms": min(last),
        "most_ms": max(last),
        "steps": len(last),
        "losses": [float(losses[0]), float(losses[-1])],
        "torch_memory_mib": torch.cuda.max_memory_reserved() >> 20,
        **seen,
    }
    answer.put((rank, result))
    distributed.destroy_process_group()


def look_at_gpu() -> dict:
    """While the host is ahead of the GPU, it is at work."""
    query = "clocks.sm,power.draw,memory.used"
    asked = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
    clock, watts, memory = subprocess.check_output(asked, text=True).split(", ")
    return {"sm_mhz": int(clock), "watts": float(watts), "used_mib": int(memory)}


class Daemon:
    def __init__(
        self, options: Any, folder: Path, lanes: int, *flags: str, environment: dict | None = None
    ) -> None:
        """folder: of its own, for its socket and its log."""
        folder.mkdir(mode=0o750, exist_ok=True)
        self.address = f"unix:{folder / 'd.sock'}"
        programs = Path(options.programs).resolve()
        command = [programs / "dmuond", f"--socket={folder / 'd.sock'}", *flags]
        command += [f"--devices=cuda:{lanes}", f"--lane_binary={programs / 'dmuond-lane'}"]
        libraries = os.pathsep.join([options.libraries, os.environ.get("LD_LIBRARY_PATH", "")])
        self._log = (folder / "daemon.log").open("w+")
        self._process = subprocess.Popen(
            list(map(str, command)),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"LD_LIBRARY_PATH": libraries} | (environment or {}),
        )

    def wait(self) -> None:
        """Until it serves, which takes all daemons of its group."""
        deadline = time.monotonic() + READY_TIMEOUT_S
        while "serving" not in self.text():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise SystemExit(f"the daemon does not serve:\n{self.text()}")
            time.sleep(0.02)

    def text(self) -> str:
        return Path(self._log.name).read_text()

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()


def run_ranks(
    options: Any, way: str, target: Callable[..., None], daemons: list[Daemon]
) -> dict[int, Any]:
    """What `target`, called as train() is, has put into its queue on each GPU, by rank.

    Ranks are shared out among the daemons, if there are any, which are waited for and ended.
    """
    results: dict[int, Any] = {}
    try:
        for daemon in daemons:
            daemon.wait()
        results = _results(options, way, target, [daemon.address for daemon in daemons])
    finally:
        for daemon in daemons:
            daemon.end()
            print(daemon.text() if len(results) < options.gpus else "", end="")
    if len(results) < options.gpus:
        raise SystemExit(f"{way}: a trainer has failed, or takes longer than {RUN_TIMEOUT_S:.0f} s")
    return results


def _results(
    options: Any, way: str, target: Callable[..., None], daemons: list[str]
) -> dict[int, Any]:
    """Fewer than there are ranks where one fails, or takes too long."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        rendezvous = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    addresses = [
        daemons[rank * len(daemons) // options.gpus] if daemons else ""
        for rank in range(options.gpus)
    ]
    answer = context.Queue()
    processes = [
        context.Process(target=target, args=(rank, options, way, rendezvous, address, answer))
        for rank, address in enumerate(addresses)
    ]
    for process in processes:
        process.start()
    results: dict[int, Any] = {}
    give_up = time.monotonic() + RUN_TIMEOUT_S
    while len(results) < options.gpus and time.monotonic() < give_up:
        if any(process.exitcode for process in processes):
            break
        with contextlib.suppress(queue.Empty):
            rank, result = answer.get(timeout=0.1)
            results[rank] = result
    for process in processes:
        if len(results) < options.gpus:
            process.kill()
        process.join()
    return results


def measure(options: Any, way: str) -> dict:
    with tempfile.TemporaryDirectory() as name:
        daemons = []
        if way.startswith("dmuond"):
            daemons = [Daemon(options, Path(name) / "0", options.gpus, *options.flag)]
        results = run_ranks(options, way, train, daemons)
    return results[0] | {"median_ms": max(result["median_ms"] for result in results.values())}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = ["compute", "adamw", "adamw-fsdp2", "dmuond", "dmuond-overlap", "dmuond-fsdp2"]
    parser.add_argument("ways", nargs="+", choices=ways)
    parser.add_argument("--model", choices=SHAPES, default="1.5b")
    parser.add_argument("--batch", type=int, default=8, help=f"sequences of {SEQUENCE} on each GPU")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--programs", default="build/cuda/bin")
    parser.add_argument("--libraries", default="", help="LD_LIBRARY_PATH of the daemon")
    parser.add_argument("--flag", action="append", default=[], help="of the daemon")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for way in options.ways:
        row = {"model": options.model, "batch": options.batch, "gpus": options.gpus, "way": way}
        rows.append(row | measure(options, way))
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1) + "\n")
        last = rows[-1]
        print(
            f"{options.model} x{options.batch} on {options.gpus}  {way:15}"
            f"{last['median_ms']:8.1f} ms ({last['least_ms']:.1f} … {last['most_ms']:.1f})"
            f"  {last['sm_mhz']} MHz  {last['watts']:.0f} W  {last['used_mib']} MiB"
            f"  loss {last['losses'][0]:.2f} → {last['losses'][1]:.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
