"""A parameter's places in the arenas: where its gradient is read from and its weights arrive.

A slot is a tensor with a storage object of its own over the arena's mapping, so that it has its own
version counter and `torch.save` writes its bytes alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement

from dmuond.errors import InvalidArgumentError
from dmuond.memory import View
from dmuond.torch.fragments import SHARDS, Holding
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
        self._gradient_address = self._gradient_bytes.data_ptr()
        self._kind = self.weight.dtype, self.weight.shape, self.weight.device

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

    def note_weight(self) -> None:
        """From here on weight_changed() tells of changes."""
        self._address = self.parameter.data_ptr()
        self._version = self.parameter._version

    def value(self) -> Tensor:
        return self.parameter.detach()

    def _held(self) -> Tensor:
        """The value, with whatever autograd knows of it."""
        return self.parameter

    def weight_changed(self) -> bool:
        """Whether somebody else has touched the weight, as far as can be seen but by its bytes."""
        moved = self.parameter.data_ptr() != self._address
        return moved or self.parameter._version != self._version

    def weight_pair(self) -> Pair | None:
        """What differs where somebody else has touched the weight, of which nothing else tells."""
        return None

    def fits(self) -> bool:
        """Whether the parameter still has the dtype, shape and device that were registered."""
        now = self._held()
        return (now.dtype, now.shape, now.device) == self._kind

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
        given, slot = self.parameter.grad, self.gradient
        if given is None:
            return False
        in_place = slot.data_ptr() == self._gradient_address
        if given is slot and in_place:
            return True
        self._copy_in(given)
        if not in_place:  # its .data was replaced
            slot.data = self._gradient_bytes
        if given is not slot:
            self.parameter.grad = slot
        return True

    def gradient_in_place(self) -> bool:
        slot = self.gradient
        return self.parameter.grad is slot and slot.data_ptr() == self._gradient_address

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
        # Only of a backward pass that makes a graph does a gradient require one.
        self._gradient_bytes.copy_(given.detach() if given.requires_grad else given)


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

    def _held(self) -> Tensor:
        # detach() and to_local() take ten times as long as all that is asked of it.
        return self.parameter._local_tensor

    def _local(self) -> Tensor:
        return self._held().detach()

    def write_weight(self) -> None:
        local = self._local()
        if local.data_ptr() != self.weight.data_ptr():
            self.weight.copy_(local)

    def bind_published(self) -> None:
        pass  # accept() copies it

    def note_weight(self) -> None:
        pass

    def value(self) -> Tensor:
        return self._local()

    def weight_changed(self) -> bool:
        return False

    def weight_pair(self) -> Pair | None:
        """By its bytes. A local tensor in the arena itself has nothing to be compared with."""
        local = self._local()
        return None if local.data_ptr() == self.weight.data_ptr() else (local, self.weight)

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
            if dim in self._added_dims and not isinstance(gradient.placements[dim], SHARDS)
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


def adopt(slots: Iterable[Slot]) -> list[int]:
    """Adopts the gradients of all; the indices of those that have none."""
    absent, others = [], []
    for slot in slots:
        gradient, own = slot.parameter.grad, slot.gradient
        if gradient is None:
            absent.append(slot.index)
        elif isinstance(slot, ShardedSlot) or gradient is own:
            slot.adopt_gradient()
        else:
            others.append(slot)
    given = copy_gradients(others)
    for slot, copied in zip(others, given, strict=True):
        if copied is None:
            slot.adopt_gradient()
            continue
        if slot.gradient.data_ptr() != slot._gradient_address:  # its .data was replaced
            slot.gradient.data = slot._gradient_bytes
        slot.parameter.grad = slot.gradient
    return absent


def copy_gradients(slots: Sequence[Slot]) -> list[Tensor | None]:
    """Copies replicas' gradients into the arena together; what p.grad was.

    None: it is absent, or lies there, or is of a kind that adopt_gradient() has to look at.
    """
    given, into, copied = [], [], []
    for slot in slots:
        gradient = slot.parameter.grad
        if (
            gradient is None
            or gradient is slot.gradient
            or gradient.requires_grad
            or gradient.layout is not torch.strided
            or (slot.parameter.data_ptr() != slot._address and not slot.fits())
        ):
            given.append(None)
            continue
        given.append(gradient)
        into.append(slot._gradient_bytes)
        copied.append(gradient)
    if copied:
        torch._foreach_copy_(into, copied)
    return given


def accept(slots: Collection[Slot], changed: bool) -> None:
    """Takes the arena's weights for the parameters'; changes from here on are noticed.

    changed: they are others than before.
    """
    if changed:
        replicas = [slot.parameter for slot in slots if not isinstance(slot, ShardedSlot)]
        torch.autograd.graph.increment_version(replicas)  # as an optimizer's own writes would
        shards = [pair for slot in slots if (pair := slot.weight_pair())]
        if shards:
            with torch.no_grad():
                torch._foreach_copy_([local for local, _ in shards], [slot for _, slot in shards])
    for slot in slots:
        if not isinstance(slot, ShardedSlot):
            slot._address = slot.parameter.data_ptr()
            slot._version = slot.parameter._version


def moved(replicas: Iterable[Slot]) -> list[Slot]:
    """Those that lie elsewhere than when their weights were noted, or in another shape.

    A tensor that is converted moves. Here and below a call for each slot would be most of the cost.
    """
    return [
        slot
        for slot in replicas
        if slot.parameter.data_ptr() != slot._address
        or slot.parameter.shape != slot.holding.local_shape
    ]


def changed(replicas: Iterable[Slot]) -> list[Slot]:
    """Those of which weight_changed() is true."""
    return [
        slot
        for slot in replicas
        if slot.parameter._version != slot._version or slot.parameter.data_ptr() != slot._address
    ]


def slot_bytes(holding: Holding, dtype: torch.dtype) -> int:
    """Bytes of a slot, up to where the next may begin."""
    size = holding.elements * dtype.itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT
