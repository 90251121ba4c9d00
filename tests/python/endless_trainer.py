"""A trainer that steps for ever; ends by printing the error that stopped it. See test_deaths.py."""

import dmuond
import numpy as np
import one_matrix
from dmuond import types

SIDE = one_matrix.SIDE


def main() -> None:
    session = dmuond.Session()
    arenas = one_matrix.register(session)
    gradient = np.ndarray((SIDE, SIDE), np.float32, arenas[one_matrix.GRADIENT])
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
