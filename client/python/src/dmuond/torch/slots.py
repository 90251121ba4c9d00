"""A parameter's places in the arenas: where its gradient is read from and its weights arrive.

A slot is a tensor with a storage object of its own over the arena's mapping, so that it has its own
version counter and `torch.save` writes its bytes alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from dmuond.errors import InvalidArgumentError
from dmuond.memory import View
from dmuond.torch.fragments import Holding
from dmuond.torch.routing import Routed
from dmuond.torch.tensor_device import Pair, TensorDevice

ALIGNMENT = 256  # bytes; as everything in a lane's memory


@dataclass(frozen=True)
class Place:
    """Where a slot lies: an arena, by its id, and the byte in it."""

    arena: int
    offset_bytes: int


class Slot:
    """A replicated parameter: it lives in the arena itself, and so does its gradient."""

    def __init__(
        self, routed: Routed, index: int, holding: Holding, grad_dtype: torch.dtype
    ) -> None:
        self.named = routed.named
        self.name = routed.named.name
        self.route = routed.route
        self.parameter = routed.named.parameter
        self.index = index  # in this rank's registration
        self.bucket = -1  # known when the daemon has answered
        self.weight_at, self.gradient_at = Place(0, 0), Place(0, 0)
        self.holding = holding
        self.grad_dtype = grad_dtype
        self._address = 0
        self._version = 0

    def map(self, arenas: Mapping[int, View], device: TensorDevice) -> None:
        """Maps the slot into these arenas. Only the parameter may still refer to former ones."""
        self._arenas, self._device = arenas, device
        self.weight = self._tensor(self.weight_at, self.parameter.dtype)
        self.gradient = self._tensor(self.gradient_at, self.grad_dtype)
        # The same bytes under another storage: stays there when somebody replaces the slot's data.
        self._gradient_bytes = self._tensor(self.gradient_at, self.grad_dtype)

    def _tensor(self, place: Place, dtype: torch.dtype) -> Tensor:
        shape = self.holding.local_shape
        if self.holding.elements == 0:
            return torch.empty(shape, dtype=dtype, device=self.parameter.device)
        contents = self._bytes(place, dtype)
        empty = torch.empty(0, dtype=dtype, device=contents.device)
        return empty.set_(contents.untyped_storage(), 0, shape, self.holding.strides)

    def _bytes(self, place: Place, dtype: torch.dtype) -> Tensor:
        size = self.holding.elements * dtype.itemsize
        return self._device.bytes_at(self._arenas[place.arena], place.offset_bytes, size)

    # --- weights ---

    def write_weight(self) -> None:
        """Writes the parameter's value into the arena, and moves the parameter there."""
        if self.parameter.data_ptr() != self.weight.data_ptr():
            self.weight.copy_(self.parameter.detach())
            self.parameter.data = self.weight

    def bind_published(self) -> None:
        """Makes the parameter what the arena holds."""
        if self.parameter.data_ptr() != self.weight.data_ptr():
            self.parameter.data = self.weight

    def accept(self, changed: bool) -> None:
        """Takes the arena's weights for the parameter's; changes from here on are noticed."""
        if changed:  # as an optimizer's own writes would
            torch.autograd.graph.increment_version(self.parameter)
        self._address = self.parameter.data_ptr()
        self._version = self.parameter._version

    def value(self) -> Tensor:
        return self.parameter.detach()

    def weight_changed(self) -> bool:
        """Whether somebody else has touched the weight, as far as can be seen but by its bytes."""
        moved = self.parameter.data_ptr() != self._address
        return moved or self.parameter._version != self._version

    def weight_pair(self) -> Pair | None:
        """What differs where somebody else has touched the weight, of which nothing else tells."""
        return None

    def fits(self) -> bool:
        """Whether the parameter still has the dtype, shape and device that were registered."""
        now, then = self.value(), self.weight
        return (now.dtype, now.shape, now.device) == (then.dtype, then.shape, then.device)

    def check_fits(self) -> None:
        if self.fits():
            return
        now, then = self.value(), self.weight
        kept = str(then.dtype).removeprefix("torch.")
        raise InvalidArgumentError(
            f"'{self.name}' was registered as {then.dtype} of shape {list(then.shape)} on "
            f"{then.device} and is now {now.dtype} of shape {list(now.shape)} on {now.device}: "
            "convert or move the model before making the optimizer. To go on as before: "
            f"model.to('{then.device}', torch.{kept}), then opt.load_state_dict(opt.state_dict()). "
            "To train the model as it is now: keep opt.state_dict(), opt.close(), and load it into "
            "a new one"
        )

    # --- gradients ---

    def drop_gradient(self) -> None:
        """Drops the gradient of a step that did not happen."""
        self.parameter.grad = None

    def adopt_gradient(self) -> bool:
        """Makes p.grad the slot, with its bytes in the arena. False: there is no gradient."""
        given = self.parameter.grad
        if given is None:
            return False
        if given is self.gradient and self.gradient_in_place():
            return True
        self._copy_in(given)
        if self.gradient.data_ptr() != self._gradient_bytes.data_ptr():  # its .data was replaced
            self.gradient.data = self._gradient_bytes
        if given is not self.gradient:
            self.parameter.grad = self.gradient
        return True

    def gradient_in_place(self) -> bool:
        return (
            self.parameter.grad is self.gradient
            and self.gradient.data_ptr() == self._gradient_bytes.data_ptr()
        )

    def gradient_unchanged(self, version: int) -> bool:
        """Whether p.grad is what lies in the arena, as far as can be seen but by its bytes.

        `version` of then.
        """
        return self.gradient_in_place() and self.gradient._version == version

    def gradient_pair(self) -> Pair | None:
        """What differs where p.grad is not what lies in the arena, and nothing else tells."""
        return None

    def gradient_checksum(self) -> Tensor:
        """Of its bytes in the arena."""
        flat = torch.empty(0, dtype=torch.uint8, device=self._gradient_bytes.device)
        size = self._gradient_bytes.nbytes
        flat.set_(self._gradient_bytes.untyped_storage(), 0, (size,), (1,))
        return self._device.checksum(flat)

    def _copy_in(self, given: Tensor) -> None:
        if given.layout is not torch.strided:
            raise InvalidArgumentError(
                f"'{self.name}' has a gradient of layout {given.layout}; dmuond takes dense "
                "ones. Use "
                "sparse=False, or give the parameter the route 'trainer'"
            )
        with torch.no_grad():
            self._gradient_bytes.copy_(given.detach())


