"""A trainer on the core client: holds any boxes of any tensors, and makes gradients from seeds."""

import sys
import threading
import zlib
from dataclasses import dataclass, field

import dmuond
import numpy as np
from dmuond import types

TOGETHER_WITHIN_S = 60


@dataclass(frozen=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    route: str = "muon"
    view: dict = field(default_factory=dict)  # fields of types.MatrixView
    reduce_factor: float = 1.0
    dtype: str = "float32"


@dataclass(frozen=True)
class Held:
    """A box of a tensor that a rank holds."""

    tensor: str
    begin: tuple[int, ...]
    end: tuple[int, ...]
    contribution: str = "SUM"

    @property
    def index(self):
        return tuple(slice(b, e) for b, e in zip(self.begin, self.end, strict=True))

    @property
    def shape(self):
        return tuple(e - b for b, e in zip(self.begin, self.end, strict=True))


@dataclass(frozen=True)
class Job:
    tensors: tuple[Tensor, ...]
    held: tuple[tuple[Held, ...], ...]  # by rank
    steps: int = 4
    absent: frozenset[tuple[int, int, str]] = frozenset()  # step (from 1), rank, tensor
    preset: str = "dmuon"
    ns_dtype: str = ""
    max_grad_norm: float = 0.0
    bucket_bytes: int = 0
    # Which ranks' gradient a rank uses: replicas of one shard must say the same.
    gradient_of: tuple[int, ...] | None = None
    name: str = "default"
    bf16_numbers: bool = False  # weights and gradients are numbers of bf16, whatever their dtype


def memory_dtype(tensor: Tensor) -> np.dtype:
    """The bits, of bfloat16: numpy does not have it."""
    return np.dtype(np.uint16 if tensor.dtype == "bfloat16" else tensor.dtype)


def stored(tensor: Tensor, values: np.ndarray) -> np.ndarray:
    """fp32 values as they lie in memory, rounded to the nearest."""
    if tensor.dtype != "bfloat16":
        return values.astype(tensor.dtype)
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def loaded(tensor: Tensor, memory: np.ndarray) -> np.ndarray:
    """A copy of what lies in memory, as numbers."""
    if tensor.dtype != "bfloat16":
        return memory.copy()
    return (memory.astype(np.uint32) << 16).view(np.float32)


def whole(tensor: Tensor, contribution: str = "SUM") -> Held:
    return Held(tensor.name, (0,) * len(tensor.shape), tensor.shape, contribution)


def _random(seed: str, shape) -> np.ndarray:
    generator = np.random.default_rng(zlib.crc32(seed.encode()))
    return generator.standard_normal(shape).astype(np.float32)


def first_weight(tensor: Tensor) -> np.ndarray:
    return 0.1 * _random(f"weight {tensor.name}", tensor.shape)


def gradient(tensor: Tensor, step: int, rank: int) -> np.ndarray:
    return _random(f"gradient {tensor.name} {step} {rank}", tensor.shape)


def scalars_of(step: int, max_grad_norm: float = 0.0) -> types.StepScalars:
    """Learning rate and momentum on a schedule."""
    group = types.GroupScalars(
        learning_rate=0.02 / step,
        weight_decay=0.1,
        momentum=0.9 + 0.01 * (step % 5),
        beta1=0.9,
        beta2=0.99,
        eps=1e-8,
    )
    return types.StepScalars(groups=[group], max_grad_norm=max_grad_norm, clip_muon=True)


def messages(job: Job, rank: int):
    """Parameters, fragments and the bytes of one arena (weights and gradients lie alike)."""
    by_name = {tensor.name: tensor for tensor in job.tensors}
    parameters, fragments, offset = [], [], 0
    index: dict[str, int] = {}
    for held in job.held[rank]:
        tensor = by_name[held.tensor]
        if tensor.name not in index:
            index[tensor.name] = len(parameters)
            kind = getattr(types, f"ELEMENT_TYPE_{tensor.dtype.upper()}")
            parameters.append(
                types.Parameter(
                    name=tensor.name,
                    shape=tensor.shape,
                    weight_type=kind,
                    gradient_type=kind,
                    route=getattr(types, f"ROUTE_{tensor.route.upper()}"),
                    view=types.MatrixView(**tensor.view) if tensor.view else None,
                    reduce_factor=tensor.reduce_factor,
                    ready_order=len(job.tensors) - job.tensors.index(tensor),
                )
            )
        strides = [int(np.prod(held.shape[d + 1 :])) for d in range(len(held.shape))]
        piece = {"offset_bytes": offset, "strides": strides}
        fragments.append(
            types.Fragment(
                parameter=index[tensor.name],
                box=types.Box(begin=held.begin, end=held.end),
                contribution=getattr(types, f"CONTRIBUTION_{held.contribution}"),
                weight=types.Slice(arena=1, **piece),
                gradient=types.Slice(arena=2, **piece),
            )
        )
        offset += -(-int(np.prod(held.shape)) * memory_dtype(tensor).itemsize // 256) * 256
    return parameters, fragments, max(offset, 256), index


class Trainer:
    """One rank, registered and attached, its weights pushed. Its arenas are the host's."""

    def __init__(self, rank: int, world: int, job: Job, **session):
        self.job, self.rank = job, rank
        self.session = dmuond.Session(rank=rank, world_size=world, job=job.name, **session)
        try:
            self._prepare()
        except BaseException:
            self.session.__exit__(*sys.exc_info())
            raise

    def _prepare(self):
        job, rank = self.job, self.rank
        parameters, fragments, size, self.index = messages(job, rank)
        config = types.GroupConfig(preset=job.preset)
        if job.ns_dtype:
            config.newton_schulz_type = getattr(types, f"ELEMENT_TYPE_{job.ns_dtype.upper()}")
        self.registered = self.session.register(
            parameters, fragments, [config], bucket_bytes=job.bucket_bytes
        )
        arenas = self.session.attach({1: self.memory(size), 2: self.memory(size)})
        self.by_name = {tensor.name: tensor for tensor in job.tensors}
        self.weights, self.gradients = (
            [
                self.place(
                    arenas[arena],
                    fragment.weight.offset_bytes,
                    held.shape,
                    memory_dtype(self.by_name[held.tensor]),
                )
                for held, fragment in zip(job.held[rank], fragments, strict=True)
            ]
            for arena in (1, 2)
        )
        if not self.session.has_state:
            for held, weight in zip(job.held[rank], self.weights, strict=True):
                tensor = self.by_name[held.tensor]
                self.put(weight, self._in_memory(tensor, first_weight(tensor)[held.index]))
            self.push()

    # What is otherwise where arenas lie elsewhere.

    def memory(self, size_bytes: int):
        """Of an arena, for attach()."""
        return size_bytes

    def place(self, arena, offset_bytes: int, shape, dtype):
        """A fragment in its arena."""
        return np.ndarray(shape, dtype, arena, offset_bytes)

    def put(self, fragment, values: np.ndarray):
        fragment[...] = values

    def get(self, fragment) -> np.ndarray:
        return fragment

    def push(self):
        self.session.push()

    def submit(self, scalars: types.StepScalars, absent: list[int]):
        return self.session.step(scalars, absent=absent)

    def _in_memory(self, tensor: Tensor, values: np.ndarray) -> np.ndarray:
        if self.job.bf16_numbers:
            bf16 = Tensor(tensor.name, tensor.shape, dtype="bfloat16")
            values = loaded(bf16, stored(bf16, values))
        return stored(tensor, values)

    def step(self):
        job, step = self.job, self.session.last_committed_step + 1
        source = job.gradient_of[self.rank] if job.gradient_of else self.rank
        for held, buffer in zip(job.held[self.rank], self.gradients, strict=True):
            tensor = self.by_name[held.tensor]
            values = gradient(tensor, step, source)[held.index]
            self.put(buffer, self._in_memory(tensor, values))
        absent = [
            index for name, index in self.index.items() if (step, self.rank, name) in job.absent
        ]
        return self.submit(scalars_of(step, job.max_grad_norm), absent)

    def held_weights(self) -> list[np.ndarray]:
        """Copies, as numbers."""
        return [
            loaded(self.by_name[held.tensor], self.get(weight))
            for held, weight in zip(self.job.held[self.rank], self.weights, strict=True)
        ]


def together(*calls):
    """Ranks of one process, each in a thread of its own: what they return, or the first error."""
    answers: list = [None] * len(calls)

    def run(at, call):
        try:
            answers[at] = call()
        except dmuond.Error as error:
            answers[at] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TOGETHER_WITHIN_S)
        assert not thread.is_alive()
    for answer in answers:
        if isinstance(answer, dmuond.Error):
            raise answer
    return answers


def train(rank: int, world: int, job: Job):
    """Weights of every held box after all steps, the last norm, the matrices of a step."""
    return run(Trainer(rank, world, job))


def run(trainer: Trainer):
    """What is left of its job."""
    while trainer.session.last_committed_step < trainer.job.steps:
        outcome = trainer.step()
    weights = trainer.held_weights()
    trainer.session.close()
    return weights, outcome.gradient_norm, outcome.matrices


def assemble(job: Job, results) -> dict[str, np.ndarray]:
    """The whole tensors, from all ranks' boxes; replicas must be equal bit by bit."""
    tensors = {
        t.name: np.full(t.shape, np.nan, np.float32 if t.dtype == "bfloat16" else t.dtype)
        for t in job.tensors
    }
    for held_by_rank, (weights, _, _) in zip(job.held, results, strict=True):
        for held, weight in zip(held_by_rank, weights, strict=True):
            target = tensors[held.tensor][held.index]
            filled = ~np.isnan(target)
            assert np.array_equal(target[filled], weight[filled]), f"replicas of {held.tensor}"
            tensors[held.tensor][held.index] = weight
    for name, tensor in tensors.items():
        assert np.isfinite(tensor).all(), name
    return tensors
