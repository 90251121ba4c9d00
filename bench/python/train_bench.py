#!/usr/bin/env python3
"""Whole training steps on the GPUs of a machine: what dmuond costs beside AdamW and beside nothing.

    train_bench.py --programs=build/cuda/bin --model=1.5b --batch=8 compute adamw dmuond

One process for each GPU trains a decoder with the sizes of Qwen2.5-1.5B, Llama-3.2-3B or
Llama-3.1-8B on random tokens, in bf16. A way to train has a row:

  compute       forward and backward pass alone: the floor of every step
  copied        the same, and each gradient is copied to a place of its own when it comes
  idle          forward and backward pass alone, beside lanes of a job that makes no steps
  adamw         DistributedDataParallel and torch's fused AdamW
  adamw-fsdp2   fully_shard of every block, and the same
  dmuond        replicas; Muon and AdamW by a daemon with a lane on each GPU
  dmuond-overlap  the same; each block's weights are waited for in the next forward pass
  dmuond-fsdp2  fully_shard of every block, and the daemon

A row has the median time of the last half of the steps, by events of the GPU between the ends of
steps that the host does not wait for, and that of forward and backward pass; then SM clock and
power meanwhile, and memory of all processes of the first GPU. --json has more: for dmuond what its
metrics say of the last step, what its plan estimates, and the processor time of daemon and lanes.
With MPS: start its control daemon first.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import dataclasses
import gc
import json
import multiprocessing
import os
import queue
import signal
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch
    from torch import Tensor, nn

SEQUENCE = 2048
READY_TIMEOUT_S, RUN_TIMEOUT_S = 60.0, 600.0
PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclasses.dataclass(frozen=True)
class Shape:
    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    vocabulary: int
    tied: bool = True


SHAPES = {
    "tiny": Shape(256, 512, 2, 4, 2, 1000),
    "1.5b": Shape(1536, 8960, 28, 12, 2, 151936),
    "3b": Shape(3072, 8192, 28, 24, 8, 128256),
    "8b": Shape(4096, 14336, 32, 32, 8, 128256, tied=False),
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
            if shape.tied:
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
    if way == "copied":
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(copy_to(torch.empty_like(parameter)))
    if way in ("compute", "copied", "idle"):
        return model, None
    if way == "adamw":
        model = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def copy_to(place: Tensor) -> Callable[[nn.Parameter], None]:
    def hook(parameter: nn.Parameter) -> None:
        place.copy_(parameter.grad)
        parameter.grad = None

    return hook


def enter(rank: int, options: Any, rendezvous: str) -> torch.device:
    """This process becomes a rank, with a GPU of its own."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(options.gpus)}
    import torch
    from torch import distributed

    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    distributed.init_process_group(
        "nccl", init_method=rendezvous, rank=rank, world_size=options.gpus, device_id=device
    )
    return device


@contextlib.contextmanager
def daemon_of_rank_0(options: Any, rank: int) -> Iterator[None]:
    """A daemon with a lane on each GPU, which every rank finds."""
    from torch import distributed

    daemon = None
    with tempfile.TemporaryDirectory(prefix="dm-") as folder:
        if rank == 0:
            daemon = Daemon(options, Path(folder) / "0", options.gpus, *options.flag)
            daemon.wait()
        address = [daemon.address if daemon else ""]
        distributed.broadcast_object_list(address, 0)
        os.environ["DMUOND_ADDRESS"] = address[0]
        try:
            yield
            distributed.barrier()
        except BaseException:
            print(daemon.text() if daemon else "", end="")
            raise
        finally:
            if daemon:
                daemon.end()


def train(
    rank: int, options: Any, ways: list[str], rendezvous: str, _address: str, answer: Any
) -> None:
    import torch
    from torch import distributed

    device = enter(rank, options, rendezvous)
    rows = []
    for way in ways:
        has_daemon = way.startswith("dmuond") or way == "idle"
        with daemon_of_rank_0(options, rank) if has_daemon else contextlib.nullcontext():
            found = measure(rank, options, way, device)
        gc.collect()
        torch.cuda.empty_cache()
        # The slowest rank's.
        slowest = torch.tensor([found["median_ms"], found["passes_ms"]], device=device)
        distributed.all_reduce(slowest, distributed.ReduceOp.MAX)
        found["median_ms"], found["passes_ms"] = slowest.tolist()
        about = {"model": options.model, "batch": options.batch, "gpus": options.gpus, "way": way}
        rows.append(about | found)
        if rank == 0:
            tell(options, rows)
    answer.put((rank, rows))
    distributed.destroy_process_group()


