"""opt.explain(): what was made of a model, in sentences that are right."""

import re

import pytest
import torch
from fsdp_trainer import process_group, sharded_model
from habits import make_model, make_optimizer, plain_loop
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


def test_the_table_has_the_learning_rate_that_counts_and_folds_equal_rows_alone(address):
    model = make_model()
    model.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
    layers = {"blocks.1.*": {"lr": 0.5, "adamw_lr": 0.003}}
    optimizer = make_optimizer(model, lr=0.02, adamw_lr=0.003, groups=layers, address=address)

    def rows():
        found = (line.split() for line in optimizer.routing_table().splitlines())
        return {parameter: (count, lr) for parameter, count, _, lr, *_ in found}

    assert rows()["parameter"] == ("count", "lr")
    assert rows()["blocks.*.weight"] == ("3", "0.02")
    assert rows()["blocks.1.weight"] == ("1", "0.5")
    assert rows()["embed.weight"] == ("1", "0.003")
    for group in optimizer.param_groups:
        group["lr"] = 0.25
    assert rows()["blocks.*.weight"] == ("4", "0.25")
    optimizer.close()


def test_whose_weights_a_job_goes_on_with_is_told_with_what_this_process_came_with(daemons, caplog):
    address = daemons.start(1, 1)[0]

    def start(model, **options):
        optimizer = make_optimizer(model, address=address, **options)
        (origin,) = sections(optimizer.explain())["Whose weights it began with"]
        return optimizer, origin

    caplog.set_level("INFO", logger="dmuond")
    model = make_model()
    optimizer, origin = start(model)
    assert origin == "those that the ranks came with: the job had none"
    plain_loop(model, optimizer, range(2))
    trained = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.session.drop()

    same = make_model()
    same.load_state_dict(trained)
    optimizer, origin = start(same, resume="require")
    equal = f"all {len(trained)} parameters of this process were equal to them"
    assert origin == f"the job's, after step 2; {equal}"
    optimizer.session.drop()

    other = make_model()
    other.load_state_dict(trained)
    with torch.no_grad():
        other.up.bias[0] += 1
    optimizer, origin = start(other, resume="require")
    found = f"1 of {len(trained)} parameters of this process were others, and have been replaced"
    assert origin == f"the job's, after step 2; {found}: 'up.bias'"
    assert f"rank 0: weights are {origin}" in caplog.messages
    assert torch.equal(other.up.bias, trained["up.bias"])
    optimizer.close()


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
