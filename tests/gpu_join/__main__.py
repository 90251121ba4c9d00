#!/usr/bin/env python3
"""Asks a machine with GPUs, and little else, what daemons, lanes and trainers do there.

  gpu-join [PART...]        contracts doctor context equal several torch faults managed speed;
                            without names: all

  contracts  what is taken for granted of the driver, statement by statement (driver_contracts)
  doctor     what dmuonctl doctor finds
  context    the daemon computes nothing, and its memory outlives every lane and trainer
  equal      jobs on one lane, on one for each GPU and in several daemons have the same bits
  several    two jobs on the same daemons, and lanes of one that die
  torch      dmuond.torch beside torch's own optimizers, where this python3 has torch and pytest
  faults     trainers, lanes and a daemon die, stop or fault: the same bits, and times
  managed    a daemon that runs the control daemon of MPS itself (--mps=managed)
  speed      what a step costs that has next to nothing to do

Every row has what is wanted, what was found, and a verdict. The first wrong row stops its part, the
others go on. Rows are in OUT/gpu-join.txt and OUT/gpu-join.json, logs in OUT/logs. Ends with 0 if
every row is right, else with 1.
"""

import argparse
import importlib.util
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import bundle
import context
import contracts
import doctor
import equal
import faults
import managed
import several
import speed
import torch_part
from machine import Machine, count_gpus
from rows import Check, Table, WrongError
from run import Run

PARTS = {
    "contracts": contracts.checks,
    "doctor": doctor.checks,
    "context": context.checks,
    "equal": equal.checks,
    "several": several.checks,
    "torch": torch_part.checks,
    "faults": faults.checks,
    "managed": managed.checks,
    "speed": speed.checks,
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu-join", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--out", type=Path, default=Path("gpu-join-results"))
    parser.add_argument("--gpus", type=int, default=0, help="default: all of the machine")
    parser.add_argument("--trainers", type=int, default=0, help="default: one for each GPU, or 2")
    parser.add_argument("--mps", default="off,on", help="without it, with it, or both in turn")
    parser.add_argument("--nodes", default="", help="daemons: 1, 2, ...; default: all that can be")
    parser.add_argument("--only", default="*", help="rows of these names: PATTERN,... with * and ?")
    parser.add_argument("--go-on", action="store_true", help="also after a wrong row of a part")
    # Of less than a millisecond: the last comes after what a disturbance waits for.
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--trainer",
        default="",
        help="a command instead of fault_trainer_cuda, with the same flags: "
        "'python3 BUNDLE/python/fault_trainer_cuda.py' is the Python client's",
    )
    parser.add_argument("--nccl", default="", help="folder of libnccl.so.2")
    parser.add_argument("--programs", type=Path, default=bundle.PROGRAMS)
    parser.add_argument(
        "--fake",
        action="store_true",
        help="on the fake driver of the build whose bin/ is --programs: no times",
    )
    options = parser.parse_args()
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"no part {part}; there are {', '.join(PARTS)}")
    if options.fake and options.gpus == 0:
        parser.error("--fake needs --gpus")
    options.parts = options.parts or [part for part in PARTS if part not in _left_out(options.fake)]
    options.mps = options.mps.split(",")
    options.gpus = options.gpus or count_gpus()
    options.trainers = options.trainers or max(2, options.gpus)
    options.nodes = [int(n) for n in options.nodes.split(",") if n] or range(1, options.gpus + 1)
    options.out = options.out.resolve()
    options.logs = options.out / "logs"
    options.logs.mkdir(parents=True, exist_ok=True)
    return options


def _left_out(fake: bool) -> set[str]:
    """Of the parts that run without being named."""
    if fake:
        return {"torch", "managed", "speed"}
    has_torch = all(importlib.util.find_spec(package) for package in ("torch", "pytest"))
    return set() if has_torch else {"torch"}


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    bundle.unpack()
    try:
        return ask(parse())
    except WrongError as error:
        print(f"gpu-join: {error}", file=sys.stderr)
        return 1


def in_each_mode(part: str, run: Run, modes: list[str]) -> Iterator[Check]:
    # The daemon of `managed` brings its own.
    for mode in ["off"] if part == "managed" else modes:
        if mode == "on":
            begin = run.machine.begin_mps
            yield Check("mps", "a control daemon listens", begin, 30.0, always=True)
        yield from PARTS[part](run)
        run.machine.end_mps()


def ask(options: argparse.Namespace) -> int:
    programs = options.programs.resolve()
    machine = Machine(programs, options.fake, options.gpus, options.logs, options.nccl)
    try:
        table = Table(options.out, machine.describe(), options.only, options.go_on)
        run = Run(machine, options)
        for part in options.parts:
            checks = in_each_mode(part, run, options.mps)
            table.check_all(part, checks, machine.end_programs)
            machine.end_mps()
    finally:
        machine.close()
    return 0 if table.all_right else 1


if __name__ == "__main__":
    sys.exit(main())
