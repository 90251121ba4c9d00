"""Options of groups that were saved: each group takes those that its parameters had."""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from dmuond.errors import InvalidArgumentError
from dmuond.torch.presets import FIXED_OPTIONS

# Loading a state leaves these keys of a group as they are.
_KEPT = {"params", "param_names", "route", *FIXED_OPTIONS}
_SAVED_KINDS = (bool, int, float, str, tuple, list, np.generic, Tensor)


def names_of(group: Mapping[str, Any], known: Container[str]) -> list[str]:
    """The names of a saved group's parameters; empty where it has none.

    torch's checkpoints have names in the place of numbers, in an order of their own, beside the
    names that were saved. They count where they are `known` as names.
    """
    identities = group["params"]
    if identities and all(isinstance(each, str) and each in known for each in identities):
        return list(identities)
    names = group.get("param_names") or ()
    if names and len(names) != len(identities):
        raise InvalidArgumentError(
            f"a group to load has {len(identities)} parameters and {len(names)} names"
        )
    return list(names)


def options_to_save(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a step or a schedule may have changed in a group, and its route."""
    found = {k: v for k, v in group.items() if k not in _KEPT and isinstance(v, _SAVED_KINDS)}
    return found | {"route": group["route"]}


def options_for(
    groups: Sequence[Mapping[str, Any]], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What each of `groups` is to take of the saved ones: of those that had its parameters.

    By the order of groups where a saved one has no names.
    """
    if len(saved) != len(groups):
        raise InvalidArgumentError(
            f"the state to load has {len(saved)} parameter groups; this optimizer has {len(groups)}"
        )
    known = {name for group in groups for name in group["param_names"]}
    names = [names_of(group, known) for group in saved]
    if all(names):
        holder = {name: index for index, members in enumerate(names) for name in members}
        chosen = [_holder_of(index, group, holder, saved) for index, group in enumerate(groups)]
    else:
        chosen = list(range(len(groups)))
    for index, (group, number) in enumerate(zip(groups, chosen, strict=True)):
        if "lr" not in saved[number]:  # torch's checkpoints give them to one of several groups
            raise InvalidArgumentError(
                f"group {number} of the state to load has no options, and would be "
                f"param_groups[{index}], which has '{group['param_names'][0]}': make the optimizer "
                "with groups as they were saved"
            )
        route = saved[number].get("route", group["route"])
        if route != group["route"]:
            raise InvalidArgumentError(
                f"'{group['param_names'][0]}' is on {group['route']}, in param_groups[{index}], "
                f"and the state to load has it on {route}, in its group {number}"
            )
    return [_options(saved[number]) for number in chosen]


def _holder_of(
    index: int,
    group: Mapping[str, Any],
    holder: Mapping[str, int],
    saved: Sequence[Mapping[str, Any]],
) -> int:
    """The number of the saved group whose options hold for all parameters of a group."""
    first, *others = group["param_names"]
    for name in (first, *others):
        if name not in holder:
            raise InvalidArgumentError(
                f"the groups of the state to load do not have '{name}', which is in "
                f"param_groups[{index}]"
            )
    chosen = holder[first]
    for name in others:
        other = holder[name]
        different = [] if other == chosen else _different(saved[chosen], saved[other])
        if different:
            key = different[0]
            raise InvalidArgumentError(
                f"'{first}' and '{name}' are both in param_groups[{index}], and the state to load "
                f"has them in its groups {chosen} and {other}, whose options differ: "
                f"{key} is {saved[chosen].get(key)!r} and {saved[other].get(key)!r}. Make the "
                "optimizer with groups as they were saved"
            )
    return chosen


def _options(saved: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in saved.items() if key not in _KEPT}


def _different(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    """The keys of options that differ."""
    a, b = _options(one), _options(other)
    return [key for key in a | b if _plain(a.get(key)) != _plain(b.get(key))]


def _plain(value: Any) -> Any:
    """What can be compared."""
    return value.tolist() if isinstance(value, Tensor | np.generic | np.ndarray) else value
