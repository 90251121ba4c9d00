"""From what the caller hands over to named parameters."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from dmuond.errors import InvalidArgumentError
from dmuond.torch.output_heads import mark_ends
from dmuond.torch.presets import FIXED_OPTIONS, TORCH_OPTIONS
from dmuond.torch.routing import Named, Pattern, matches
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
_A_SLIP = 0.8  # how much of a key is that of an option, in difflib's measure
# Options of torch's own optimizers that change results, with the value that dmuond computes by.
_NOT_HERE = {"amsgrad": False, "dampening": 0, "decoupled_weight_decay": True}


@dataclass(eq=False)
class Given:
    """Options as the caller wrote them in one place: a group's dict, or that of a pattern."""

    where: str  # for errors
    options: dict[str, Any]


class Group(NamedTuple):
    """Parameters with the options that were given for them; of two for one key the later counts."""

    members: list[Named]
    given: list[Given]


def groups(
    params: Any,
    patterns: Mapping[Pattern, Mapping[str, Any]] | None = None,
    *,
    whole: bool = True,
) -> tuple[list[Group], LeftAlone]:
    """Groups of named parameters with options, and what the routing table lists besides.

    patterns: options of what a shell pattern matches; the first that matches a name counts.
    whole: other ranks have no other parts of the model.
    """
    if isinstance(params, str | Mapping) or not isinstance(params, nn.Module | Iterable):
        raise InvalidArgumentError(
            f"params is of type {type(params).__name__}: pass the model, or groups; "
            "model.named_parameters() if there is no other way"
        )
    given = params if isinstance(params, nn.Module) else list(params)
    if isinstance(given, list) and given and all(isinstance(item, dict) for item in given):
        found = []
        for number, item in enumerate(given):
            if "params" not in item:
                raise InvalidArgumentError("a group has no 'params'")
            members = _named(item["params"])
            mark_ends(item["params"], members, whole=whole and len(given) == 1)
            found.append(Group(members, [_given(f"group {number}", item)]))
        sources = [item["params"] for item in given]
        _check_once(found)
        _tell_submodules_apart(found)
    else:
        found, sources = [Group(_named(given), [])], [given]
        mark_ends(given, found[0].members, whole=whole)
    members = [named for group in found for named in group.members]
    _check_members(members)
    if patterns:
        taken = _taken(patterns, [named.name for named in members])
        found = [part for group in found for part in _split(group, taken)]
    return found, [row for source in sources for row in _buffers(source)]


def another_group(given: Mapping[str, Any], known: Mapping[int, Named]) -> tuple[Group, LeftAlone]:
    """A group beside those that there are. `known`: what has a name already, by id."""
    if not isinstance(given, Mapping) or "params" not in given:
        raise InvalidArgumentError("a group is a dict with 'params' and options")
    options = _given("the group to add", given)
    source = given["params"]
    if not isinstance(source, nn.Module):
        source = [source] if isinstance(source, Tensor) else list(source)
        source = [(known[id(item)].name, item) if id(item) in known else item for item in source]
    members = _named(source)
    mark_ends(source, members, whole=False)
    members = [known.get(id(named.parameter), named) for named in members]
    _check_members([*known.values(), *(n for n in members if id(n.parameter) not in known)])
    return Group(members, [options]), _buffers(given["params"])


def _given(where: str, options: Mapping[str, Any]) -> Given:
    found = {key: value for key, value in options.items() if key != "params"}
    _check_keys(found)
    return Given(where, found)


def _split(group: Group, patterns: Mapping[Pattern, tuple[Given, set[str]]]) -> Iterable[Group]:
    """What each pattern takes of a group, and the rest."""
    left = group.members
    for given, names in patterns.values():
        part = [named for named in left if named.name in names]
        if part:
            yield Group(part, [*group.given, given])
        left = [named for named in left if named.name not in names]
    if left:
        yield Group(left, group.given)


def _taken(
    patterns: Mapping[Pattern, Mapping[str, Any]], names: list[str]
) -> dict[Pattern, tuple[Given, set[str]]]:
    """The options of each pattern, and the names that it takes. It takes some."""
    found: dict[Pattern, tuple[Given, set[str]]] = {}
    owner: dict[str, Pattern] = {}
    for pattern, options in patterns.items():
        if not isinstance(options, Mapping):
            raise InvalidArgumentError(f"groups['{pattern}'] is no dict of options: {options!r}")
        matching = [name for name in names if matches(pattern, name)]
        if not matching:
            raise InvalidArgumentError(
                f"groups: '{pattern}' matches no parameter; the first are {', '.join(names[:3])}"
            )
        free = {name for name in matching if name not in owner}
        if not free:
            raise InvalidArgumentError(
                f"groups: '{pattern}' has no effect, since patterns before it match all that it "
                f"matches ('{owner[matching[0]]}' has '{matching[0]}'), and the first that matches "
                "counts: put it before them"
            )
        owner |= dict.fromkeys(free, pattern)
        found[pattern] = (_given(f"groups['{pattern}']", options), free)
    return found


def _check_keys(options: Mapping[str, Any]) -> None:
    """Refuses what is but a slip of the pen in an option, or an option that there is not."""
    for key, value in options.items():
        if key in _NOT_HERE and value != _NOT_HERE[key]:
            raise InvalidArgumentError(
                f"a group has {key}={value!r}, which dmuond does not have: take it away"
            )
        meant = difflib.get_close_matches(key, GROUP_OPTIONS, 1, _A_SLIP)
        if meant and key not in GROUP_OPTIONS:
            raise InvalidArgumentError(
                f"a group has the unknown option '{key}': is '{meant[0]}' meant?"
            )


def _check_once(found: list[Group]) -> None:
    seen: set[int] = set()
    for group in found:
        for named in group.members:
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
    counts = Counter(named.name for group in found for named in group.members)
    for number, group in enumerate(found):
        if any(counts[named.name] > 1 and named.module is not None for named in group.members):
            group.members[:] = [
                dataclasses.replace(named, name=f"group{number}.{named.name}")
                for named in group.members
            ]


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
            layer = module
            if isinstance(module, ParametrizationList):
                layer = model.get_submodule(path.rpartition("parametrizations.")[0].rstrip("."))
            yield Named(_clean(name), parameter, module, attribute, layer)


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
