"""Optimizer state in torch's own layout, to and from the daemon's tensors.

Per parameter: momentum_buffer (muon) or exp_avg and exp_avg_sq (adamw), step, and master, the fp32
weights. Tensors have the placement of their parameter on this rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from dmuond import types
from dmuond.errors import InvalidArgumentError
from dmuond.state_chunks import StateTensor
from dmuond.torch.loaded_options import names_of
from dmuond.torch.slots import Slot

KEYS = {
    "master": types.STATE_KIND_MASTER,
    "momentum_buffer": types.STATE_KIND_MOMENTUM,
    "exp_avg": types.STATE_KIND_EXP_AVG,
    "exp_avg_sq": types.STATE_KIND_EXP_AVG_SQ,
    "step": types.STATE_KIND_STEP,
}
_NAMES = {kind: key for key, kind in KEYS.items()}
ROUTE_KEYS = {
    "muon": ("master", "momentum_buffer", "step"),
    "adamw": ("master", "exp_avg", "exp_avg_sq", "step"),
}


def to_torch(tensors: Iterable[StateTensor], slots: Sequence[Slot]) -> dict[str, dict[str, Tensor]]:
    """State by parameter name and key."""
    by_name = {slot.name: slot for slot in slots}
    state: dict[str, dict[str, Tensor]] = {}
    for tensor in tensors:
        slot = by_name[tensor.parameter]
        state.setdefault(slot.name, {})[_NAMES[tensor.kind]] = _as_placed(tensor, slot)
    return state


def _as_placed(tensor: StateTensor, slot: Slot) -> Tensor:
    if tensor.kind == types.STATE_KIND_STEP:
        return torch.tensor(float(tensor.values[0]), dtype=torch.float32, device="cpu")
    values = torch.from_numpy(tensor.values.astype(np.float32))
    local = slot.holding.from_registered(values).contiguous()
    return _placed(local, slot.parameter)


def master_of(parameter: Tensor) -> Tensor:
    """The parameter's own value as `to_torch` has masters: a copy on the CPU."""
    value = parameter.detach()
    local = value.to_local() if isinstance(value, DTensor) else value
    return _placed(local.to("cpu", torch.float32, copy=True), parameter)


def _placed(local: Tensor, parameter: Tensor) -> Tensor:
    """Of a DTensor, a DTensor. from_local() would move it to the device of the mesh."""
    if not isinstance(parameter, DTensor):
        return local
    spec = parameter._spec
    meta = TensorMeta(parameter.shape, parameter.stride(), local.dtype)
    return DTensor(
        local, DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta), requires_grad=False
    )


@dataclass(frozen=True)
class Entry:
    """The saved state of one parameter, with the options of the group that it was saved in."""

    slot: Slot
    saved: dict[str, Any]
    group: dict[str, Any]
    options: dict[str, Any]  # of the group that the parameter is in now


def match(
    state_dict: dict[str, Any], groups: Sequence[dict], slots: dict[int, Slot]
) -> list[Entry]:
    """Finds the parameter of every saved state: by name where there are names, else by order.

    A state_dict of torch.optim.Muon or AdamW covers the parameters of that route, in their order.
    `slots`: by id of the parameter.
    """
    current = [(slots[id(p)], group) for group in groups for p in group["params"]]
    by_name = {slot.name: (slot, group) for slot, group in current}
    saved: list[tuple[Any, dict[str, Any]]] = []
    names: list[str] = []
    for group in state_dict["param_groups"]:
        saved += [(identity, group) for identity in group["params"]]
        names += names_of(group, by_name)
    if len(names) == len(saved):
        unknown = [name for name in names if name not in by_name]
        if unknown:
            raise InvalidArgumentError(
                f"the state to load has '{unknown[0]}', which this optimizer does not update"
            )
        chosen = [by_name[name] for name in names]
    else:
        chosen = _by_order(saved, current, state_dict["state"])
    return [
        Entry(slot, state_dict["state"][identity], group, options)
        for (identity, group), (slot, options) in zip(saved, chosen, strict=True)
        if state_dict["state"].get(identity)
    ]


def _by_order(saved: list, current: list, state: dict) -> list:
    if len(saved) == len(current):
        return current
    keys = {key for identity, _ in saved for key in state.get(identity, ())}
    for route, key in (("muon", "momentum_buffer"), ("adamw", "exp_avg")):
        members = [pair for pair in current if pair[0].route == route]
        if key in keys and len(members) == len(saved):
            return members
    counts = {r: sum(slot.route == r for slot, _ in current) for r in ("muon", "adamw")}
    raise InvalidArgumentError(
        f"the state to load has {len(saved)} parameters; this optimizer has {counts['muon']} on "
        "muon and "
        f"{counts['adamw']} on adamw. Save with named parameters, or route the same ones"
    )


def to_daemon(entries: Iterable[Entry]) -> Iterator[StateTensor]:
    for entry in entries:
        allowed = ROUTE_KEYS[entry.slot.route]
        wrong = {"momentum_buffer", "exp_avg", "max_exp_avg_sq"} & set(entry.saved) - set(allowed)
        if wrong:
            raise InvalidArgumentError(
                f"the state to load of '{entry.slot.name}' has {', '.join(sorted(wrong))}; its "
                "route "
                f"here is {entry.slot.route}, which has {', '.join(allowed)}"
            )
        for key in allowed:
            if key in entry.saved and not _is_absent(entry.saved[key]):
                values = _local_values(entry, key)
                yield StateTensor(entry.slot.name, 0, KEYS[key], values)


def _is_absent(value: Any) -> bool:
    """Torch's flat checkpoints have an empty dict for what was not saved."""
    return value is None or isinstance(value, dict) and not value


def _local_values(entry: Entry, key: str) -> np.ndarray:
    value, holding = entry.saved[key], entry.slot.holding
    if key == "step":
        return np.array([float(value)], dtype=np.float64)
    if isinstance(value, DTensor):
        value = value.to_local()
    if tuple(value.shape) != holding.local_shape:
        if tuple(value.shape) != holding.shape:
            raise InvalidArgumentError(
                f"{key} of '{entry.slot.name}' to load has shape {list(value.shape)}; the "
                "parameter has "
                f"{list(holding.shape)}"
            )
        for dim, (first, size) in enumerate(zip(holding.begin, holding.local_shape, strict=True)):
            value = value.narrow(dim, first, size)
    values = value.detach().to("cpu", torch.float32)
    factor = _form_factor(entry) if key == "momentum_buffer" else 1.0
    if factor != 1.0:
        values = values * factor
    return holding.as_registered(values).contiguous().numpy()


def _form_factor(entry: Entry) -> float:
    """Between momentum in sum and EMA form: buf_sum = buf_ema / (1 - mu)."""
    have = entry.group.get("momentum_form") or "ema"  # torch's and Keller's own are EMA
    want = entry.options["momentum_form"]
    if have == want:
        return 1.0
    mu = float(entry.group.get("momentum", entry.options["momentum"]))
    return 1.0 / (1.0 - mu) if want == "sum" else 1.0 - mu
