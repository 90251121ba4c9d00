"""From what the caller hands over to named parameters."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from dmuond.errors import InvalidArgumentError
from dmuond.torch.presets import FIXED_OPTIONS, TORCH_OPTIONS
from dmuond.torch.routing import Named, matches
from dmuond.torch.wrappers import refuse_foreign, refuse_wrappers

# Options that a caller's group may have. Other keys stay in the group, for whoever reads them.
GROUP_OPTIONS = {
    "lr",
    "adamw_lr",
    "momentum",
    "weight_decay",
    "adamw_weight_decay",
    "betas",
    "eps",
    *FIXED_OPTIONS,
    *TORCH_OPTIONS,
}
LeftAlone = list[tuple[str, tuple[int, ...], str]]  # name, shape, why
Group = tuple[list[Named], dict[str, Any]]
_A_SLIP = 0.8  # how much of a key is that of an option, in difflib's measure


def groups(
    params: Any, patterns: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[list[Group], LeftAlone]:
    """Groups of named parameters with options, and what the routing table lists besides.

    patterns: options of what a shell pattern matches; the first that matches a name counts.
    """
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
            _check_keys(options)
            members = _named(item["params"])
            if len(given) > 1:
                _mark_nameless(item["params"], members)
            found.append((members, options))
        sources = [item["params"] for item in given]
        _check_once(found)
        _tell_submodules_apart(found)
    else:
        found, sources = [(_named(given), {})], [given]
    _check_members([named for members, _ in found for named in members])
    if patterns:
        _check_patterns(patterns, [named.name for members, _ in found for named in members])
        found = [part for group in found for part in _split(group, patterns)]
    return found, [row for source in sources for row in _buffers(source)]


def another_group(given: Mapping[str, Any], known: Mapping[int, Named]) -> tuple[Group, LeftAlone]:
    """A group beside those that there are. `known`: what has a name already, by id."""
    if not isinstance(given, Mapping) or "params" not in given:
        raise InvalidArgumentError("a group is a dict with 'params' and options")
    options = {key: value for key, value in given.items() if key != "params"}
    _check_keys(options)
    source = given["params"]
    if not isinstance(source, nn.Module):
        source = [source] if isinstance(source, Tensor) else list(source)
        source = [(known[id(item)].name, item) if id(item) in known else item for item in source]
    members = _named(source)
    _mark_nameless(source, members)
    members = [known.get(id(named.parameter), named) for named in members]
    _check_members([*known.values(), *(n for n in members if id(n.parameter) not in known)])
    return (members, options), _buffers(given["params"])


def _split(group: Group, patterns: Mapping[str, Mapping[str, Any]]) -> Iterable[Group]:
    """What each pattern takes of a group, and the rest."""
    members, options = group
    taken: dict[str | None, list[Named]] = {key: [] for key in (*patterns, None)}
    for named in members:
        taken[next((key for key in patterns if matches(key, named.name)), None)].append(named)
    for key, part in taken.items():
        if part:
            yield part, options if key is None else options | dict(patterns[key])


def _check_patterns(patterns: Mapping[str, Mapping[str, Any]], names: list[str]) -> None:
    for pattern, options in patterns.items():
        if not isinstance(options, Mapping):
            raise InvalidArgumentError(f"groups['{pattern}'] is no dict of options: {options!r}")
        _check_keys(options)
        if not any(matches(pattern, name) for name in names):
            raise InvalidArgumentError(
                f"groups: '{pattern}' matches no parameter; the first are {', '.join(names[:3])}"
            )


def _check_keys(options: Mapping[str, Any]) -> None:
    """Refuses what is but a slip of the pen in an option."""
    for key in options:
        meant = difflib.get_close_matches(key, GROUP_OPTIONS, 1, _A_SLIP)
        if meant and key not in GROUP_OPTIONS:
            raise InvalidArgumentError(
                f"a group has the unknown option '{key}': is '{meant[0]}' meant?"
            )


def _check_once(found: list[Group]) -> None:
    seen: set[int] = set()
    for members, _ in found:
        for named in members:
            if id(named.parameter) in seen:
                raise InvalidArgumentError(f"'{named.name}' is in two groups")
            seen.add(id(named.parameter))


def _check_places(members: list[Named]) -> None:
    """Raises for two parameters that are one memory: each would get memory of its own."""
    names: dict[tuple[torch.device, int], str] = {}
    for named in members:
        parameter = named.parameter
        if is_lazy(parameter) or isinstance(parameter, DTensor) or not parameter.data_ptr():
            continue
        other = names.setdefault((parameter.device, parameter.data_ptr()), named.name)
        if other != named.name:
            raise InvalidArgumentError(
                f"'{other}' and '{named.name}' are two parameters in the same memory (one's .data "
                "was given to the other), and would be trained apart: tie them by one nn.Parameter,"
                " as in head.weight = embed.weight"
            )


def _tell_submodules_apart(found: list[Group]) -> None:
    """Names are those of a group's own module: where two have the same, its number goes before."""
    counts = Counter(named.name for members, _ in found for named in members)
    for number, (members, _) in enumerate(found):
        if any(counts[named.name] > 1 and named.module is not None for named in members):
            members[:] = [
                dataclasses.replace(named, name=f"group{number}.{named.name}") for named in members
            ]


def _mark_nameless(source: Any, members: list[Named]) -> None:
    """Of a group beside others: what it holds itself has no name from the model."""
    for named in members:
        named.nameless = named.module is source


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
        refuse_wrappers(source)
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
    for name, parameter in members:
        refuse_foreign(name, parameter)
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


def _check_members(members: list[Named]) -> None:
    names: set[str] = set()
    for named in members:
        if named.name in names:
            raise InvalidArgumentError(
                f"two parameters have the name '{named.name}': give (name, parameter) pairs with "
                "names of their own"
            )
        names.add(named.name)
    if not names:
        raise InvalidArgumentError("there are no parameters")
    _check_places(members)


def _buffers(source: Any) -> LeftAlone:
    if not isinstance(source, nn.Module):
        return []
    persistent = set(source.state_dict().keys())
    return [
        (_clean(name), tuple(buffer.shape), "buffer of the model: the daemon does not restore it")
        for name, buffer in source.named_buffers()
        if name in persistent
    ]
