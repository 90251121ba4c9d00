"""Which layers a model's structure, or its names, show as its last: they may be output heads."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList, is_parametrized

from dmuond.torch.layers import End, Kind, Named

# A layer with one of these names is a head; of a part with such a name, its last layer is.
_HEAD = re.compile(
    r"(^|_)(head|(?<!pre_)classifier|predictor|logits?|unembed(ding)?)\d*$"
    r"|^((roi_)?heads|fc|cls|score|outputs?|output_(layer|projection|head)|embed_out|qa_outputs"
    r"|cls_score|bbox_(pred|reg)|(head|classifier)_\w+|aux(\d|_?(logits|classifier|head))\w*)$",
    re.IGNORECASE,
)
_HEAD_IN_A_BLOCK = re.compile(r"^((lm_)?head|heads|classifier|unembed(ding)?)$")  # of a layer
_HEAD_OF_NAMES = re.compile(r"^(out|fc_out|proj_out|to_logits|decoder)$")  # where no class is known
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)


def mark_ends(source: Any, members: list[Named], *, whole: bool) -> None:
    """Sets `end` of the members of a group, which come from the source: a module, or names.

    whole: the group is all that there is, so that its last layer may be the model's.
    """
    if isinstance(source, nn.Module):
        ends = dict(_of_module(source, whole))
        for named in members:
            named.end = ends.get(id(named.layer), End.NO)
    else:
        _mark_by_names(members, whole)


# --- by structure ---


def _of_module(model: nn.Module, whole: bool) -> Iterator[tuple[int, End]]:
    """Ends by id of the layer; what comes later counts."""
    beside = () if isinstance(model, nn.Sequential) else model.children()
    for child in beside:
        if isinstance(child, nn.Sequential) and (end := _last_layer(child)):
            yield id(end), End.PART
    heads = list(_named_heads(model))
    end = _last_layer(model)
    if end and not whole:
        yield id(end), End.PART
    elif end and sum(map(_holds_matrices, model.modules())) == 1:
        yield id(end), End.ONLY
    elif end and all(_is_auxiliary(path) for path, _ in heads):
        yield id(end), End.MODEL
    for _, head in heads:
        yield id(head), End.HEAD


def _named_heads(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    outermost = ""
    for path, module in model.named_modules():
        *above, name = path.split(".")
        if any(part.isdigit() for part in above):
            if _HEAD_IN_A_BLOCK.search(name) and not _has_layers_below(module):
                yield path, module
        elif _HEAD.search(name):
            nested = bool(outermost) and path.startswith(outermost)
            if nested and _has_layers_below(module):
                continue  # roi_heads.box_head: other parts of roi_heads take what it makes
            outermost = outermost if nested else f"{path}."
            if end := _last_layer(module):
                yield path, end


def _is_auxiliary(path: str) -> bool:
    return path.lower().startswith("aux") or any(part.isdigit() for part in path.split(".")[:-1])


def _last_layer(module: nn.Module) -> nn.Module | None:
    """None: it lies in one of several blocks, whose outputs other layers take."""
    children = [child for child in module.children() if any(map(_is_layer, child.modules()))]
    if not children:
        return module if _is_layer(module) else None
    last = children[-1]
    if isinstance(module, _CONTAINERS) and _has_layers_below(last):
        alike = sum(type(child) is type(last) for child in children)
        is_chain = isinstance(last, nn.Sequential) or 1 == alike < len(children)
        if not isinstance(module, nn.Sequential) or not is_chain:
            return None
    return _last_layer(last)


def _has_layers_below(module: nn.Module) -> bool:
    return any(_is_layer(below) for below in module.modules() if below is not module)


def _is_layer(module: nn.Module) -> bool:
    """Whether it may compute outputs by itself, which an embedding does not."""
    return _holds_matrices(module) and not isinstance(module, _EMBEDDINGS)


def _holds_matrices(module: nn.Module) -> bool:
    """Whether it has itself, not in modules below, more than vectors."""
    if isinstance(module, ParametrizationList):
        return False  # what it has is the module's that it parametrizes
    held = [*module._parameters.values()]
    if is_parametrized(module):
        for originals in module.parametrizations.values():
            held += originals._parameters.values()
    return any(parameter is not None and _is_matrix(parameter) for parameter in held)


def _is_matrix(parameter: Tensor) -> bool:
    return not is_lazy(parameter) and parameter.ndim > 1


# --- by names ---


def _mark_by_names(members: list[Named], whole: bool) -> None:
    layers = [n for n in members if _is_matrix(n.parameter) and n.kind is Kind.FOREIGN]
    heads = {part: named for named in layers if (part := _head_part(named))}
    for named in heads.values():
        named.end = End.HEAD
    told = not all(_is_auxiliary(".".join(named.path)) for named in heads.values())
    if whole and not told and len(layers) > 1 and not layers[-1].in_block:
        layers[-1].end = End.MODEL


def _head_part(named: Named) -> tuple[str, ...]:
    """The part of the model whose name says that it is a head, or nothing."""
    path = named.path
    of_a_layer = _HEAD_IN_A_BLOCK if named.in_block else _HEAD
    if of_a_layer.search(path[-1]) or named.in_block:
        return tuple(path) if of_a_layer.search(path[-1]) else ()
    for depth, part in enumerate(path, 1):
        if _HEAD.search(part) or _HEAD_OF_NAMES.search(part):
            return tuple(path[:depth])
    return ()
