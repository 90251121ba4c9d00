"""The routing table as text, layers of equal parameters folded into one line."""

from __future__ import annotations

import re
from collections.abc import Iterable

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


def format_table(rows: Iterable[types.RoutingRow]) -> str:
    folded: dict[tuple, list[types.RoutingRow]] = {}
    for row in rows:
        name = re.sub(r"(?<=\.)\d+(?=\.)", "*", row.parameter)
        folded.setdefault((name, row.route, row.matrices, row.why), []).append(row)
    lines = [("parameter", "count", "route", "matrices", "owners", "why")]
    for (name, route, matrices, why), members in folded.items():
        owners = _ranges(owner for row in members for owner in row.owners)
        shown = members[0].parameter if len(members) == 1 else name
        each = str(matrices) if route == types.ROUTE_MUON else ""
        lines.append((shown, str(len(members)), _ROUTE_NAMES.get(route, "?"), each, owners, why))
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )
