"""Which optimizer a parameter gets by default, where models look as people's do; no daemon."""

from __future__ import annotations

import re

import dmuond
import needs
import pytest
import torch
from dmuond.torch import RowBlocks
from dmuond.torch.collect import groups
from dmuond.torch.routing import Router
from torch import nn


def routed(model, **options) -> dict[str, tuple[str, str]]:
    """Route and reason of each parameter of more than one dimension."""
    given, _ = groups(model)
    router = Router(None, options.get("views"), conv=options.get("conv", "adamw"))
    found = router.route([named for members, _ in given for named in members])
    return {r.named.name: (r.route, r.reason) for r in found if r.named.parameter.ndim > 1}


def on_muon(model, **options) -> list[str]:
    return [name for name, (route, _) in routed(model, **options).items() if route == "muon"]


def guessed(model, **options) -> set[str]:
    return {name for name, (_, reason) in routed(model, **options).items() if "guess" in reason}


def tree(**parts) -> nn.Module:
    """A module of these modules, and of parameters of these shapes."""
    module = nn.Module()
    for name, part in parts.items():
        if isinstance(part, nn.Module):
            module.add_module(name, part)
        else:
            module.register_parameter(name, nn.Parameter(torch.zeros(part)))
    return module


def block() -> nn.Module:
    mlp = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    return tree(norm=nn.LayerNorm(8), attn=tree(proj=nn.Linear(8, 8)), mlp=mlp)


class Conv1D(nn.Module):
    """As transformers has it: weights are (inputs, outputs)."""

    def __init__(self, nf: int, nx: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(nx, nf))


class TopKRouter(nn.Module):
    """Of a class that nobody here knows."""

    def __init__(self, width: int, experts: int):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(experts, width))


# --- output heads ---

NET = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())  # without a matrix


@pytest.mark.parametrize(
    ("model", "hidden", "heads"),
    [
        (nn.Sequential(nn.Linear(9, 6), nn.ReLU(), nn.Linear(6, 2)), ["0"], ["2"]),
        (
            nn.Sequential(
                nn.Sequential(nn.Linear(9, 6), nn.ReLU()), nn.Sequential(nn.Linear(6, 2))
            ),
            ["0.0"],
            ["1.0"],
        ),
        (tree(fc1=nn.Linear(9, 6), fc2=nn.Linear(6, 2)), ["fc1"], ["fc2"]),
        (
            tree(layers=nn.ModuleList([nn.Linear(9, 6), nn.Linear(6, 2)])),
            ["layers.0"],
            ["layers.1"],
        ),
        (tree(layer4=NET, fc=nn.Linear(8, 5)), [], ["fc"]),
        (
            tree(features=NET, classifier=nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 5))),
            ["classifier.0"],
            ["classifier.1"],
        ),
        (
            tree(
                encoder=tree(layer=nn.Sequential(block(), block())),
                pooler=tree(dense=nn.Linear(8, 8)),
                classifier=tree(dense=nn.Linear(8, 8), out_proj=nn.Linear(8, 3)),
            ),
            [
                *(f"encoder.layer.0.{w}" for w in ("attn.proj", "mlp.0", "mlp.2")),
                *(f"encoder.layer.1.{w}" for w in ("attn.proj", "mlp.0", "mlp.2")),
                "pooler.dense",
                "classifier.dense",
            ],
            ["classifier.out_proj"],
        ),
        (
            tree(AuxLogits=tree(conv=NET, fc=nn.Linear(8, 5)), fc=nn.Linear(8, 5)),
            [],
            ["AuxLogits.fc", "fc"],
        ),
        (
            tree(
                roi_heads=tree(
                    box_head=tree(fc6=nn.Linear(8, 9), fc7=nn.Linear(9, 9)),
                    box_predictor=tree(cls_score=nn.Linear(9, 4), bbox_pred=nn.Linear(9, 16)),
                )
            ),
            ["roi_heads.box_head.fc6", "roi_heads.box_head.fc7"],
            ["roi_heads.box_predictor.cls_score", "roi_heads.box_predictor.bbox_pred"],
        ),
        (
            tree(pre_classifier=nn.Linear(8, 8), classifier=nn.Linear(8, 3)),
            ["pre_classifier"],
            ["classifier"],
        ),
        (
            tree(
                qa_outputs=nn.Linear(8, 2),
                bbox_predictor=tree(layers=nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 4)])),
            ),
            ["bbox_predictor.layers.0"],
            ["qa_outputs", "bbox_predictor.layers.1"],
        ),
    ],
)
def test_output_heads_are_on_adamw_by_a_stated_guess(model, hidden, heads):
    found = {
        name.removesuffix(".weight"): (route, reason)
        for name, (route, reason) in routed(model).items()
        if "convolution" not in reason
    }
    assert [name for name, (route, _) in found.items() if route == "muon"] == hidden
    assert [name for name, (route, _) in found.items() if route == "adamw"] == heads
    for name in heads:
        assert found[name][1].startswith("output head (guess: "), name
    for name in hidden:
        assert found[name][1] == "2-D hidden weight", name


