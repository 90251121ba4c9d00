"""What ordinary mistakes get: an error that names what was wrong, and nothing has changed.

One daemon serves all tests of this file: none of these clients disturbs the next.
"""

import copy
import pickle
import re

import core_trainer
import dmuond
import dmuond.torch
import numpy as np
import pytest
import torch
from core_trainer import Held, Job, Tensor, whole
from daemons import Daemons
from dmuond import InvalidArgumentError, types
from dmuond.torch import Experts, RowBlocks
from habits import ADAMW_LR, loss_of, make_model, make_optimizer, plain_loop, weights
from torch import nn


@pytest.fixture(scope="module")
def address():
    with Daemons() as started:
        yield started.start(1, 1, "--session_linger=0", "--jobs_max=1")[0]


@pytest.fixture
def make(address):
    """Makes an optimizer of a fresh model; closes it."""
    made = []

    def make(model=None, lr=0.02, **options):
        model = make_model() if model is None else model
        made.append(make_optimizer(model, lr, **{"address": address, **options}))
        return made[-1]

    yield make
    for optimizer in made:
        optimizer.close()


NAN = float("nan")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lr": -1.0}, "lr=-1.0: must be finite and not negative"),
        ({"lr": NAN}, "lr=nan"),
        ({"lr": None}, "lr=None is not a number"),
        ({"adamw_lr": "fast"}, "adamw_lr='fast' is not a number"),
        ({"adamw_lr": None}, "adamw_lr is needed: with scale 'original'"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"eps": NAN}, "eps=nan"),
        ({"momentum": 1.0}, "momentum=1.0: must be less than 1"),
        ({"betas": 0.9}, "betas=0.9 are not two numbers"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\]=1.0: must be less than 1"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
        ({"preset": "mune"}, "preset 'mune' is unknown; there are dmuon, torch, keller"),
        ({"scale": "big"}, "scale='big' is unknown; there are match_rms_adamw"),
        ({"ns_dtype": torch.float64}, "ns_dtype=torch.float64 is unknown"),
        ({"ns_form": "gram", "ns_dtype": "bf16"}, "ns_form=gram cannot .* ns_dtype=bfloat16"),
        ({"ns_coefficients": [(1, 2)]}, r"ns_coefficients=\[\(1, 2\)\]"),
        ({"ns_coefficients": []}, "ns_coefficients has no steps"),
        ({"ns_coefficients": [(1.0, NAN, 0.0)]}, r"rank 0, groups\[0\]: .*not finite"),
        ({"ns_coefficients": [(9.0, 9.0, 9.0)] * 9}, r"rank 0, groups\[0\]: .*diverge"),
        ({"ns_restarts": [2]}, r"rank 0, groups\[0\]: ns_restarts=2: ns_form=standard has no"),
        ({"preset": "dmuon", "ns_restarts": [2, 9]}, "ns_restarts=2,9: .* steps 1 to 4 of the 5"),
        ({"preset": "dmuon", "ns_restarts": (4, 2)}, "ns_restarts=4,2: .* in increasing order"),
        ({"preset": "dmuon", "ns_restarts": 2}, "ns_restarts=2: the steps before which"),
        ({"preset": "dmuon", "ns_restarts": []}, r"ns_restarts=\[\] has no steps"),
        ({"reduction": "avg"}, "reduction='avg' is neither 'mean' nor 'sum'"),
        ({"bucket_bytes": -5}, "bucket_bytes=-5"),
        ({"route": [("up.*", "moun")]}, "route of 'up.weight' is 'moun'; there are muon, adamw"),
        ({"route": [("nobody.*", "muon")]}, "route: no trainable parameter matches 'nobody"),
        ({"route": [("up.bias", "muon")]}, r"'up.bias' is muon, but its shape is \[40\]"),
        ({"route": "muon"}, "route: 'muon' is neither a function nor"),
        ({"route": lambda name, p: 3}, "route: the rule answers 3 for 'embed.weight'"),
        ({"views": ["qkv"]}, r"views=\['qkv'\] is not a dict"),
        ({"views": {"nobody": "qkv"}}, "views: no trainable parameter matches 'nobody'"),
        ({"views": {"up.weight": "qkv"}}, r"'up.weight' of shape \[40, 24\] has no three equal"),
        ({"views": {"up.weight": RowBlocks(3, 4)}}, "'up.weight' .* have 7 rows of its 40"),
        ({"views": {"up.weight": "heads:7"}}, "'up.weight' .* 7 heads do not divide its 40"),
        ({"views": {"up.weight": 7}}, "views: 7 for 'up.weight' is not RowBlocks"),
        (
            {"views": {"embed.weight": Experts()}},
            "'embed.weight' has a view but its route",
        ),
        ({"rank": "0"}, "rank='0' is not an integer"),
        ({"rank": 1, "world_size": 1}, "rank 1 in a world of 1.*RANK_OUT_OF_RANGE"),
        ({"world_size": 0}, "world_size is 0"),
        ({"job": "a b"}, "job name 'a b'.*JOB_NAME_INVALID"),
        ({"job": 3}, "job=3 is not a name"),
        ({"resume": 77}, "resume=77"),
        ({"address": "localhost:8080"}, "'localhost:8080' is not the path of a Unix socket"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_a_wrong_option_is_named_with_its_value(make, options, words):
    with pytest.raises(InvalidArgumentError, match=words):
        make(**options)


def test_an_unknown_option_is_named(make):
    with pytest.raises(TypeError, match="'learning_rate'"):
        make(learning_rate=1.0)
    with pytest.raises(InvalidArgumentError, match="unknown option 'lrr'"):
        make([{"params": make_model(), "lrr": 1.0}])


class Holder(nn.Module):
    def __init__(self, tensor):
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(4, 4))
        self.extra = nn.Parameter(tensor)


