"""Where only names are known, or modules not of torch: routes, and whose weights are trained."""

import copy
import re
import warnings

import dmuond
import pytest
import torch
from dmuond.torch.collect import groups
from dmuond.torch.routing import Router
from habits import Model, loss_of, make_model, make_optimizer
from torch import nn


def routes(params) -> dict[str, tuple[str, str]]:
    """Route and reason of each, by default."""
    given, _ = groups(params)
    routed = Router(None, None).route([named for members, _ in given for named in members])
    return {r.named.name: (r.route, r.reason) for r in routed}


def named(name: str, *shape: int):
    return name, nn.Parameter(torch.empty(shape))


class VocabParallelEmbedding(nn.Module):
    """As in Megatron: no nn.Embedding, and no Linear below the head."""

    def __init__(self, words: int, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(words, width))


class ColumnParallelLinear(VocabParallelEmbedding):
    pass


def test_a_models_names_alone_give_the_routes_of_the_model():
    model = make_model()
    by_model = {name: route for name, (route, _) in routes(model).items()}
    by_names = {name: route for name, (route, _) in routes(model.named_parameters()).items()}
    assert by_names == by_model


@pytest.mark.parametrize(
    "name",
    [
        "embed.weight",
        "model.embed_tokens.weight",
        "transformer.wte.weight",
        "transformer.wpe.weight",
        "tok_embeddings.weight",
        "bert.embeddings.word_embeddings.weight",
        "encoder.emb.weight",
        "tok_table",
        "pos_table.weight",
        "out.weight",
        "model.out.weight",
        "lm_head.weight",
        "head.weight",
        "classifier.weight",
        "vision.blocks.3.head.weight",
    ],
)
def test_names_of_embeddings_and_heads_go_to_adamw(name):
    (route, reason), *_ = routes([named(name, 16, 100), named("mlp.up.weight", 16, 8)]).values()
    assert route == "adamw"
    assert "embedding" in reason or "head" in reason


@pytest.mark.parametrize(
    "name",
    [
        "blocks.0.attn.out.weight",
        "layers.11.self_attn.out_proj.weight",
        "layers.2.mlp.fc_out.weight",
        "layers.2.attn.pos_proj.weight",
        "mlp.member.weight",
        "layers.0.q_proj.weight",
    ],
)
def test_names_of_hidden_matrices_go_to_muon(name):
    assert routes([named(name, 64, 64)])[name][0] == "muon"


def test_what_only_a_name_tells_is_said_with_the_remedy():
    found = routes([named("embed.weight", 100, 16), named("out.weight", 100, 16)])
    for name in ("embed.weight", "out.weight"):
        assert found[name][0] == "adamw"
        assert "pass the model" in found[name][1]


GUESSED_BY_ROWS = (
    "adamw",
    "output head (guess: as many rows as the embedding has; route= says otherwise)",
)


def test_a_projection_to_the_vocabulary_is_a_head_whatever_its_name():
    found = routes([named("wte.weight", 100, 16), named("to_words.weight", 100, 16)])
    assert found["to_words.weight"] == GUESSED_BY_ROWS
    last = routes(nn.Sequential(nn.Embedding(100, 16), nn.Linear(16, 100)))
    assert last["1.weight"] == GUESSED_BY_ROWS