def measure(rank: int, options: Any, way: str, device: torch.device) -> dict:
    import torch

    torch.cuda.reset_peak_memory_stats()
    with device:
        model = make_model(SHAPES[options.model])
    model, optimizer = make_way(way, model)
    idle = attach_idle(device) if way == "idle" else None
    generator = torch.Generator(device).manual_seed(rank)
    size = (options.batch, SEQUENCE)
    vocabulary = SHAPES[options.model].vocabulary
    passed, ended, losses, seen, tracing = [], [], [], {}, None
    for step in range(options.steps):
        if rank == 0 and step == options.steps // 2:
            seen["processors"] = Processors()
            if options.traces and way.startswith("dmuond"):
                tracing = trace(options, way)
        tokens = torch.randint(0, vocabulary, size, generator=generator, device=device)
        loss = model(tokens)
        loss.backward()
        passed.append(mark())
        if optimizer is None:
            for parameter in model.parameters():
                parameter.grad = None
        else:
            optimizer.step()
            optimizer.zero_grad()
        ended.append(mark())
        losses.append(loss.detach())
        if rank == 0 and step == options.steps - 2:
            seen |= look_at_gpu()
    torch.cuda.synchronize()
    last = range(options.steps // 2, options.steps)
    times = [ended[i - 1].elapsed_time(ended[i]) for i in last]
    passes = [ended[i - 1].elapsed_time(passed[i]) for i in last]
    if rank == 0:
        seen["processors"] = seen["processors"].used()
    if way.startswith("dmuond"):
        seen["metrics"] = dict(optimizer.metrics())
        if rank == 0:
            seen["plan"] = json.loads(ask(options, "plan", "--json"))
    if tracing is not None:
        tracing.wait()
    for attached in (optimizer if way.startswith("dmuond") else None, idle):
        if attached is not None:
            attached.close()
    return {
        "median_ms": statistics.median(times),
        "least_ms": min(times),
        "most_ms": max(times),
        "passes_ms": statistics.median(passes),
        "steps": len(times),
        "losses": [float(losses[0]), float(losses[-1])],
        "torch_memory_mib": torch.cuda.max_memory_reserved() >> 20,
        **seen,
    }


def mark() -> torch.cuda.Event:
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def attach_idle(device: torch.device) -> Any:
    """To a job that has made its steps."""
    import dmuond.torch
    from torch import nn

    model = nn.Linear(64, 64, device=device)
    optimizer = dmuond.torch.Muon(model, lr=1e-3, adamw_lr=1e-4, verbose=False)
    for _ in range(2):
        model(model.weight).sum().backward()
        optimizer.step()
    optimizer.wait()
    return optimizer


def dmuonctl(options: Any, *words: str) -> tuple[list[str], dict[str, str]]:
    """Command and environment."""
    libraries = os.pathsep.join([options.libraries, os.environ.get("LD_LIBRARY_PATH", "")])
    command = [str(Path(options.programs).resolve() / "dmuonctl"), *words]
    return command, os.environ | {"LD_LIBRARY_PATH": libraries}


def ask(options: Any, *words: str) -> str:
    command, environment = dmuonctl(options, *words)
    return subprocess.check_output(command, env=environment, text=True)


def trace(options: Any, way: str) -> subprocess.Popen:
    """Of the next steps, while they are made."""
    file = options.traces / f"{options.model}-{options.batch}-{way}.json"
    command, environment = dmuonctl(options, "trace", "--steps=3", "-o", str(file))
    return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)


class Processors:
    """What daemons and lanes of this machine use of them, from now on."""

    def __init__(self) -> None:
        self._begin, self._before = time.monotonic(), self._seconds()

    def used(self) -> dict[str, list[float]]:
        """Cores, of each process."""
        after, took_s = self._seconds(), time.monotonic() - self._begin
        found: dict[str, list[float]] = {}
        for (pid, name), seconds in after.items():
            if (pid, name) in self._before:
                cores = (seconds - self._before[pid, name]) / took_s
                found.setdefault(name, []).append(round(cores, 3))
        return found

    @staticmethod
    def _seconds() -> dict[tuple[int, str], float]:
        found = {}
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                head, fields = path.read_text().rsplit(") ", 1)
                pid, name = head.split(" (", 1)
                if name.startswith("dmuond"):
                    user, system = fields.split()[11:13]
                    ticks = int(user) + int(system)
                    found[int(pid), name] = ticks / os.sysconf("SC_CLK_TCK")
        return found