def frozen():
    return make_model().requires_grad_(False)


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (list, "there are no parameters"),
        (lambda: 3, "params is of type int"),
        (lambda: dict(make_model().named_parameters()), "params is of type dict"),
        (lambda: make_model().parameters(), "parameters need names.*named_parameters"),
        (lambda: [{"lr": 1.0}], "a group has no 'params'"),
        (lambda: [{"params": make_model()}] * 2, "'embed.weight' is in two groups"),
        (frozen, "no parameter has the route muon or adamw"),
        (lambda: make_model().double(), "'embed.weight' is torch.float64; dmuond takes float32"),
        (lambda: Holder(torch.zeros(3, dtype=torch.cfloat)), "'extra' is torch.complex64"),
        (lambda: Holder(torch.zeros(3, device="meta")), "'extra' is on meta"),
        (lambda: Holder(torch.zeros(0, 8)), "'extra' of shape 0x8 has no elements"),
        (lambda: nn.LazyLinear(3), "'weight' of a lazy module has no shape yet"),
        (lambda: nn.DataParallel(make_model()), "wrapped in DataParallel"),
    ],
    ids=range(13),
)
def test_parameters_that_cannot_be_trained_are_named(make, params, words):
    with pytest.raises(InvalidArgumentError, match=words):
        make(params())


def test_a_second_optimizer_of_one_rank_is_refused_and_the_first_goes_on(make):
    model = make_model()
    first = make(model)
    with pytest.raises(dmuond.Error, match=r"rank 0 of job 'default' has a live session.*pid"):
        make()
    plain_loop(model, first)


@pytest.mark.parametrize("place", [lambda w: w.data, lambda w: w.data.t()], ids=["same", "turned"])
def test_two_parameters_in_one_memory_are_refused_by_name(make, place):
    model = make_model()
    model.down.weight.data = place(model.up.weight)
    with pytest.raises(dmuond.InvalidArgumentError, match=r"'up.weight' and 'down.weight' are two"):
        make(model)


def test_another_job_is_refused_with_the_holders_name(make):
    make(job="mine")
    with pytest.raises(dmuond.Error, match="mine") as caught:
        make(job="yours")
    assert caught.value.reason == "OTHER_JOB"


def test_resuming_a_job_that_is_not_there_is_refused(make):
    with pytest.raises(dmuond.FailedPreconditionError, match="no state to resume"):
        make(resume=types.RESUME_REQUIRE)


@pytest.fixture
def trained(make):
    """A model and its optimizer after a step; the next one has gradients already."""
    model = make_model()
    optimizer = make(model, early_buckets=False)
    plain_loop(model, optimizer, range(1))
    loss_of(model, 1).backward()
    return model, optimizer


