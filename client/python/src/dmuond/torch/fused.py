"""Weights that hold several matrices: which view takes them apart, and which would do so wrongly.

Shapes of the layers beside a weight tell how high its blocks are.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from torch import nn
from torch.nn.parameter import is_lazy

from dmuond.torch.layers import Kind, Named
from dmuond.torch.views import Heads, RowBlocks, View

_QKV = re.compile(r"qkv|^c_attn$|^query_key_value$", re.IGNORECASE)
# Of GPT-NeoX, Bloom and Megatron: each head's query, key and value follow each other.
_ALTERNATING = re.compile(r"^(query_key_value|linear_qkv)$")
_GATE_UP = re.compile(r"gate_?(and_)?up|up_?(and_)?gate|^w1[23]$", re.IGNORECASE)
_OF_GATES = re.compile(r"weight_[ih]h(_|$)")
_AFTER_ATTENTION = ("o_proj", "out_proj", "c_proj", "proj", "dense", "wo", "to_out.0", "merge")
_ALTERNATE = (
    "each head's query, key and value may follow each other; if so, 'heads:N' with three times the "
    "number of heads makes a matrix of each"
)
_INPUT_ROWS = "its rows are inputs, and what is fused lies along its columns, which no view cuts"


class Neighbours:
    """The shapes of all parameters, by name."""

    def __init__(self, members: Iterable[Named]) -> None:
        self._shapes = {
            ".".join(n.path): tuple(n.parameter.shape) for n in members if not is_lazy(n.parameter)
        }

    def of(self, named: Named, *names: str) -> tuple[int, ...]:
        """Of the first of these that is beside it in its module; empty where there is none."""
        beside = named.path[:-1]
        found = (self._shapes.get(".".join([*beside, name])) for name in names)
        return next((shape for shape in found if shape), ())


def advice(named: Named, near: Neighbours) -> str:
    """What to say of a weight that has no view. Empty: it does not look fused."""
    blocks = _blocks(named, near)
    if blocks is None:
        return ""
    if isinstance(blocks, str):
        return f"looks fused, but no view is sure to fit: {blocks}"
    # A name alone does not tell whether they alternate.
    if_so = ", where queries, keys and values follow each other" if _is_qkv(named) else ""
    return f"looks fused: see views=, with {_rows(blocks)}{if_so}"


def refusal(named: Named, view: View | str, near: Neighbours) -> str:
    """Why a view would cut this weight wrongly. Empty: nothing speaks against it."""
    by_rows = isinstance(view, RowBlocks | Heads) or view == "qkv" or str(view).startswith("heads:")
    if by_rows and _has_input_rows(named, near):
        return f"{_INPUT_ROWS}: leave the view away"
    if view != "qkv":
        return ""
    if _ALTERNATING.search(named.path[-1]):
        return _ALTERNATE
    blocks = _blocks(named, near)
    if isinstance(blocks, list) and len(blocks) == 3 and len(set(blocks)) > 1:
        return f"its blocks are not equal: write {_rows(blocks)}"
    return ""


def _is_qkv(named: Named) -> bool:
    return _QKV.search(named.path[-1]) is not None


def _rows(blocks: list[int]) -> str:
    return f"RowBlocks({', '.join(map(str, blocks))})"


def _blocks(named: Named, near: Neighbours) -> list[int] | str | None:
    """Rows of each block, or why they are not known. None: it does not look fused."""
    rows, layer, name = named.parameter.shape[-2], named.layer, named.path[-1]
    if isinstance(layer, nn.RNNBase | nn.RNNCellBase):
        gates = _gates(layer) if _OF_GATES.match(named.tensor_name) else 1
        return [rows // gates] * gates if gates > 1 else None
    if layer is None and _OF_GATES.match(named.tensor_name):
        return "an LSTM has four blocks of rows, a GRU three"
    if named.tensor_name == "in_proj_weight":  # nn.MultiheadAttention's
        return [rows // 3] * 3
    if found := _of_mamba(named, near):
        return found
    if not (_is_qkv(named) or _GATE_UP.search(name)):
        return None
    if _has_input_rows(named, near):
        return _INPUT_ROWS
    if _GATE_UP.search(name):
        return _halves(named, near)
    return _of_attention(named, near)


def _gates(layer: nn.Module) -> int:
    if isinstance(layer, nn.LSTM | nn.LSTMCell):
        return 4
    return 3 if isinstance(layer, nn.GRU | nn.GRUCell) else 1


def _halves(named: Named, near: Neighbours) -> list[int] | str | None:
    rows = named.parameter.shape[-2]
    if getattr(named.module, "is_concatenated", True) is False:  # transformers' experts
        return "gate and up alternate row by row"
    if named.kind not in (Kind.MATRIX, Kind.FOREIGN) and not near.of(named, "down_proj", "w2"):
        return "which dimension is its outputs is not known"
    return None if rows % 2 else [rows // 2] * 2


def _of_attention(named: Named, near: Neighbours) -> list[int] | str:
    rows, columns = named.parameter.shape[-2:]
    after = near.of(named, *_AFTER_ATTENTION)
    queries = after[1] if len(after) == 2 else 0
    if _ALTERNATING.search(named.path[-1]):
        return _ALTERNATE
    if queries and rows > queries and (rows - queries) % 2 == 0:
        return [queries, (rows - queries) // 2, (rows - queries) // 2]
    if not queries and rows == 3 * columns:
        return [columns] * 3
    return "RowBlocks(queries, keys, values) needs the rows of each"


def _of_mamba(named: Named, near: Neighbours) -> list[int] | None:
    """Of a state space model, which is told by its A_log."""
    decays, out = near.of(named, "A_log"), near.of(named, "out_proj")
    if not decays or len(out) != 2:
        return None
    name, rows, inner = named.path[-1], named.parameter.shape[0], out[1]
    if name == "in_proj" and rows == 2 * inner:
        return [inner, inner]
    mixed = near.of(named, "conv1d")
    if name == "in_proj" and mixed and len(decays) == 1 and rows == inner + mixed[0] + decays[0]:
        state = (mixed[0] - inner) // 2
        return [inner, inner, state, state, decays[0]]
    steps = near.of(named, "dt_proj")
    if name == "x_proj" and len(decays) == 2 and steps and rows == steps[1] + 2 * decays[1]:
        return [steps[1], decays[1], decays[1]]
    return None


def _has_input_rows(named: Named, near: Neighbours) -> bool:
    """Whether it is held as (inputs, outputs): by its class, or by shapes."""
    if named.kind in (Kind.INPUT_ROWS, Kind.MATRIX):
        return named.kind is Kind.INPUT_ROWS
    told = getattr(named.module, "is_transposed", None)  # transformers' experts
    if isinstance(told, bool):
        return told
    rows, columns = named.parameter.shape[-2:]
    down = near.of(named, "down_proj", "w2")
    if _GATE_UP.search(named.path[-1]) and len(down) == named.parameter.ndim:
        return columns == 2 * down[-2] and rows != 2 * down[-1]
    return _is_qkv(named) and columns == 3 * rows