class BytesModel(nn.Module):
    """256 words, and as many hidden units in each block."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(256, 64)
        blocks = (
            nn.ModuleDict({"fc": nn.Linear(64, 256), "gate_proj": nn.Linear(64, 256)})
            for _ in range(2)
        )
        self.blocks = nn.ModuleList(blocks)
        self.to_bytes = nn.Linear(64, 256)


@pytest.mark.parametrize(
    "of", [lambda m: m, lambda m: m.named_parameters()], ids=["model", "names"]
)
def test_as_many_rows_as_words_make_no_head_inside_a_block(of):
    found = routes(of(BytesModel()))
    for block in range(2):
        for name in ("fc", "gate_proj"):
            route, reason = found[f"blocks.{block}.{name}.weight"]
            assert route == "muon" and reason.startswith("2-D hidden weight")
    assert found["to_bytes.weight"] == GUESSED_BY_ROWS


def test_reasons_say_what_is_a_guess_and_by_what():
    model = nn.Module()
    model.words = nn.Embedding(100, 16)
    model.tok_emb = nn.Parameter(torch.zeros(50, 16))
    model.lm_head = nn.Linear(16, 70)
    model.experts = nn.Parameter(torch.zeros(4, 16, 16))
    model.norm = nn.LayerNorm(16)
    found = {name: reason for name, (_, reason) in routes(model).items()}
    assert found == {
        "words.weight": "embedding",
        "tok_emb": "embedding (guess: by its name)",
        "lm_head.weight": "output head (guess: by its name)",
        "lm_head.bias": "bias, norm or scalar",
        "experts": "stack of experts (guess: by its name)",
        "norm.weight": "bias, norm or scalar",
        "norm.bias": "bias, norm or scalar",
    }


def test_embeddings_and_heads_of_foreign_classes_go_to_adamw():
    model = nn.Module()
    model.words = VocabParallelEmbedding(100, 16)
    model.hidden = ColumnParallelLinear(64, 16)
    model.to_words = ColumnParallelLinear(100, 16)
    found = routes(model)
    assert found["words.weight"] == (
        "adamw",
        "embedding (guess: by its class, VocabParallelEmbedding)",
    )
    assert found["to_words.weight"] == GUESSED_BY_ROWS
    by_class = "2-D hidden weight (guess: by its class, ColumnParallelLinear)"
    assert found["hidden.weight"] == ("muon", by_class)


def test_a_bare_table_of_positions_is_an_embedding():
    model = nn.Module()
    model.pos_embed = nn.Parameter(torch.zeros(64, 16))
    model.hidden = nn.Linear(16, 16)
    assert routes(model)["pos_embed"][0] == "adamw"


def test_as_many_positions_as_hidden_units_make_no_head():
    model = nn.Module()
    model.positions = nn.Embedding(64, 16)
    model.up = nn.Linear(16, 64)
    model.down = nn.Linear(64, 8)
    assert routes(model)["up.weight"][0] == "muon"


def test_the_error_of_nameless_parameters_recommends_the_model():
    with pytest.raises(dmuond.InvalidArgumentError, match="pass the model"):
        groups(make_model().parameters())


def test_the_optimizer_prints_why(muon, capfd):
    muon(make_model().named_parameters(), verbose=True)
    printed = capfd.readouterr().err
    row = next(line for line in printed.splitlines() if "embed.weight" in line)
    assert "adamw" in row
    assert "pass the model" in row


def test_replaced_parameters_are_refused_where_only_names_are_known_too(muon):
    model = make_model()
    optimizer = muon(model.named_parameters())
    loss_of(model, 0).backward()
    optimizer.step()
    other = Model().state_dict()
    model.load_state_dict(other, assign=True)
    loss_of(model, 1).backward()
    with pytest.raises(dmuond.Error, match=r"is no longer the parameter that was registered"):
        optimizer.step()
    assert optimizer.last_committed_step == 1
    for name, value in model.state_dict().items():
        assert torch.equal(value, other[name]), name


def test_what_deepspeed_has_taken_over_afterwards_is_refused(muon):
    """ZeRO gives each parameter this attribute; its engine calls step() of the optimizer it has."""
    model = make_model()
    optimizer = muon(model)
    for p in model.parameters():
        p._hp_mapping = None
    loss_of(model, 0).backward()
    with pytest.raises(dmuond.InvalidArgumentError, match=r"'embed.weight' belongs to DeepSpeed"):
        optimizer.step()
    assert optimizer.last_committed_step == 0


def test_a_parameter_that_is_put_back_is_no_other(muon):
    model = make_model()
    optimizer = muon(model.named_parameters())
    kept = model.up.weight
    model.up.weight = nn.Parameter(kept.detach().clone())
    model.up.weight = kept
    loss_of(model, 0).backward()
    optimizer.step()
    assert optimizer.last_committed_step == 1


class Adapted(nn.Module):
    """A layer beside one of low rank, as adapters wrap them."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.low = layer, nn.Linear(8, 4)

    def forward(self, x):
        return self.layer(x) + self.low(x)


