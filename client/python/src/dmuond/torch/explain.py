"""What the optimizer has made of a model, as text: routes, gradients, holdings and guesses."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fractions import Fraction

from torch import Tensor
from torch.distributed.tensor import DTensor

from dmuond import types
from dmuond.torch.mesh_roles import describe
from dmuond.torch.reduction import Reduction, Share
from dmuond.torch.routing import Routed, matches
from dmuond.torch.slots import Slot
from dmuond.torch.table import fold

_OTHER_ROUTE = {"muon": "adamw", "adamw": "muon"}


def explanation(
    routing: str,
    routed: Sequence[Routed],
    slots: Iterable[Slot],
    shares: Mapping[int, Share],
    reduction: Reduction,
    weights: str,
) -> str:
    """routing: the table. shares: by id of the parameter. weights: where they have come from."""
    parts = {"Which optimizer updates what:": routing.splitlines()}
    gradients: dict[str, list[str]] = {}
    holdings: dict[str, list[str]] = {}
    for slot in slots:
        gradient = _gradient(slot.parameter, shares[id(slot.parameter)], reduction)
        gradients.setdefault(gradient, []).append(slot.name)
        holdings.setdefault(_holding(slot, shares[id(slot.parameter)]), []).append(slot.name)
    parts["What becomes of the ranks' gradients:"] = _listed(gradients)
    parts["What this rank holds:"] = _listed(holdings)
    parts["Whose weights it began with:"] = [weights]
    parts["What is guessed:"] = _guesses(routed) or ["nothing"]
    return "\n".join(
        line for title, lines in parts.items() for line in (title, *(f"  {x}" for x in lines))
    )


def _listed(found: Mapping[str, list[str]]) -> list[str]:
    return [f"{what}: {', '.join(_folded(names))}" for what, names in found.items()]


def _folded(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(map(fold, names)))


def _gradient(parameter: Tensor, share: Share, reduction: Reduction) -> str:
    reduced = reduction.reduced.get(id(parameter))
    first = "" if reduced is None else f"FSDP2 averages over {describe(reduced.mesh)}; then "
    if share.contribution == types.CONTRIBUTION_SAME:
        what = "holders have equal gradients, and one of each is taken"
    elif share.contribution == types.CONTRIBUTION_NONE:
        what = "this rank's are equal to others', which are taken"
    else:
        what = "the daemon adds up the holders'"
    factor = Fraction(abs(share.factor)).limit_denominator(1 << 20)
    times = "" if factor == 1 else f", times {factor}"
    return f"{first}{what}{times}{', with the sign changed (maximize)' * (share.factor < 0)}"


def _holding(slot: Slot, share: Share) -> str:
    parameter = slot.parameter
    if isinstance(parameter, DTensor):
        ranks = sorted(parameter.device_mesh.mesh.flatten().tolist())
        cut = ", ".join(map(repr, parameter.placements))
        return f"its part of {cut} over {describe(parameter.device_mesh)}, ranks {ranks}"
    return "whole, as every rank does" if share.held_by_all else "whole"


def _guesses(routed: Iterable[Routed]) -> list[str]:
    """One line for layers of one name, where a pattern matches those alone."""
    names = [item.named.name for item in routed]
    found: dict[tuple[str, str, str], list[str]] = {}
    for item in routed:
        if "guess" in item.reason:
            key = fold(item.named.name), item.route, item.reason
            found.setdefault(key, []).append(item.named.name)
    lines = []
    for (pattern, route, reason), members in found.items():
        alone = [name for name in names if matches(pattern, name)] == members
        for name in [pattern] if alone and len(members) > 1 else members:
            line = f'route=[("{name}", "{_OTHER_ROUTE[route]}")] says otherwise'
            lines.append(f"{name} is on {route}, {reason}; {line}")
    return lines
