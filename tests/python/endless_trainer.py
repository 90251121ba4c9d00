"""A trainer that steps for ever; ends by printing the error that stopped it. See test_deaths.py."""

import dmuond
import numpy as np
from dmuond import types

SIDE = 16
BYTES = SIDE * SIDE * 4


def main() -> None:
    session = dmuond.Session()
    place = {"offset_bytes": 0, "strides": [SIDE, 1]}
    parameter = types.Parameter(
        name="w",
        shape=[SIDE, SIDE],
        weight_type=types.ELEMENT_TYPE_FLOAT32,
        gradient_type=types.ELEMENT_TYPE_FLOAT32,
        route=types.ROUTE_MUON,
        reduce_factor=0.5,
    )
    fragment = types.Fragment(
        parameter=0,
        box=types.Box(begin=[0, 0], end=[SIDE, SIDE]),
        contribution=types.CONTRIBUTION_SUM,
        weight=types.Slice(arena=1, **place),
        gradient=types.Slice(arena=2, **place),
    )
    session.register([parameter], [fragment], [types.GroupConfig(preset="keller")])
    arenas = session.attach({1: BYTES, 2: BYTES})
    gradient = np.ndarray((SIDE, SIDE), np.float32, arenas[2])
    gradient[...] = np.random.default_rng(session.rank).standard_normal((SIDE, SIDE))
    session.push()
    scalars = types.StepScalars(groups=[types.GroupScalars(learning_rate=0.1, momentum=0.9)])
    session.step(scalars)
    print("stepping", flush=True)
    try:
        while True:
            session.step(scalars)
    except dmuond.Error as error:
        print(type(error).__name__, error, flush=True)


if __name__ == "__main__":
    main()
