"""The example script survivor.py in processes of its own, and what they have printed."""

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

PATIENCE_S = 300.0
STEPS = 300  # of the fixture `undisturbed`
SCRIPT = Path(__file__).parents[2] / "client/python/examples/survivor.py"


class Survivor:
    """One rank. Its output is read as it comes.

    hold: a step at which nobody reads on before `wait_for` has a later one, or `finish`. Its output
    has room for a few lines: so it goes a few steps further, however late the test looks.
    """

    def __init__(
        self,
        address: str,
        rank: int,
        world: int,
        steps: int,
        resume: bool = False,
        hold: int | None = None,
    ):
        environment = os.environ | {
            "DMUOND_ADDRESS": address,
            "DMUOND_RESUME": str(int(resume)),
            "DMUOND_RECONNECT_S": "120",
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": "1",
        }
        output, theirs = socket.socketpair()
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel makes it the least
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(steps)],
            env=environment,
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        self.lines: list[str] = []
        self.errors = ""
        self._hold = hold
        self._read_more = threading.Condition()
        self._reader = threading.Thread(target=self._read, args=(output,), daemon=True)
        self._reader.start()

    def _read(self, output: socket.socket):
        with output, output.makefile(buffering=1) as lines:
            for line in lines:
                with self._read_more:
                    self.lines.append(line.rstrip("\n"))
                    self._read_more.notify_all()
                    self._read_more.wait_for(lambda: self._hold is None or self.step() < self._hold)
        self.errors = self.process.stderr.read()
        with self._read_more:
            self._read_more.notify_all()

    def _hold_at(self, step: int | None):
        with self._read_more:
            self._hold = step
            self._read_more.notify_all()

    def step(self) -> int:
        """The last step that it has told of."""
        steps = [int(line.split()[1]) for line in self.lines if line.startswith("step ")]
        return steps[-1] if steps else 0

    def wait_for(self, step: int):
        if self._hold is not None:
            self._hold_at(step)
        with self._read_more:
            self._read_more.wait_for(
                lambda: self.step() >= step or self.process.poll() is not None, PATIENCE_S
            )
        assert self.step() >= step, self.report()

    def finish(self) -> list[str]:
        """Its lines, once it has ended well."""
        self._hold_at(None)
        self.process.wait(timeout=PATIENCE_S)
        self._reader.join()
        assert self.process.returncode == 0, self.report()
        return self.lines

    def returns(self) -> list[int]:
        """The steps that it was set back to."""
        return [int(line.split()[2]) for line in self.lines if line.startswith("back to ")]

    def run(self) -> dict[str, str]:
        """What each step was in the end, and the weights: a step that was gone over counts anew."""
        return {" ".join(line.split()[:-1]): line for line in self.lines if "back to" not in line}

    def report(self) -> str:
        return "\n".join([*self.lines[-10:], self.errors])

    def end(self):
        self._hold_at(None)
        self.process.kill()
        self.process.wait()
