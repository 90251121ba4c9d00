"""Every parallelism trains what torch.optim.Muon and AdamW train in one process on all data.

Weights, momenta and the joint norm that is clipped by are compared; `pytest -s` prints the largest
differences, which docs/parallelism.md has.
"""

import functools
from pathlib import Path

import parallel_trainer
import pytest
import torch
from daemons import Daemons
from habits import TorchOptimizers, assert_same_weights, loss_of_all, torch_in_fp32, weights
from parallel_models import matrices, moonlight, transformer
from parallel_trainer import CLIP, SET_UPS, STEPS
from torch import nn
from trainers import Ranks, TrainerFailedError

TIMEOUT_S = 550.0  # of all set-ups of as many ranks
TOLERANCE = 1e-5  # of momenta and norms
WEIGHTS_TOLERANCE = 1e-4  # AdamW divides by noise
# How many ranks have other data, and the model, where it is not two and the transformer.
REFERENCES = {
    "tensor parallel": (1, transformer),
    "tensor parallel, FSDP2, few rows": (4, functools.partial(transformer, inner=9)),
    "tensor parallel, HSDP": (4, transformer),
    "HSDP": (4, transformer),
    "pipeline": (1, transformer),
    "pipeline, tied": (2, functools.partial(transformer, tied=True)),
} | {name: (4, moonlight) for name in SET_UPS[4] if name.startswith("experts")}


@pytest.fixture(scope="module")
def ranks():
    """Processes of these tests alone: torch keeps what it knows of a mesh for equal ones."""
    with Ranks() as processes:
        yield processes


@pytest.fixture(scope="module")
def trained(ranks, tmp_path_factory):
    """What each rank of a set-up has in the end; all set-ups of as many ranks are run together."""

    @functools.cache
    def run(world):
        folder = tmp_path_factory.mktemp("group") / "store"
        with Daemons() as daemons:
            addresses = daemons.start(2, 1)
            function = parallel_trainer.all_set_ups
            try:
                return ranks.run(function, world, addresses, str(folder), timeout_s=TIMEOUT_S)
            except TrainerFailedError as failed:  # once, and not once for each set-up
                return failed

    def results(world):
        found = run(world)
        if isinstance(found, TrainerFailedError):
            raise found
        return found

    return results


@pytest.fixture(scope="module")
def refusals(ranks, tmp_path_factory):
    """What each rank is told. None of this reaches a daemon."""
    folder = tmp_path_factory.mktemp("group") / "store"
    return ranks.run(parallel_trainer.refusals, 4, ["unix:/nowhere"], str(folder))


@functools.cache
def trained_in_one_process(make, data):
    """Weights, momenta, norms."""
    model = make()
    optimizer = TorchOptimizers(model, matrices=matrices(model))
    norms = []
    with torch_in_fp32():
        for step in range(STEPS):
            loss_of_all(model, step, data).backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
            optimizer.step()
            optimizer.zero_grad()
    states = {p: state for part in optimizer.parts for p, state in part.state.items()}
    momenta = {
        name: states[p].get("momentum_buffer", states[p].get("exp_avg"))
        for name, p in model.named_parameters()
    }
    return weights(model), momenta, norms


def put_together(results):
    """All parameters; ranks that hold the same have the same."""
    found = {}
    for result in results:
        for name, value in result.items():
            assert torch.equal(found.setdefault(name, value), value), f"ranks differ in {name}"
    return found


def largest_difference(got, want, start=None):
    """Relative to the size of what is wanted, or of its change."""
    sizes = {name: (value - (start or {}).get(name, 0)).norm() for name, value in want.items()}
    return max(((got[name] - want[name]).norm() / size).item() for name, size in sizes.items())


@pytest.mark.parametrize(
    ("world", "set_up"), [(world, name) for world, names in SET_UPS.items() for name in names]
)
def test_training_equals_one_process_on_all_data(trained, world, set_up):
    data, make = REFERENCES.get(set_up, (2, transformer))
    results = [result[set_up] for result in trained(world)]
    got_weights, got_momenta = (put_together([result[i] for result in results]) for i in (0, 1))
    want_weights, want_momenta, want_norms = trained_in_one_process(make, data)
    start = weights(make())
    assert_same_weights(got_weights, want_weights, start, WEIGHTS_TOLERANCE)
    assert_same_weights(got_momenta, want_momenta, dict.fromkeys(want_momenta, 0.0), TOLERANCE)
    norms = results[0][2]
    assert all(result[2] == norms for result in results)
    assert norms == pytest.approx(want_norms, rel=TOLERANCE) and min(norms) > CLIP
    differences = (
        largest_difference(got_weights, want_weights, start),
        largest_difference(got_momenta, want_momenta),
        max(abs(got / want - 1) for got, want in zip(norms, want_norms, strict=True)),
    )
    print(f"\n| {set_up} | {world} |", *(f"{difference:.0e} |" for difference in differences))


def test_the_page_has_every_set_up():
    page = (Path(__file__).parents[2] / "docs/parallelism.md").read_text()
    for world, names in SET_UPS.items():
        for name in names:
            assert f"\n| {name} | {world} |" in page


def test_a_layout_that_cannot_be_read_is_refused_with_what_to_pass(refusals):
    for rank, words in enumerate(refusals):
        assert "'weight' has the placement Partial(sum) along dimension 0" in words["sums"]
        assert "nn.Parameter(p.redistribute(placements=[Replicate()]))" in words["sums"]
        assert "'weight' has the placement _StridedShard(" in words["pieces"]
        assert "a rank has several pieces of it" in words["pieces"]
        assert "nn.Parameter(p.redistribute(placements=[Shard(0)]))" in words["pieces"]
        assert "route=[('weight', 'trainer')]" in words["pieces"]
        assert "'weight' is a TwoTensor, whose elements lie in other" in words["two tensors"]
        missing = "lies on the mesh (dp=2), which this rank is not part of"
        assert (missing in words["elsewhere"]) == (rank >= 2)
        assert "'weight' lies on the mesh (dp=2)" in words["elsewhere"]


def test_fsdp1_and_zero_are_refused_with_the_reason(refusals):
    for words in refusals:
        assert "the model is wrapped in FullyShardedDataParallel (FSDP1)" in words["FSDP1"]
        for names in ("FSDP1's names", "FSDP1's own names"):
            assert "belongs to FullyShardedDataParallel (FSDP1), which cuts" in words[names]
            assert "Use fully_shard (FSDP2)" in words[names]
        assert "the model is wrapped in DeepSpeed, whose ZeRO stages" in words["ZeRO"]
        for names in ("ZeRO's names", "ZeRO's third stage"):
            assert "'embed.weight' belongs to DeepSpeed, whose ZeRO stages" in words[names]


def test_experts_whose_divisor_is_not_known_are_refused_with_the_line_to_write(refusals):
    line = '\n    mesh=mesh, mesh_roles={"shards": "mean", "ep": "mean"}\n'
    for words in refusals:
        assert (
            "is a shard of FSDP2 beside 'layers.1.mlp.experts.gate_proj'"
            in words["experts beside shards"]
        )
        assert (
            "'layers.1.mlp.experts.gate_proj' lies on the mesh (shards=2, ep=2), of which "
            in (words["shards of experts"])
        )
        assert "FSDP2 averages over (shards=2)" in words["shards of experts"]
        assert line in words["experts beside shards"] and line in words["shards of experts"]
