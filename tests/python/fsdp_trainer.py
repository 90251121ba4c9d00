"""One rank of a model sharded by FSDP2, on torch's default device; functions for every rank."""

import contextlib
import warnings

import torch
from habits import STEPS, loss_of, make_model, make_optimizer, weights
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard


@contextlib.contextmanager
def process_group(rank, world, folder, backend=None):
    # torch.distributed of FSDP2 on CPU says that gloo is slow, and that meshes have one device.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dist.init_process_group(
            backend or ("nccl" if torch.get_default_device().type == "cuda" else "gloo"),
            init_method=f"file://{folder}",
            rank=rank,
            world_size=world,
        )
        try:
            yield
        finally:
            dist.destroy_process_group()


def sharded_model(world, seed=0, mesh_shape=None, dtype=torch.float32, **options):
    """As scripts do it: parts first, then the whole."""
    model = make_model(seed).to(dtype)
    names = ("replicas", "shards")[-len(mesh_shape or (world,)) :]
    kind = torch.get_default_device().type
    mesh = init_device_mesh(kind, mesh_shape or (world,), mesh_dim_names=names)
    for part in (model.up, model.down, model.narrow, model.wide):
        fully_shard(part, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def full_weights(model):
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward pass without a backward the root's are whole
    return {name: p.detach().full_tensor().clone() for name, p in model.named_parameters()}


def plain(model, optimizer, step, rank):
    loss_of(model, step, rank).backward()
    optimizer.step()


def zeroing_in_place(model, optimizer, step, rank):
    optimizer.zero_grad(set_to_none=False)
    plain(model, optimizer, step, rank)


def clipping_by_hand(model, optimizer, step, rank):
    loss_of(model, step, rank).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def clipping_late(model, optimizer, step, rank):
    """Leaves no trace on a DTensor, neither its version nor its address changes."""
    loss_of(model, step, rank).backward()
    if step >= 3:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def signalling_early(model, optimizer, step, rank):
    loss_of(model, step, rank).backward()
    assert optimizer.session.is_signalled(0) == (step >= 2)
    optimizer.step()


def clipping_what_was_signalled(model, optimizer, step, rank):
    """The first withdrawn attempt ends early signals."""
    loss_of(model, step, rank).backward()
    assert optimizer.session.is_signalled(0) == (2 <= step <= 3)
    if step >= 3:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()


def two_backwards(model, optimizer, step, rank):
    loss_of(model, step, rank).backward()
    loss_of(model, step + 50, rank).backward()
    optimizer.step()


def accumulating(model, optimizer, step, rank):
    model.set_requires_gradient_sync(False)
    loss_of(model, step, rank).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, step + 50, rank).backward()
    optimizer.step()


def evaluating(model, optimizer, step, rank):
    plain(model, optimizer, step, rank)
    model.eval()
    with torch.no_grad():
        loss_of(model, 99, rank)
    model.train()
    if step == 2:  # a module more: all are looked through, while the root's parameters are whole
        model.add_module("added", nn.Identity())
        optimizer._check_model()


def without_a_shard(model, optimizer, step, rank):
    """The first rank has no gradient of its part of a matrix in the last step."""
    loss_of(model, step, rank).backward()
    if step == STEPS - 1 and rank == 0:
        model.down.weight.grad = None
    optimizer.step()


def with_closure(model, optimizer, step, rank):
    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        return loss

    assert optimizer.step(closure).item() > 0


def train(rank, world, folder, loop, model_options=None, **options):
    """The whole weights after `loop` for each step."""
    with process_group(rank, world, folder):
        model = sharded_model(world, **(model_options or {}))
        optimizer = make_optimizer(model, **options)
        for step in range(STEPS):
            loop(model, optimizer, step, rank)
            optimizer.zero_grad()
        optimizer.close()
        return full_weights(model)


def train_clipped(rank, world, folder):
    return train(rank, world, folder, signalling_early, max_grad_norm=0.1)


def train_signalling_early(rank, world, folder, loop):
    return train(rank, world, folder, loop, early_buckets=True)


def scaled(rank, world, folder, **options):
    """An overflow on the last rank alone, in the third step; weights and scales."""
    with process_group(rank, world, folder):
        model = sharded_model(world)
        optimizer = make_optimizer(model, **options)
        kind = torch.get_default_device().type
        scaler = torch.amp.GradScaler(kind, init_scale=1024.0, growth_interval=4)
        scales = []
        for step in range(STEPS):
            loss = loss_of(model, step, rank)
            if step == 2 and rank == world - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        optimizer.close()
        return full_weights(model), scales


def saved_and_uninterrupted(rank, world, folder, at, checkpoint=None):
    """The whole state after `at` steps, and the weights in the end.

    `checkpoint`: a folder for torch.distributed.checkpoint to save that state in.
    """
    with process_group(rank, world, folder):
        model = sharded_model(world)
        optimizer = make_optimizer(model)
        for step in range(at):
            plain(model, optimizer, step, rank)
            optimizer.zero_grad()
        state = optimizer.state_dict()
        for name, p in zip(names_of(state), ordered(optimizer), strict=True):
            entry = state["state"][name[0]]
            for key in set(entry) - {"step"}:
                assert entry[key].placements == p.placements and entry[key].shape == p.shape, name
        whole = {
            position: {key: full(value).clone() for key, value in entry.items()}
            for position, entry in state["state"].items()
        }
        saved = full_weights(model), state | {"state": whole}
        if checkpoint:
            model_state, optimizer_state = get_state_dict(model, optimizer)
            state = {"model": model_state, "optimizer": optimizer_state}
            dcp.save(state, checkpoint_id=checkpoint)
        for step in range(at, STEPS):
            plain(model, optimizer, step, rank)
            optimizer.zero_grad()
        optimizer.close()
        return saved, full_weights(model)


