#!/usr/bin/env python3
"""What one job's steps cost where another one has the same daemons.

    jobs_bench.py --programs=build/cpu/bin [--nodes=2] [--json=FILE]

The first job has one small matrix and a rank on each node: a step is mostly the daemons'
decision. In every other block of its steps the second job does:

    steps      it steps, too, with 2,000 parameters
    floods     four of its processes make calls as fast as they can, which are refused
    lanes      one of its lanes is killed again and again: each time a new epoch, with new lanes
    begins     it ends and begins anew, again and again

Prints the median and the 90th percentile of the first job's steps, without and with each.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import statistics
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Event

    from core_trainer import Job, Trainer

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "python"))

PARAMETERS = 2_000
FLOODS = 4


def many_parameters(name: str) -> Job:
    from core_trainer import Job, Tensor, whole

    tensors = tuple(Tensor(f"p{i}", (8, 8)) for i in range(PARAMETERS))
    return Job(tensors, (tuple(whole(tensor) for tensor in tensors),), name=name)


def one_matrix(name: str, world: int) -> Job:
    from core_trainer import Job, Tensor, whole

    square = Tensor("square", (16, 16))
    return Job((square,), ((whole(square),),) * world, name=name)


class Quiet:
    """The first job: a thread for each rank."""

    def __init__(self, addresses: list[str]) -> None:
        from core_trainer import Trainer

        world = len(addresses)
        self.times: list[float] = []
        self.ranks = [None] * world
        job = one_matrix("quiet", world)

        def begin(rank: int) -> None:
            self.ranks[rank] = Trainer(rank, world, job, address=addresses[rank])

        self.together(*(lambda r=r: begin(r) for r in range(world)))

    @staticmethod
    def together(*calls: Callable[[], None]) -> None:
        threads = [threading.Thread(target=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def block(self, steps: int) -> list[float]:
        """The times of rank 0's steps."""
        times = []

        def rank_0() -> None:
            for _ in range(steps):
                begin = time.perf_counter()
                self.ranks[0].step()
                times.append(time.perf_counter() - begin)

        def other(trainer: Trainer) -> None:
            for _ in range(steps):
                trainer.step()

        self.together(rank_0, *(lambda t=t: other(t) for t in self.ranks[1:]))
        return times


def steps(addresses: list[str], go: Event, ended: Event) -> None:
    from core_trainer import Trainer

    trainer = Trainer(0, 1, many_parameters("beside"), address=addresses[0])
    while not ended.is_set():
        if go.wait(0.1):
            trainer.step()
    trainer.session.close()


def flood(address: str, go: Event, ended: Event) -> None:
    import grpc
    from dmuond import _proto
    from dmuond._proto import trainer_pb2 as messages

    options = [("grpc.default_authority", "localhost"), ("grpc.use_local_subchannel_pool", 1)]
    with grpc.insecure_channel(address, options=options) as channel:
        stub = _proto.stub(channel, "Trainer")
        request = messages.WaitStepRequest(key=messages.SessionKey(session=65, incarnation=1))
        while not ended.is_set():
            if not go.wait(0.1):
                continue
            with suppress(grpc.RpcError):
                stub.WaitStep(request, timeout=10)


def floods(addresses: list[str], go: Event, ended: Event) -> None:
    others = [
        multiprocessing.Process(target=flood, args=(addresses[0], go, ended)) for _ in range(FLOODS)
    ]
    for process in others:
        process.start()
    for process in others:
        process.join()


def lanes_of(job: str) -> list[int]:
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if f"--job={job}" in command.read_text().split("\0"):
                found.append(int(command.parent.name))
    return found


def lanes(addresses: list[str], go: Event, ended: Event) -> None:
    from core_trainer import Trainer

    trainer = Trainer(0, 1, one_matrix("beside", 1), address=addresses[0])
    while not ended.is_set():
        if not go.wait(0.1):
            continue
        for pid in lanes_of("beside")[:1]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        trainer.step()
    trainer.session.close()


def begins(addresses: list[str], go: Event, ended: Event) -> None:
    from core_trainer import Trainer

    while not ended.is_set():
        if not go.wait(0.1):
            continue
        trainer = Trainer(0, 1, one_matrix("beside", 1), address=addresses[0])
        trainer.step()
        trainer.session.close()


def figures(times: list[float]) -> dict[str, float]:
    return {
        "p50_ms": round(statistics.median(times) * 1e3, 4),
        "p90_ms": round(statistics.quantiles(times, n=10)[8] * 1e3, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--programs", required=True)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=10, help="of each kind")
    parser.add_argument("--steps", type=int, default=300, help="of a block")
    parser.add_argument("--json", help="file to write")
    options = parser.parse_args()
    os.environ["DMUOND_BIN_DIR"] = str(Path(options.programs).resolve())

    from daemons import Daemons

    rows = {}
    print("#  beside  p50 alone  p50 beside  ratio  p90 alone  p90 beside  ratio")
    for noise in (steps, floods, lanes, begins):
        with Daemons() as daemons:
            addresses = daemons.start(options.nodes, 1)
            quiet = Quiet(addresses)
            go, ended = multiprocessing.Event(), multiprocessing.Event()
            beside = multiprocessing.Process(target=noise, args=(addresses, go, ended))
            beside.start()
            time.sleep(2)  # until it has begun
            quiet.block(options.steps)
            times: dict[bool, list[float]] = {False: [], True: []}
            for block in range(2 * options.blocks):
                loud = block % 2 == 1
                (go.set if loud else go.clear)()
                time.sleep(0.5)
                times[loud] += quiet.block(options.steps)
            go.set()
            ended.set()
            beside.join()
            quiet.together(*(rank.session.close for rank in quiet.ranks))
        alone, both = figures(times[False]), figures(times[True])
        rows[noise.__name__] = {"alone": alone, "beside": both}
        print(
            f"{noise.__name__:>8}",
            *(
                f"{alone[key]:>10.3f} {both[key]:>11.3f} {both[key] / alone[key]:>6.2f}"
                for key in ("p50_ms", "p90_ms")
            ),
            flush=True,
        )
    if options.json:
        Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    main()
