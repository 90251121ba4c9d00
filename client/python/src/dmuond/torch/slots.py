"""A parameter's places in the arenas: where its gradient is read from and its weights arrive.

A slot is a tensor with a storage object of its own over the arena's mapping, so that it has its own
version counter and `torch.save` writes its bytes alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
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


def _references(parameter: Tensor) -> int:
    """How many refer to the tensor p.grad, from Python."""
    gradient = parameter.grad
    return sys.getrefcount(gradient)


_nobodys = torch.zeros(1, device="cpu", requires_grad=True)
_nobodys.grad = torch.zeros(1, device="cpu")
_REFERENCES = _references(_nobodys)  # where nobody holds it


def grad_dtype_of(parameter: Tensor) -> torch.dtype:
    """Of its gradient: the parameter's own, or another in torch versions that have such."""
    return getattr(parameter, "grad_dtype", None) or parameter.dtype


@dataclass(frozen=True)
class Place:
    """Where a slot lies: an arena, by its id, and the byte in it.

    padded: it begins at a multiple of ALIGNMENT, and nobody has what lies between it and the next.
    """

    arena: int
    offset_bytes: int
    padded: bool = True


class Slot:
    """A replicated parameter: it lives in the arena itself, and so does its gradient.

    Attributes: is_lent (p.grad has been `gradient`, and since then nobody has looked whether it is
    still held), arenas (in which it is mapped), and those that the constructor sets.
    """

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

    def map(self, arenas: Mapping[int, View], device: TensorDevice) -> None:
        """Maps the slot into these arenas. Only the parameter may still refer to former ones."""
        self.arenas, self._device = arenas, device
        # Its storage is not the parameter's: share_memory_() of the parameter leaves it here.
        self.weight = self._tensor(self.weight_at, self.parameter.dtype)
        self._make_gradient()
        # The same bytes under another storage: stays there when somebody replaces the slot's data.
        self.gradient_bytes = self._tensor(self.gradient_at, self.grad_dtype)
        self._gradient_address = self.gradient_bytes.data_ptr()
        self._kind = self.weight.dtype, self.weight.shape, self.weight.device

    def _make_gradient(self) -> None:
        self.gradient = self._tensor(self.gradient_at, self.grad_dtype)
        self.is_lent = False
        # While nobody else holds the tensor or its storage.
        self._references = sys.getrefcount(self.gradient)
        self._storage = self.gradient.untyped_storage()
        self._storage_uses = torch._C._storage_Use_Count(self._storage._cdata)

    def _tensor(self, place: Place, dtype: torch.dtype) -> Tensor:
        shape = self.holding.local_shape
        if self.holding.elements == 0:
            return torch.empty(shape, dtype=dtype, device=self.parameter.device)
        contents = self._bytes(place, dtype)
        empty = torch.empty(0, dtype=dtype, device=contents.device)
        return empty.set_(contents.untyped_storage(), 0, shape, self.holding.strides)

    def _bytes(self, place: Place, dtype: torch.dtype) -> Tensor:
        size = self.holding.elements * dtype.itemsize
        return self._device.bytes_at(self.arenas[place.arena], place.offset_bytes, size)

    # --- weights ---

    def write_weight(self) -> None:
        """Writes the parameter's value into the arena, and moves the parameter there."""
        if self.parameter.data_ptr() != self.weight.data_ptr():
            self.weight.copy_(self.parameter.detach())
            self._bind()

    def bind_published(self) -> None:
        """Makes the parameter what the arena holds."""
        if self.parameter.data_ptr() != self.weight.data_ptr():
            self._bind()

    def _bind(self) -> None:
        self.parameter.data = self._tensor(self.weight_at, self.weight.dtype)

    def value(self) -> Tensor:
        return self.parameter.detach()

    def _held(self) -> Tensor:
        """The value, with whatever autograd knows of it."""
        return self.parameter

    def fits(self) -> bool:
        """Whether dtypes, shape and device of the parameter are still those registered."""
        return self._weight_fits() and grad_dtype_of(self.parameter) == self.grad_dtype

    def _weight_fits(self) -> bool:
        now = self._held()
        return (now.dtype, now.shape, now.device) == self._kind

    def check_fits(self) -> None:
        if self.fits():
            return
        if self._weight_fits():
            raise InvalidArgumentError(
                f"'{self.name}' was registered with gradients of {self.grad_dtype}, and its "
                f"grad_dtype is {grad_dtype_of(self.parameter)} now: set it before making the "
                f"optimizer. To go on as before: opt.zero_grad(), and grad_dtype = "
                f"{self.grad_dtype} again"
            )
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
        """Makes p.grad the slot, with its bytes in the arena. False: there is no gradient.

        One of the script's own is copied alone.
        """
        if self.gradient_in_place():
            return True
        stays = self.is_the_scripts()
        given = self.parameter.grad
        if given is None:
            return False
        if given is self.gradient:  # its .data was replaced
            self._copy_in(given)
            self.gradient.data = self.gradient_bytes
            return True
        self.let_go()
        self._copy_in(given)
        if not stays:
            self.parameter.grad, self.is_lent = self.gradient, True
        return True

    def let_go(self) -> None:
        """Gives a former p.grad that somebody still holds memory of its own.

        Called before other bytes come into the arena: what zero_grad() has taken from the parameter
        is its holder's, as with torch.
        """
        self.is_lent = False
        is_held = sys.getrefcount(self.gradient) > self._references
        if is_held:
            self.gradient.data = self.gradient.detach().clone()
        if is_held or self.gradient.data_ptr() != self._gradient_address:
            self._make_gradient()

    def is_the_scripts(self) -> bool:
        """Whether p.grad is the script's own tensor, which it may go on to use in p.grad's stead.

        So is a part of a larger buffer, and one with a graph behind it. Else autograd has made it,
        and nobody has it but the parameter.
        """
        given = self.parameter.grad
        if given is None or given is self.gradient:
            return False
        if given.layout is not torch.strided or given.requires_grad or given._is_view():
            return True
        if given.untyped_storage().nbytes() != given.nbytes:
            return True
        del given
        return _references(self.parameter) > _REFERENCES

    def is_viewed(self) -> bool:
        """Whether another tensor (a view, p.grad.data) or array shares the memory of p.grad's."""
        if not self.is_lent or self.parameter.grad is self.gradient:
            return False
        return torch._C._storage_Use_Count(self._storage._cdata) > self._storage_uses

    def gradient_in_place(self) -> bool:
        slot = self.gradient
        return self.parameter.grad is slot and slot.data_ptr() == self._gradient_address

    def gradient_unchanged(self, version: int) -> bool:
        """Whether p.grad is what lies in the arena, as far as can be seen but by its bytes.

        `version` of then.
        """
        return self.gradient_in_place() and self.gradient._version == version

    def gradient_checksum(self) -> Tensor:
        """Of its bytes in the arena."""
        flat = torch.empty(0, dtype=torch.uint8, device=self.gradient_bytes.device)
        size = self.gradient_bytes.nbytes
        flat.set_(self.gradient_bytes.untyped_storage(), 0, (size,), (1,))
        return self._device.checksum(flat)

    def _copy_in(self, given: Tensor) -> None:
        if given.layout is not torch.strided:
            raise InvalidArgumentError(
                f"'{self.name}' has a gradient of layout {given.layout}; dmuond takes dense "
                "ones. Use "
                "sparse=False, or give the parameter the route 'trainer'"
            )
        # Only of a backward pass that makes a graph does a gradient require one.
        self.gradient_bytes.copy_(given.detach() if given.requires_grad else given)


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
        pass  # take_shards() copies it

    def value(self) -> Tensor:
        return self._local()

    def is_the_scripts(self) -> bool:
        return False  # whoever made it, it stays p.grad

    def weight_pair(self) -> Pair | None:
        """What differs where somebody else has touched the weight: nothing but its bytes tells.

        None: the local tensor lies in the arena itself, and there is nothing to compare it with.
        """
        local = self._held()
        return None if local.data_ptr() == self.weight.data_ptr() else (local, self.weight)

    def adopt_gradient(self) -> bool:
        shard = self.given_shard()
        if shard is not None:
            self._copy_in(shard)
        return shard is not None

    def given_shard(self) -> Tensor | None:
        """What lies here of p.grad, which is placed as the parameter is from now on."""
        given = self.parameter.grad
        if given is None:
            return None
        if not self.gradient_is_placed():
            # Tensor parallel code leaves parts (of a norm under sequence parallel), or the whole
            # of a shard (of an embedding). Torch's own optimizers do this inside their arithmetic.
            given = given.redistribute(placements=self._placements(given))
            self.parameter.grad = given
        return given._local_tensor

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
        """What differs where p.grad is not what lies in the arena: nothing but its bytes tells."""
        if self.parameter.grad is None:
            return None
        return self.parameter.grad._local_tensor.to(self.grad_dtype), self.gradient_bytes


