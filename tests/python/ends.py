"""Scripts that end in every way, each in a child of one process: see test_unclosed.py.

usage: ends.py ADDRESS FOLDER
Prints how each child has ended, as JSON. FOLDER gets what it has said on stderr.
"""

import contextlib
import json
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable

import core_trainer


def train(name: str) -> core_trainer.Trainer:
    square = core_trainer.Tensor("square", (16, 16))
    job = core_trainer.Job((square,), ((core_trainer.whole(square),),), name=name)
    trainer = core_trainer.Trainer(0, 1, job, address=sys.argv[1])
    trainer.step()
    return trainer


def fail(name: str, kind: type[BaseException], *arguments: object) -> None:
    trainer = train(name)
    trainer.step()
    raise kind(*arguments)


def succeed(name: str) -> int:
    trainer = train(name)
    trainer.step()
    return 0


def open_step(name: str) -> None:
    """A gradient is announced, and its step never comes."""
    trainer = train(name)
    trainer.session.signal(0)


def in_a_process(start: str, target: Callable[..., object], *arguments: object) -> int:
    process = multiprocessing.get_context(start).Process(target=target, args=arguments)
    process.start()
    process.join()
    return process.exitcode


@contextlib.contextmanager
def released(name: str):
    trainer = train(name)
    try:
        yield
    finally:
        del trainer


# What the script does; {} is the name of its job.
WELL = {
    "comes_to_its_end": "t = train({})",
    "has_closed": "t = train({}); t.session.close()",
    "returns": "succeed({})",
    "exits_0": "t = train({}); sys.exit(0)",
    "exits_in_a_function": "def main():\n t = train({})\n sys.exit()\nmain()",
    "quits": "t = train({}); exit()",
    "exits_with_what_main_returns": "sys.exit(succeed({}))",
    "has_caught_another_error": "t = train({})\ntry: 1 / 0\nexcept ZeroDivisionError as e: pass",
    "has_caught_an_exit": "t = train({})\ntry: sys.exit(3)\nexcept SystemExit: pass",
    "goes_on_after_an_error": "try: fail({}, ValueError)\nexcept ValueError as e: pass",
    "begins_again_after_an_error": (
        "try: fail({}, ValueError)\nexcept ValueError: pass\nsucceed({})"
    ),
    "suppresses_an_error": "with contextlib.suppress(ValueError): fail({}, ValueError)",
    "leaves_its_block": "with train({}).session: pass",
    "leaves_a_step_open": "open_step({})",
    "begins_again_after_an_open_step": "open_step({}); open_step({})",
    "has_a_child_that_returns": "sys.exit(in_a_process('fork', succeed, {}))",
    "has_a_spawned_child_that_exits": "sys.exit(in_a_process('spawn', fail, {}, SystemExit, 0))",
}
BADLY = {
    "raises": "t = train({}); raise RuntimeError('mine')",
    "raises_in_a_function": "fail({}, RuntimeError, 'mine')",
    "exits_3": "t = train({}); sys.exit(3)",
    "exits_3_in_a_function": "def main():\n t = train({})\n sys.exit(3)\nmain()",
    "exits_with_words": "t = train({}); sys.exit('words')",
    "raises_system_exit": "t = train({}); raise SystemExit(3)",
    "raises_system_exit_in_a_function": "fail({}, SystemExit, 3)",
    "quits_with_3": "t = train({}); exit(3)",
    "exits_1_in_a_clause": "try: fail({}, ValueError)\nexcept ValueError: sys.exit(1)",
    "exits_1_after_an_error": "try: fail({}, ValueError)\nexcept ValueError: pass\nsys.exit(1)",
    "exits_1_after_a_named_error": (
        "try: fail({}, ValueError)\nexcept ValueError as e: pass\nsys.exit(1)"
    ),
    "lets_go_while_an_error_passes": (
        "with contextlib.suppress(ZeroDivisionError), released({}): 1 / 0\nsys.exit(1)"
    ),
    "exits_1_with_a_step_open": "open_step({}); sys.exit(1)",
    "raises_in_its_block": "with train({}).session: raise RuntimeError('mine')",
    "leaves_at_once": "t = train({}); os._exit(0)",
    "is_terminated": "t = train({}); os.kill(os.getpid(), signal.SIGTERM)",
    "is_killed": "t = train({}); os.kill(os.getpid(), signal.SIGKILL)",
    "is_interrupted": "t = train({}); os.kill(os.getpid(), signal.SIGINT)",
    "has_a_child_that_raises": "sys.exit(in_a_process('fork', fail, {}, ValueError))",
    "has_a_spawned_child_that_raises": "sys.exit(in_a_process('spawn', fail, {}, ValueError))",
}

if __name__ == "__main__":
    os.environ["TORCHELASTIC_RUN_ID"] = "r"  # Ctrl-C ends the process, and not its job
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have ignored it
    mine, statuses = "", {}
    for name in (*WELL, *BADLY):
        pid = os.fork()
        if pid == 0:
            mine = name
            break
        statuses[name] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if mine:
        said = os.open(f"{sys.argv[2]}/{mine}", os.O_CREAT | os.O_WRONLY)
        os.dup2(said, 2)
        exec((WELL | BADLY)[mine].replace("{}", repr(mine)))  # the end of this very script
    else:
        print(json.dumps(statuses))
