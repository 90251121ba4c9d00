"""From what the caller hands over to named parameters, refusing wrappers that own the gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from dmuond.errors import InvalidArgumentError
from dmuond.torch.routing import Named

# Options that a caller's group may have.
_GROUP_OPTIONS = {
    "lr",
    "adamw_lr",
    "preset",
    "momentum",
    "weight_decay",
    "adamw_weight_decay",
    "betas",
    "eps",
    "momentum_form",
    "nesterov",
    "scale",
    "ns_form",
    "ns_norm",
    "ns_eps",
    "ns_dtype",
    "ns_coefficients",
    "ns_restarts",
}
LeftAlone = list[tuple[str, tuple[int, ...], str]]  # name, shape, why


def groups(params: Any) -> tuple[list[tuple[list[Named], dict[str, Any]]], LeftAlone]:
    """Groups of named parameters with options, and what the routing table lists besides."""
    if isinstance(params, str | Mapping) or not isinstance(params, nn.Module | Iterable):
        raise InvalidArgumentError(
            f"params is of type {type(params).__name__}: pass the model, or groups; "
            "model.named_parameters() if there is no other way"
        )
    given = params if isinstance(params, nn.Module) else list(params)
    if isinstance(given, list) and given and all(isinstance(item, dict) for item in given):
        found = []
        for item in given:
            options = {key: value for key, value in item.items() if key != "params"}
            if "params" not in item:
                raise InvalidArgumentError("a group has no 'params'")
            unknown = set(options) - _GROUP_OPTIONS
            if unknown:
                raise InvalidArgumentError(f"a group has the unknown option '{sorted(unknown)[0]}'")
            found.append((_named(item["params"]), options))
        sources = [item["params"] for item in given]
    else:
        found, sources = [(_named(given), {})], [given]
    _check_names([named for members, _ in found for named in members])
    return found, [row for source in sources for row in _buffers(source)]


def modules(params: Any) -> list[nn.Module]:
    """The modules among what was handed over."""
    if isinstance(params, nn.Module):
        return [params]
    if isinstance(params, list | tuple):
        found = (item.get("params") if isinstance(item, dict) else None for item in params)
        return [item for item in found if isinstance(item, nn.Module)]
    return []


def _named(source: Any) -> list[Named]:
    if isinstance(source, nn.Module):
        _refuse_wrappers(source)
        return list(_of_module(source))
    members = [source] if isinstance(source, Tensor) else list(source)
    if not all(
        isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], Tensor)
        for item in members
    ):
        raise InvalidArgumentError(
            "parameters need names, for the routing table and for restarts: pass the model. "
            "model.named_parameters() is possible, too; embeddings and heads are told by their "
            "names alone then"
        )
    return [Named(_clean(name), parameter) for name, parameter in members]


def _of_module(model: nn.Module) -> Iterable[Named]:
    seen: set[int] = set()
    for path, module in model.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue  # tied: the first name stands for all
            seen.add(id(parameter))
            name = f"{path}.{attribute}" if path else attribute
            yield Named(_clean(name), parameter, module, attribute)


def _clean(name: str) -> str:
    """Names as in the plain model, whether it is compiled or not."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def _check_names(members: list[Named]) -> None:
    names: set[str] = set()
    for named in members:
        if named.name in names:
            raise InvalidArgumentError(f"two parameters have the name '{named.name}'")
        names.add(named.name)
    if not names:
        raise InvalidArgumentError("there are no parameters")


def _buffers(source: Any) -> LeftAlone:
    if not isinstance(source, nn.Module):
        return []
    persistent = set(source.state_dict().keys())
    return [
        (_clean(name), tuple(buffer.shape), "buffer of the model: the daemon does not restore it")
        for name, buffer in source.named_buffers()
        if name in persistent
    ]


def _refuse_wrappers(model: nn.Module) -> None:
    for module in model.modules():
        kind = type(module).__name__
        if kind == "DistributedDataParallel":
            raise InvalidArgumentError(
                "the model is wrapped in DistributedDataParallel, which averages gradients after "
                "dmuond has read them. Take the wrapper away: dmuond averages over the ranks itself"
            )
        if kind == "FullyShardedDataParallel":
            raise InvalidArgumentError(
                "the model is wrapped in FullyShardedDataParallel, whose flat parameters are no "
                "matrices. Use fully_shard (FSDP2)"
            )
        if kind == "DataParallel":
            raise InvalidArgumentError(
                "the model is wrapped in DataParallel. Run one process per device instead; dmuond "
                "averages over the ranks"
            )
