"""Options and groups as people write them to torch's own optimizers, and what becomes of them."""

import dmuond
import dmuond.torch
import pytest
import torch
from dmuond.torch.collect import groups
from dmuond.torch.options import split_groups
from dmuond.torch.routing import Router
from fsdp_trainer import process_group
from habits import (
    ADAMW_LR,
    LR,
    MATRICES,
    STEPS,
    TOLERANCE,
    TorchOptimizers,
    assert_same_training,
    assert_same_weights,
    loss_of,
    make_model,
    make_optimizer,
    plain_loop,
    weights,
)
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations

JORDAN = (3.4445, -4.7750, 2.0315)
ADJUST_LR_FNS = [
    name
    for name in ("original", "match_rms_adamw", "spectral_unclamped")
    if name in torch.optim.Muon.__doc__  # the last one of newer versions
]


def routed(model, **options):
    """Route and reason of each parameter."""
    given, _ = groups(model)
    found = Router(None, options.get("views")).route([n for members, _ in given for n in members])
    return {item.named.name: (item.route, item.reason) for item in found}


# --- torch's names ---


@pytest.mark.parametrize("adjust_lr_fn", ADJUST_LR_FNS)
def test_torchs_names_of_options_mean_what_they_mean_to_torch(muon, adjust_lr_fn):
    model, reference = make_model(), make_model()
    start = weights(reference)
    named = {"ns_coefficients": (3.0, -3.2, 1.2), "ns_steps": 3, "adjust_lr_fn": adjust_lr_fn}
    others = TorchOptimizers(reference)
    others.parts[0] = torch.optim.Muon(
        [dict(reference.named_parameters())[name] for name in MATRICES], lr=LR, **named
    )
    plain_loop(model, muon(model, **named))
    plain_loop(reference, others)
    assert_same_training(model, reference, start)


# Each step of the polynomial adds to what rounding has made of the one before.
@pytest.mark.parametrize(("steps", "tolerance"), [(1, TOLERANCE), (7, 3e-4)])
def test_a_number_of_steps_alone_keeps_the_coefficients(muon, steps, tolerance):
    model, reference = make_model(), make_model()
    start = weights(reference)
    others = TorchOptimizers(reference)
    others.parts[0].param_groups[0]["ns_steps"] = steps
    plain_loop(model, muon(model, ns_steps=steps))
    plain_loop(reference, others)
    assert_same_training(model, reference, start, tolerance)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"adjust_lr_fn": "original", "scale": "spectral"}, "scale='spectral' is given, too"),
        ({"adjust_lr_fn": "spectral"}, "adjust_lr_fn='spectral' is unknown.* scale= has more"),
        ({"ns_steps": 0}, "ns_steps=0 is no number of steps"),
        ({"ns_steps": 3, "ns_coefficients": [JORDAN] * 2}, "ns_coefficients has 2 steps"),
        ({"ns_steps": 3, "preset": "dmuon"}, "'dmuon' has coefficients of its own"),
    ],
)
def test_options_that_say_two_things_are_refused(address, given, words):
    with pytest.raises(dmuond.InvalidArgumentError, match=words):
        make_optimizer(make_model(), address=address, **given)


def test_the_options_of_each_route_are_its_own(muon):
    """An eps as large as the updates are, and another decay for what is on AdamW."""
    model, reference = make_model(), make_model()
    start = weights(reference)
    options = {"ns_eps": 0.5, "weight_decay": 0.2, "adamw_weight_decay": 0.6}
    plain_loop(model, muon(model, **options))
    others = TorchOptimizers(reference)
    others.parts[0].param_groups[0].update(eps=0.5, weight_decay=0.2)
    others.parts[1].param_groups[0].update(weight_decay=0.6)
    plain_loop(reference, others)
    assert_same_training(model, reference, start)


def ascending(model, optimizer, negated):
    for step in range(STEPS):
        loss_of(model, step).backward()
        for name in negated:
            model.get_parameter(name).grad.neg_()
        optimizer.step()
        optimizer.zero_grad()


