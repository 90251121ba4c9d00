"""The options of a group, from the caller's and the preset's."""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any

from dmuond.errors import InvalidArgumentError
from dmuond.torch.checks import checked_fraction, checked_number
from dmuond.torch.collect import GROUP_OPTIONS, Given, Group
from dmuond.torch.presets import (
    FIXED_OPTIONS,
    TORCH_OPTIONS,
    coefficients,
    preset_named,
    with_own_scale,
)
from dmuond.torch.routing import Routed

_ROUTES = ("muon", "adamw")
# The scale under which one learning rate fits AdamW's parameters too.
_ADAMW_SCALE = "match_rms_adamw"
# Each key reaches one route alone. Its value is the key with the same part on the other, or None.
_MUONS = dict.fromkeys({*FIXED_OPTIONS, *TORCH_OPTIONS} - {"maximize"}) | {"momentum": "betas"}
_ADAMWS = {
    "betas": "momentum",
    "eps": "ns_eps",
    "adamw_lr": "lr",
    "adamw_weight_decay": "weight_decay",
}
# Both keys reach both routes; on adamw the value of the second one counts, where it is given.
_FIRST_ON_ADAMW = {"lr": "adamw_lr", "weight_decay": "adamw_weight_decay"}


def split_groups(
    given: Iterable[Group], routed: Iterable[Routed], base: dict[str, Any]
) -> list[dict[str, Any]]:
    """Each group of the caller becomes one per route, since the options differ.

    base: the constructor's options, which count where a group has none. Raises where a group has
    one that counts for no parameter.
    """
    by_parameter = {id(item.named.parameter): item for item in routed}
    found = [(g, [by_parameter[id(named.parameter)] for named in g.members]) for g in given]
    _refuse_without_effect(found)
    groups = []
    for group, items in found:
        kept: dict[str, Any] = {}
        for part in group.given:
            kept |= {key: v for key, v in part.options.items() if key not in GROUP_OPTIONS}
        routes = [route for route in _ROUTES if any(item.route == route for item in items)]
        for route in routes:
            members = [item.named for item in items if item.route == route]
            options = _options(group, base, route, beside_muon="muon" in routes)
            params = [(named.name, named.parameter) for named in members]
            groups.append({"params": params, **kept, **options})
    if not groups:
        raise InvalidArgumentError("no parameter has the route muon or adamw")
    return groups


def _given_by(part: Given) -> dict[str, Any]:
    """Its options. None is as good as nothing, as in the constructor."""
    return {k: v for k, v in part.options.items() if k in GROUP_OPTIONS and v is not None}


# --- what counts for whom ---


def _refuse_without_effect(groups: list[tuple[Group, list[Routed]]]) -> None:
    """Each option counts for some parameter of the place where it was written."""
    members: dict[Given, list[Routed]] = {}
    counting: set[tuple[Given, str]] = set()
    for group, items in groups:
        latest = {key: part for part in group.given for key in _given_by(part)}
        routes = {item.route for item in items}
        for key, part in latest.items():
            if any(_reaches(key, route, latest) for route in routes):
                counting.add((part, key))
        for part in group.given:
            members.setdefault(part, []).extend(items)
    for part, items in members.items():
        for key, value in _given_by(part).items():
            if items and (part, key) not in counting:
                raise InvalidArgumentError(
                    f"{part.where}: {key}={value!r} has no effect: {_why_without(key, items)}"
                )


def _reaches(key: str, route: str, beside: Container[str]) -> bool:
    """Whether an option counts on a route, in a group that has these beside it."""
    if route == "muon":
        return key not in _ADAMWS
    return route == "adamw" and key not in _MUONS and _FIRST_ON_ADAMW.get(key) not in beside


def _why_without(key: str, items: list[Routed]) -> str:
    name, routes = items[0].named.name, {item.route for item in items}
    if routes == {"trainer"}:
        return f"all of these parameters are left alone; of '{name}' because: {items[0].reason}"
    for route, keys in (("muon", _MUONS), ("adamw", _ADAMWS)):
        if key in keys and route not in routes:
            remedy = f"write {keys[key]} for those, or " if keys[key] else ""
            other = "adamw" if route == "muon" else "muon"
            return (
                f"it is for parameters on {route}, and all of these are on {other}, as '{name}': "
                f"{remedy}take it away"
            )
    if key in _FIRST_ON_ADAMW and "muon" not in routes:
        return f"on adamw, as '{name}' is, {_FIRST_ON_ADAMW[key]} comes first: take one away"
    return "patterns of groups= give all of its parameters another: take it away"


# --- their values ---


def _options(group: Group, base: dict[str, Any], route: str, beside_muon: bool) -> dict[str, Any]:
    own: dict[str, Any] = {}
    for part in group.given:
        own |= _given_by(part)
    given = with_own_scale(base) | with_own_scale(own)
    preset = preset_named(given["preset"])
    options = {key: given.get(key) for key in FIXED_OPTIONS}
    options["ns_coefficients"] = coefficients(given)
    options["route"] = route
    options["maximize"] = bool(options["maximize"])
    for key in ("momentum_form", "nesterov", "scale"):
        if options[key] is None:
            options[key] = getattr(preset, key)
    rate, decay = "lr", "weight_decay"
    if route == "adamw":
        if beside_muon:
            _refuse_one_for_both(group, own, base, options["scale"])
        rate, decay = _adamw_key("lr", own, base), _adamw_key("weight_decay", own, base)
        if rate == "lr" and "lr" not in own and options["scale"] != _ADAMW_SCALE:
            raise InvalidArgumentError(f"adamw_lr is needed: {_not_on_scale(options['scale'])}")
    if given[decay] is None:
        given[decay] = preset.weight_decay
    for key in (rate, decay, "eps"):
        checked_number(key, given[key])
    checked_fraction("momentum", given["momentum"])
    betas = given["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise InvalidArgumentError(f"betas={betas!r} are not two numbers")
    for index, beta in enumerate(betas):
        checked_fraction(f"betas[{index}]", beta)
    return options | {
        "lr": given[rate],
        "weight_decay": given[decay],
        "momentum": given["momentum"],
        "betas": tuple(betas),
        "eps": given["eps"],
    }


def _adamw_key(key: str, own: dict[str, Any], base: dict[str, Any]) -> str:
    """Under which key parameters on adamw find theirs: a group's own come before any other."""
    first = _FIRST_ON_ADAMW[key]
    return first if first in own or (key not in own and base[first] is not None) else key


def _refuse_one_for_both(
    group: Group, own: dict[str, Any], base: dict[str, Any], scale: str
) -> None:
    """Refuses an option for muon and adamw alike where they are known to need one each."""
    for key, first in _FIRST_ON_ADAMW.items():
        if key not in own or first in own:
            continue
        if base[first] is not None:
            why = f"the optimizer has {first}={base[first]!r} for those on adamw"
        elif key == "lr" and scale != _ADAMW_SCALE:
            why = _not_on_scale(scale)
        else:
            continue
        where = next(part.where for part in group.given if key in _given_by(part))
        raise InvalidArgumentError(
            f"{where}: {key}={own[key]!r} would be for parameters on muon and on adamw, and {why}: "
            f"give {first} as well"
        )


def _not_on_scale(scale: str) -> str:
    return f"with scale '{scale}' lr is not on AdamW's scale"


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
