"""A job of many parameters, small ones."""

import dmuond
import numpy as np
from dmuond import types

PARAMETERS = 10_000


def register(session: dmuond.Session) -> None:
    """Nine matrices and a vector, time and again, with random gradients."""
    parameters, fragments, at = [], [], 0
    for number in range(PARAMETERS):
        vector = number % 10 == 9
        shape = [16] if vector else [8 + number % 3, 16]
        parameters.append(
            types.Parameter(
                name=f"decoder.layers.{number // 10}.part{number % 10}.weight",
                shape=shape,
                weight_type=types.ELEMENT_TYPE_FLOAT32,
                gradient_type=types.ELEMENT_TYPE_FLOAT32,
                route=types.ROUTE_ADAMW if vector else types.ROUTE_MUON,
                reduce_factor=1.0,
            )
        )
        piece = {"offset_bytes": at, "strides": [1] if vector else [16, 1]}
        fragments.append(
            types.Fragment(
                parameter=number,
                box=types.Box(begin=[0] * len(shape), end=shape),
                contribution=types.CONTRIBUTION_SUM,
                weight=types.Slice(arena=1, **piece),
                gradient=types.Slice(arena=2, **piece),
            )
        )
        at += int(np.prod(shape)) * 4
    session.register(parameters, fragments, [types.GroupConfig(preset="keller")])
    session.attach({1: at, 2: at})
    chance = np.random.default_rng(1)
    session.arenas[2].view(np.float32)[:] = chance.standard_normal(at // 4)
    session.push()
