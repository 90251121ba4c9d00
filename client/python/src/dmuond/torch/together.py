"""Replicas that are looked at, or whose gradients are copied, together.

An answer of torch's about one tensor takes a tenth of a microsecond, and a call of a Python
function for each tensor as much again: of small tensors that is most of what a step costs. So each
question is put to all of them by one map, and only where answers differ does somebody look whose.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from dmuond.torch.host_tensors import words_at
from dmuond.torch.samples import edges
from dmuond.torch.slots import Slot

_address = Tensor.data_ptr
# Shape, and the gradient's dtype where torch lets programs set one.
_kind = operator.attrgetter(*(["grad_dtype"] if hasattr(Tensor, "grad_dtype") else []), "shape")
_gradient, _version = operator.attrgetter("grad"), operator.attrgetter("_version")
_in_arena, _is_lent = operator.attrgetter("gradient"), operator.attrgetter("is_lent")
_is_dense, _size_bytes = Tensor.is_contiguous, operator.attrgetter("nbytes")

_WORD_BYTES = 4
_LOOKS = 8  # at words of each small gradient that was signalled


class Replicas:
    """Notes where the weights of replicas lie and their versions, and tells of changes since."""

    def __init__(self, slots: Iterable[Slot]) -> None:
        """Nothing is noted yet: note() all of them first."""
        self._slots = list(slots)
        self._parameters = [slot.parameter for slot in self._slots]
        self._position = {slot.index: position for position, slot in enumerate(self._slots)}
        self._kinds = list(map(_kind, self._parameters))
        self._addresses = [0] * len(self._slots)
        self._versions = [0] * len(self._slots)

    def moved(self) -> list[Slot]:
        """Those that lie elsewhere than noted, or are of another shape or gradient's dtype.

        A tensor that is converted moves.
        """
        addresses = list(map(_address, self._parameters))
        kinds = list(map(_kind, self._parameters))
        if addresses == self._addresses and kinds == self._kinds:
            return []
        then = zip(self._addresses, self._kinds, strict=True)
        return self._where(zip(addresses, kinds, strict=True), then)

    def changed(self) -> list[Slot]:
        """Those that somebody may have touched, as far as addresses and versions tell."""
        addresses = list(map(_address, self._parameters))
        versions = list(map(_version, self._parameters))
        if addresses == self._addresses and versions == self._versions:
            return []
        then = zip(self._addresses, self._versions, strict=True)
        return self._where(zip(addresses, versions, strict=True), then)

    def note(self, slots: Iterable[Slot]) -> None:
        """From here on changes of these are noticed."""
        for slot in slots:
            position = self._position[slot.index]
            self._addresses[position] = slot.parameter.data_ptr()
            self._versions[position] = slot.parameter._version

    def written(self) -> None:
        """The daemon has written all of them, which counts as a write of an optimizer's own.

        A change that changed() has not seen yet is still one.
        """
        torch.autograd.graph.increment_version(self._parameters)
        self._versions = [version + 1 for version in self._versions]

    def _where(self, now: Iterable[object], then: Iterable[object]) -> list[Slot]:
        differs = map(operator.ne, now, then)
        return list(itertools.compress(self._slots, differs))


class SmallGradients:
    """Gradients of mapped replicas, copied into the arena by one call of torch.

    p.grad stays the tensor that autograd has made.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.slots = list(slots)
        self._parameters = [slot.parameter for slot in self.slots]
        self._bytes = [slot.gradient_bytes for slot in self.slots]
        self._found: list[Tensor | None] = []  # p.grad of each, when it was copied
        self._given: list[Tensor] = []  # those that there were
        self._addresses: list[int] = []
        self._versions: list[int] = []
        self._words = _WordSamples(self.slots)

    def copy(self) -> bool:
        """Copies those that there are. False: some need adopt_gradient(), and all may have it."""
        found, into = list(map(_gradient, self._parameters)), self._bytes
        if any(map(_is_lent, self.slots)):
            if any(map(operator.is_, found, map(_in_arena, self.slots))):
                return False  # zero_grad(set_to_none=False)
            for slot in self.slots:
                slot.let_go()
        given: list[Tensor] = found
        if any(map(operator.is_, found, itertools.repeat(None))):
            there = [gradient is not None for gradient in found]
            given, into = (
                list(itertools.compress(found, there)),
                list(itertools.compress(into, there)),
            )
        try:
            if given:
                with torch.no_grad():  # a gradient of which a graph was made requires one
                    torch._foreach_copy_(into, given)
        except RuntimeError:  # not dense, or of another shape: adopt_gradient() says of which
            return False
        self._found, self._given = found, given
        return True

    def note(self) -> None:
        """From here on changed() tells whether somebody has touched what was copied."""
        self._addresses = list(map(_address, self._given))
        self._versions = list(map(_version, self._given))
        self._words.note(self._found, self._given, self._addresses)

    def changed(self) -> list[Slot]:
        """Whose p.grad is not what was copied, as far as is seen: of its bytes some are compared.

        Those are at other places each time (samples.py).
        """
        now = list(map(_gradient, self._parameters))
        if (
            all(map(operator.is_, now, self._found))
            and list(map(_address, self._given)) == self._addresses
            and list(map(_version, self._given)) == self._versions
        ):
            return [self.slots[position] for position in self._words.changed()]
        noted = iter(zip(self._given, self._addresses, self._versions, strict=True))
        of = [None if gradient is None else next(noted) for gradient in self._found]
        return [
            slot
            for slot, gradient, then in zip(self.slots, now, of, strict=True)
            if not (
                gradient is then
                if then is None or gradient is None
                else (gradient is then[0] and (gradient.data_ptr(), gradient._version) == then[1:])
            )
        ]

    def absent(self) -> list[int]:
        """Indices of the slots that had no gradient to be copied."""
        if len(self._given) == len(self.slots):
            return []
        pairs = zip(self.slots, self._found, strict=True)
        return [slot.index for slot, gradient in pairs if gradient is None]

    def forget(self) -> None:
        """Lets the gradients go."""
        self._found, self._given = [], []
        self._words.forget()