@pytest.mark.parametrize("container", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_the_last_matrix_of_blocks_is_no_head(container):
    for count in (1, 3):
        model = tree(blocks=container([block() for _ in range(count)]), norm=nn.LayerNorm(8))
        assert f"blocks.{count - 1}.mlp.2.weight" in on_muon(model)
        assert guessed(model) == set()
    attention = tree(output=nn.Linear(8, 8), key=nn.Linear(8, 8))
    model = tree(blocks=nn.ModuleList([tree(attention=attention)]), head=nn.Linear(8, 9))
    assert "blocks.0.attention.output.weight" in on_muon(model)


def test_what_may_be_a_head_and_is_on_muon_says_so():
    parts = tree(actor=nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)), critic=nn.Linear(8, 1))
    found = routed(parts)
    assert found["critic.weight"][0] == "adamw"
    assert found["actor.1.weight"][0] == "muon" and "output head" in found["actor.1.weight"][1]
    assert guessed(nn.Linear(4, 4)) == {"weight"}
    groups_of_modules = [{"params": NET}, {"params": nn.Sequential(nn.Dropout(), nn.Linear(8, 5))}]
    assert guessed(groups_of_modules) == {"1.weight"}


def test_the_last_layer_of_a_stage_is_not_the_models():
    stage = tree(embed=nn.Embedding(9, 8), up=nn.Linear(8, 8), down=nn.Linear(8, 8))
    given, _ = groups(stage, whole=False)
    found = Router(None, None).route(given[0][0])
    assert [r.route for r in found] == ["adamw", "muon", "adamw", "muon", "adamw"]
    assert "may be an output head" in found[3].reason


# --- parameters that are no layer's weight ---


@pytest.mark.parametrize(
    "name",
    [
        "A_log",
        "relative_position_bias_table",
        "mask_token",
        "queries",
        "prompts",
        "layer_scale",
        "pos_embed",
        "gate_up_proj_bias",
        "pos_bias_u",
        "scales",
    ],
)
def test_parameters_of_unknown_meaning_are_on_adamw_by_a_stated_guess(name):
    experts = tree(**{name: (4, 16)}, up=nn.Linear(8, 8))
    model = tree(layers=nn.ModuleList([tree(experts=experts)]), head=nn.Linear(8, 4))
    for given in (model, list(model.named_parameters())):
        route, reason = routed(given)[f"layers.0.experts.{name}"]
        assert route == "adamw" and "guess: " in reason
        assert "hidden weight" not in reason


def test_bare_matrices_that_are_well_known_are_on_muon_by_a_stated_guess():
    experts = tree(gate_up_proj=(4, 12, 8), down_proj=(4, 8, 6))
    shared = tree(w1=(6, 8), qkv=(24, 8))
    model = tree(experts=experts, shared=shared, router=TopKRouter(8, 4), head=nn.Linear(8, 9))
    found = routed(model)
    assert on_muon(model) == list(found)[:-1]
    assert guessed(model) == set(found)
    assert found["router.weight"][1] == "2-D hidden weight (guess: by its class, TopKRouter)"


def test_weights_of_layers_that_are_known_are_no_guess():
    model = tree(
        a=nn.LSTM(8, 8),
        b=nn.GRUCell(8, 8),
        c=nn.MultiheadAttention(8, 2, kdim=4, vdim=4, add_bias_kv=True),
        d=Conv1D(8, 8),
        e=nn.Linear(8, 8),
        head=nn.Linear(8, 3),
    )
    nn.utils.parametrizations.orthogonal(model.e)
    assert guessed(model) == {"head.weight", "c.bias_k", "c.bias_v"}
    assert len(on_muon(model)) == 2 + 2 + 4 + 1 + 1


# --- weights that are fused ---


QKV = "RowBlocks(8, 8, 8), where queries, keys and values follow each other"
GROUPED = "RowBlocks(8, 4, 4), where queries, keys and values follow each other"
INPUTS = "its rows are inputs"


def beside(**parts) -> nn.Module:
    return tree(layers=nn.ModuleList([tree(**parts)]), head=nn.Linear(8, 4))


