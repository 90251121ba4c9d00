"""Chooses what the optimizer asks of a device, by where the parameters are."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from dmuond.errors import InvalidArgumentError
from dmuond.torch.tensor_device import TensorDevice


def device_of(parameters: Iterable[tuple[str, Tensor]]) -> TensorDevice:
    """The device that all of these named parameters are on.

    Raises InvalidArgumentError where they are on several, or on one of a kind that no lane has.
    """
    first: tuple[str, torch.device] | None = None
    for name, parameter in parameters:
        device = parameter.device
        if device.type not in ("cpu", "cuda"):
            raise InvalidArgumentError(
                f"'{name}' is on {device}; dmuond takes parameters on cpu and on cuda devices"
            )
        if first is None:
            first = name, device
        elif device != first[1]:
            raise InvalidArgumentError(
                f"'{first[0]}' is on {first[1]} and '{name}' on {device}: one optimizer has "
                "parameters of one device. Run a process for each GPU, or give what is to stay "
                "elsewhere the route 'trainer'"
            )
    if first is None or first[1].type == "cpu":
        from dmuond.torch.host_tensors import HostTensors

        return HostTensors()
    from dmuond.torch.cuda_tensors import CudaTensors

    return CudaTensors(first[1])