def look_at_gpu() -> dict:
    """While the host is ahead of the GPU, it is at work."""
    clock, watts, memory = ask_smi("gpu=clocks.sm,power.draw,memory.used")[0]
    of_processes = {
        Path(f"/proc/{pid}/comm").read_text().strip(): int(mib)
        for pid, mib in ask_smi("compute-apps=pid,used_memory")
    }
    return {
        "sm_mhz": int(clock),
        "watts": float(watts),
        "used_mib": int(memory),
        "processes_mib": of_processes,
    }


def ask_smi(query: str) -> list[list[str]]:
    """Rows, of the first GPU."""
    asked = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits", "--id=0"]
    lines = subprocess.check_output(asked, text=True).splitlines()
    return [line.split(", ") for line in lines if line]


def tell(options: Any, rows: list[dict]) -> None:
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    last = rows[-1]
    print(
        f"{options.model} x{options.batch} on {options.gpus}  {last['way']:15}"
        f"{last['median_ms']:8.1f} ms ({last['least_ms']:.1f} … {last['most_ms']:.1f})"
        f"  passes {last['passes_ms']:.1f} ms"
        f"  {last['sm_mhz']} MHz  {last['watts']:.0f} W  {last['used_mib']} MiB"
        f"  loss {last['losses'][0]:.2f} → {last['losses'][1]:.2f}",
        flush=True,
    )


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
            preexec_fn=_end_with_parent,
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


def _end_with_parent() -> None:
    """The daemon of a rank that is killed leaves no memory in use."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def run_ranks(
    options: Any, way: Any, target: Callable[..., None], daemons: list[Daemon]
) -> dict[int, Any]:
    """What `target`, called as train() is, has put into its queue on each GPU, by rank.

    Ranks are shared out among the daemons, if there are any, which are waited for and ended.
    """
    results: dict[int, Any] = {}
    try:
        for daemon in daemons:
            daemon.wait()
        addresses = [daemon.address for daemon in daemons]
        with tempfile.TemporaryDirectory(prefix="dm-") as folder:
            # A port that is free now may be a daemon's when ranks listen.
            rendezvous = f"file://{folder}/rendezvous"
            results = _results(options, way, target, addresses, rendezvous)
    finally:
        for daemon in daemons:
            daemon.end()
            print(daemon.text() if len(results) < options.gpus else "", end="")
    if len(results) < options.gpus:
        raise SystemExit(f"{way}: a trainer has failed, or takes longer than {RUN_TIMEOUT_S:.0f} s")
    return results


def _results(
    options: Any,
    way: Any,
    target: Callable[..., None],
    daemons: list[str],
    rendezvous: str,
) -> dict[int, Any]:
    """Fewer than there are ranks where one fails, or takes too long."""
    context = multiprocessing.get_context("spawn")
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


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Of whoever calls run_ranks() and starts daemons."""
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--programs", default="build/cuda/bin")
    parser.add_argument("--libraries", default="", help="LD_LIBRARY_PATH of the daemon")
    parser.add_argument("--flag", action="append", default=[], help="of the daemon")
    parser.add_argument("--json", type=Path)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ways = ["compute", "copied", "idle", "adamw", "adamw-fsdp2"]
    ways += ["dmuond", "dmuond-overlap", "dmuond-fsdp2"]
    parser.add_argument("ways", nargs="+", choices=ways)
    parser.add_argument("--model", choices=SHAPES, default="1.5b")
    parser.add_argument("--batch", type=int, default=8, help=f"sequences of {SEQUENCE} on each GPU")
    parser.add_argument("--steps", type=int, default=20)
    add_run_options(parser)
    parser.add_argument("--traces", type=Path, help="folder for traces of three steps of dmuond's")
    options = parser.parse_args()
    run_ranks(options, options.ways, train, [])


if __name__ == "__main__":
    main()
