"""Each parallelism as a script sets it up, on one rank of many; functions that tests run on each.

A set-up returns what one rank has at the end: whole weights and momenta by name, and the norms of
the reduced gradients.
"""

import torch
from fsdp_trainer import full, names_of, process_group
from habits import batch, make_optimizer
from mesh_trainer import refusal
from parallel_models import Stack, loss, mixtures, moonlight, stage, transformer, unstacked
from torch import distributed as dist
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.nn import functional
from torch.testing._internal.two_tensor import TwoTensor

STEPS, CLIP, MICROBATCHES = 4, 0.1, 4


def train(optimizer, backward, *parts):
    """`backward`: of the step's number. `parts`: of the model, that this rank has."""
    norms = []
    for step in range(STEPS):
        backward(step)
        optimizer.step()
        optimizer.zero_grad()
        norms.append(optimizer.last_outcome.gradient_norm)
    for module in (module for part in parts for module in part.modules()):
        if isinstance(module, FSDPModule):
            module.unshard()
    weights = {name: p.detach() for part in parts for name, p in part.named_parameters()}
    state = optimizer.state_dict()
    momenta = {
        name: state["state"][at].get("momentum_buffer", state["state"][at].get("exp_avg"))
        for at, name in names_of(state)
    }
    found = [
        unstacked({name: full(tensor).clone() for name, tensor in tensors.items()})
        for tensors in (weights, momenta)
    ]
    optimizer.close()
    dist.barrier()  # the next set-up's job begins when this one has ended
    return *found, norms


def make(params, **options):
    return make_optimizer(params, max_grad_norm=CLIP, **options)


def data(step, rank):
    tokens = batch(step, rank)
    return tokens[:, :-1], tokens[:, 1:]


def on_data(model, rank):
    def backward(step):
        inputs, targets = data(step, rank)
        loss(model(inputs), targets).backward()

    return backward


def sharded(model, mesh, **options):
    """As scripts do it: parts first, then the whole."""
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def meshed(sizes, roles):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(roles))
    return mesh, {"mesh": mesh, "mesh_roles": roles}


# --- tensor, sequence and context parallel ---


def tensor_parallel(model, tp, sequence=False):
    """Sizes that tp does not divide stay DTensors from one layer to the next."""
    between = Shard(1) if sequence else Replicate()
    plan = {
        "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "layers.*.attention": PrepareModuleInput(
            input_layouts=(between,), desired_input_layouts=(Replicate(),)
        ),
        "layers.*.attention.[qkv]": ColwiseParallel(),
        "layers.*.attention.o": RowwiseParallel(output_layouts=between),
        "layers.*.up": ColwiseParallel(input_layouts=between, use_local_output=False),
        "layers.*.down": RowwiseParallel(output_layouts=between),
        "head": ColwiseParallel(input_layouts=between, output_layouts=Replicate()),
    }
    if sequence:  # the last norm stays plain: its gradients are parts of one
        plan["layers.*.*_norm"] = SequenceParallel()
    there = {"embed": model.embed is not None, "head": model.head is not None}
    plan = {name: style for name, style in plan.items() if there.get(name, True)}
    return parallelize_module(model, tp, plan)


def tensor_parallel_alone(rank, world):
    mesh, roles = meshed((world,), {"tp": "same"})
    model = tensor_parallel(transformer(), mesh)
    return train(make(model, **roles), on_data(model, 0), model)


def tensor_parallel_on_other_data(way):
    """way: what is done to a model that is tensor parallel, along the mesh's other dimension."""

    def run(rank, world):
        mesh, roles = meshed((2, 2), {"dp": "mean", "tp": "same"})
        model = tensor_parallel(transformer(), mesh["tp"])
        way(model, mesh["dp"])
        return train(make(model, **roles), on_data(model, mesh["dp"].get_local_rank()), model)

    return run


def replicated(model, mesh):
    """As `sharded`, by FSDP2's replicas."""
    for layer in model.layers.values():
        replicate(layer, mesh=mesh)
    replicate(model, mesh=mesh)


def left_alone(model, mesh):
    """The replicas' gradients are averaged by dmuond."""


