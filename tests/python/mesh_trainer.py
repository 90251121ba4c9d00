"""One rank of four on a mesh of 2 x 2 (or of two on a pipeline), set up in many ways over gloo."""

import dmuond
import torch
from fsdp_trainer import process_group
from habits import STEPS, batch, loss_of, make_model, make_optimizer
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

SHARDED = ("up", "down")
OVERFLOW = 2  # the step in which a gradient of one rank is not finite


def mesh_of(*names):
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def tensor_parallel(tp):
    """Two layers are sharded, the rest are plain tensors with equal gradients."""
    return parallelize_module(
        make_model(), tp, {"up": ColwiseParallel(), "down": RowwiseParallel()}
    )


def sequence_parallel(tp):
    """Between the sharded layers each rank has half of the sequence.

    Plain tensors and the norm have parts of a gradient, and the embedding's shards the whole of it.
    """
    return parallelize_module(
        make_model(),
        tp,
        {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )


def shards_on(mesh):
    model = make_model()
    for part in (model.up, model.down, model.narrow, model.wide):
        fully_shard(part, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def shards_of(parallel, mesh):
    """Tensor parallel along tp, and fully_shard along dp: both cut the rows of `up`."""
    model = parallel(mesh["tp"])
    for part in (model.up, model.down):
        fully_shard(part, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def whole(parameters):
    """The named weights, shards put together."""
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in parameters
    }


def train(model, data, given=None, part=1.0, **options):
    """Weights after STEPS, each on this rank's data; the norms of the reduced gradients.

    part: of the loss, that this rank computes.
    """
    optimizer = make_optimizer(given or model, **options)
    norms = []
    for step in range(STEPS):
        (part * loss_of(model, step, data)).backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_outcome.gradient_norm)
    optimizer.close()
    return trained(model), norms


def trained(model):
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return whole(model.named_parameters())


def new_scaler():
    return torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)


def train_scaled(model, data, broken, given=None, **options):
    """Weights, the scales after each step, and why steps were skipped.

    broken: the parameter whose gradient has a NaN in one step on this rank; None: not on this one.
    """
    optimizer, scaler = make_optimizer(given or model, **options), new_scaler()
    scales, told = [], []
    for step in range(STEPS):
        scaler.scale(loss_of(model, step, data)).backward()
        if step == OVERFLOW and broken is not None:
            gradient = broken.grad
            local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            local[-1] = float("nan")
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        if optimizer.step_was_skipped:
            told.append((step, optimizer.last_outcome.detail))
    optimizer.close()
    return trained(model), scales, told


def overflows(rank, roles):
    """A NaN on one rank alone, whose replica of the gradient no lane reads."""
    mesh = roles["mesh"]
    dp, _ = mesh.get_coordinate()
    plain, shards = tensor_parallel(mesh["tp"]), shards_on(mesh["dp"])
    on_all = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    biased = parallelize_module(
        make_model(), on_all, {"narrow": RowwiseParallel(input_layouts=Replicate())}
    )
    by_hand = [(name, p) for name, p in biased.named_parameters() if isinstance(p, DTensor)]
    return {
        "tensor parallel": train_scaled(
            plain, dp, plain.norm.weight if rank == 3 else None, **roles
        ),
        "shards with equal ones": train_scaled(
            shards, dp, shards.norm.weight if rank == 1 else None, **roles
        ),
        "DTensors alone": train_scaled(
            biased, 0, biased.narrow.bias if rank == 2 else None, given=by_hand
        ),
    }


def on_a_mesh(rank, world, folder):
    """What every set-up of four ranks trains, by name: weights and norms."""
    with process_group(rank, world, folder):
        mesh = mesh_of("dp", "tp")
        dp, tp = mesh.get_coordinate()
        roles = {"mesh": mesh, "mesh_roles": {"dp": "mean", "tp": "same"}}
        sums = {"mesh": mesh, "mesh_roles": {"dp": "mean", "tp": "sum"}}
        # A bucket for each parameter, signalled during the backward pass where that is safe.
        early = {"bucket_bytes": 1, "early_buckets": True}
        flat = mesh["dp", "tp"]._flatten("all")
        beside = mesh_of("replicas", "shards")
        means = {"mesh": beside, "mesh_roles": {"replicas": "mean", "shards": "mean"}}
        twice = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("outer", "inner", "shards"))
        all_means = {"mesh": twice, "mesh_roles": dict.fromkeys(twice.mesh_dim_names, "mean")}
        replicas = shards_on(twice["inner", "shards"])
        pipeline = mesh_of("pp", "dp")
        stages = {"mesh": pipeline, "mesh_roles": {"pp": "stages", "dp": "mean"}}
        return {
            "tensor parallel": train(tensor_parallel(mesh["tp"]), dp, **roles, **early),
            "tensor parallel, clipped": train(
                tensor_parallel(mesh["tp"]), dp, max_grad_norm=0.1, **roles
            ),
            "shards of tensor parallel": train(shards_of(tensor_parallel, mesh), dp, **roles),
            "shards of tensor parallel, early": train(
                shards_of(tensor_parallel, mesh), dp, max_grad_norm=0.1, **roles, **early
            ),
            "sequence parallel": train(sequence_parallel(mesh["tp"]), dp, **sums, **early),
            "shards with replicas": train(shards_on(beside["shards"]), rank, **means),
            "replicas of shards with replicas, by names": train(
                replicas, rank, given=list(replicas.named_parameters()), **all_means
            ),
            "shards with equal ones": train(shards_on(mesh["dp"]), dp, **roles),
            "shards over equal ones": train(shards_on(flat), dp, **roles),
            "shards of parts": train(shards_on(flat), rank, part=0.5, **sums),
            "replicas by hand": train_replicas(mesh["dp"], dp, **roles),
            "pipeline": train_stage(*pipeline.get_coordinate(), **stages),
            "pipeline by its size": train_stage(
                *pipeline.get_coordinate(), data_parallel_size=2, max_grad_norm=0.1
            ),
            "experts": train_experts(rank, data_parallel_size=4),
            "overflows": overflows(rank, roles),
        }