class ShardedSlot(Slot):
    """A shard of a DTensor: FSDP may replace its local tensor, so it is copied in and out.

    A local tensor that lies in the arena itself needs no copy, as long as nobody replaces it.
    """

    def __init__(
        self,
        routed: Routed,
        index: int,
        holding: Holding,
        grad_dtype: torch.dtype,
        added_dims: frozenset[int],
    ) -> None:
        """added_dims: of the parameter's mesh; what lies there is added up by the daemon."""
        super().__init__(routed, index, holding, grad_dtype)
        self._added_dims = added_dims

    def _local(self) -> Tensor:
        return self.parameter.detach().to_local()

    def write_weight(self) -> None:
        local = self._local()
        if local.data_ptr() != self.weight.data_ptr():
            self.weight.copy_(local)

    def bind_published(self) -> None:
        self._copy_out()

    def accept(self, changed: bool) -> None:
        if changed:
            self._copy_out()

    def value(self) -> Tensor:
        return self._local()

    def weight_changed(self) -> bool:
        return False

    def weight_pair(self) -> Pair | None:
        """By its bytes. A local tensor in the arena itself has nothing to be compared with."""
        local = self._local()
        return None if local.data_ptr() == self.weight.data_ptr() else (local, self.weight)

    def _copy_out(self) -> None:
        local = self._local()
        if local.data_ptr() != self.weight.data_ptr():
            with torch.no_grad():
                local.copy_(self.weight)

    def adopt_gradient(self) -> bool:
        given = self.parameter.grad
        if given is None:
            return False
        if not self.gradient_is_placed():
            # Tensor parallel code leaves parts (of a norm under sequence parallel), or the whole
            # of a shard (of an embedding). Torch's own optimizers do this inside their arithmetic.
            given = given.redistribute(placements=self._placements(given))
            self.parameter.grad = given
        self._copy_in(given.detach().to_local())
        return True

    def gradient_is_placed(self) -> bool:
        """Whether the gradient lies as the parameter does, where it is not added up."""
        given = self.parameter.grad
        return given is None or tuple(given.placements) == self._placements(given)

    def _placements(self, gradient: DTensor) -> tuple[Placement, ...]:
        own = self.parameter.placements
        return tuple(
            gradient.placements[dim]
            if dim in self._added_dims and not gradient.placements[dim].is_shard()
            else own[dim]
            for dim in range(len(own))
        )

    def gradient_unchanged(self, version: int) -> bool:
        return True

    def gradient_pair(self) -> Pair | None:
        """By its bytes: neither its version nor the local tensor's tells."""
        if self.parameter.grad is None:
            return None
        local = self.parameter.grad.detach().to_local()
        return local.to(self.grad_dtype), self._gradient_bytes


def slot_bytes(holding: Holding, dtype: torch.dtype) -> int:
    """Bytes of a slot, up to where the next may begin."""
    size = holding.elements * dtype.itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT
