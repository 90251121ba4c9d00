"""Chooses the memory that a session's arenas lie in, by the device's name."""

from __future__ import annotations

import re

from dmuond.errors import InvalidArgumentError
from dmuond.memory import Memory


def memory_of(device: str) -> Memory:
    """For "cpu" or "cuda:N". Raises InvalidArgumentError, and as CudaMemory does.

    Only for a GPU is cuda-bindings imported.
    """
    if device == "cpu":
        from dmuond.host_memory import HostMemory

        return HostMemory()
    found = re.fullmatch(r"cuda:(\d+)", device) if isinstance(device, str) else None
    if found is None:
        raise InvalidArgumentError(f'device={device!r} is neither "cpu" nor "cuda:0", "cuda:1", …')
    from dmuond.cuda_memory import CudaMemory

    return CudaMemory(int(found[1]))
