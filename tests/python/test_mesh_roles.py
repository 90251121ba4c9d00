"""Tensor and sequence parallel, shards with replicas, pipelines: each as one process on all data.

What the ranks see is said by mesh= and mesh_roles=, or data_parallel_size=; where it cannot be
known and is not said, the optimizer is not made, and the line to write is in the message.
"""

import mesh_trainer
import pytest
import torch
from daemons import Daemons
from habits import (
    STEPS,
    assert_same_weights,
    loss_of,
    make_model,
    torch_in_fp32,
    train_torch,
    weights,
)
from mesh_trainer import OVERFLOW
from torch import nn


@pytest.fixture(scope="module")
def launch(ranks, tmp_path_factory):
    """Runs a function of mesh_trainer on `world` ranks of two daemons; results by rank."""

    def run(function, world):
        folder = tmp_path_factory.mktemp("group") / "store"
        with Daemons() as daemons:
            return ranks.run(function, world, daemons.start(2, 1), str(folder))

    return run


@pytest.fixture(scope="module")
def on_a_mesh(launch):
    return launch(mesh_trainer.on_a_mesh, 4)


@pytest.fixture(scope="module")
def refusals(launch):
    results = launch(mesh_trainer.refusals, 4)
    assert all(result == results[0] for result in results)
    return results[0]


def train_in_one_process(world, clip=None):
    norms = []

    def loop(model, step):
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())

    with torch_in_fp32():
        return train_torch(world, loop=loop), norms


def assert_trained(results, want):
    """The ranks' weights are equal where they share them, all are there, and as one process's."""
    got = {}
    for trained, norms in results:
        for name, value in trained.items():
            assert torch.equal(got.setdefault(name, value), value), f"ranks differ in {name}"
        assert norms == results[0][1]
        assert norms == pytest.approx(want[1], rel=1e-5)
    assert_same_weights(got, want[0], weights(make_model()))


@pytest.mark.parametrize(
    ("set_up", "world", "clip"),
    [
        ("tensor parallel", 2, None),
        ("tensor parallel, clipped", 2, 0.1),
        ("shards of tensor parallel", 2, None),
        ("shards of tensor parallel, early", 2, 0.1),
        ("sequence parallel", 2, None),
        ("shards with replicas", 4, None),
        ("replicas of shards with replicas, by names", 4, None),
        ("shards with equal ones", 2, None),
        ("shards over equal ones", 2, None),
        ("shards of parts", 4, None),
        ("pipeline", 2, None),
        ("pipeline by its size", 2, 0.1),
    ],
)
def test_training_equals_one_process_on_all_data(on_a_mesh, set_up, world, clip):
    assert_trained([r[set_up] for r in on_a_mesh], train_in_one_process(world, clip))


def test_replicas_on_other_data_are_averaged_whatever_their_gradients_say(on_a_mesh):
    elements = 4 * 6
    for result in on_a_mesh:
        assert result["replicas by hand"][1] == [pytest.approx(elements**0.5 * (1 + 3) / 2)] * 2


def test_experts_are_divided_by_all_ranks_on_other_data(on_a_mesh):
    elements = 4 * (4 * 6)  # of four experts together
    for result in on_a_mesh:
        assert result["experts"][1] == [pytest.approx((elements * (8.0 / 4) ** 2) ** 0.5)]


@pytest.fixture(scope="module")
def scales_of_torch():
    """After each step, of one process that has the NaN."""
    scaler, model = mesh_trainer.new_scaler(), make_model()
    optimizer, scales = torch.optim.SGD(model.parameters(), lr=0.0), []
    for step in range(STEPS):
        scaler.scale(loss_of(model, step)).backward()
        if step == OVERFLOW:
            model.norm.weight.grad[-1] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    assert scales[OVERFLOW] < scales[OVERFLOW - 1]
    return scales


@pytest.mark.parametrize(
    ("set_up", "world", "broken", "on_rank"),
    [
        ("tensor parallel", 2, "norm.weight", 3),
        ("shards with equal ones", 2, "norm.weight", 1),
        ("DTensors alone", None, "narrow.bias", 2),
    ],
)
def test_a_nan_in_a_replica_that_nobody_reads_skips_the_step_on_all_ranks(
    on_a_mesh, scales_of_torch, set_up, world, broken, on_rank
):
    results = [result["overflows"][set_up] for result in on_a_mesh]
    why = f'the gradient of parameter "{broken}" is not finite on rank {on_rank}'
    for _, scales, told in results:
        assert scales == scales_of_torch
        assert told == [(OVERFLOW, why)]
    if world is None:
        return

    def without_one(model, step):
        if step == OVERFLOW:
            model.zero_grad()

    with torch_in_fp32():
        want = train_torch(world, loop=without_one)
    for got, _, _ in results:
        assert_same_weights(got, want, weights(make_model()))


def test_two_stages_are_refused_without_a_divisor_and_trained_with_one(launch):
    results = launch(mesh_trainer.on_two_stages, 2)
    for words, _, _ in results:
        assert "DIVISOR_UNKNOWN" in words and "held whole by 1 of 2 trainers" in words
        assert "\n    data_parallel_size=1 " in words and "\n    data_parallel_size=2 " in words
        assert '\n    mesh=mesh, mesh_roles={"pp": "stages", "dp": "mean"}' in words
    assert_trained([by_size for _, by_size, _ in results], train_in_one_process(1))
    assert_trained([clipped for _, _, clipped in results], train_in_one_process(1, 0.1))


def test_what_cannot_be_known_is_refused_with_the_line_to_write(refusals):
    line = '\n    mesh=mesh, mesh_roles={"dp": "mean", "tp": "same"}\n'
    words = refusals["sub-mesh"]
    assert "'up.weight' lies on the mesh (tp=2), 2 of the job's 4 ranks" in words and line in words
    words = refusals["shards on a sub-mesh"]
    assert "'embed.weight' lies on the mesh (dp=2)" in words
    assert '\n    mesh=mesh, mesh_roles={"dp": "mean", "tp": "mean"}\n' in words
    words = refusals["plain beside"]
    assert "'embed.weight' is a plain tensor beside 'up.weight'" in words
    assert '\n    mesh=mesh, mesh_roles={"tp": "same"}\n' in words


def test_a_wrong_mesh_or_role_is_refused_by_name(refusals):
    assert "mesh=(tp=2) has 2 ranks and the job 4" in refusals["small mesh"]
    assert "says nothing of 'dp'" in refusals["no roles"]
    assert "says nothing of 'tp'" in refusals["a role missing"]
    assert 'mesh_roles={"dp": "mean", "tp": "..."}' in refusals["a role missing"]
    assert "gives 'tp' the role 'equal', which there is not" in refusals["no such role"]
    assert "names 'cp', which mesh=(dp=2, tp=2) does not have" in refusals["no such dimension"]
    assert "mesh='dp' is not a DeviceMesh" in refusals["no mesh"]
    assert "data_parallel_size=3 must be a number that divides the 4 ranks" in refusals["size"]
    assert "data_parallel_size=2" in refusals["both"] and "mesh=" in refusals["both"]
    assert "over 'tp', whose role 'stages'" in refusals["foreign mesh"]