def adopt(slots: Iterable[Slot]) -> list[int]:
    """Adopts the gradients of all; the indices of those that have none."""
    whole, shards = [], []
    for slot in slots:
        (shards if isinstance(slot, ShardedSlot) else whole).append(slot)
    return [slot.index for slot in whole if not slot.adopt_gradient()] + _adopt_shards(shards)


@torch.no_grad()
def _adopt_shards(shards: list[ShardedSlot]) -> list[int]:
    """By one call of torch: one for each shard takes the host longer than the device."""
    given = [(slot, slot.given_shard()) for slot in shards]
    there = [(slot, shard) for slot, shard in given if shard is not None]
    try:
        if there:
            into = [slot.gradient_bytes for slot, _ in there]
            torch._foreach_copy_(into, [shard for _, shard in there])
    except RuntimeError:  # _copy_in() says of which gradient
        for slot, shard in there:
            slot._copy_in(shard)
    return [slot.index for slot, shard in given if shard is None]


def part_views(slots: Sequence[Slot]) -> None:
    """Gives gradients memory of their own that are views of others' in the arena.

    Called before other bytes come into the arena.
    """
    lent = [slot for slot in slots if slot.is_lent]
    if not any(slot.is_viewed() for slot in lent):
        return
    addresses = {slot.gradient.untyped_storage().data_ptr() for slot in lent}
    for slot in slots:
        given = slot.parameter.grad
        if given is None or given is slot.gradient or isinstance(given, DTensor):
            continue
        if given.layout is torch.strided and given.untyped_storage().data_ptr() in addresses:
            slot.parameter.grad = given.detach().clone()


@torch.no_grad()
def take_shards(shards: Iterable[ShardedSlot]) -> None:
    """Takes the arena's weights for the local tensors'."""
    pairs = [pair for slot in shards if (pair := slot.weight_pair())]
    if pairs:
        torch._foreach_copy_([local for local, _ in pairs], [slot for _, slot in pairs])


def slot_bytes(holding: Holding, dtype: torch.dtype) -> int:
    """Bytes of a slot, up to where the next may begin."""
    size = holding.elements * dtype.itemsize
    return -(-size // ALIGNMENT) * ALIGNMENT
