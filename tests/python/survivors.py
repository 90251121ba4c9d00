"""The example script survivor.py in processes of its own, and what they have printed."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

PATIENCE_S = 180.0
STEPS = 300  # of the fixture `undisturbed`
SCRIPT = Path(__file__).parents[2] / "client/python/examples/survivor.py"


class Survivor:
    """One rank. Its output is read as it comes."""

    def __init__(self, address: str, rank: int, world: int, steps: int, resume: bool = False):
        environment = os.environ | {
            "DMUOND_ADDRESS": address,
            "DMUOND_RESUME": str(int(resume)),
            "DMUOND_RECONNECT_S": "120",
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "OMP_NUM_THREADS": "1",
        }
        self.process = subprocess.Popen(
            [sys.executable, str(SCRIPT), str(steps)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.errors = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
        self.errors = self.process.stderr.read()

    def step(self) -> int:
        """The last step that it has told of."""
        steps = [int(line.split()[1]) for line in self.lines if line.startswith("step ")]
        return steps[-1] if steps else 0

    def wait_for(self, step: int):
        deadline = time.monotonic() + PATIENCE_S
        while self.step() < step:
            assert self.process.poll() is None, self.report()
            assert time.monotonic() < deadline, self.report()
            time.sleep(0.005)

    def finish(self) -> list[str]:
        """Its lines, once it has ended well."""
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
        self.process.kill()
        self.process.wait()
