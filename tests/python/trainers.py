"""Trainers as processes of their own, for tests with several ranks.

The processes live on from test to test, and are forked by one that has imported torch: each import
would take 5 s of a processor, and 450 MB.
"""

import contextlib
import ctypes
import multiprocessing
import multiprocessing.connection
import os
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TIMEOUT_S = 400.0  # of what hangs: a busy machine does not fail a test
PRELOADED = ["dmuond.torch", "torch.distributed.fsdp", "torch.distributed.tensor.parallel"]
PR_SET_PDEATHSIG = 1


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


def _main(connection, environment):
    """environment: of whoever asked for this process, which is forked by another one."""
    os.environ.clear()
    os.environ.update(environment)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # nobody stays when tests are killed
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
        # Libraries of another place, as the fake driver, are looked for when a process begins.
        context = multiprocessing.get_context(
            "spawn" if "LD_LIBRARY_PATH" in os.environ else "forkserver"
        )
        context.set_forkserver_preload(PRELOADED)
        while len(self._members) < world:
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(theirs, dict(os.environ)), daemon=True)
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
