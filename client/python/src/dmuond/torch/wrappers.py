"""Refuses models and parameters that another library has taken apart, with the reason."""

from __future__ import annotations

from torch import Tensor, nn

from dmuond.errors import InvalidArgumentError

_FSDP1 = (
    "FullyShardedDataParallel (FSDP1), which cuts parameters as one flat vector: ranks hold pieces "
    "of matrices that are no boxes. Use fully_shard (FSDP2), whose shards dmuond reads"
)
_ZERO = (
    "DeepSpeed, whose ZeRO stages cut parameters, gradients or the optimizer's state as flat "
    "vectors and run an optimizer of their own. Leave DeepSpeed away: dmuond cuts the state over "
    "the nodes by itself (docs/parallelism.md), and fully_shard (FSDP2) cuts the parameters"
)
_OF_MODULES = {
    "DistributedDataParallel": "DistributedDataParallel, which averages gradients after dmuond has "
    "read them. Take the wrapper away: dmuond averages over the ranks itself (docs/python.md, "
    "'Coming from DDP', says what else the wrapper has done)",
    "FullyShardedDataParallel": _FSDP1,
    "DataParallel": "DataParallel. Run one process per device instead; dmuond averages over the "
    "ranks",
    "DeepSpeedEngine": _ZERO,
    "PipelineEngine": _ZERO,
}
# Attributes that these libraries give to parameters.
_OF_PARAMETERS = {"_fsdp_flattened": _FSDP1, "ds_id": _ZERO, "_hp_mapping": _ZERO}


def refuse_wrappers(model: nn.Module) -> None:
    for path, module in model.named_modules():
        why = _OF_MODULES.get(type(module).__name__)
        if why:
            raise InvalidArgumentError(f"the model is wrapped in {why}")
        for name, parameter in module._parameters.items():
            if parameter is not None:
                refuse_foreign(f"{path}.{name}" if path else name, parameter)


def refuse_foreign(name: str, parameter: Tensor) -> None:
    for attribute, why in _OF_PARAMETERS.items():
        if hasattr(parameter, attribute):
            raise InvalidArgumentError(f"'{name}' belongs to {why}")