class Copied(torch.autograd.Function):
    """What several ranks compute with; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=ctx.group)
        return gradient, None


class Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class ByHand(nn.Module):
    """A layer of which this rank computes with some rows, or some columns, of the weight."""

    def __init__(self, whole, tp, dim):
        super().__init__()
        self.group, self.dim = tp.get_group(), dim
        for name, p in list(whole.named_parameters()):
            mine = p.detach().chunk(tp.size(), dim)[tp.get_local_rank()].contiguous()
            shard = DTensor.from_local(mine, tp, [Shard(dim)], shape=p.shape, stride=p.stride())
            self.register_parameter(name, nn.Parameter(shard))

    def forward(self, x):
        weight = self.weight.to_local()
        if self.dim == 1:
            return Summed.apply(functional.linear(x, weight), self.group)
        return functional.linear(Copied.apply(x, self.group), weight, self.bias.to_local())


def tensor_parallel_by_hand(rank, world):
    mesh, roles = meshed((2, 2), {"dp": "mean", "tp": "same"})
    model = transformer()
    for layer in model.layers.values():
        layer.up, layer.down = ByHand(layer.up, mesh["tp"], 0), ByHand(layer.down, mesh["tp"], 1)
    return train(make(model, **roles), on_data(model, mesh["dp"].get_local_rank()), model)


def sequence_parallel(rank, world):
    mesh, roles = meshed((2, 2), {"dp": "mean", "tp": "sum"})
    model = tensor_parallel(transformer(), mesh["tp"], sequence=True)
    return train(make(model, **roles), on_data(model, mesh["dp"].get_local_rank()), model)


def context_parallel(role, shards=False):
    """role: each rank's loss is the mean of its tokens, or its tokens' part of the whole loss."""

    def run(rank, world):
        mesh, roles = meshed((2, 2), {"dp": "mean", "cp": role})
        model = transformer()
        for layer in model.layers.values():
            layer.attention.context = mesh["cp"].get_group()
        if shards:
            sharded(model, mesh["dp", "cp"]._flatten("dp_cp"))
            roles = {}
        dp, cp = mesh.get_coordinate()

        def backward(step):
            inputs, targets = (tokens.chunk(2, 1)[cp] for tokens in data(step, dp))
            (loss(model(inputs), targets) * (0.5 if role == "sum" else 1)).backward()

        return train(make(model, **roles), backward, model)

    return run


def replicas_of_shards(rank, world):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = sharded(transformer(), mesh)
    return train(make(model), on_data(model, rank), model)


def few_rows(rank, world):
    """Nine rows are cut into 5 and 4, and these into four each."""
    mesh, roles = meshed((4, 2), {"dp": "mean", "tp": "same"})
    model = sharded(tensor_parallel(transformer(inner=9), mesh["tp"]), mesh["dp"])
    return train(make(model, **roles), on_data(model, mesh["dp"].get_local_rank()), model)


def replicas_of_shards_of_tensor_parallel(rank, world):
    mesh, roles = meshed((2, 2, 2), {"replicas": "mean", "shards": "mean", "tp": "same"})
    model = sharded(tensor_parallel(transformer(), mesh["tp"]), mesh["replicas", "shards"])
    return train(make(model, **roles), on_data(model, rank // 2), model)


# --- pipelines ---


def scheduled(parts, numbers, stages, group, rank, kind=Schedule1F1B, scale_grads=True, **options):
    """kind: one for several stages of a rank where it has several."""
    found = [
        PipelineStage(part, number, stages, torch.device("cpu"), group=group)
        for part, number in zip(parts, numbers, strict=True)
    ]

    def part_of_loss(logits, targets):
        return loss(logits, targets) / (1 if scale_grads else MICROBATCHES)

    given = found if len(found) > 1 else found[0]
    schedule = kind(given, MICROBATCHES, loss_fn=part_of_loss, scale_grads=scale_grads)

    def backward(step):
        inputs, targets = data(step, rank)
        given = (inputs,) if 0 in numbers else ()
        schedule.step(*given, target=targets if stages - 1 in numbers else None)
        # Scaling changes what was signalled during the backward pass.
        assert optimizer.session.is_signalled(0) == (step >= 2 and not scale_grads)

    optimizer = make([{"params": part} for part in parts], early_buckets=True, **options)
    return train(optimizer, backward, *parts)


def pipeline(kind=Schedule1F1B, *, shards=False, tied=False, **options):
    """tied: the last stage has the embedding as well, whose weight is its head's."""

    def run(rank, world):
        mesh, roles = meshed((2, 2), {"pp": "stages", "dp": "mean"})
        pp, dp = mesh.get_coordinate()
        numbers = (pp,) if kind is Schedule1F1B else (pp, pp + 2)
        stages = 2 * len(numbers)
        parts = [stage(number, stages, tied) for number in numbers]
        if shards:
            parts = [sharded(part, mesh["dp"]) for part in parts]
        group = mesh["pp"].get_group()
        return scheduled(parts, numbers, stages, group, dp, kind, **roles, **options)

    return run