def make_layers():
    torch.manual_seed(0)
    body = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
    return nn.ModuleDict({"body": body, "head": nn.Linear(8, 4)})


def train_layers(model, optimizer, steps):
    for _ in range(steps):
        x = torch.ones(2, 8)
        for layer in model["body"]:
            x = layer(x).tanh()
        model["head"](x).square().mean().backward()
        optimizer.step()
        model.zero_grad()


def replace_the_head(model):
    model["head"] = nn.Linear(8, 4)


def replace_a_layer(model):
    model["body"][1] = nn.Linear(8, 8)


def insert_a_layer(model):
    model["body"].insert(1, nn.Linear(8, 8))


def replace_past_torch(model):
    model._modules["head"] = nn.Linear(8, 4)


def adapt_the_head(model):
    model["head"] = Adapted(model["head"])


def append_a_layer(model):
    model["body"].append(nn.Linear(8, 8))


def append_a_frozen_layer_and_thaw_it(model):
    model["body"].append(nn.Linear(8, 8).requires_grad_(False))
    yield
    model["body"].requires_grad_(True)


IS_REPLACED = (
    "of the model is no longer the parameter that was registered .* make the optimizer after it"
)
IS_ADDED = "came into the model after the optimizer was made, .* make one after it"


REFUSED = {
    replace_the_head: f"'head.weight' {IS_REPLACED}",
    replace_a_layer: f"'body.1.weight' {IS_REPLACED}",
    insert_a_layer: f"'body.1.weight' {IS_REPLACED}",
    replace_past_torch: f"'head.weight' {IS_REPLACED}",
    adapt_the_head: f"'head.low.weight' {IS_ADDED}",
    append_a_layer: f"'body.3.weight' {IS_ADDED}",
    append_a_frozen_layer_and_thaw_it: f"'body.3.weight' {IS_ADDED}",
}


def test_layers_that_came_after_the_optimizer_are_refused(address):
    """Those that torch does not tell of, within ten steps."""
    for change, words in REFUSED.items():
        model = make_layers()
        optimizer = make_optimizer(model, address=address)
        train_layers(model, optimizer, 3)
        for _ in change(model) or ():
            train_layers(model, optimizer, 1)
        untold = change in (insert_a_layer, replace_past_torch)
        with pytest.raises(dmuond.Error, match=words):
            train_layers(model, optimizer, 10 if untold else 1)
        optimizer.close()


def test_models_may_change_where_all_that_trains_is_the_optimizers(address):
    model = make_layers()
    optimizer = make_optimizer(model, address=address)

    def swap_for_an_evaluation():
        head, model["head"] = model["head"], nn.Identity()
        model["head"] = head

    changes = [
        lambda: model.add_module("frozen", nn.Linear(8, 8).requires_grad_(False)),
        lambda: model.add_module("average", torch.optim.swa_utils.AveragedModel(model["body"])),
        lambda: setattr(model["body"], "0", torch.compile(model["body"][0], backend="eager")),
        lambda: model["body"].pop(2),
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))(torch.ones(8)).sum().backward(),
        swap_for_an_evaluation,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for change in changes:
            train_layers(model, optimizer, 1)
            change()
        train_layers(model, optimizer, 10)
    assert optimizer.last_committed_step == len(changes) + 10
    optimizer.close()


def test_a_checkpoint_loaded_where_only_names_are_known_is_refused_until_it_is_pushed(muon):
    model = make_model()
    optimizer = muon(model.named_parameters())
    model.load_state_dict(make_model(1).state_dict())
    loss_of(model, 0).backward()
    with pytest.raises(dmuond.Error, match=r"push_parameters\(\)"):
        optimizer.step()
    optimizer.push_parameters()
    optimizer.step()
    assert optimizer.last_committed_step == 1


