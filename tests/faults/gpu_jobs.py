#!/usr/bin/env python3
"""Whole jobs on GPUs, as a GPU machine is asked first: a daemon, its lanes and two trainers.

Runs what tools/gpu/bundle.sh collected (its folder is the argument), needs nothing but Python, and
prints a line for each check. All checks run on one GPU, with a lane that both trainers share; on
all of the machine's, with a lane for each; and in two daemons with half of the GPUs each, whose
lanes exchange by NCCL. With arenas that the daemon makes, and with the trainers' own. Every run
must end with the weights of the first one, bit by bit: the GPUs are alike.

  gpu_jobs.py FOLDER [--out=FOLDER] [--gpus=N] [--nodes=N,...] [--only=CHECK] [--steps=N]
                     [--trainer=COMMAND]
"""

import argparse
import itertools
import os
import pathlib
import secrets
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time

WORLD = 2
PATIENCE_S = 90.0


def free_port():
    with socket.socket() as asked:
        asked.bind(("127.0.0.1", 0))
        return asked.getsockname()[1]


class Program:
    """A process whose lines are kept as they come."""

    def __init__(self, command, log, **environment):
        self.log = log
        self.lines = []
        self.process = subprocess.Popen(
            [str(word) for word in command],
            env=os.environ | environment,
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
    """`gpus`: so many have a lane, on each node. `own`: arenas are the trainers' own memory."""

    def __init__(self, options, name, nodes, gpus, own, *flags):
        self.folder, self.out, self.steps = options.folder, options.out, options.steps
        self.trainer = shlex.split(options.trainer or str(self.folder / "fault_trainer_cuda"))
        self.name, self.nodes, self.gpus, self.own = name, nodes, gpus, own
        self.home = pathlib.Path(tempfile.mkdtemp(prefix="dmuond-gpu-"))
        (self.home / "secret").write_text(secrets.token_hex(32))
        (self.home / "secret").chmod(0o600)
        self.coordinator = f"127.0.0.1:{free_port()}"
        self.flags = flags
        self.trainers = []
        self.daemons = []
        for node in range(nodes):
            self.daemons.append(self.start_daemon(node))
        for daemon in self.daemons:
            self.wait_serving(daemon)

    @property
    def daemon(self):
        return self.daemons[-1]

    def start_daemon(self, node):
        group = [
            f"--nodes={self.nodes}", f"--node_rank={node}", f"--coordinator={self.coordinator}",
            f"--peer_listen={self.coordinator if node == 0 else '127.0.0.1:0'}",
            f"--peer_secret_file={self.home / 'secret'}",
        ]  # fmt: skip
        devices = range(node * self.gpus, (node + 1) * self.gpus)
        return Program(
            [
                self.folder / "dmuond", f"--socket={self.home / f'd{node}.sock'}",
                f"--devices=cuda:{self.gpus}", f"--lane_binary={self.folder / 'dmuond-lane'}",
                f"--snapshot_dir={self.home / 'snapshots'}", "--snapshot_every_steps=10",
                *(group if self.nodes > 1 else []), *self.flags,
            ],
            self.out / f"{self.name}-daemon{node}.log",
            CUDA_VISIBLE_DEVICES=",".join(map(str, devices)),
        )  # fmt: skip

    def wait_serving(self, daemon):
        deadline = time.monotonic() + PATIENCE_S
        while not any("serving" in line for line in daemon.lines):
            if daemon.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the daemon does not serve: " + " | ".join(daemon.lines[-3:]))
            time.sleep(0.01)

    def restart_daemon(self):
        self.daemon.kill()
        self.daemons[-1] = self.start_daemon(self.nodes - 1)
        self.wait_serving(self.daemon)

    def start_trainer(self, rank, resume="never"):
        node = rank * self.nodes // WORLD
        device = node * self.gpus + rank % self.gpus
        return Trainer(
            [
                *self.trainer, f"--address={self.home / f'd{node}.sock'}",
                f"--rank={rank}", f"--world_size={WORLD}", f"--steps={self.steps}",
                f"--device=cuda:{device}{',own' if self.own else ''}",
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
        for daemon in self.daemons:
            daemon.process.send_signal(signal.SIGTERM)
        for daemon in self.daemons:
            if daemon.finish() != 0:
                raise RuntimeError("a daemon ended badly: " + " | ".join(daemon.lines[-3:]))
        return {
            (rank, step): digest
            for rank, trainer in enumerate(self.trainers)
            for step, digest, _ in trainer.steps()
        }

    def end(self):
        for program in [*self.trainers, *self.daemons]:
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
    begin = time.monotonic()
    reached = job.trainers[0].steps()[-1][0]
    job.restart_daemon()
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
    daemons = [str(daemon.process.pid) for daemon in job.daemons]
    note.append(f"compute processes {pids}, daemons {daemons}")
    if set(daemons) & set(pids):
        raise RuntimeError("a daemon has a context")
    return job.finish()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path("jobs-results"))
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--nodes", default="1,2", help="1: one daemon; 2: two, where GPUs suffice")
    # Of less than a millisecond: the last comes after what a check waits for.
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--trainer",
        help="a command instead of fault_trainer_cuda, with the same flags: "
        "'python3 CHECKOUT/tests/faults/fault_trainer_cuda.py' (with PYTHONPATH of "
        "CHECKOUT/client/python/src and CHECKOUT/tests/python) is the Python client's",
    )
    parser.add_argument("--only", help="this check alone, after an undisturbed run")
    options = parser.parse_args()
    options.folder = options.folder.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    expected, failed = None, 0
    checks = [undisturbed, undisturbed, no_context, lane_killed, trainer_killed,
              trainers_exit_while_busy, daemon_killed, trainer_faults]  # fmt: skip
    if options.only:
        checks = [check for check in checks if check.__name__ in ("undisturbed", options.only)]
    groups = [(1, 1), *({(1, options.gpus)} - {(1, 1)})] if "1" in options.nodes else []
    if "2" in options.nodes and options.gpus >= 2:
        groups.append((2, options.gpus // 2))
    kinds = itertools.product(groups, (False, True), ((), ("--mps=off",)), enumerate(checks))
    for (nodes, gpus), own, flags, (number, check) in kinds:
        note, job = [], None
        where = f"{nodes}x{gpus}gpu"
        name = f"{number}-{check.__name__}-{where}" + "-own" * own + "-mps-off" * bool(flags)
        begin = time.monotonic()
        try:
            job = Job(options, name, nodes, gpus, own, *flags)
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
