"""opt.explain(): what was made of a model, in sentences that are right."""

import re

import pytest
from fsdp_trainer import process_group, sharded_model
from habits import make_model, make_optimizer
from torch import nn


def sections(text: str) -> dict[str, list[str]]:
    """Lines by the title that they stand under."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in text.splitlines():
        if line.startswith("  "):
            found[title].append(line.strip())
        else:
            title = line.rstrip(":")
            found[title] = []
    return found


def test_what_is_guessed_comes_with_the_line_that_says_otherwise(muon):
    model = make_model()
    model.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    optimizer = muon(model)
    explained = sections(optimizer.explain())
    optimizer.close()
    (guess,) = explained["What is guessed"]
    assert 'route=[("head.weight", "muon")]' in guess
    (holding,) = explained["What this rank holds"]
    assert holding.endswith("head.weight, blocks.*.weight, blocks.*.bias")
    other = sections(muon(make_model(), route=[("head.weight", "muon")]).explain())
    assert other["What is guessed"] == ["nothing"]


def explained(rank, world, options):
    optimizer = make_optimizer(make_model(), **options)
    text = optimizer.explain()
    optimizer.close()
    return sections(text)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "adds up the holders', times 1/3: embed"),
        ({"reduction": "sum"}, "adds up the holders': embed"),
        ({"maximize": True}, r"times 1/3, with the sign changed \(maximize\): embed"),
    ],
)
def test_replicas_are_added_up_and_divided(ranks, address, options, words):
    for one in ranks.run(explained, 3, [address], options):
        (gradient,) = one["What becomes of the ranks' gradients"]
        assert re.search(words, gradient)
        (holding,) = one["What this rank holds"]
        assert holding.startswith("whole")


def explained_shards(rank, world, folder):
    with process_group(rank, world, folder):
        optimizer = make_optimizer(sharded_model(world))
        text = optimizer.explain()
        optimizer.close()
    return sections(text)


def test_shards_are_averaged_by_fsdp2(ranks, address, tmp_path):
    for one in ranks.run(explained_shards, 2, [address], str(tmp_path / "group")):
        (gradient,) = one["What becomes of the ranks' gradients"]
        assert gradient.startswith("FSDP2 averages over (shards=2); then holders have equal")
        (holding,) = one["What this rank holds"]
        assert "Shard(dim=0) over (shards=2), ranks [0, 1]: embed.weight" in holding
