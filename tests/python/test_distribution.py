"""Distribution changes nothing: the same weights, bit for bit, however many daemons and lanes."""

import core_trainer
import numpy as np
import pytest
from core_trainer import Held, Job, Tensor, whole
from reference import AdamW, MuonMatrix, relative_difference

WORLD = 4
TOPOLOGIES = [(1, 1), (1, 4), (2, 2), (4, 1)]  # daemons, lanes of each

MATRICES = (
    Tensor("square", (40, 40)),
    Tensor("square2", (40, 40)),
    Tensor("wide", (24, 56)),
    Tensor("tall", (56, 24)),
    Tensor("row", (1, 33)),
    Tensor("odd", (37, 41)),
    Tensor("fused", (48, 32), view={"kind": 2, "row_blocks": [16, 16, 16]}),
    Tensor("heads", (32, 48), view={"kind": 3, "heads": 4}),
    Tensor("experts", (4, 12, 20)),
)
# The first is cut into pieces over the lanes.
OTHERS = (Tensor("table", (5000, 61), route="adamw"), Tensor("bias", (77,), route="adamw"))
ALL = MATRICES + OTHERS


def with_factor(tensors, factor):
    return tuple(Tensor(t.name, t.shape, t.route, t.view, factor, t.dtype) for t in tensors)