def experts(**shapes) -> nn.Module:
    return beside(experts=tree(**shapes))


@pytest.mark.parametrize(
    ("model", "name", "advice"),
    [
        (beside(qkv=nn.Linear(8, 24), proj=nn.Linear(8, 8)), "qkv.weight", QKV),
        (beside(to_qkv=nn.Linear(8, 24)), "to_qkv.weight", QKV),
        (beside(qkv_proj=nn.Linear(8, 16), o_proj=nn.Linear(8, 8)), "qkv_proj.weight", GROUPED),
        (beside(c_attn=Conv1D(24, 8), c_proj=Conv1D(8, 8)), "c_attn.weight", INPUTS),
        (beside(query_key_value=nn.Linear(8, 24)), "query_key_value.weight", "each head's query"),
        (beside(a=nn.MultiheadAttention(8, 2)), "a.in_proj_weight", "RowBlocks(8, 8, 8)"),
        (beside(gate_up_proj=nn.Linear(8, 12)), "gate_up_proj.weight", "RowBlocks(6, 6)"),
        (beside(a=nn.LSTM(8, 5)), "a.weight_hh_l0", "RowBlocks(5, 5, 5, 5)"),
        (beside(a=nn.GRUCell(8, 5)), "a.weight_ih", "RowBlocks(5, 5, 5)"),
        (
            experts(gate_up_proj=(4, 12, 8), down_proj=(4, 8, 6)),
            "experts.gate_up_proj",
            "RowBlocks(6, 6)",
        ),
        (experts(gate_up_proj=(4, 8, 12), down_proj=(4, 6, 8)), "experts.gate_up_proj", INPUTS),
        (
            beside(A_log=(16, 3), in_proj=nn.Linear(8, 32), out_proj=nn.Linear(16, 8)),
            "in_proj.weight",
            "RowBlocks(16, 16)",
        ),
        (
            beside(
                A_log=(2,),
                in_proj=nn.Linear(8, 16 + 22 + 2),
                conv1d=nn.Conv1d(22, 22, 4, groups=22),
                out_proj=nn.Linear(16, 8),
            ),
            "in_proj.weight",
            "RowBlocks(16, 16, 3, 3, 2)",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_looks_fused_is_told_the_view_that_fits_or_that_none_does(model, name, advice):
    route, reason = routed(model)[f"layers.0.{name}"]
    assert route == "muon"
    fits = advice.startswith("RowBlocks")
    told = "looks fused: see views=, with " if fits else "looks fused, but no view is sure to fit: "
    assert told + advice in reason
    if fits:
        blocks = eval(advice.split(", where")[0])
        assert sum(blocks.rows) == model.get_parameter(f"layers.0.{name}").shape[-2]
        viewed = routed(model, views={f"layers.0.{name}": blocks})
        assert "fused" not in viewed[f"layers.0.{name}"][1]


def test_what_is_one_matrix_does_not_look_fused():
    model = beside(
        a=nn.RNN(8, 8), in_proj=nn.Linear(8, 16), up=nn.Linear(8, 16), b=nn.LSTM(8, 8, proj_size=4)
    )
    found = routed(model)
    assert {name for name, (_, reason) in found.items() if "fused" in reason} == {
        "layers.0.b.weight_ih_l0",
        "layers.0.b.weight_hh_l0",
    }


@pytest.mark.parametrize(
    ("model", "view", "words"),
    [
        (beside(c_attn=Conv1D(24, 8)), "qkv", INPUTS),
        (beside(c_attn=Conv1D(24, 9)), RowBlocks(3, 3, 3), INPUTS),
        (beside(c_attn=Conv1D(24, 8)), "heads:2", INPUTS),
        (experts(gate_up_proj=(4, 8, 12), down_proj=(4, 6, 8)), RowBlocks(4, 4), INPUTS),
        (beside(query_key_value=nn.Linear(8, 24)), "qkv", "each head's query, key and value"),
        (
            beside(qkv=nn.Linear(16, 24), proj=nn.Linear(16, 16)),
            "qkv",
            r"not equal: write RowBlocks\(16, 4, 4\)",
        ),
    ],
)
def test_a_view_that_would_cut_wrongly_is_refused_with_the_reason(model, view, words):
    words = f"would cut 'layers.0.*wrongly: .*{words}"
    with pytest.raises(dmuond.InvalidArgumentError, match=words):
        routed(model, views={"layers.*": view})


def test_heads_that_alternate_can_be_taken_apart_head_by_head():
    model, views = beside(query_key_value=nn.Linear(8, 24)), {"layers.*.weight": "heads:6"}
    assert on_muon(model, views=views) == ["layers.0.query_key_value.weight"]


# --- convolutions ---


def convolutions() -> nn.Module:
    return tree(
        stem=nn.Conv2d(3, 8, 3),
        norm=nn.BatchNorm2d(8),
        up=nn.ConvTranspose2d(8, 6, 3),
        grouped=nn.ConvTranspose2d(6, 6, 3, groups=2),
        squeeze=nn.Linear(6, 6),
        last=nn.Conv2d(6, 2, 1),
    )


def test_conv_muon_flattens_every_kernel_but_the_last_and_says_which_side_it_took():
    found = routed(convolutions(), conv="muon")
    assert found["stem.weight"] == ("muon", "4-D, flattened")
    up = "4-D, flattened: transposed, its outputs are dimension 1"
    assert found["up.weight"] == ("muon", up)
    assert found["grouped.weight"] == (
        "adamw",
        "a transposed convolution of groups, whose outputs are no rows",
    )
    head = "output head (guess: the model's last layer; route= says otherwise)"
    assert found["last.weight"] == ("adamw", head)
    assert on_muon(convolutions()) == ["squeeze.weight"]


def test_one_view_for_all_is_refused_with_what_flattens_all_convolutions():
    for pattern in ("*", "*.weight"):
        with pytest.raises(dmuond.InvalidArgumentError, match='flatten all .* by conv="muon"'):
            routed(convolutions(), views={pattern: "flatten"})


def test_what_cannot_be_flattened_is_refused_by_name():
    with pytest.raises(dmuond.InvalidArgumentError, match="'grouped.weight' cannot be flattened"):
        routed(convolutions(), views={"grouped.weight": "flatten"})
    with pytest.raises(dmuond.InvalidArgumentError, match="conv='sgd' is neither"):
        routed(convolutions(), conv="sgd")
    names = list(convolutions().named_parameters())
    with pytest.raises(dmuond.InvalidArgumentError, match="whether 'stem.weight' is a conv"):
        routed(names, conv="muon")


def test_where_no_class_is_known_the_side_is_a_stated_guess():
    found = routed(list(convolutions().named_parameters()), views={"up.weight": "flatten"})
    route, reason = found["up.weight"]
    assert route == "muon" and "guess: its outputs are dimension 0" in reason


def test_a_rule_that_puts_a_convolution_on_muon_flattens_it():
    given, _ = groups(convolutions())
    members = [named for part, _ in given for named in part]
    rules = [(re.compile(r"^[su].*\.weight"), "muon")]
    found = {r.named.name: r for r in Router(rules, None).route(members)}
    assert (found["stem.weight"].rows, found["up.weight"].rows) == (0, 1)
    assert found["squeeze.weight"].rows is None


# --- models of packages, where they are installed ---


def test_models_of_transformers_have_their_heads_on_adamw_and_their_matrices_on_muon():
    needs.package("transformers")
    import transformers

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 128, "vocab_size": 200}
    moe = {"num_local_experts": 4, "num_key_value_heads": 2, "head_dim": 16, **sizes}
    for name, config, heads in [
        ("GptOssForCausalLM", transformers.GptOssConfig(num_experts_per_tok=2, **moe), 1),
        ("MixtralForCausalLM", transformers.MixtralConfig(**moe), 1),
        ("BertForSequenceClassification", transformers.BertConfig(**sizes), 1),
        ("RobertaForMaskedLM", transformers.RobertaConfig(**sizes), 0),  # tied
        ("MambaForCausalLM", transformers.MambaConfig(state_size=16, **sizes), 0),
    ]:
        found = routed(getattr(transformers, name)(config))
        told = [reason for route, reason in found.values() if route == "adamw"]
        assert sum("output head" in reason for reason in told) == heads, name
        for parameter, (route, _) in found.items():
            plain = not any(word in parameter for word in ("embed", "bias", "A_log", "conv"))
            hidden = plain and parameter.split(".")[0] not in ("lm_head", "classifier")
            assert (route == "muon") == (hidden or parameter.startswith("lm_head.dense")), parameter


def test_models_of_torchvision_have_their_heads_on_adamw():
    needs.package("torchvision")
    from torchvision import models

    for name in ("resnet18", "mobilenet_v3_small", "squeezenet1_1", "swin_t", "alexnet"):
        with torch.device("meta"):
            found = routed(getattr(models, name)(), conv="muon")
        heads = [n for n, (_, reason) in found.items() if reason.startswith("output head (guess")]
        assert heads == [list(found)[-1]], name