def assert_unchanged_and_alive(model, optimizer, before):
    for name, want in before.items():
        assert torch.equal(weights(model)[name], want), name
    optimizer.step()
    assert optimizer.last_committed_step == 2


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("lr", -1.0, r"groups\[0\].learning_rate = -1"),
        ("lr", NAN, r"groups\[0\].learning_rate = nan"),
        ("lr", "fast", r"param_groups\[0\].*'fast'"),
        ("betas", (0.9,), r"param_groups\[0\].*\(0.9,\)"),
        ("momentum", -0.5, r"groups\[0\].momentum = -0.5"),
        # Finite, and yet the step would publish NaN.
        ("betas", (1.0, 0.999), r"groups\[0\].beta1 = 1; .* less than 1"),
        ("lr", 1e39, r"groups\[0\].learning_rate = 1e\+39; .* at most 1e\+06"),
        ("weight_decay", 1e39, r"groups\[0\].weight_decay = 1e\+39"),
    ],
)
def test_a_schedule_gone_wrong_is_refused_and_the_step_can_be_repeated(
    trained, option, value, words
):
    model, optimizer = trained
    before, right = weights(model), optimizer.param_groups[0][option]
    optimizer.param_groups[0][option] = value
    with pytest.raises(InvalidArgumentError, match=words):
        optimizer.step()
    optimizer.param_groups[0][option] = right
    assert_unchanged_and_alive(model, optimizer, before)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda o: setattr(o, "trainer_state", 5), "trainer_state is int, not bytes"),
        (lambda o: o.push_parameters(["nobody"]), "no parameter 'nobody'"),
        (lambda o: o.push_parameters("up.weight"), "is one name: give a list"),
        (lambda o: o.load_state_dict({}), "no 'state' and 'param_groups'"),
        (lambda o: o.load_state_dict(None), "no 'state' and 'param_groups'"),
        (lambda o: o.load_state_dict({"state": {}, "param_groups": []}), "0 parameter groups"),
        (lambda o: o.add_param_group({"params": []}), "include_frozen=True"),
    ],
    ids=range(7),
)
def test_a_wrong_call_is_refused_and_changes_nothing(trained, call, words):
    model, optimizer = trained
    before = weights(model)
    with pytest.raises(InvalidArgumentError, match=words):
        call(optimizer)
    assert_unchanged_and_alive(model, optimizer, before)


def test_a_trainer_state_that_is_too_long_is_refused(trained):
    model, optimizer = trained
    before = weights(model)
    optimizer.trainer_state = b"x" * (dmuond.session.TRAINER_STATE_BYTES_MAX + 1)
    with pytest.raises(InvalidArgumentError, match="1048577 bytes; at most 1048576"):
        optimizer.step()
    optimizer.trainer_state = b""
    assert_unchanged_and_alive(model, optimizer, before)


def test_a_model_converted_afterwards_is_refused_and_loses_nothing(trained):
    model, optimizer = trained
    before = weights(model)
    model.to(torch.bfloat16)
    model.zero_grad()
    loss_of(model, 1).backward()
    words = (
        r"'embed.weight' was registered as torch.float32 .* is now torch.bfloat16 .*"
        "convert or move the model before making the optimizer"
    )
    state = optimizer.state_dict()
    for call in (
        optimizer.step,
        optimizer.push_parameters,
        lambda: optimizer.load_state_dict(state),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            call()
    model.to("cpu", torch.float32)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_unchanged_and_alive(model, optimizer, before)


def test_the_state_of_a_model_converted_afterwards_goes_to_a_new_optimizer(trained, make):
    model, optimizer = trained
    model.to(torch.bfloat16)
    state = optimizer.state_dict()
    optimizer.close()
    again = make(model)
    again.load_state_dict(state)
    masters = [entry["master"] for entry in state["state"].values()]
    for kept, entry in zip(masters, again.state_dict()["state"].values(), strict=True):
        assert torch.equal(entry["master"], kept)
    model.zero_grad()
    loss_of(model, 1).backward()
    again.step()
    again.close()


def test_an_optimizer_is_not_copied(trained):
    for copying in (copy.deepcopy, pickle.dumps):
        with pytest.raises(dmuond.Error, match="state_dict"):
            copying(trained[1])


def test_a_closed_optimizer_says_so(trained):
    model, optimizer = trained
    optimizer.close()
    optimizer.close()
    for call in (optimizer.step, optimizer.state_dict, optimizer.push_parameters):
        with pytest.raises(dmuond.Error, match="the session is closed"):
            call()
    model(torch.tensor([[1, 2]]))  # the weights are still there


def test_a_step_without_any_gradient_changes_nothing(make):
    model = make_model()
    optimizer = make(model)
    before = weights(model)
    optimizer.step()
    assert_unchanged_and_alive_at(model, optimizer, before, 1)


def assert_unchanged_and_alive_at(model, optimizer, before, step):
    for name, want in before.items():
        assert torch.equal(weights(model)[name], want), name
    assert optimizer.last_committed_step == step


def test_gradients_that_are_never_finite_end_the_job_by_name(make):
    model = make_model()
    optimizer = make(model)
    before = weights(model)

    def train():
        while True:
            loss_of(model, 0).backward()
            model.up.weight.grad[0, 0] = NAN
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(dmuond.Aborted, match='"up.weight" is not finite.*skipped steps in a row'):
        train()
    assert_unchanged_and_alive_at(model, optimizer, before, optimizer.last_committed_step)
    assert optimizer.last_committed_step > 1


# --- the core client ---

SQUARE = Tensor("square", (8, 8))


def registered(address, held, tensors=(SQUARE,), **job):
    return core_trainer.Trainer(0, 1, Job(tensors, (held,), **job), address=address)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ((Held("square", (0, 0), (4, 8)),), "square"),  # a hole
        ((whole(SQUARE), Held("square", (4, 0), (8, 8))), "square"),  # an overlap
        ((Held("square", (0, 0), (9, 8)),), "square"),  # beyond the tensor
        ((Held("square", (4, 0), (2, 8)),), "square"),  # the wrong way round
    ],
    ids=["hole", "overlap", "beyond", "reversed"],
)
def test_boxes_that_do_not_make_up_the_tensor_are_refused_by_name(address, held, words):
    with pytest.raises(InvalidArgumentError, match=words) as caught:
        registered(address, held)
    assert caught.value.reason == "LAYOUT_INVALID"


