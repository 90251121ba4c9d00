"""The trainer of fault_trainer.cc on the Python client: same model, same lines, same exit codes.

Both may be ranks of one job, and each rank's weights are the same bits whichever it is. With
--early each bucket is signalled as soon as its gradients are there, and weights are waited for
bucket by bucket, as dmuond.torch does with early signals and overlap_forward.
"""

import argparse
import os
import time
from collections.abc import Callable

import dmuond
import numpy as np
from dmuond import fault_point, types

LEARNING_RATE = 0.02
GRADIENTS, WEIGHTS = 1, 2  # arenas
ALIGNMENT = 64
EXIT_REFUSED, EXIT_LOST = 1, 3
MASK = (1 << 64) - 1


def noise(seed: int, count: int) -> np.ndarray:
    values = np.empty(count, np.float32)
    x = seed
    for i in range(count):
        x = (x * 6364136223846793005 + 1442695040888963407) & MASK
        values[i] = (x >> 40) - (1 << 23)
    return values / np.float32(1 << 23)


def hash_of(arrays: list[np.ndarray]) -> int:
    """FNV-1a of all bytes."""
    value = 0xCBF29CE484222325
    for byte in b"".join(array.tobytes() for array in arrays):
        value = ((value ^ byte) * 0x100000001B3) & MASK
    return value


