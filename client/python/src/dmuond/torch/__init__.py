"""The optimizer for PyTorch: `dmuond.torch.Muon`."""

from dmuond.errors import Aborted, DaemonLost, Error, RolledBack, Unreachable
from dmuond.torch.loop_state import LoopState
from dmuond.torch.muon import Muon
from dmuond.torch.presets import PRESETS, Preset
from dmuond.torch.views import Experts, Flatten, Heads, RowBlocks

__all__ = [
    "PRESETS",
    "Aborted",
    "DaemonLost",
    "Error",
    "Experts",
    "Flatten",
    "Heads",
    "LoopState",
    "Muon",
    "Preset",
    "RolledBack",
    "RowBlocks",
    "Unreachable",
]
