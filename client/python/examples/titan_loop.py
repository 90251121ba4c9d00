"""A loop as torchtitan has it: meta device, fully_shard and compile block by block, DCP.

usage: torchrun --nproc-per-node=N titan_loop.py FOLDER LAST (under dmuonctl run)
It goes on from FOLDER's checkpoint, of whatever number of ranks, makes the steps up to LAST, and
leaves a checkpoint of them. All ranks together have the same four batches whatever their number.
"""

import argparse
import hashlib
import os
from typing import Any

import dmuond.torch
import torch
from tiny_model import TinyModel, batch, loss_of
from torch import distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

PARTS = 4  # batches of a step


class State:
    """Model, optimizer, schedule and step, as torch.distributed.checkpoint asks for them."""

    def __init__(self, model: nn.Module, opt: dmuond.torch.Muon, schedule: Any) -> None:
        self.model, self.opt, self.schedule, self.step = model, opt, schedule, 0

    def state_dict(self) -> dict[str, Any]:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.opt, options=options),
            "schedule": self.schedule.state_dict(),
            "step": self.step,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.opt, state["optimizer"], options=options)
        self.schedule.load_state_dict(state["schedule"])
        self.step = state["step"]


def build(world: int) -> nn.Module:
    """The weights are made when each rank has its shards."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    with torch.device("meta"):
        model = TinyModel()
    for block in model.blocks:
        block.compile(backend="aot_eager")
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return model


def main(folder: str, last: int) -> None:
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(world)
    opt = dmuond.torch.Muon(
        model, lr=1e-2, adamw_lr=1e-3, max_grad_norm=1.0, ns_dtype="float32", verbose=False
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: min(1.0, (step + 1) / 4))
    state = State(model, opt, schedule)
    if os.path.exists(f"{folder}/.metadata"):
        dcp.load({"train": state}, checkpoint_id=folder)
    while state.step < last:
        state.step += 1
        parts = range(rank, PARTS, world)
        for part in parts:
            model.set_requires_gradient_sync(part + world >= PARTS)
            tokens = batch(state.step, part)
            loss = loss_of(model(tokens), tokens) / len(parts)
            loss.backward()
        opt.step()
        schedule.step()
        opt.zero_grad()
        norm = opt.last_outcome.gradient_norm
        if rank == 0:
            print("step", state.step, norm, schedule.get_last_lr()[0], flush=True)
    dcp.save({"train": state}, checkpoint_id=folder)
    whole = [p.detach().full_tensor().numpy().tobytes() for p in model.parameters()]
    if rank == 0:
        print("weights", hashlib.sha256(b"".join(whole)).hexdigest(), flush=True)
    opt.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("last", type=int)
    main(**vars(parser.parse_args()))
