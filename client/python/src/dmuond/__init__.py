"""Client of dmuond, the service that owns the optimizer of a training job.

`dmuond.Session` is the core: it registers tensors, maps the arenas that the daemon allocates,
signals gradients and hands in steps. It imports no framework. `dmuond.torch.Muon` builds on it.
"""

from dmuond import types
from dmuond.errors import (
    Aborted,
    DaemonLost,
    Error,
    FailedPreconditionError,
    InvalidArgumentError,
    RolledBack,
    StateLost,
    Unreachable,
)
from dmuond.session import Registered, Session
from dmuond.state_chunks import StateTensor

__version__ = "0.2.0"

__all__ = [
    "Aborted",
    "DaemonLost",
    "Error",
    "FailedPreconditionError",
    "InvalidArgumentError",
    "Registered",
    "RolledBack",
    "Session",
    "StateLost",
    "StateTensor",
    "Unreachable",
    "__version__",
    "types",
]