class Layout:
    def __init__(self, rank: int, world: int):
        whole = [("first", (16, 24)), ("second", (16, 24)), ("sharded", (8 * world, 12))]
        whole += [("table", (40, 3)), ("bias", (24,))]
        self.parameters, self.fragments, self.shapes = [], [], []
        self.bytes = 0
        for index, (name, shape) in enumerate(whole):
            sharded = name == "sharded"  # one row block for each trainer
            box = types.Box(begin=[0] * len(shape), end=shape)
            if sharded:
                box = types.Box(begin=[8 * rank, 0], end=[8 * rank + 8, 12])
            muon = name not in ("table", "bias")
            self.parameters.append(
                types.Parameter(
                    name=name,
                    shape=shape,
                    weight_type=types.ELEMENT_TYPE_FLOAT32,
                    gradient_type=types.ELEMENT_TYPE_FLOAT32,
                    route=types.ROUTE_MUON if muon else types.ROUTE_ADAMW,
                    route_reason="named by the trainer",
                    view=types.MatrixView(kind=types.MatrixView.KIND_WHOLE) if muon else None,
                    reduce_factor=1.0 if sharded else 1.0 / world,
                    ready_order=len(whole) - 1 - index,
                    held_by_all=not sharded,
                )
            )
            held = tuple(end - begin for begin, end in zip(box.begin, box.end, strict=True))
            strides = [int(np.prod(held[d + 1 :])) for d in range(len(held))]
            place = {"offset_bytes": self.bytes, "strides": strides}
            self.fragments.append(
                types.Fragment(
                    parameter=index,
                    box=box,
                    contribution=types.CONTRIBUTION_SUM,
                    gradient=types.Slice(arena=GRADIENTS, **place),
                    weight=types.Slice(arena=WEIGHTS, **place),
                )
            )
            self.shapes.append(held)
            size = 4 * int(np.prod(held))
            self.bytes += -(-size // ALIGNMENT) * ALIGNMENT


class Trainer:
    """Its arenas are host memory; what is otherwise on a GPU, fault_trainer_cuda.py has."""

    device = "cpu"
    stream: int | None = None

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.unsaid = False  # weights of the last step have been waited for, and not been printed
        self.layout = Layout(options.rank, options.world_size)
        self.session = dmuond.Session(
            options.address,
            job=options.job,
            rank=options.rank,
            world_size=options.world_size,
            resume=options.resume,
            device=self.device,
        )
        self.register()

    def register(self) -> None:
        registered = self.session.register(
            self.layout.parameters,
            self.layout.fragments,
            [types.GroupConfig(preset="torch")],
            bucket_bytes=2000,
        )
        self.bucket_of = registered.parameter_bucket
        self.session.attach({arena: self.memory() for arena in (GRADIENTS, WEIGHTS)})
        self.take_arenas()

    def memory(self) -> int:
        """Of an arena."""
        return self.layout.bytes

    def send(self, arena: int, parameter: int) -> None:
        """What has been computed is to lie in the arena."""

    def fetch_weights(self) -> None:
        """What lies in the arena, after waiting for it, is to be in `weights`."""

    def take_arenas(self) -> None:
        self.weights, self.gradients = (
            [
                np.ndarray(
                    shape, np.float32, self.session.arenas[arena], fragment.weight.offset_bytes
                )
                for fragment, shape in zip(self.layout.fragments, self.layout.shapes, strict=True)
            ]
            for arena in (WEIGHTS, GRADIENTS)
        )

    @property
    def last_step(self) -> int:
        return self.session.last_committed_step

    def say(self, what: str) -> None:
        self.fetch_weights()
        self.unsaid = False
        outcome, durable = self.session.last_outcome, self.session.durable_step
        print(
            f"{what} {self.last_step} attempt {0 if outcome is None else outcome.attempt} "
            f"weights {hash_of(self.weights):016x} at {time.monotonic_ns()} "
            f"durable {-1 if durable is None else durable}",
            flush=True,
        )

    def check_state(self) -> None:
        """What a script keeps beside the weights must be of the same step as they are."""
        step, state = self.last_step, self.session.trainer_state.decode()
        print(f"state {step} {state}", flush=True)
        if step != 0 and state != str(step):
            raise RuntimeError(f"WRONG: at step {step} the trainer state is that of step {state}")

    def compute_gradients(self, step: int) -> None:
        """Backwards; a bucket of which every gradient is there is signalled."""
        left = list(self.bucket_of)
        for p in reversed(range(len(self.weights))):
            shape = self.weights[p].shape
            seed = step * 1_000_003 + p * 101 + self.options.rank
            size = self.weights[p].size
            self.gradients[p][...] = np.float32(0.3) * self.weights[p] + noise(seed, size).reshape(
                shape
            )
            self.send(GRADIENTS, p)
            bucket, left[p] = left[p], None
            if self.options.early and bucket not in left:
                self.session.signal(bucket, self.stream)

    def step(self, step: int) -> None:
        if self.options.early:
            for bucket in self.bucket_of:  # as modules of a forward pass do, in their order
                self.session.wait_published([bucket], self.stream)
        if self.unsaid:
            self.say("step")
        self.compute_gradients(step)
        group = types.GroupScalars(
            learning_rate=LEARNING_RATE / step,
            weight_decay=0.01,
            momentum=0.95,
            beta1=0.9,
            beta2=0.999,
            eps=1e-8,
        )
        scalars = types.StepScalars(groups=[group], loss_scale=1, max_grad_norm=3, clip_muon=True)
        self.session.step(
            scalars,
            trainer_state=str(step).encode(),
            wait=not self.options.early,
            stream=self.stream,
        )

    def checked_step(self) -> None:
        step = self.last_step + 1
        self.step(step)
        outcome = self.session.last_outcome
        if outcome.kind != types.Outcome.KIND_COMMITTED or outcome.step != step:
            raise RuntimeError(f"WRONG: step {step} is {outcome.kind} as step {outcome.step}")
        self.unsaid = True
        if not self.options.early:
            self.say("step")

    def first_weights(self) -> None:
        for p, weight in enumerate(self.weights):
            weight[...] = noise(77 + p, weight.size).reshape(weight.shape)
            self.send(WEIGHTS, p)
        self.session.push()

    def train(self) -> None:
        """A way back may be told of by each of these calls, also by the one that would end it."""
        self.check_state()
        has_weights = self.session.has_state
        while not self.session.closed:
            try:
                if not has_weights:
                    self.first_weights()
                    has_weights = True
                elif self.last_step < self.options.steps:
                    self.checked_step()
                else:
                    self.session.wait_published(stream=self.stream)
                    if self.unsaid:
                        self.say("step")
                    self.session.close()
            except dmuond.RolledBack as back:
                has_weights = True
                if back.fresh_arenas:
                    self.take_arenas()
                self.say("rolled_back")
                self.check_state()


def is_lost(error: dmuond.Error) -> bool:
    """What the job's members can mend while a new trainer starts."""
    lost = isinstance(error, dmuond.DaemonLost | dmuond.Unreachable | dmuond.Aborted)
    return lost or error.code in ("UNAVAILABLE", "ABORTED")


def main(make_trainer: Callable[[argparse.Namespace], Trainer]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--job", default="default")
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--world_size", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--resume", default="never")
    parser.add_argument("--early", action="store_true")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    fault_point.connect_driver()
    code = 0
    try:
        make_trainer(options).train()
    except dmuond.Error as error:
        print(f"ended {error.reason} {type(error).__name__}: {error}", flush=True)
        code = EXIT_LOST if is_lost(error) else EXIT_REFUSED
    except RuntimeError as error:
        print(f"ended {error}", flush=True)
        code = EXIT_REFUSED
    os._exit(code)  # to the daemon it dies where it fails: at a script's end sessions are closed


if __name__ == "__main__":
    main(Trainer)