def cuts(size: int, parts: int):
    """As torch.chunk cuts: uneven, with empty ones at the end."""
    step = -(-size // parts)
    return [(min(k * step, size), min((k + 1) * step, size)) for k in range(parts)]


def sharded(tensor: Tensor, dim: int, rank: int, parts: int = WORLD) -> Held:
    begin, end = [0] * len(tensor.shape), list(tensor.shape)
    begin[dim], end[dim] = cuts(tensor.shape[dim], parts)[rank]
    return Held(tensor.name, tuple(begin), tuple(end), "SAME")


def replicated() -> Job:
    tensors = with_factor(ALL, 1 / WORLD)
    return Job(tensors, (tuple(whole(t) for t in tensors),) * WORLD)


def replicated_with_absent() -> Job:
    job = replicated()
    everywhere = {(2, rank, "wide") for rank in range(WORLD)}
    somewhere = {(1, 0, "square"), (1, 3, "table"), (3, 1, "square"), (3, 2, "square")}
    somewhere |= {(4, rank, "bias") for rank in range(WORLD)} | {(2, 1, "experts")}
    return Job(job.tensors, job.held, absent=frozenset(everywhere | somewhere))


def clipped() -> Job:
    job = replicated()
    return Job(job.tensors, job.held, max_grad_norm=1.0)


def many_buckets() -> Job:
    job = replicated()
    return Job(job.tensors, job.held, bucket_bytes=4096)


def of_dtype(tensors, dtype):
    return tuple(Tensor(t.name, t.shape, t.route, t.view, t.reduce_factor, dtype) for t in tensors)


def half_precision() -> Job:
    tensors = of_dtype(with_factor(ALL, 1 / WORLD), "float16")
    return Job(tensors, (tuple(whole(t) for t in tensors),) * WORLD)


def bfloat16() -> Job:
    tensors = of_dtype(with_factor(ALL, 1 / WORLD), "bfloat16")
    return Job(tensors, (tuple(whole(t) for t in tensors),) * WORLD)


def bfloat16_by_rows() -> Job:
    job = by_rows()
    return Job(of_dtype(job.tensors, "bfloat16"), job.held, gradient_of=job.gradient_of)


def by_rows() -> Job:
    held = tuple(tuple(sharded(t, 0, rank) for t in ALL) for rank in range(WORLD))
    return Job(ALL, held, gradient_of=(0,) * WORLD)


def by_columns() -> Job:
    held = tuple(tuple(sharded(t, len(t.shape) - 1, rank) for t in ALL) for rank in range(WORLD))
    return Job(ALL, held, gradient_of=(0,) * WORLD)


def by_rows_and_columns() -> Job:
    def box(tensor, rank):
        rows, cols = cuts(tensor.shape[-2], 2)[rank // 2], cuts(tensor.shape[-1], 2)[rank % 2]
        lead = len(tensor.shape) - 2
        begin = (0,) * lead + (rows[0], cols[0])
        return Held(tensor.name, begin, tensor.shape[:lead] + (rows[1], cols[1]), "SAME")

    held = tuple(
        tuple(box(t, rank) for t in MATRICES) + tuple(sharded(t, 0, rank) for t in OTHERS)
        for rank in range(WORLD)
    )
    return Job(ALL, held, gradient_of=(0,) * WORLD)


def sharded_and_replicated() -> Job:
    """HSDP: two replicas of two shards, reduced already."""
    held = tuple(tuple(sharded(t, 0, rank % 2, 2) for t in ALL) for rank in range(WORLD))
    return Job(ALL, held, gradient_of=(0,) * WORLD)


def experts_of_some() -> Job:
    """Each half of the experts is held, and averaged, by two ranks; the rest by all."""
    experts = Tensor("experts", (4, 12, 20), reduce_factor=0.5)
    dense = with_factor([t for t in ALL if t.name != "experts"], 1 / WORLD)
    held = tuple(
        (
            Held("experts", (2 * (rank % 2), 0, 0), (2 * (rank % 2) + 2, 12, 20)),
            *(whole(t) for t in dense),
        )
        for rank in range(WORLD)
    )
    return Job((experts, *dense), held)


LAYOUTS = [
    replicated,
    replicated_with_absent,
    clipped,
    many_buckets,
    half_precision,
    bfloat16,
    bfloat16_by_rows,
    by_rows,
    by_columns,
    by_rows_and_columns,
    sharded_and_replicated,
    experts_of_some,
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)
def test_topology_changes_no_bit(daemons, ranks, layout):
    job = layout()
    first = None
    for nodes, lanes in TOPOLOGIES:
        addresses = daemons.start(nodes, lanes)
        results = ranks.run(core_trainer.train, WORLD, addresses, job)
        weights = core_trainer.assemble(job, results)
        norms = {norm for _, norm, _ in results}
        assert len(norms) == 1
        first = first or (weights, norms)
        assert norms == first[1], f"{nodes} x {lanes}"
        for name, weight in weights.items():
            assert np.array_equal(weight, first[0][name]), f"{name} on {nodes} x {lanes}"


def test_bf16_weights_are_the_masters_rounded_to_the_nearest(daemons, ranks):
    """Of gradients and first weights in bf16, what fp32 trainers get of the same numbers."""
    job = bfloat16()
    rounded = Job(with_factor(ALL, 1 / WORLD), job.held, bf16_numbers=True)
    address = daemons.start(1, 2)
    got = core_trainer.assemble(job, ranks.run(core_trainer.train, WORLD, address, job))
    want = core_trainer.assemble(rounded, ranks.run(core_trainer.train, WORLD, address, rounded))
    for tensor in job.tensors:
        in_bf16 = core_trainer.loaded(tensor, core_trainer.stored(tensor, want[tensor.name]))
        assert np.array_equal(got[tensor.name], in_bf16), tensor.name


@pytest.mark.parametrize("home", [0, 1])
@pytest.mark.parametrize("layout", [replicated, replicated_with_absent, many_buckets, by_rows])
def test_daemon_without_trainers_changes_no_bit(daemons, ranks, layout, home):
    """Two daemons own parameters; all trainers are with one of them."""
    job = layout()
    alone = ranks.run(core_trainer.train, WORLD, daemons.start(1, 1), job)
    addresses = daemons.start(2, 1)
    away = ranks.run(core_trainer.train, WORLD, [addresses[home]], job)
    assert {norm for _, norm, _ in away} == {norm for _, norm, _ in alone}
    want, got = core_trainer.assemble(job, alone), core_trainer.assemble(job, away)
    for name in want:
        assert np.array_equal(got[name], want[name]), name


@pytest.mark.parametrize(
    "layout", [by_rows, by_columns, by_rows_and_columns, sharded_and_replicated]
)
def test_sharding_changes_no_bit(daemons, ranks, layout):
    address = daemons.start(1, 2)
    job = layout()
    got = core_trainer.assemble(job, ranks.run(core_trainer.train, WORLD, address, job))
    alone = Job(ALL, (tuple(whole(t) for t in ALL),), name="alone")
    want = core_trainer.assemble(alone, ranks.run(core_trainer.train, 1, address, alone))
    for name in want:
        assert np.array_equal(got[name], want[name]), name


def blocks_of(tensor: Tensor):
    """Index of every matrix of a muon tensor."""
    if tensor.view.get("kind") == 2:
        edges = np.cumsum([0, *tensor.view["row_blocks"]])
        return [np.s_[a:b] for a, b in zip(edges[:-1], edges[1:], strict=True)]
    if tensor.view.get("kind") == 3:
        rows = tensor.shape[0] // tensor.view["heads"]
        return [np.s_[k * rows : (k + 1) * rows] for k in range(tensor.view["heads"])]
    if len(tensor.shape) == 3:
        return [np.s_[k] for k in range(tensor.shape[0])]
    return [np.s_[:]]


@pytest.mark.parametrize("layout", [replicated, replicated_with_absent, by_rows, experts_of_some])
def test_several_trainers_compute_what_the_formulas_say(daemons, ranks, layout):
    job = layout()
    job = Job(**{**job.__dict__, "ns_dtype": "float32", "preset": "torch"})
    addresses = daemons.start(2, 1)
    got = core_trainer.assemble(job, ranks.run(core_trainer.train, WORLD, addresses, job))
    for tensor in job.tensors:
        start = core_trainer.first_weight(tensor)
        want = expected(job, tensor, start)
        assert relative_difference(got[tensor.name], want, start) < 1e-4, tensor.name


def expected(job: Job, tensor: Tensor, start: np.ndarray) -> np.ndarray:
    muon = tensor.route == "muon"
    blocks = blocks_of(tensor) if muon else [np.s_[:]]
    units = [MuonMatrix(start[b], "torch") if muon else AdamW(start[b]) for b in blocks]
    for step in range(1, job.steps + 1):
        reduced = reduce(job, tensor, step)
        if reduced is None:
            continue
        group = core_trainer.scalars_of(step).groups[0]
        for block, unit in zip(blocks, units, strict=True):
            lr, decay = group.learning_rate, group.weight_decay
            if muon:
                unit.step(reduced[block], lr, group.momentum, decay)
            else:
                unit.step(reduced[block], lr, (group.beta1, group.beta2), group.eps, decay)
    out = np.empty(tensor.shape)
    for block, unit in zip(blocks, units, strict=True):
        out[block] = unit.weight
    return out


def reduce(job: Job, tensor: Tensor, step: int) -> np.ndarray | None:
    total, present = np.zeros(tensor.shape), False
    for rank, held_by_rank in enumerate(job.held):
        for held in held_by_rank:
            if held.tensor != tensor.name or (step, rank, tensor.name) in job.absent:
                continue
            source = job.gradient_of[rank] if job.gradient_of else rank
            part = core_trainer.gradient(tensor, step, source)[held.index]
            if held.contribution == "SUM":
                total[held.index] += part
            else:
                total[held.index] = part
            present = True
    return total * tensor.reduce_factor if present else None
