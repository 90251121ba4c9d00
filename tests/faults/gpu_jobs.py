#!/usr/bin/env python3
"""Whole jobs on GPUs, as a GPU machine is asked first: a daemon, its lanes and two trainers.

Runs what tools/gpu/bundle.sh collected (its folder is the argument), needs nothing but Python, and
prints a line for each check. All checks run on one GPU, with a lane that both trainers share, and
then on all of the machine's, with a lane for each; with arenas that the daemon makes, and with the
trainers' own. Every run must end with the weights of the first one, bit by bit: the GPUs are alike.

  gpu_jobs.py FOLDER [--out=FOLDER] [--gpus=N] [--only=CHECK] [--steps=N]
"""

import argparse
import itertools
import os
import pathlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

WORLD = 2
PATIENCE_S = 90.0


class Program:
    """A process whose lines are kept as they come."""

    def __init__(self, command, log):
        self.log = log
        self.lines = []
        self.process = subprocess.Popen(
            [str(word) for word in command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        with open(self.log, "a") as log:
            for line in self.process.stdout:
                self.lines.append(line.rstrip("\n"))
                log.write(line)
                log.flush()

    def kill(self):
        self.process.kill()
        self.process.wait()
        self.reader.join()

    def finish(self):
        self.process.wait(PATIENCE_S)
        self.reader.join()
        return self.process.returncode


class Trainer(Program):
    def steps(self):
        """(step, hash of the weights, nanoseconds)."""
        words = [line.split() for line in self.lines if line.startswith("step ")]
        return [(int(w[1]), w[5], int(w[7])) for w in words]

    def wait_for(self, step):
        self._wait(f"step {step}", lambda: any(number >= step for number, _, _ in self.steps()))

    def wait_for_snapshot(self):
        def durable(line):
            return line.startswith("step ") and int(line.split()[9]) > 0

        self._wait("snapshot", lambda: any(map(durable, self.lines)))

    def _wait(self, what, come):
        deadline = time.monotonic() + PATIENCE_S
        while not come():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no {what}: " + " | ".join(self.lines[-3:]))
            time.sleep(0.002)


class Job:
    """`gpus`: so many have a lane. `own`: arenas lie in memory of the trainers' own."""

    def __init__(self, options, name, gpus, own, *flags):
        self.folder, self.out, self.steps = options.folder, options.out, options.steps
        self.name, self.gpus, self.own = name, gpus, own
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="dmuond-gpu-"))
        self.flags = flags
        self.trainers = []
        self.start_daemon()

    def start_daemon(self):
        socket = self.home / "d.sock"
        self.daemon = Program(
            [
                self.folder / "dmuond", f"--socket={socket}", f"--devices=cuda:{self.gpus}",
                f"--lane_binary={self.folder / 'dmuond-lane'}",
                f"--snapshot_dir={self.home / 'snapshots'}", "--snapshot_every_steps=10",
                *self.flags,
            ],
            self.out / f"{self.name}-daemon.log",
        )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while not any("serving" in line for line in self.daemon.lines):
            if self.daemon.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(
                    "the daemon does not serve: " + " | ".join(self.daemon.lines[-3:])
                )
            time.sleep(0.01)

    def start_trainer(self, rank, resume="never"):
        return Trainer(
            [
                self.folder / "fault_trainer_cuda", f"--address={self.home / 'd.sock'}",
                f"--rank={rank}", f"--world_size={WORLD}", f"--steps={self.steps}",
                f"--device=cuda:{rank % self.gpus}{',own' if self.own else ''}",
                f"--resume={resume}", "--early",
            ],
            self.out / f"{self.name}-trainer{rank}.log",
        )  # fmt: skip

    def start_trainers(self):
        self.trainers = [self.start_trainer(rank) for rank in range(WORLD)]

    def lane(self):
        children = subprocess.run(
            ["pgrep", "-P", str(self.daemon.process.pid), "-f", "dmuond-lane"],
            capture_output=True, text=True,
        ).stdout.split()  # fmt: skip
        return int(children[0])

    def finish(self):
        """Each rank's weights after each step, in the end: a rank has a shard of its own."""
        for trainer in self.trainers:
            if trainer.finish() != 0:
                raise RuntimeError("a trainer ended badly: " + " | ".join(trainer.lines[-3:]))
        self.daemon.process.send_signal(signal.SIGTERM)
        if self.daemon.finish() != 0:
            raise RuntimeError("the daemon ended badly: " + " | ".join(self.daemon.lines[-3:]))
        return {
            (rank, step): digest
            for rank, trainer in enumerate(self.trainers)
            for step, digest, _ in trainer.steps()
        }

    def end(self):
        for program in [*self.trainers, self.daemon]:
            if program.process.poll() is None:
                program.kill()