def pipeline_alone(rank, world):
    return scheduled(
        [stage(rank, world)], (rank,), world, dist.group.WORLD, 0, data_parallel_size=1
    )


def pipeline_by_hand(rank, world):
    """Two stages of FSDP2's shards; activations go there, their gradients come back."""
    mesh, roles = meshed((2, 2), {"pp": "stages", "dp": "mean"})
    pp, dp = mesh.get_coordinate()
    part = sharded(stage(pp, 2), mesh["dp"])
    other = (rank + 2) % 4

    def backward(step):
        inputs, targets = data(step, dp)
        if pp == 0:
            out = part(inputs)
            dist.send(out.detach(), other)
            gradient = torch.empty_like(out)
            dist.recv(gradient, other)
            out.backward(gradient)
        else:
            received = torch.empty(*inputs.shape, 24)
            dist.recv(received, other)
            loss(part(received.requires_grad_()), targets).backward()
            dist.send(received.grad, other)

    return train(make(part, **roles), backward, part)


def data_tensor_and_pipeline_parallel(rank, world):
    mesh, roles = meshed((2, 2, 2), {"pp": "stages", "dp": "mean", "tp": "same"})
    pp, dp, _ = mesh.get_coordinate()
    part = sharded(tensor_parallel(stage(pp, 2), mesh["tp"]), mesh["dp"])
    return scheduled([part], (pp,), 2, mesh["pp"].get_group(), dp, **roles)


# --- experts ---


