"""The routing table as text, layers of equal parameters folded into one line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from dmuond import types

_ROUTE_NAMES = {
    types.ROUTE_MUON: "muon",
    types.ROUTE_ADAMW: "adamw",
    types.ROUTE_TRAINER: "trainer",
}


def _ranges(numbers: Iterable[int]) -> str:
    """ "0-3,5" for 0, 1, 2, 3, 5."""
    parts: list[list[int]] = []
    for number in sorted(set(numbers)):
        if parts and parts[-1][1] == number - 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def format_table(rows: Iterable[types.RoutingRow], rates: Mapping[str, float]) -> str:
    """rates: learning rates by parameter. Those of others, which other ranks hold, stay blank."""
    folded: dict[tuple, list[types.RoutingRow]] = {}
    for row in rows:
        rate = f"{rates[row.parameter]:.4g}" if row.parameter in rates else ""
        key = (fold(row.parameter), row.route, rate, row.matrices, row.why)
        folded.setdefault(key, []).append(row)
    lines = [("parameter", "count", "route", "lr", "matrices", "owners", "why")]
    for (name, route, rate, matrices, why), members in folded.items():
        owners = _ranges(owner for row in members for owner in row.owners)
        shown = members[0].parameter if len(members) == 1 else name
        each = str(matrices) if route == types.ROUTE_MUON else ""
        route_name = _ROUTE_NAMES.get(route, "?")
        lines.append((shown, str(len(members)), route_name, rate, each, owners, why))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def fold(name: str) -> str:
    """Layers of one name as one: blocks.*.up.weight."""
    return re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
