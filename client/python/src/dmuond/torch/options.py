"""The options of a group, from the caller's and the preset's."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from dmuond.errors import InvalidArgumentError
from dmuond.torch.checks import checked_fraction, checked_number
from dmuond.torch.collect import GROUP_OPTIONS
from dmuond.torch.presets import FIXED_OPTIONS, from_torch_names, preset_named
from dmuond.torch.routing import Named, Routed

# The scale under which one learning rate fits AdamW's parameters too.
_ADAMW_SCALE = "match_rms_adamw"


def split_groups(
    given: list[tuple[list[Named], dict[str, Any]]], routed: list[Routed], base: dict[str, Any]
) -> list[dict[str, Any]]:
    """Each group of the caller becomes one per route, since the options differ."""
    by_parameter = {id(item.named.parameter): item for item in routed}
    groups = []
    for members, own in given:
        kept = {key: value for key, value in own.items() if key not in GROUP_OPTIONS}
        for route in ("muon", "adamw"):
            params = [
                (named.name, named.parameter)
                for named in members
                if by_parameter[id(named.parameter)].route == route
            ]
            if params:
                groups.append({"params": params, **kept, **_options(base | own, route)})
    if not groups:
        raise InvalidArgumentError("no parameter has the route muon or adamw")
    return groups


def _options(given: dict[str, Any], route: str) -> dict[str, Any]:
    preset = preset_named(given["preset"])
    given = from_torch_names(given)
    options = {key: given.get(key) for key in FIXED_OPTIONS}
    options["route"] = route
    options["maximize"] = bool(options["maximize"])
    for key in ("momentum_form", "nesterov", "scale"):
        if options[key] is None:
            options[key] = getattr(preset, key)
    decay = preset.weight_decay if given["weight_decay"] is None else given["weight_decay"]
    lr = given["lr"]
    if route == "adamw":
        if given["adamw_lr"] is None and options["scale"] != _ADAMW_SCALE:
            raise InvalidArgumentError(
                f"adamw_lr is needed: with scale '{options['scale']}' lr is not on AdamW's scale"
            )
        lr = lr if given["adamw_lr"] is None else given["adamw_lr"]
        if given["adamw_weight_decay"] is not None:
            decay = given["adamw_weight_decay"]
    name = "adamw_lr" if route == "adamw" and given["adamw_lr"] is not None else "lr"
    for key, value in ((name, lr), ("weight_decay", decay), ("eps", given["eps"])):
        checked_number(key, value)
    checked_fraction("momentum", given["momentum"])
    betas = given["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InvalidArgumentError(f"betas={betas!r} are not two numbers")
    for index, beta in enumerate(betas):
        checked_fraction(f"betas[{index}]", beta)
    return options | {
        "lr": lr,
        "weight_decay": decay,
        "momentum": given["momentum"],
        "betas": tuple(betas),
        "eps": given["eps"],
    }


class Registered:
    """What of the groups is registered once, for all steps: their parameters and fixed options."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        self._members, self._options = _members(groups), _fixed(groups)

    def check(self, groups: Iterable[dict[str, Any]]) -> None:
        """Refuses groups in which something of it has changed: a step would not follow."""
        remedy = "close() this optimizer and make one with the groups as they are to be"
        if _members(groups) != self._members:
            raise InvalidArgumentError(
                "param_groups have other parameters than those that were registered, which steps "
                f"go on updating: {remedy}. To train one no longer: requires_grad_(False)"
            )
        for index, (now, then) in enumerate(zip(_fixed(groups), self._options, strict=True)):
            for key in (key for key in FIXED_OPTIONS if now[key] != then[key]):
                raise InvalidArgumentError(
                    f"param_groups[{index}]['{key}'] is {now[key]}, and was {then[key]} when it "
                    f"was registered, which fixes it: {remedy}"
                )


def _members(groups: Iterable[dict[str, Any]]) -> list[list[int]]:
    return [list(map(id, group["params"])) for group in groups]


def _fixed(groups: Iterable[dict[str, Any]]) -> list[dict[str, str]]:
    return [{key: repr(group.get(key)) for key in FIXED_OPTIONS} for group in groups]