def session_with(address, change):
    """Registers a matrix with messages that `change` has spoilt; closes."""
    parameter = types.Parameter(
        name="w",
        shape=[8, 8],
        weight_type=types.ELEMENT_TYPE_FLOAT32,
        gradient_type=types.ELEMENT_TYPE_FLOAT32,
        route=types.ROUTE_MUON,
        reduce_factor=1.0,
    )
    fragment = types.Fragment(
        box=types.Box(begin=[0, 0], end=[8, 8]),
        contribution=types.CONTRIBUTION_SUM,
        weight=types.Slice(arena=1, strides=[8, 1]),
        gradient=types.Slice(arena=2, strides=[8, 1]),
    )
    arenas = {1: 256, 2: 256}
    change(parameter, fragment, arenas)
    with dmuond.Session(address, rank=0, world_size=1) as session:
        session.register([parameter], [fragment], [types.GroupConfig(preset="keller")])
        session.attach(arenas)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p, f, a: setattr(p, "weight_type", 77), '"w".*77'),
        (lambda p, f, a: setattr(p, "route", 9), '"w".*9'),
        (lambda p, f, a: setattr(p, "reduce_factor", NAN), "'w'.*nan"),
        (lambda p, f, a: setattr(p, "group", 3), "'w' is of group 3, and there are 1"),
        (lambda p, f, a: setattr(p, "group", -1), "'w' is in group -1"),
        (lambda p, f, a: setattr(f, "parameter", 4), "names parameter 4 of 1"),
        (lambda p, f, a: setattr(f.weight, "offset_bytes", 128), "'w'"),
        (lambda p, f, a: setattr(f.weight, "offset_bytes", 2**63 - 64), "'w'"),
        (lambda p, f, a: setattr(f.gradient, "offset_bytes", -64), "'w'"),
        (lambda p, f, a: f.weight.strides.__setitem__(0, 2**62), "'w'"),
        (lambda p, f, a: setattr(f.weight, "arena", 5), "arena 5"),
        (lambda p, f, a: a.update({2: 100}), "'w'"),
        (lambda p, f, a: a.update({2: -4}), "-4"),
        (lambda p, f, a: a.update({2: 2**62}), str(2**62)),
    ],
    ids=range(14),
)
def test_a_registration_gone_wrong_names_the_parameter_or_value(address, change, words):
    with pytest.raises(dmuond.Error, match=words) as caught:
        session_with(address, change)
    assert caught.value.reason, caught.value


