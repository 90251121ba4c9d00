"""The smallest layout: one matrix, which every rank has whole and adds a gradient to."""

from dmuond import types

WEIGHT, GRADIENT = 1, 2  # arenas
SIDE = 16


def layout(
    rows: int,
    columns: int,
    *,
    name: str = "w",
    preset: str = "keller",
    reduce_factor: float = 0.5,
    weight: int = WEIGHT,
    gradient: int = GRADIENT,
) -> dict[str, list]:
    """Parameters, fragments and groups, as a registration has them."""
    parameter = types.Parameter(
        name=name,
        shape=[rows, columns],
        weight_type=types.ELEMENT_TYPE_FLOAT32,
        gradient_type=types.ELEMENT_TYPE_FLOAT32,
        route=types.ROUTE_MUON,
        reduce_factor=reduce_factor,
    )
    fragment = types.Fragment(
        parameter=0,
        box=types.Box(begin=[0, 0], end=[rows, columns]),
        contribution=types.CONTRIBUTION_SUM,
        weight=types.Slice(arena=weight, strides=[columns, 1]),
        gradient=types.Slice(arena=gradient, strides=[columns, 1]),
    )
    group = types.GroupConfig(preset=preset)
    return {"parameters": [parameter], "fragments": [fragment], "groups": [group]}


def register(session) -> dict:
    """The session's arenas, after it has registered a matrix of SIDE x SIDE and attached it."""
    made = layout(SIDE, SIDE)
    session.register(made["parameters"], made["fragments"], made["groups"])
    return session.attach({WEIGHT: SIDE * SIDE * 4, GRADIENT: SIDE * SIDE * 4})