def test_maximize_goes_up_and_counts_for_its_group_alone(muon):
    """torch.optim.Muon has no such option: it gets the gradients of the negative."""
    model, reference = make_model(), make_model()
    start = weights(reference)
    pattern = {"[!u]*": {"maximize": True}}
    ascending(model, muon(model, groups=pattern), ())
    others = TorchOptimizers(reference)
    up = dict(reference.up.named_parameters())["bias"]
    rest = [p for p in others.parts[1].param_groups[0]["params"] if p is not up]
    others.parts[1] = torch.optim.AdamW(
        [{"params": [up]}, {"params": rest, "maximize": True}], lr=ADAMW_LR, weight_decay=0.1
    )
    ascending(reference, others, [name for name in MATRICES if name != "up.weight"])
    assert_same_training(model, reference, start)


# --- which option of a group reaches which parameters ---


def options_by_name(params, patterns=None, route=None, **given):
    """The options that each parameter gets, of an optimizer that is made so; no daemon."""
    constructor = {
        "lr": 5e-3,
        "adamw_lr": None,
        "preset": "dmuon",
        "momentum": 0.95,
        "weight_decay": None,
        "adamw_weight_decay": None,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
    }
    found, _ = groups(params, patterns)
    routed = Router(route, None).route([n for members, _ in found for n in members])
    made = split_groups(found, routed, constructor | given)
    return {name: group for group in made for name, _ in group["params"]}


TWO_RATES = {"lr": 5e-3, "adamw_lr": 1e-3}
TWO_DECAYS = {"weight_decay": 0.1, "adamw_weight_decay": 0.01}


@pytest.mark.parametrize(
    ("constructor", "pattern", "bias", "weight"),
    [
        ({}, {}, (5e-3, 0.0), (5e-3, 0.0)),
        (TWO_RATES | TWO_DECAYS, {}, (1e-3, 0.01), (5e-3, 0.1)),
        # Of AdamW's alone.
        (TWO_RATES, {"*.bias": {"lr": 0.0}}, (0.0, 0.0), (5e-3, 0.0)),
        (TWO_DECAYS, {"*.bias": {"weight_decay": 0.0}}, (5e-3, 0.0), (5e-3, 0.1)),
        (TWO_RATES, {"*.bias": {"adamw_lr": 2e-3}}, (2e-3, 0.0), (5e-3, 0.0)),
        ({"preset": "keller"} | TWO_RATES, {"*.bias": {"lr": 2e-3}}, (2e-3, 0.0), (5e-3, 0.0)),
        (TWO_RATES, {"*.bias": {"lr": None, "weight_decay": 0.2}}, (1e-3, 0.2), (5e-3, 0.0)),
        # Of Muon's alone.
        (TWO_RATES | TWO_DECAYS, {"up.weight": {"lr": 1.0}}, (1e-3, 0.01), (1.0, 0.1)),
        (TWO_DECAYS, {"up.weight": {"weight_decay": 0.0}}, (5e-3, 0.01), (5e-3, 0.0)),
        # Of both.
        ({}, {"up.*": {"lr": 1.0, "weight_decay": 0.2}}, (1.0, 0.2), (1.0, 0.2)),
        (TWO_RATES, {"up.*": {"lr": 1.0, "adamw_lr": 2.0}}, (2.0, 0.0), (1.0, 0.0)),
        (TWO_RATES, {"up.*": {"adamw_lr": 2.0}}, (2.0, 0.0), (5e-3, 0.0)),
        ({}, {"up.*": {"weight_decay": 0.1, "adamw_weight_decay": 0.0}}, (5e-3, 0.0), (5e-3, 0.1)),
    ],
)
def test_rates_and_decays_of_a_group_come_before_the_constructors(
    constructor, pattern, bias, weight
):
    found = options_by_name(make_model(), pattern, **constructor)
    assert tuple(found["up.bias"][key] for key in ("lr", "weight_decay")) == bias
    assert tuple(found["up.weight"][key] for key in ("lr", "weight_decay")) == weight


def test_an_option_of_one_pattern_for_several_groups_counts_where_it_can():
    model = make_model()
    dicts = [{"params": model.up, "betas": (0.8, 0.9)}, {"params": model.down}]
    found = options_by_name(dicts, {"*weight": {"momentum": 0.5}, "*bias": {"eps": 1e-4}})
    assert found["group0.weight"]["momentum"] == found["group1.weight"]["momentum"] == 0.5
    assert (found["group0.bias"]["betas"], found["group0.bias"]["eps"]) == ((0.8, 0.9), 1e-4)


def test_a_scale_of_a_group_takes_the_place_of_the_constructors():
    pattern = {"up.weight": {"adjust_lr_fn": "spectral_unclamped"}}
    found = options_by_name(make_model(), pattern, scale="none", adamw_lr=1e-3)
    assert (found["up.weight"]["scale"], found["down.weight"]["scale"]) == ("spectral", "none")


@pytest.mark.parametrize(
    ("pattern", "words"),
    [
        *(
            ({"*.bias": {key: value}}, rf"groups\['\*.bias'\]: {key}=.* on muon, .*'up.bias'.*{to}")
            for key, value, to in (
                ("momentum", 0.9, "write betas"),
                ("nesterov", False, "take it away"),
                ("scale", "none", "take it away"),
                ("adjust_lr_fn", "original", "take it away"),
                ("preset", "keller", "take it away"),
                ("ns_steps", 3, "take it away"),
                ("ns_dtype", "float32", "take it away"),
            )
        ),
        *(
            ({"up.weight": {key: value}}, f": {key}=.* on adamw, .*'up.weight': write {to} ")
            for key, value, to in (
                ("betas", (0.8, 0.9), "momentum"),
                ("eps", 1e-6, "ns_eps"),
                ("adamw_lr", 1e-4, "lr"),
                ("adamw_weight_decay", 0.0, "weight_decay"),
            )
        ),
        ({"*.bias": {"lr": 1.0, "adamw_lr": 2.0}}, "lr=1.0 has no effect: .* adamw_lr comes first"),
        ({"up.*": {"lr": 1.0}}, "lr=1.0 would be for .* adamw_lr=0.001 .* give adamw_lr as well"),
        ({"up.*": {"weight_decay": 0.2}}, "give adamw_weight_decay as well"),
        ({"norm.*": {"lr": 1.0}}, "lr=1.0 has no effect: all .* left alone; of 'norm.weight'"),
        ({"up.*": {}, "up.weight": {}}, "'up.weight' has no effect, since patterns before it"),
        ({"up.*": {"amsgrad": True}}, "amsgrad=True, which dmuond does not have"),
    ],
)
def test_an_option_of_a_group_that_would_count_for_nothing_is_refused_by_name(pattern, words):
    with pytest.raises(dmuond.InvalidArgumentError, match=words):
        options_by_name(make_model(), pattern, [("norm.*", "trainer")], **TWO_RATES, **TWO_DECAYS)


def test_a_rate_for_both_routes_is_refused_where_it_is_not_on_adamws_scale():
    with pytest.raises(dmuond.InvalidArgumentError, match="group 0: lr=1.0 .*scale 'original'"):
        options_by_name([{"params": make_model(), "lr": 1.0}], preset="keller")
    with pytest.raises(dmuond.InvalidArgumentError, match="patterns of groups= give all"):
        options_by_name([{"params": make_model(), "lr": 1.0}], {"*": {"lr": 2.0}})


def test_biases_have_a_rate_and_a_decay_of_their_own_as_with_torch(muon):
    """In torch's own dicts, beside options of the constructor for adamw."""
    model, reference = make_model(), make_model()
    start = weights(reference)
    own = {"lr": ADAMW_LR / 2, "weight_decay": 0.3}
    decayed = [(n, p) for n, p in model.named_parameters() if p.ndim > 1]
    biases = [(n, p) for n, p in model.named_parameters() if p.ndim < 2]
    optimizer = muon([{"params": decayed}, {"params": biases, **own}], adamw_weight_decay=0.2)
    others = TorchOptimizers(reference)
    named = dict(reference.named_parameters())
    others.parts[1] = torch.optim.AdamW(
        [
            {"params": [named["embed.weight"], named["head.weight"]]},
            {"params": [named[name] for name, _ in biases], **own},
        ],
        lr=ADAMW_LR,
        weight_decay=0.2,
    )
    plain_loop(model, optimizer)
    plain_loop(reference, others)
    assert_same_training(model, reference, start)