def stacked(model, ep):
    """Experts as stacks, of which each rank along `ep` has some: DTensors."""
    for mixture in mixtures(model):
        stack = mixture.experts = Stack(mixture.experts)
        mixture.group = ep.get_group()
        stack.first = -(-len(stack.gate_proj) // ep.size()) * ep.get_local_rank()
        for name, p in list(stack.named_parameters()):
            stack.register_parameter(name, nn.Parameter(distribute_tensor(p, ep, [Shard(0)])))
    return model


def experts_as_dtensors(rank, world):
    mesh, roles = meshed((world,), {"ep": "mean"})
    model = stacked(moonlight(), mesh)
    return train(make(model, **roles), on_data(model, rank), model)


def shards_of_experts(divisor):
    """divisor: what FSDP2 is told to divide the experts' gradients by; None: it is not told."""

    def run(rank, world):
        mesh, roles = meshed((2, 2), {"shards": "mean", "ep": "mean"})
        model = stacked(moonlight(), mesh["ep"])
        for mixture in mixtures(model):
            fully_shard(mixture.experts, mesh=mesh["shards"])
            if divisor:
                mixture.experts.set_gradient_divide_factor(divisor)
                mixture.experts.set_force_sum_reduction_for_comms(True)  # gloo needs it
        sharded(model, mesh["shards", "ep"]._flatten("dp"))
        return train(make(model, **roles), on_data(model, rank), model)

    return run


def experts_as_dtensors_with_replicas(rank, world):
    mesh, roles = meshed((2, 2), {"dp": "mean", "ep": "mean"})
    model = stacked(moonlight(), mesh["ep"])
    return train(make(model, **roles), on_data(model, rank), model)


def some_by_name(group):
    """The model without the experts of the other ranks of the group."""
    model = moonlight()
    for mixture in mixtures(model):
        mixture.group = group
        for number in list(mixture.experts):
            if int(number) % group.size() != group.rank():
                del mixture.experts[number]
    return model


def experts_by_name(rank, world):
    model = some_by_name(dist.group.WORLD)
    return train(make(model, data_parallel_size=world), on_data(model, rank), model)


def experts_by_name_beside_shards(rank, world):
    model = some_by_name(dist.group.WORLD)
    sharded(model, init_device_mesh("cpu", (world,)), ignored_params=experts_of(model))
    return train(make(model, data_parallel_size=world), on_data(model, rank), model)


def experts_of(model):
    return {p for mixture in mixtures(model) for p in mixture.experts.parameters()}


def experts_by_name_with_replicas(rank, world):
    mesh, roles = meshed((2, 2), {"dp": "mean", "ep": "mean"})
    model = some_by_name(mesh["ep"].get_group())
    return train(make(model, **roles), on_data(model, rank), model)


# By the number of ranks, and by name.
SET_UPS = {
    3: {"tensor parallel": tensor_parallel_alone},
    4: {
        "tensor parallel, replicas": tensor_parallel_on_other_data(left_alone),
        "tensor parallel, FSDP2": tensor_parallel_on_other_data(sharded),
        "tensor parallel, replicate()": tensor_parallel_on_other_data(replicated),
        "tensor parallel by hand": tensor_parallel_by_hand,
        "sequence parallel": sequence_parallel,
        "context parallel": context_parallel("mean"),
        "context parallel, sums": context_parallel("sum"),
        "context parallel, FSDP2": context_parallel("mean", shards=True),
        "HSDP": replicas_of_shards,
        "pipeline": pipeline_alone,
        "pipeline, replicas": pipeline(),
        "pipeline, interleaved": pipeline(ScheduleInterleaved1F1B),
        "pipeline, zero bubble": pipeline(ScheduleInterleavedZeroBubble),
        "pipeline, signalled early": pipeline(scale_grads=False),
        "pipeline, FSDP2": pipeline(shards=True),
        "pipeline, FSDP2, signalled early": pipeline(shards=True, scale_grads=False),
        "pipeline, interleaved, FSDP2": pipeline(ScheduleInterleaved1F1B, shards=True),
        "pipeline by hand, FSDP2": pipeline_by_hand,
        "pipeline, tied": pipeline(tied=True),
        "experts as DTensors": experts_as_dtensors,
        "experts as DTensors, replicas": experts_as_dtensors_with_replicas,
        "experts as DTensors, FSDP2": shards_of_experts(None),
        "experts as DTensors, FSDP2 told the divisor": shards_of_experts(4.0),
        "experts by name": experts_by_name,
        "experts by name, FSDP2": experts_by_name_beside_shards,
        "experts by name, replicas": experts_by_name_with_replicas,
    },
    8: {
        "data, tensor and pipeline parallel": data_tensor_and_pipeline_parallel,
        "tensor parallel, FSDP2, few rows": few_rows,
        "tensor parallel, HSDP": replicas_of_shards_of_tensor_parallel,
    },
}


def all_set_ups(rank, world, folder, chosen=None):
    with process_group(rank, world, folder):
        return {
            name: run(rank, world)
            for name, run in SET_UPS[world].items()
            if chosen is None or name in chosen
        }


# --- what is refused ---


def refusals(rank, world, folder):
    """What is said of each model that cannot be read, or whose sums are not known."""
    with process_group(rank, world, folder):
        line = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
        few = DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",))
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shards", "ep"))
        beside = stacked(moonlight(), square["shards", "ep"]._flatten("all"))
        fully_shard(beside, ignored_params=experts_of(beside))
        half = stacked(moonlight(), square["ep"])
        for mixture in mixtures(half):
            fully_shard(mixture.experts, mesh=square["shards"])
        sharded(half, square["shards", "ep"]._flatten("dp"))
        whole = torch.randn(12, 8)
        pieces = [_StridedShard(0, split_factor=3)]
        models = {
            "sums": alone(DTensor.from_local(whole, line, [Partial()])),
            "pieces": alone(distribute_tensor(whole, line, pieces, src_data_rank=None)),
            "elsewhere": alone(distribute_tensor(whole, few, [Shard(0)])),
            "two tensors": alone(TwoTensor(whole, whole)),
            "FSDP1": fsdp1(),
            "FSDP1's names": list(fsdp1(use_orig_params=False).named_parameters()),
            "FSDP1's own names": list(fsdp1(use_orig_params=True).named_parameters()),
            "ZeRO": DeepSpeedEngine(),
            "ZeRO's names": list(marked("_hp_mapping").named_parameters()),
            "ZeRO's third stage": marked("ds_id"),
            "experts beside shards": beside,
            "shards of experts": half,
        }
        return {what: refusal(lambda model=model: make(model)) for what, model in models.items()}


def alone(weight):
    module = nn.Module()
    module.weight = nn.Parameter(weight)
    return module


def fsdp1(**options):
    return FullyShardedDataParallel(transformer(), device_id=torch.device("cpu"), **options)


class DeepSpeedEngine(nn.Module):
    """Stands for the class of that name."""

    def __init__(self):
        super().__init__()
        self.module = transformer()


def marked(attribute):
    """As DeepSpeed leaves parameters, which have an attribute of its own then."""
    model = transformer()
    for p in model.parameters():
        setattr(p, attribute, 1)
    return model