def test_training_a_copy_is_told_once(muon):
    model = make_model()
    optimizer = muon(copy.deepcopy(model).named_parameters())
    loss_of(model, 0).backward()
    missing = r"no gradient has come in the first step of embed.weight"
    with pytest.warns(UserWarning, match=missing) as warned:
        optimizer.step()
    assert warned[0].filename == __file__, "the line that calls step()"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(1, 12):
            loss_of(model, step).backward()
            optimizer.step()


def test_weights_that_no_step_uses_are_told_once(muon):
    model = make_model()
    model.unused = nn.Linear(24, 24)
    optimizer = muon(model)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        for step in range(12):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        for _ in range(2):
            for p in model.unused.parameters():
                p.grad = torch.ones_like(p)
            optimizer.step()
    told = [str(warning.message) for warning in heard if "dmuond" in str(warning.message)]
    assert len(told) == 2
    assert "no gradient has come in 10 steps of unused.weight, unused.bias." in told[0]
    assert "unused.weight, unused.bias have gradients since step 13" in told[1]


def test_nobody_at_the_address_is_told_with_the_remedy(tmp_path):
    path = tmp_path / "nobody.sock"
    with pytest.raises(dmuond.Unreachable) as told:
        dmuond.Session(str(path), connect_for_s=0)
    assert f"no dmuond answers at {path} (" in str(told.value)
    assert "DMUOND_ADDRESS" in str(told.value)
    assert "dmuonctl doctor" in str(told.value)


def test_groups_are_chosen_by_patterns_of_names_and_keep_what_is_no_option():
    layers = {"up.*": {"lr": 0.5, "lr_scale": 2}, "*.weight": {"weight_decay": 0.25, "name": "w"}}
    given, _ = groups(make_model(), layers)
    found = [
        (sorted(named.name for named in members), [part.options for part in written])
        for members, written in given
    ]
    assert found[0] == (["up.bias", "up.weight"], [layers["up.*"]])
    assert "down.weight" in found[1][0] and found[1][1] == [layers["*.weight"]]
    assert found[2] == (["narrow.bias", "norm.bias"], [])
    for wrong, words in [
        ({"*": {}, "up.*": {}}, "'up.*' has no effect, since patterns before it match all"),
        ({"layers.*": {}}, "'layers.*' matches no parameter; the first are embed.weight"),
        ({"up.*": {"weigth_decay": 0.1}}, "'weigth_decay': is 'weight_decay' meant"),
        ({"up.*": 0.1}, "no dict of options: 0.1"),
    ]:
        with pytest.raises(dmuond.InvalidArgumentError, match=re.escape(words)):
            groups(make_model(), wrong)


def test_a_layer_that_is_a_group_by_itself_is_routed_by_a_guess():
    blocks, head = nn.Sequential(nn.Linear(8, 8)), nn.Linear(8, 37)
    found = routes([{"params": blocks}, {"params": head}])
    last = "guess: the last layer of a part or group may be an output head; see route="
    assert found["0.weight"] == found["weight"] == ("muon", f"2-D hidden weight ({last})")
    only = "guess: the only layer may be an output head; see route="
    assert routes(head)["weight"] == ("muon", f"2-D hidden weight ({only})")


def test_groups_of_submodules_are_told_apart():
    model = make_model()
    given, _ = groups([{"params": model.up}, {"params": model.down}, {"params": model.embed}])
    names = [[named.name for named in members] for members, _ in given]
    assert names == [["group0.weight", "group0.bias"], ["group1.weight"], ["group2.weight"]]
    alone, _ = groups([{"params": model.up}, {"params": [("other", model.down.weight)]}])
    assert [n.name for members, _ in alone for n in members] == ["weight", "bias", "other"]