# --- convolutions and weight_norm ---


class Convolution(nn.Module):
    """A convolution whose kernel is also there as the matrix that it is made of."""

    def __init__(self, flat: bool, transposed: bool = False):
        super().__init__()
        kernel = torch.randn(6, 4, 2, 3, generator=torch.Generator().manual_seed(0)) / 4
        self.transposed = transposed
        self.conv = nn.ConvTranspose2d(6, 4, (2, 3)) if transposed else nn.Conv2d(4, 6, (2, 3))
        self.conv.bias = None
        # A matrix has a row for each output.
        matrix = (kernel.transpose(0, 1) if transposed else kernel).flatten(1)
        self.conv.weight = nn.Parameter(matrix if flat else kernel)

    def kernel(self):
        weight = self.conv.weight
        if weight.ndim == 2:
            weight = weight.view(4, 6, 2, 3) if self.transposed else weight.view(6, 4, 2, 3)
            return weight.transpose(0, 1) if self.transposed else weight
        return weight

    def forward(self, step: int):
        channels = 6 if self.transposed else 4
        images = torch.randn(4, channels, 8, 8, generator=torch.Generator().manual_seed(1 + step))
        convolve = nn.functional.conv_transpose2d if self.transposed else nn.functional.conv2d
        return convolve(images, self.kernel()).sin().square().mean()

    def train_by(self, optimizer):
        for step in range(STEPS):
            self(step).backward()
            optimizer.step()
            optimizer.zero_grad()


VIEWED = {"views": {"conv.weight": "flatten"}}


@pytest.mark.parametrize(
    ("transposed", "memory_format", "options"),
    [
        (False, torch.contiguous_format, VIEWED),
        (False, torch.channels_last, {"conv": "muon"}),
        (True, torch.contiguous_format, {"conv": "muon"}),
        (True, torch.channels_last, {"views": {"conv.weight": dmuond.torch.Flatten()}}),
    ],
)
def test_a_flattened_convolution_is_trained_as_torch_trains_the_matrix(
    muon, transposed, memory_format, options
):
    model, reference = (Convolution(flat, transposed) for flat in (False, True))
    model.conv.weight.data = model.conv.weight.data.to(memory_format=memory_format)
    start = {"kernel": reference.kernel().detach().clone()}
    optimizer = muon(model, **options)
    assert [(row.route, row.matrices) for row in optimizer.routing] == [(1, 1)]
    model.train_by(optimizer)
    reference.train_by(torch.optim.Muon(reference.parameters(), lr=LR))
    got, want = model.kernel().detach(), reference.kernel().detach()
    assert_same_weights({"kernel": got}, {"kernel": want}, start)


@pytest.mark.parametrize("transposed", [False, True])
def test_the_state_of_a_flattened_convolution_has_the_kernels_shape_and_goes_on(muon, transposed):
    model, reference = (Convolution(flat, transposed) for flat in (False, True))
    optimizer = muon(model, **VIEWED)
    model.train_by(optimizer)
    saved, start = optimizer.state_dict(), weights(model)
    torchs = torch.optim.Muon(reference.parameters(), lr=LR)
    reference.train_by(torchs)
    buffer = saved["state"][0]["momentum_buffer"]
    reference.conv.weight.data = torchs.state[reference.conv.weight]["momentum_buffer"]
    assert (buffer - reference.kernel().detach()).norm() <= 1e-3 * buffer.norm()
    assert torch.equal(saved["state"][0]["master"], model.conv.weight)
    model.load_state_dict(start)  # these are compared with the masters
    model.train_by(optimizer)
    optimizer.close()
    again = Convolution(False, transposed)
    again.load_state_dict(start)
    optimizer = muon(again, **VIEWED)
    optimizer.load_state_dict(saved)
    again.train_by(optimizer)
    assert torch.equal(again.conv.weight, model.conv.weight)


