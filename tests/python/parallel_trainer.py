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
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.two_tensor import TwoTensor

STEPS, CLIP, MICROBATCHES = 4, 0.1, 4


def train(optimizer, backward, *parts, momenta_are_whole=True):
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
    if not momenta_are_whole:
        momenta = {}
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


def sharded(model, mesh):
    """As scripts do it: parts first, then the whole."""
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


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
    if sequence:
        plan |= dict.fromkeys(("layers.*.*_norm", "norm"), SequenceParallel())
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
    """Nine rows over 2, and the 5 and 4 of them over 4.

    FSDP2 cuts what tensor parallel has cut; its placements say so, but torch reads other rows out
    of them, so that it does not put momenta together.
    """
    mesh, roles = meshed((4, 2), {"dp": "mean", "tp": "same"})
    model = sharded(tensor_parallel(transformer(inner=9), mesh["tp"]), mesh["dp"])
    backward = on_data(model, mesh["dp"].get_local_rank())
    return train(make(model, **roles), backward, model, momenta_are_whole=False)


def replicas_of_shards_of_tensor_parallel(rank, world):
    mesh, roles = meshed((2, 2, 2), {"replicas": "mean", "shards": "mean", "tp": "same"})
    model = sharded(tensor_parallel(transformer(), mesh["tp"]), mesh["replicas", "shards"])
    return train(make(model, **roles), on_data(model, rank // 2), model)


# --- pipelines ---


def scheduled(parts, numbers, stages, group, rank, **options):
    """1F1B, or interleaved where the rank has several stages."""
    found = [
        PipelineStage(part, number, stages, torch.device("cpu"), group=group)
        for part, number in zip(parts, numbers, strict=True)
    ]
    if len(found) == 1:
        schedule = Schedule1F1B(found[0], MICROBATCHES, loss_fn=loss)
    else:
        schedule = ScheduleInterleaved1F1B(found, MICROBATCHES, loss_fn=loss)

    def backward(step):
        inputs, targets = data(step, rank)
        given = (inputs,) if 0 in numbers else ()
        schedule.step(*given, target=targets if stages - 1 in numbers else None)

    optimizer = make([{"params": part} for part in parts], **options)
    return train(optimizer, backward, *parts)


def pipeline(*, interleaved=False, shards=False, tied=False):
    """tied: the last stage has the embedding as well, whose weight is its head's."""

    def run(rank, world):
        mesh, roles = meshed((2, 2), {"pp": "stages", "dp": "mean"})
        pp, dp = mesh.get_coordinate()
        numbers = (pp, pp + 2) if interleaved else (pp,)
        stages = 2 * len(numbers)
        parts = [stage(number, stages, tied) for number in numbers]
        if shards:
            parts = [sharded(part, mesh["dp"]) for part in parts]
        return scheduled(parts, numbers, stages, mesh["pp"].get_group(), dp, **roles)

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


def experts_by_name(rank, world):
    model = moonlight()
    for mixture in mixtures(model):
        mixture.group = dist.group.WORLD
        for number in list(mixture.experts):
            if int(number) % world != rank:
                del mixture.experts[number]
    return train(make(model, data_parallel_size=world), on_data(model, rank), model)


# By the number of ranks, and by name.
SET_UPS = {
    3: {"tensor parallel": tensor_parallel_alone},
    4: {
        "tensor parallel, replicas": tensor_parallel_on_other_data(left_alone),
        "tensor parallel, FSDP2": tensor_parallel_on_other_data(sharded),
        "tensor parallel, replicate()": tensor_parallel_on_other_data(replicated),
        "sequence parallel": sequence_parallel,
        "context parallel": context_parallel("mean"),
        "context parallel, sums": context_parallel("sum"),
        "context parallel, FSDP2": context_parallel("mean", shards=True),
        "HSDP": replicas_of_shards,
        "pipeline": pipeline_alone,
        "pipeline, replicas": pipeline(),
        "pipeline, interleaved": pipeline(interleaved=True),
        "pipeline, FSDP2": pipeline(shards=True),
        "pipeline, interleaved, FSDP2": pipeline(interleaved=True, shards=True),
        "pipeline by hand, FSDP2": pipeline_by_hand,
        "pipeline, tied": pipeline(tied=True),
        "experts as DTensors": experts_as_dtensors,
        "experts as DTensors, FSDP2": shards_of_experts(None),
        "experts as DTensors, FSDP2 told the divisor": shards_of_experts(4.0),
        "experts by name": experts_by_name,
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
        experts = {p for mixture in mixtures(beside) for p in mixture.experts.parameters()}
        fully_shard(beside, ignored_params=experts)
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
