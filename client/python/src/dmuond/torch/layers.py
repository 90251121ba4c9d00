"""What a parameter is to its layer: the weight of a known class, or what only its name can tell."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import ParametrizationList

_GUESSED_BY_NAME = "guess: by its name"
_GUESSED_BY_NAME_ALONE = "guess: by its name alone; pass the model, or route="
# torch.nn.utils.weight_norm calls what it scales weight_v; spectral_norm and pruning weight_orig.
_WEIGHT_NAMES = ("weight", "weight_v", "weight_orig")
_WEIGHT = re.compile(r"(^|_)weights?(_|$)", re.IGNORECASE)
_BIAS = re.compile(r"(^|_)bias(es)?(_|\d|$)", re.IGNORECASE)
_CONVOLUTIONS_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class Kind(enum.Enum):
    """What a parameter of two or more dimensions is. Rows of a matrix are its outputs."""

    EMBEDDING = enum.auto()
    MATRIX = enum.auto()
    INPUT_ROWS = enum.auto()  # a matrix that its class holds as (inputs, outputs)
    CONVOLUTION = enum.auto()  # a kernel: outputs, inputs of each group, and so on
    TRANSPOSED_CONVOLUTION = enum.auto()  # a kernel: inputs, outputs of each group, and so on
    FOREIGN = enum.auto()  # the `weight` of a class that is not known, or of which none is known
    BARE = enum.auto()  # of another name, so that its meaning is not known


class End(enum.Enum):
    """Whether a layer is where a model ends, as far as structure and names tell."""

    NO = enum.auto()
    HEAD = enum.auto()  # its name says so, or it is the last of a part whose name does
    MODEL = enum.auto()  # the last layer of the model
    ONLY = enum.auto()  # the model has no other
    PART = enum.auto()  # the last of an nn.Sequential beside others, or of a group's module


@dataclass
class Named:
    """A parameter with its place in the model."""

    name: str
    parameter: Tensor
    module: nn.Module | None = None  # that holds it; None where only names were given
    attribute: str = ""
    layer: nn.Module | None = None  # whose weight it is: the module, or what that parametrizes
    end: End = End.NO

    @property
    def guessed_by_name(self) -> str:
        """How a reason says that it goes by the name."""
        return _GUESSED_BY_NAME_ALONE if self.module is None else _GUESSED_BY_NAME

    @property
    def path(self) -> list[str]:
        """Of names, as far as the module that it is the weight of, or the bare parameter."""
        parts = _plain(self.name)
        return parts[:-1] if len(parts) > 1 and parts[-1] in _WEIGHT_NAMES else parts

    @property
    def tensor_name(self) -> str:
        """What the layer calls it."""
        last = _plain(self.name)[-1]
        return "weight" if last in _WEIGHT_NAMES else last

    @property
    def in_block(self) -> bool:
        """A module that is numbered itself, as in an nn.Sequential, is in no block by that."""
        return any(part.isdigit() for part in self.path[:-1])

    @property
    def kind(self) -> Kind:
        layer, name = self.layer, self.tensor_name
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
            return Kind.EMBEDDING
        if isinstance(self.module, ParametrizationList) and not self._stands_for_the_weight():
            return Kind.BARE
        if name == "weight":
            if isinstance(layer, _CONVOLUTIONS_TRANSPOSED):
                return Kind.TRANSPOSED_CONVOLUTION
            if isinstance(layer, nn.modules.conv._ConvNd):
                return Kind.CONVOLUTION
            if isinstance(layer, nn.Linear | nn.Bilinear):
                return Kind.MATRIX
            if any(base.__name__ == "Conv1D" for base in type(layer).__mro__):  # transformers'
                return Kind.INPUT_ROWS
            return Kind.FOREIGN
        of_torch = (nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
        if isinstance(layer, of_torch) and _WEIGHT.search(name):
            return Kind.MATRIX
        return Kind.FOREIGN if layer is None and _WEIGHT.search(name) else Kind.BARE

    @property
    def is_bias(self) -> bool:
        """By its name, which is all that tells one of two dimensions."""
        named = self.path[-1] if self.module is None else self.tensor_name
        return _BIAS.search(named) is not None

    def _stands_for_the_weight(self) -> bool:
        """Whether it has the weight's place: the only original, or what weight_norm scales."""
        assert isinstance(self.module, ParametrizationList)
        normed = isinstance(self.module[0], parametrizations._WeightNorm)
        return self.attribute == "original" or (normed and self.attribute == "original1")


def _plain(name: str) -> list[str]:
    """Of head.parametrizations.weight.original1, head.weight."""
    parts = name.split(".")
    if "parametrizations" in parts[-3:-2]:
        parts[-3:] = parts[-2:-1]
    return parts