def full(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def names_of(state):
    return [
        (position, name)
        for group in state["param_groups"]
        for position, name in zip(group["params"], group["param_names"], strict=True)
    ]


def ordered(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def continued(rank, world, folder, saved, at):
    """From whole tensors, whatever number of ranks they came from."""
    with process_group(rank, world, folder):
        model = sharded_model(world, seed=5)
        optimizer = make_optimizer(model)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(dist.tensor.distribute_tensor(saved[0][name], p.device_mesh, p.placements))
        optimizer.push_parameters()
        optimizer.load_state_dict(saved[1])
        for step in range(at, STEPS):
            plain(model, optimizer, step, rank)
            optimizer.zero_grad()
        optimizer.close()
        return full_weights(model)


def through_torchs_checkpoints(rank, world, folder, at):
    """Saved and loaded by torch.distributed.checkpoint's state_dict functions; both ends."""
    with process_group(rank, world, folder):
        model = sharded_model(world)
        optimizer = make_optimizer(model)
        for step in range(at):
            plain(model, optimizer, step, rank)
            optimizer.zero_grad()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        model_state = {name: value.clone() for name, value in model_state.items()}
        for step in range(at, STEPS):
            plain(model, optimizer, step, rank)
            optimizer.zero_grad()
        optimizer.close()
        want = full_weights(model)

        model = sharded_model(world, seed=5)
        optimizer = make_optimizer(model)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
        )
        for step in range(at, STEPS):
            plain(model, optimizer, step, rank)
            optimizer.zero_grad()
        optimizer.close()
        return want, full_weights(model)


def continued_from_checkpoint(rank, world, folder, checkpoint, at):
    """From what torch.distributed.checkpoint has saved on any number of ranks."""
    with process_group(rank, world, folder):
        model = sharded_model(world, seed=5)
        optimizer = make_optimizer(model)
        model_state, optimizer_state = get_state_dict(model, optimizer)
        state = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(state, checkpoint_id=checkpoint)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        for step in range(at, STEPS):
            plain(model, optimizer, step, rank)
            optimizer.zero_grad()
        optimizer.close()
        return full_weights(model)


def own_weights_loaded(rank, world, folder, at):
    """In bf16: the end of an uninterrupted run, and of one whose weights are loaded into itself."""
    with process_group(rank, world, folder):
        ends = []
        for loads in (False, True):
            model = sharded_model(world, dtype=torch.bfloat16)
            optimizer = make_optimizer(model)
            for step in range(STEPS):
                if loads and step == at:
                    own = {name: p.detach().clone() for name, p in model.named_parameters()}
                    model.load_state_dict(own)
                plain(model, optimizer, step, rank)
                optimizer.zero_grad()
            optimizer.close()
            ends.append(full_weights(model))
        return ends


def loaded_late(rank, world, folder, checkpoint):
    """A checkpoint of DTensors loaded after the optimizer was made."""
    with process_group(rank, world, folder):
        model = sharded_model(world, seed=5)
        optimizer = make_optimizer(model)
        state = {
            name: dist.tensor.distribute_tensor(checkpoint[name], p.device_mesh, p.placements)
            for name, p in model.named_parameters()
        }
        model.load_state_dict(state)
        for step in range(STEPS):
            plain(model, optimizer, step, rank)
            optimizer.zero_grad()
        optimizer.close()
        return full_weights(model)


def changed_by_hand(rank, world, folder, **options):
    """What a step says after a weight was changed where nothing but its bytes tells."""
    with process_group(rank, world, folder):
        model = sharded_model(world)
        optimizer = make_optimizer(model, **options)
        plain(model, optimizer, 0, rank)
        with torch.no_grad():
            model.up.weight.to_local().numpy()[...] *= 2.0
        loss_of(model, 1, rank).backward()
        try:
            optimizer.step()
            words = ""
        except RuntimeError as error:
            words = str(error)
        optimizer.push_parameters()
        optimizer.step()
        committed = optimizer.last_committed_step
        optimizer.close()
        return words, committed


def in_mixed_precision(rank, world, folder, **options):
    """fp32 shards, bf16 computing: finite, and the loss falls."""
    with process_group(rank, world, folder):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = sharded_model(world, mp_policy=policy)
        optimizer = make_optimizer(model, **options)
        losses = []
        for _ in range(STEPS):
            loss = loss_of(model, 0, 0)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        optimizer.close()
        return losses


def wrapped_in_ddp(rank, world, folder):
    """What the optimizer says of a wrapped model; then the way the message shows."""
    with process_group(rank, world, folder):
        model = make_model()
        wrapped = nn.parallel.DistributedDataParallel(model)
        try:
            make_optimizer(wrapped)
            words = ""
        except ValueError as error:
            words = str(error)
        del wrapped
        model = make_model()
        optimizer = make_optimizer(model)  # rank and world from the process group
        for step in range(STEPS):
            plain(model, optimizer, step, rank)
            optimizer.zero_grad()
        optimizer.close()
        return words, weights(model)


def inside_ddp(rank, world, folder, as_view):
    """The optimizer made of the plain model, which is then run through DDP all the same."""
    with process_group(rank, world, folder):
        model = make_model()
        optimizer = make_optimizer(model)
        wrapped = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=as_view)
        for step in range(STEPS):
            plain(wrapped, optimizer, step, rank)
            optimizer.zero_grad()
        optimizer.close()
        return weights(model)
