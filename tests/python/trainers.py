"""Trainers as processes of their own, for tests with several ranks.

The processes live on from test to test, since importing torch takes seconds.
"""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TIMEOUT_S = 120.0


class TrainerFailedError(AssertionError):
    """A trainer raised; carries its rank and traceback."""

    def __init__(self, rank: int, text: str):
        super().__init__(f"rank {rank}:\n{text}")
        self.rank = rank


@contextlib.contextmanager
def _environment(values: Mapping[str, str]):
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _main(connection):
    while True:
        try:
            function, rank, world, environment, arguments = connection.recv()
        except EOFError:
            return
        try:
            with _environment(environment):
                answer = (True, function(rank, world, *arguments))
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


class Ranks:
    """As many trainer processes as have been asked for; after a failure they are new ones."""

    def __init__(self):
        self._context = multiprocessing.get_context("spawn")
        self._members: list[tuple[Any, Any]] = []  # process, connection

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._end()

    def run(
        self,
        function: Callable[..., Any],
        world: int,
        addresses: Sequence[str],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> list[Any]:
        """Runs function(rank, world, *arguments) in `world` processes; returns results by rank.

        Ranks are spread over the daemons in blocks. The environment is as torchrun sets it.
        """
        self._grow(world)
        for rank, (_, connection) in enumerate(self._members[:world]):
            values = {
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "DMUOND_ADDRESS": addresses[rank * len(addresses) // world],
                **(environment or {}),
            }
            connection.send((function, rank, world, values, arguments))
        try:
            return self._results(world, timeout_s)
        except BaseException:
            self._end()
            raise

    def _grow(self, world: int):
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        while len(self._members) < world:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_main, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))

    def _results(self, world: int, timeout_s: float) -> list[Any]:
        waiting = {connection: rank for rank, (_, connection) in enumerate(self._members[:world])}
        results: list[Any] = [None] * world
        deadline = time.monotonic() + timeout_s
        while waiting:
            left = max(0.0, deadline - time.monotonic())
            ready = multiprocessing.connection.wait(list(waiting), left)
            if not ready:
                rank = min(waiting.values())
                raise TrainerFailedError(rank, f"no result in {timeout_s} s")
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    succeeded, results[rank] = connection.recv()
                except EOFError:
                    succeeded, results[rank] = False, "the process ended without a result"
                if not succeeded:
                    raise TrainerFailedError(rank, results[rank])
        return results

    def _end(self):
        for process, connection in self._members:
            process.kill()
            process.join()
            connection.close()
        self._members = []