class First(nn.Module):
    def __init__(self):
        super().__init__()
        whole = make_model()
        self.embed, self.up, self.down = whole.embed, whole.up, whole.down

    def forward(self, tokens):
        x = self.embed(tokens)
        return x + self.down(torch.relu(self.up(x)))


class Second(nn.Module):
    def __init__(self):
        super().__init__()
        whole = make_model()
        self.narrow, self.wide = whole.narrow, whole.wide
        self.norm, self.head = whole.norm, whole.head

    def forward(self, x):
        return self.head(self.norm(x + self.wide(torch.tanh(self.narrow(x)))))


def backward_of_stage(stage, module, step, data):
    """Activations go to the next stage and their gradients come back. Stages are in blocks."""
    tokens = batch(step, data)
    other = (dist.get_rank() + dist.get_world_size() // 2) % dist.get_world_size()
    if stage == 0:
        out = module(tokens[:, :-1])
        dist.send(out.detach(), other)
        gradient = torch.empty_like(out)
        dist.recv(gradient, other)
        out.backward(gradient)
        return
    received = torch.empty(4, 8, 24)
    dist.recv(received, other)
    logits = module(received.requires_grad_())
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    dist.send(received.grad, other)


def train_stage(stage, data, **options):
    module = (First, Second)[stage]()
    optimizer = make_optimizer(module, **options)
    norms = []
    for step in range(STEPS):
        backward_of_stage(stage, module, step, data)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_outcome.gradient_norm)
    optimizer.close()
    return whole(module.named_parameters()), norms


def train_experts(rank, **options):
    """One expert on each rank, whose gradient is the sum of all ranks' losses' gradients."""
    module = nn.Module()
    module.register_module(f"expert{rank}", nn.Linear(6, 4, bias=False))
    expert = module.get_submodule(f"expert{rank}")
    optimizer = make_optimizer(module, **options)
    expert.weight.grad = torch.full((4, 6), 8.0)
    optimizer.step()
    norm = optimizer.last_outcome.gradient_norm
    optimizer.close()
    return {}, [norm]


def train_replicas(along, data, **options):
    """DTensors whose gradients are made of local tensors, and say that they are equal, or parts."""
    module = nn.Module()
    module.weight = nn.Parameter(distribute_tensor(torch.zeros(4, 6), along, [Replicate()]))
    optimizer = make_optimizer(module, **options)
    norms = []
    for placement in (Replicate(), Partial()):
        local = module.weight.to_local(grad_placements=[placement])
        (local * (1 + 2 * data)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_outcome.gradient_norm)
    optimizer.close()
    return {}, norms


def on_two_stages(rank, world, folder):
    """What a pipeline says without a divisor; then what it trains with each line it was shown."""
    with process_group(rank, world, folder):
        words = refusal(lambda: make_optimizer((First, Second)[rank]()))
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
        roles = {"pp": "stages", "dp": "mean"}
        return (
            words,
            train_stage(rank, 0, data_parallel_size=1),
            train_stage(rank, 0, mesh=mesh, mesh_roles=roles, max_grad_norm=0.1),
        )


def refusal(make):
    try:
        make()
    except dmuond.InvalidArgumentError as error:
        return str(error)
    return ""


def refusals(rank, world, folder):
    """What each set-up that cannot be known says; none of them reaches the daemon."""
    with process_group(rank, world, folder):
        mesh = mesh_of("dp", "tp")
        all_of_them = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
        model = make_model()
        roles = {"dp": "mean", "tp": "same"}
        set_ups = {
            "sub-mesh": (tensor_parallel(mesh["tp"]), {}),
            "shards on a sub-mesh": (shards_on(mesh["dp"]), {}),
            "plain beside": (tensor_parallel(all_of_them), {}),
            "small mesh": (model, {"mesh": mesh["tp"], "mesh_roles": {"tp": "same"}}),
            "no roles": (model, {"mesh": mesh}),
            "a role missing": (model, {"mesh": mesh, "mesh_roles": {"dp": "mean"}}),
            "no such role": (model, {"mesh": mesh, "mesh_roles": roles | {"tp": "equal"}}),
            "no such dimension": (model, {"mesh": mesh, "mesh_roles": roles | {"cp": "sum"}}),
            "no mesh": (model, {"mesh": "dp", "mesh_roles": roles}),
            "size": (model, {"data_parallel_size": 3}),
            "both": (model, {"mesh": mesh, "mesh_roles": roles, "data_parallel_size": 2}),
            "foreign mesh": (
                shards_on(init_device_mesh("cpu", (4,))),
                {"mesh": mesh, "mesh_roles": {"dp": "mean", "tp": "stages"}},
            ),
        }
        return {
            what: refusal(lambda model=model, options=options: make_optimizer(model, **options))
            for what, (model, options) in set_ups.items()
        }