def undisturbed(job, note):
    job.start_trainers()
    weights = job.finish()
    times = [t for _, _, t in job.trainers[0].steps()][5:]
    gaps = sorted(b - a for a, b in zip(times, times[1:], strict=False))
    note.append(f"step p50 {statistics.median(gaps) / 1e6:.2f} ms")
    return weights


def lane_killed(job, note):
    job.start_trainers()
    job.trainers[0].wait_for(1)
    lane = job.lane()
    job.trainers[0].wait_for(12)
    os.kill(lane, signal.SIGKILL)
    begin = time.monotonic()
    reached = job.trainers[0].steps()[-1][0]
    job.trainers[0].wait_for(reached + 2)
    note.append(f"at work again after {time.monotonic() - begin:.2f} s")
    return job.finish()


def trainer_killed(job, note):
    job.start_trainers()
    job.trainers[0].wait_for(12)
    job.trainers[1].kill()
    begin = time.monotonic()
    reached = job.trainers[0].steps()[-1][0]
    job.trainers[1] = job.start_trainer(1, resume="if_present")
    job.trainers[0].wait_for(reached + 2)
    note.append(f"at work again after {time.monotonic() - begin:.2f} s")
    return job.finish()


def trainers_exit_while_busy(job, note):
    """Both die; the state is the daemon's."""
    job.start_trainers()
    job.trainers[0].wait_for(12)
    for trainer in job.trainers:
        trainer.kill()
    job.trainers = [job.start_trainer(rank, resume="if_present") for rank in range(WORLD)]
    return job.finish()


def trainer_faults(job, note):
    """An illegal access, which under MPS ends all that is at work on the GPU, its lane too."""
    job.start_trainers()
    job.trainers[0].wait_for(12)
    job.trainers[1].process.send_signal(signal.SIGUSR1)
    begin = time.monotonic()
    again = 0
    while any(trainer.process.poll() != 0 for trainer in job.trainers):
        for rank, trainer in enumerate(job.trainers):
            if trainer.process.poll() in (None, 0):
                continue
            trainer.reader.join()
            job.trainers[rank] = job.start_trainer(rank, resume="if_present")
            again += 1
        if time.monotonic() > begin + PATIENCE_S:
            raise RuntimeError(f"not at an end, {again} trainers started again")
        time.sleep(0.01)
    seconds = time.monotonic() - begin
    note.append(f"{again} trainers started again, at the end after {seconds:.2f} s")
    return job.finish()


def daemon_killed(job, note):
    job.start_trainers()
    job.trainers[0].wait_for_snapshot()
    job.daemon.kill()
    begin = time.monotonic()
    reached = job.trainers[0].steps()[-1][0]
    job.start_daemon()
    job.trainers[0].wait_for(reached + 1)
    note.append(f"past where it was after {time.monotonic() - begin:.2f} s")
    return job.finish()


def no_context(job, note):
    """The daemon is no compute process of the driver's, while memory of its making is in use."""
    job.start_trainers()
    job.trainers[0].wait_for(5)
    listed = subprocess.run(
        ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"],
        capture_output=True, text=True,
    ).stdout.split("\n")  # fmt: skip
    pids = [line.split(",")[0].strip() for line in listed if line.strip()]
    note.append(f"compute processes {pids}, the daemon is {job.daemon.process.pid}")
    if str(job.daemon.process.pid) in pids:
        raise RuntimeError("the daemon has a context")
    return job.finish()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("jobs-results"))
    parser.add_argument("--gpus", type=int, default=1)
    # Of less than a millisecond: the last comes after what a check waits for.
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--only", help="this check alone, after an undisturbed run")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    expected, failed = None, 0
    checks = [undisturbed, undisturbed, no_context, lane_killed, trainer_killed,
              trainers_exit_while_busy, daemon_killed, trainer_faults]  # fmt: skip
    if options.only:
        checks = [check for check in checks if check.__name__ in ("undisturbed", options.only)]
    kinds = itertools.product(
        sorted({1, options.gpus}), (False, True), ((), ("--mps=off",)), enumerate(checks)
    )
    for gpus, own, flags, (number, check) in kinds:
        note, job = [], None
        name = f"{number}-{check.__name__}-{gpus}gpu" + "-own" * own + "-mps-off" * bool(flags)
        begin = time.monotonic()
        try:
            job = Job(options, name, gpus, own, *flags)
            weights = check(job, note)
            expected = expected or weights
            wrong = sorted(
                step for rank, step in weights if weights[rank, step] != expected[rank, step]
            )
            ended = all((rank, options.steps) in weights for rank in range(WORLD))
            verdict = "holds" if ended and not wrong else f"FAILS: other bits from step {wrong[:1]}"
        except (RuntimeError, OSError, IndexError, subprocess.TimeoutExpired) as error:
            verdict = f"FAILS: {error}"
        finally:
            if job is not None:
                job.end()
        failed += verdict != "holds"
        print(
            f"{name:44} {time.monotonic() - begin:6.1f} s  {verdict}  {'; '.join(note)}",
            flush=True,
        )
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
