"""The machine with GPUs, real or the fake driver's, and the processes that run on it."""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bundle import PYTHON
from rows import WrongError

PATIENCE_S = 90.0
PAUSE_S = 0.002
MPS_CONTROL = "nvidia-cuda-mps-control"


def until(what: str, come: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not come():
        if time.monotonic() > deadline:
            raise WrongError(f"{what}: not in {patience_s:.0f} s")
        time.sleep(PAUSE_S)


class Program:
    """A process whose lines are kept as they come. It and its children are a process group."""

    def __init__(self, command: list, log: Path, environment: dict[str, str]):
        self._log = log
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [str(word) for word in command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        with self._log.open("a") as log:
            for line in self.process.stdout:
                self.lines.append(line.rstrip("\n"))
                log.write(line)
                log.flush()

    @property
    def last_words(self) -> str:
        return " | ".join(self.lines[-3:])

    def kill(self) -> None:
        self.process.kill()
        self.wait()

    def kill_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def wait(self, patience_s: float = PATIENCE_S) -> int:
        """Returns its exit code when all its lines are there."""
        try:
            code = self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise WrongError(f"has not ended: {self.last_words}") from None
        self._reader.join(PATIENCE_S)
        return code


class Machine:
    """Threads: one. `with_mps`: what processes that are started from now on find."""

    def __init__(self, programs: Path, fake: bool, gpus: int, out: Path, nccl: str):
        self.programs, self.is_fake, self.gpus, self.out = programs, fake, gpus, out
        self.lane = programs / ("dmuond-lane-fake" if fake else "dmuond-lane")
        self.with_mps = False
        self._folder = Path(tempfile.mkdtemp(prefix="dmuond-gpu-"))
        self._pipes = self._folder / "mps"
        self._started: list[Program] = []
        self._control: Program | None = None
        self._nccl = nccl or _nccl_of_this_python()
        self._fake_number = str(secrets.randbelow(1 << 31))

    def close(self) -> None:
        self.end_programs()
        self.end_mps()
        shutil.rmtree(self._folder, ignore_errors=True)

    def make_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self._folder))

    def start(self, command: list, log: str, kind: type = Program, **variables: str) -> Program:
        environment = self._environment() | variables
        program = kind(command, self.out / re.sub(r"[^\w.]+", "-", log), environment)
        self._started.append(program)
        return program

    def run(self, command: list, log: str, patience_s: float = PATIENCE_S) -> Program:
        """Until it has ended."""
        program = self.start(command, log)
        program.wait(patience_s)
        return program

    def end_programs(self) -> None:
        for program in self._started:
            program.kill_group()
        self._started.clear()

    def begin_mps(self) -> str:
        """A control daemon of our own, from whose folder processes take it."""
        self._pipes.mkdir()
        self.with_mps = True
        if self.is_fake:
            (self._pipes / "control").touch()  # what tells a daemon that one listens
            return "as the fake driver says"
        if shutil.which(MPS_CONTROL) is None:
            raise WrongError(f"{MPS_CONTROL} is not there")
        log = self.out / "mps-control.log"
        self._control = Program([MPS_CONTROL, "-f"], log, self._environment())
        until("MPS listens", (self._pipes / "control").exists, 20.0)
        return "it does"

    def end_mps(self) -> None:
        if self._control is not None:
            self._control.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._control.process.wait(10.0)
            self._control.kill_group()
            self._control = None
        shutil.rmtree(self._pipes, ignore_errors=True)
        self.with_mps = False

    def describe(self) -> str:
        if self.is_fake:
            return f"{self.gpus} of the fake driver"
        return "; ".join(_ask_smi("gpu=name,driver_version,clocks.max.sm,power.limit"))

    def compute_processes(self) -> list[int]:
        """Pids, as the driver lists them."""
        return [int(line) for line in _ask_smi("compute-apps=pid") if line.isdigit()]

    def memory_in_use_mib(self) -> int:
        """Of all GPUs."""
        return sum(int(line) for line in _ask_smi("gpu=memory.used"))

    def settled_memory_mib(self) -> int:
        """What is in use when what has just ended is gone: two readings agree."""
        readings = [self.memory_in_use_mib()]

        def agree() -> bool:
            time.sleep(0.5)
            readings.append(self.memory_in_use_mib())
            return readings[-1] == readings[-2]

        until("memory settles", agree, 20.0)
        return readings[-1]

    def _environment(self) -> dict[str, str]:
        clean = {key: v for key, v in os.environ.items() if not key.startswith("DMUOND_")}
        clean["CUDA_MPS_PIPE_DIRECTORY"] = str(self._pipes)
        clean["CUDA_MPS_LOG_DIRECTORY"] = str(self._folder)
        paths = [self._nccl, clean.get("LD_LIBRARY_PATH", "")]
        if self.is_fake:
            paths.insert(0, str(self.programs.parent / "fake_cuda"))
            clean |= {
                "FAKE_CUDA_DEVICES": str(self.gpus),
                "FAKE_CUDA_MACHINE": self._fake_number,
                "FAKE_CUDA_MPS": str(int(self.with_mps)),
                "FAKE_CUDA_NO_CONTEXT": "dmuond",
            }
        clean["PYTHONPATH"] = os.pathsep.join([str(PYTHON), clean.get("PYTHONPATH", "")])
        clean["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
        return clean


def count_gpus() -> int:
    return len(_ask_smi("gpu=index"))


def _ask_smi(query: str) -> list[str]:
    command = ["nvidia-smi", f"--query-{query}", "--format=csv,noheader,nounits"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise WrongError(f"nvidia-smi: {error}") from None
    return [line.strip() for line in asked.stdout.splitlines() if line.strip()]


def _nccl_of_this_python() -> str:
    """The folder of the package that PyTorch brings."""
    for place in sys.path:
        folder = Path(place) / "nvidia/nccl/lib"
        if (folder / "libnccl.so.2").exists():
            return str(folder)
    return ""
