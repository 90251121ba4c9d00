"""Which matrices a parameter consists of, where it is more than one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dmuond import types
from dmuond.errors import InvalidArgumentError


@dataclass(frozen=True)
class RowBlocks:
    """Consecutive blocks of rows, as in a fused QKV projection; their sum is the number of rows."""

    rows: tuple[int, ...]

    def __init__(self, *rows: int) -> None:
        object.__setattr__(self, "rows", tuple(rows))


@dataclass(frozen=True)
class Heads:
    """Equal blocks of rows, one for each head."""

    count: int


@dataclass(frozen=True)
class Experts:
    """Dimensions before the last two are a batch of matrices."""


@dataclass(frozen=True)
class Flatten:
    """Dimensions after the first are the columns of one matrix, as of a convolution's kernel."""


View = RowBlocks | Heads | Experts | Flatten
Views = Mapping[str, View | str]


def parse(view: View | str, name: str, shape: tuple[int, ...]) -> types.MatrixView:
    """The message for a view.

    Words: "qkv" (three equal blocks of rows), "heads:N", "experts", "flatten".
    """
    if view == "qkv":
        if len(shape) < 2 or shape[-2] % 3:
            raise InvalidArgumentError(
                f"views: '{name}' of shape {list(shape)} has no three equal blocks of rows; for "
                "grouped "
                "queries give RowBlocks(query_rows, key_rows, value_rows)"
            )
        view = RowBlocks(*[shape[-2] // 3] * 3)
    elif isinstance(view, str) and view.startswith("heads:") and view[6:].isdigit():
        view = Heads(int(view[6:]))
    elif view == "experts":
        view = Experts()
    if isinstance(view, RowBlocks):
        return types.MatrixView(kind=types.MatrixView.KIND_ROW_BLOCKS, row_blocks=view.rows)
    if isinstance(view, Heads):
        return types.MatrixView(kind=types.MatrixView.KIND_HEADS, heads=view.count)
    if isinstance(view, Experts) or flattens(view):
        return types.MatrixView(kind=types.MatrixView.KIND_WHOLE)
    raise InvalidArgumentError(
        f"views: {view!r} for '{name}' is not RowBlocks, Heads, Experts, Flatten, 'qkv', "
        "'heads:N', 'experts' or 'flatten'"
    )


def flattens(view: View | str | None) -> bool:
    """Whether the parameter is registered as the matrix that Flatten makes of it."""
    return view == "flatten" or isinstance(view, Flatten)