class _WordSamples:
    """Of small gradients on the host, each in memory of its own; places as in samples.py.

    A gradient that does not lie as its parameter does is not looked at.
    """

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._sizes_bytes = [slot.holding.elements * slot.grad_dtype.itemsize for slot in slots]
        begins: list[int] = []
        sizes: list[int] = []
        positions: list[int] = []  # of the slot
        for position, size_bytes in enumerate(self._sizes_bytes):
            words = size_bytes // _WORD_BYTES
            for begin, end in itertools.pairwise(edges(0, words, min(words, _LOOKS))):
                begins.append(begin)
                sizes.append(end - begin)
                positions.append(position)
        self._begins, self._sizes, self._positions = (
            np.array(values, np.int64) for values in (begins, sizes, positions)
        )
        self._turn = np.random.default_rng(0).integers(1 << 40, size=len(begins))
        self.forget()

    def note(
        self, found: Sequence[Tensor | None], given: Sequence[Tensor], addresses: Sequence[int]
    ) -> None:
        """found: each slot's gradient. given: those that there are, and where.

        REQUIRES: they stay until forget() is called.
        """
        self._turn += 1
        begins = np.array(addresses, np.int64)
        positions = range(len(found))
        if len(given) < len(found):
            positions = [position for position in positions if found[position] is not None]
        sizes_bytes = [self._sizes_bytes[position] for position in positions]
        if not all(map(_is_dense, given)) or list(map(_size_bytes, given)) != sizes_bytes:
            pairs = zip(given, positions, strict=True)
            begins[[not self._has_all(gradient, position) for gradient, position in pairs]] = 0
        of_slots = np.zeros(len(found), np.int64)
        of_slots[positions] = begins
        rows = of_slots[self._positions]
        at = rows + _WORD_BYTES * (self._begins + self._turn % self._sizes)
        self._of, self._at = self._positions[rows != 0], at[rows != 0]
        self._noted = words_at(self._at)

    def changed(self) -> list[int]:
        """Positions of the slots that have other words than were noted."""
        differ = words_at(self._at) != self._noted
        return sorted(set(self._of[differ].tolist())) if differ.any() else []

    def forget(self) -> None:
        self._at = self._of = np.zeros(0, np.int64)
        self._noted = words_at(self._at)

    def _has_all(self, gradient: Tensor, position: int) -> bool:
        """Whether all of the slot's words lie behind its address."""
        into = self._slots[position].gradient_bytes
        lies_alike = gradient.is_contiguous() or gradient.stride() == into.stride()
        return lies_alike and gradient.nbytes == into.nbytes