def sharded_convolution(rank, world, folder, transposed):
    """Every rank has the same data. The kernel in the end."""
    with process_group(rank, world, folder):
        model = Convolution(False, transposed)
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
        optimizer = make_optimizer(model, **VIEWED)
        for step in range(STEPS):
            model(step).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.reshard()
        kernel = model.conv.weight.detach().full_tensor().numpy()
        optimizer.close()
    return kernel


@pytest.mark.parametrize("transposed", [False, True])
def test_shards_of_a_flattened_convolution_are_trained_as_the_whole(
    ranks, address, tmp_path, transposed
):
    def train(world):
        folder = str(tmp_path / str(world))
        return ranks.run(sharded_convolution, world, [address], folder, transposed)

    whole, *_ = train(1)
    start = Convolution(flat=False).conv.weight.detach().numpy()
    for world in (2, 4):  # of six rows (or inputs), on four ranks two, two, two and none
        for kernel in train(world):
            assert abs(kernel - whole).max() <= 1e-5 * abs(whole - start).max()


def test_a_convolution_without_the_view_is_on_adamw_and_says_what_to_write():
    model = nn.Sequential(nn.Conv2d(3, 6, 3))
    route, reason = routed(model)["0.weight"]
    assert route == "adamw" and "'flatten'" in reason
    assert routed(model, views={"0.weight": "flatten"})["0.weight"] == ("muon", "4-D, flattened")


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
@pytest.mark.parametrize("norm", [parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.parametrize("dim", [0, 1, None])
def test_magnitudes_of_weight_norm_are_on_adamw_and_directions_where_the_weight_was(norm, dim):
    model = nn.ModuleDict({"up": nn.Linear(24, 40), "head": nn.Linear(40, 9)})
    before = {name: route for name, (route, _) in routed(model).items()}
    for layer in model.values():
        norm(layer, dim=dim)
    found = routed(model)
    for layer in ("up", "head"):
        magnitude, direction = [n for n in found if n.startswith(layer) and "bias" not in n]
        assert found[magnitude][0] == "adamw"
        assert found[direction][0] == before[f"{layer}.weight"]


def test_a_model_with_weight_norm_is_trained_as_by_torch(muon):
    model, reference = make_model(), make_model()
    for each in (model, reference):
        parametrizations.weight_norm(each.up)
        parametrizations.weight_norm(each.head)
    start = weights(reference)
    others = TorchOptimizers.__new__(TorchOptimizers)
    named = dict(reference.named_parameters())
    matrices = [n for n in MATRICES if n in named] + ["up.parametrizations.weight.original1"]
    others.parts = [
        torch.optim.Muon([named[name] for name in matrices], lr=LR),
        torch.optim.AdamW(
            [p for name, p in named.items() if name not in matrices], ADAMW_LR, weight_decay=0.1
        ),
    ]
    plain_loop(model, muon(model))
    plain_loop(reference, others)
    assert_same_training(model, reference, start)


# --- groups that are added ---


def test_groups_added_before_the_first_step_are_trained_as_by_torch(muon):
    model, reference = make_model(), make_model()
    start = weights(reference)
    first = [("embed.weight", model.embed.weight), ("up.weight", model.up.weight)]
    optimizer = muon(first, route=[("up.weight", "muon")])
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
    optimizer.add_param_group({"params": [("up.bias", model.up.bias)], "name": "biases"})
    rest = [(n, p) for n, p in model.named_parameters() if n.split(".")[0] not in ("embed", "up")]
    optimizer.add_param_group({"params": rest})
    assert [group["route"] for group in optimizer.param_groups] == [
        "muon",
        "adamw",
        "adamw",
        "muon",
        "adamw",
    ]
    assert schedule.optimizer is optimizer
    plain_loop(model, optimizer)
    plain_loop(reference, TorchOptimizers(reference))
    assert_same_training(model, reference, start)


def test_frozen_parameters_can_be_added_without_names_once_they_train(muon):
    model, reference = make_model(), make_model()
    start = weights(reference)
    model.up.requires_grad_(False)
    optimizer = muon(model)
    model.up.requires_grad_(True)
    optimizer.add_param_group({"params": model.up.parameters(), "lr": LR / 2, "adamw_lr": ADAMW_LR})
    named = dict(reference.named_parameters())
    others = TorchOptimizers(reference)
    others.parts[0] = torch.optim.Muon(
        [
            {"params": [named[n] for n in MATRICES if n != "up.weight"], "lr": LR},
            {"params": [named["up.weight"]], "lr": LR / 2},
        ]
    )
    plain_loop(model, optimizer)
    plain_loop(reference, others)
    assert_same_training(model, reference, start)
    assert {row.parameter for row in optimizer.routing} == set(named)


def test_gradients_that_were_there_are_those_of_the_first_step(muon):
    model, reference = make_model(), make_model()
    start = weights(reference)
    others = [(n, p) for n, p in model.named_parameters() if n != "head.weight"]
    optimizer = muon(others, route=[(name, "muon") for name in MATRICES])
    loss_of(model, 0).backward()
    optimizer.add_param_group({"params": [("head.weight", model.head.weight)]})
    optimizer.step()
    loss_of(reference, 0).backward()
    TorchOptimizers(reference).step()
    assert_same_training(model, reference, start)


@pytest.mark.parametrize(
    ("group", "words"),
    [
        ({"lr": 1.0}, "a group is a dict with 'params'"),
        ({"params": list(nn.Linear(3, 3).parameters())}, "parameters need names"),
        ({"params": nn.Linear(3, 3), "lrr": 1.0}, "unknown option 'lrr': is 'lr' meant"),
        ({"params": [("up.weight", nn.Parameter(torch.zeros(3, 3)))]}, "have the name 'up.weight'"),
    ],
)
def test_a_group_that_cannot_be_added_changes_nothing(muon, group, words):
    model = make_model()
    optimizer = muon(model)
    with pytest.raises(dmuond.InvalidArgumentError, match=words):
        optimizer.add_param_group(group)
    plain_loop(model, optimizer)
    assert len(optimizer.param_groups) == 2


def test_groups_after_the_first_step_are_refused_with_the_line_to_write(muon):
    model = make_model()
    optimizer = muon(model)
    plain_loop(model, optimizer, range(1))
    with pytest.raises(dmuond.InvalidArgumentError, match="step 1 .* include_frozen=True"):
        optimizer.add_param_group({"params": nn.Linear(3, 3)})
    plain_loop(model, optimizer, range(1, 3))


def adding(rank, world):
    """The weights in the end."""
    model = make_model()
    optimizer = make_optimizer(model.up, max_grad_norm=1.0)
    optimizer.add_param_group({"params": [("narrow.weight", model.narrow.weight)]})
    for step in range(3):
        loss_of(model, step, rank).backward()
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    return {name: w.numpy() for name, w in weights(model).items()}


def test_all_ranks_add_a_group_together(ranks, daemons):
    addresses = daemons.start(2, 1)
    first, *others = ranks.run(adding, 4, addresses)
    start = weights(make_model())
    assert not (first["narrow.weight"] == start["narrow.weight"].numpy()).all()
    for other in others:
        for name, weight in first.items():
            assert (other[name] == weight).all(), name


# --- groups that are edited ---


@pytest.mark.parametrize(
    ("key", "value"),
    [("nesterov", False), ("scale", "none"), ("maximize", True), ("preset", "keller")],
)
def test_an_option_that_is_changed_after_it_was_registered_is_refused(muon, key, value):
    model = make_model()
    optimizer = muon(model)
    loss_of(model, 0).backward()
    was = optimizer.param_groups[0][key]
    optimizer.param_groups[0][key] = value
    with pytest.raises(
        dmuond.InvalidArgumentError, match=rf"param_groups\[0\]\['{key}'\] is .*was"
    ):
        optimizer.step()
    optimizer.param_groups[0][key] = was
    optimizer.step()
    assert optimizer.last_committed_step == 1


def test_a_parameter_that_is_taken_out_of_its_group_is_refused(muon):
    model = make_model()
    optimizer = muon(model)
    loss_of(model, 0).backward()
    optimizer.param_groups[0]["params"].pop()
    with pytest.raises(dmuond.InvalidArgumentError, match="other parameters than those that were"):
        optimizer.step()
