"""Client of dmuond, the service that owns the optimizer of a training job.

`dmuond.Session` is the core: it registers tensors, maps the arenas that the daemon allocates, on
the host or on a GPU, signals gradients and hands in steps. It imports no framework, and the CUDA
driver only for a session with a GPU. `dmuond.torch.Muon` builds on it.
"""

from dmuond import types
from dmuond.device_array import DeviceArray
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
    "DeviceArray",
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
