"""Trainers as processes of their own, for tests with several ranks."""

import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from typing import Any

TIMEOUT_S = 120.0


class TrainerFailedError(AssertionError):
    """A trainer raised; carries its rank and traceback."""

    def __init__(self, rank: int, text: str):
        super().__init__(f"rank {rank}:\n{text}")
        self.rank = rank


def _main(connection, function, rank, world, address, arguments):
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank), DMUOND_ADDRESS=address
    )
    try:
        connection.send((True, function(rank, world, *arguments)))
    except BaseException:
        connection.send((False, traceback.format_exc()))
    connection.close()


def run(
    function: Callable[..., Any],
    world: int,
    addresses: Sequence[str],
    *arguments: Any,
    timeout_s: float = TIMEOUT_S,
) -> list[Any]:
    """Runs function(rank, world, *arguments) in `world` processes; returns the results by rank.

    Ranks are spread over the daemons in blocks. The environment is as torchrun sets it.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("spawn")
    started = []
    for rank in range(world):
        ours, theirs = context.Pipe()
        address = addresses[rank * len(addresses) // world]
        process = context.Process(
            target=_main, args=(theirs, function, rank, world, address, arguments)
        )
        process.start()
        theirs.close()
        started.append((process, ours))
    results, failures = [], []
    try:
        for rank, (_, connection) in enumerate(started):
            if not connection.poll(timeout_s):
                failures.append(TrainerFailedError(rank, f"no result in {timeout_s} s"))
                continue
            try:
                ok, value = connection.recv()
            except EOFError:
                ok, value = False, "the process ended without a result"
            results.append(value)
            if not ok:
                failures.append(TrainerFailedError(rank, value))
    finally:
        for process, connection in started:
            if failures:
                process.kill()
            process.join()
            connection.close()
    if failures:
        raise failures[0]
    return results