def test_steps_that_do_not_fit_the_registration_are_refused(address):
    trainer = registered(address, (whole(SQUARE),))
    session, before = trainer.session, trainer.weights[0].copy()
    right = core_trainer.scalars_of(1)
    two = types.StepScalars(groups=[right.groups[0], right.groups[0]])
    for arguments, words in (
        ({"scalars": types.StepScalars()}, "0 .*1 are registered"),
        ({"scalars": two}, "2 .*1 are registered"),
        ({"scalars": right, "absent": [1]}, "absent names parameter 1; 1 are registered"),
        ({"scalars": right, "absent": [-1]}, "absent names parameter -1; 1 are registered"),
    ):
        with pytest.raises(InvalidArgumentError, match=words):
            session.step(**arguments)
    with pytest.raises(InvalidArgumentError, match="bucket 7; there are 1"):
        session.signal(7)
    assert np.array_equal(trainer.weights[0], before)
    trainer.step()
    assert session.last_committed_step == 1
    session.close()


def test_what_is_signalled_is_not_absent_unless_it_is_withdrawn(address):
    trainer = registered(address, (whole(SQUARE),))
    session, before = trainer.session, trainer.weights[0].copy()
    session.signal(0)
    with pytest.raises(InvalidArgumentError, match="parameter 0, but its bucket 0 has been"):
        session.step(core_trainer.scalars_of(1), absent=[0])
    session.step(core_trainer.scalars_of(1), absent=[0], withdraw=True)
    assert session.last_committed_step == 1
    assert np.array_equal(trainer.weights[0], before)
    session.close()


def test_calls_out_of_order_are_refused(address):
    with dmuond.Session(address, rank=0, world_size=1) as session:
        for call, words in (
            (session.push, "must attach"),
            (lambda: session.attach({1: 4}), "must register"),
            (lambda: session.step(core_trainer.scalars_of(1)), "attach"),
            (lambda: session.signal(0), "attach"),
            (lambda: list(session.pull()), "no state to read"),
        ):
            with pytest.raises(dmuond.Error, match=words):
                call()


# --- several ranks ---


def meeting(rank, world, options_of_rank):
    """Makes an optimizer with the rank's own options; what it says."""
    options = dict(options_of_rank[rank])
    model = make_model()
    if options.pop("other_shape", False):
        model.up = nn.Linear(24, 48)
    try:
        make_optimizer(model, **options).close()
        return ""
    except dmuond.Error as error:
        return f"{error.reason}: {error}"


def awake(rank, world):
    """Runs when the process has imported what it needs."""


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"other_shape": True}, ["up.weight", "40", "48"]),
        ({"momentum_form": "sum"}, ["groups[0]", "MOMENTUM_SUM", "MOMENTUM_EMA"]),
        ({"bucket_bytes": 4096}, ["bucket_bytes", "4096"]),
        ({"reduction": "sum"}, ["embed.weight"]),
    ],
    ids=lambda value: "-".join(value),
)
def test_ranks_that_say_different_things_are_told_both(ranks, address, other, words):
    answers = ranks.run(meeting, 2, [address], [{}, other])
    assert any(all(word in answer for word in words) for answer in answers), answers


def test_ranks_that_disagree_on_their_number_are_told_both(ranks, daemons):
    address = daemons.start(1, 1, "--register_timeout=3s")
    ranks.run(awake, 2, address)  # so that they meet
    answers = ranks.run(meeting, 2, address, [{}, {"world_size": 3}])
    told = [answer for answer in answers if "WORLD_DIFFERS" in answer]
    # Whoever comes second is told.
    both = re.compile(r"has world_size (2, rank 1 says 3|3, rank 0 says 2)\b")
    assert told and all(both.search(answer) for answer in told), answers


def test_a_rank_that_does_not_come_is_named(ranks, daemons):
    address = daemons.start(1, 1, "--register_timeout=1s")
    (answer,) = ranks.run(meeting, 1, address, [{"world_size": 2}])
    assert "RANKS_MISSING" in answer
    assert "of 2 ranks these have not registered in time: 1" in answer


def test_a_wrong_token_is_refused(daemons, tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text("secret\n")
    token.chmod(0o600)
    address = daemons.start(1, 1, f"--token_file={token}")[0]
    with pytest.raises(dmuond.Error) as caught:
        make_optimizer(make_model(), adamw_lr=ADAMW_LR, address=address)
    assert caught.value.reason == "TOKEN_WRONG"
    monkeypatch.setenv("DMUOND_TOKEN_FILE", str(token))
    make_optimizer(make_model(), adamw_lr=ADAMW_LR, address=address).close()
