"""Running statistics of normalisation layers, which each rank keeps for itself."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from dmuond.torch.notices import warn


def warn_of_own_statistics(models: Iterable[nn.Module]) -> None:
    """Warns where ranks' running statistics drift apart: the daemon takes no part in buffers.

    DistributedDataParallel sends rank 0's buffers to all ranks before each forward pass.
    SyncBatchNorm computes equal ones on all ranks.
    """
    found = [
        path
        for model in models
        for path, module in model.named_modules()
        if isinstance(module, _NormBase)
        and not isinstance(module, nn.SyncBatchNorm)
        and module.running_mean is not None
    ]
    if found:
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        warn(
            f"dmuond: the running statistics of '{found[0]}'{more} are each rank's own: they "
            "follow its data alone, where DistributedDataParallel takes rank 0's for all. "
            "nn.SyncBatchNorm.convert_sync_batchnorm(model) makes them equal; or broadcast the "
            "buffers before an evaluation and before a checkpoint (docs/python.md, 'Coming from "
            "DDP')"
        )
