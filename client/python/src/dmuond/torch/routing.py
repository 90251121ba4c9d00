"""Which optimizer a parameter gets, and why: every route has a reason."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from dmuond import types
from dmuond.errors import InvalidArgumentError
from dmuond.torch import fused
from dmuond.torch import views as matrix_views
from dmuond.torch.layers import End, Kind, Named

ROUTES = {
    "muon": types.ROUTE_MUON,
    "adamw": types.ROUTE_ADAMW,
    "trainer": types.ROUTE_TRAINER,
}
RouteResult = str | tuple[str, str] | None
RouteCallable = Callable[[str, Tensor], RouteResult]
Pattern = str | re.Pattern
RouteRules = RouteCallable | Sequence[tuple[Pattern, str] | RouteCallable]

_EMBEDDING = re.compile(r"embed", re.IGNORECASE)
_EMBEDDING_PART = re.compile(r"embed|(^|_)emb(s|_|$)|^w[tp]e$", re.IGNORECASE)
_EMBEDDING_OUTSIDE_BLOCKS = re.compile(r"^(tok|token|pos|position|vocab)_", re.IGNORECASE)
_POSITIONS = re.compile(r"(^|[._])(pos|position|positions|positional|wpe)([._]|$)", re.IGNORECASE)
_GUESSED_BY_ROWS = "guess: as many rows as the embedding has; route= says otherwise"
_LAST_LAYER = "guess: the model's last layer; route= says otherwise"
_LAST_NAME = "guess: the last of the names; pass the model, or route="
_MAYBE_A_HEAD = {
    End.ONLY: "guess: the only layer may be an output head; see route=",
    End.PART: "guess: the last layer of a part or group may be an output head; see route=",
}
# torch.nn.utils.parametrizations.weight_norm calls its magnitudes original0; the older
# torch.nn.utils.weight_norm calls them weight_g.
_MAGNITUDE_NAMES = ("original0", "weight_g")
# A bare parameter with one of these names is taken for a matrix, by a guess.
_MATRIX = re.compile(r"(^|_)(\w+_proj|qkv|kernel|w\d|w_?[qkvo]|(w|lora)_\w|fc\d?)$", re.IGNORECASE)
_SIDE_UNKNOWN = " (guess: its outputs are dimension 0, as of all but transposed convolutions)"
_CONVOLUTIONS = (Kind.CONVOLUTION, Kind.TRANSPOSED_CONVOLUTION)


@dataclass
class Routed:
    """A parameter with its route."""

    named: Named
    route: str
    reason: str
    view: types.MatrixView = field(default_factory=types.MatrixView)
    # Registered as a matrix: this dimension's rows, and all the rest. None: as it is.
    rows: int | None = None


def matches(pattern: Pattern, name: str) -> bool:
    """Regular expressions search; strings are shell patterns of the whole name."""
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def _is_magnitude(named: Named) -> bool:
    """Whether it has weight_norm's lengths, one number for each row (or what `dim` says)."""
    wide = [size for size in named.parameter.shape if size != 1]
    return named.name.rpartition(".")[2] in _MAGNITUDE_NAMES and len(wide) < 2


def _embedding_reason(named: Named) -> str:
    """Empty: it is none. Where the layer's class does not tell, the name does: fail closed."""
    if named.kind is Kind.EMBEDDING:
        return "embedding"
    if named.kind not in (Kind.FOREIGN, Kind.BARE):
        return ""
    layer = type(named.layer).__name__
    if named.layer is not None and named.kind is Kind.FOREIGN and _EMBEDDING.search(layer):
        return f"embedding (guess: by its class, {layer})"
    looks_so = any(_EMBEDDING_PART.search(part) for part in named.path) or (
        _EMBEDDING_OUTSIDE_BLOCKS.search(named.path[-1]) and not named.in_block
    )
    return f"embedding ({named.guessed_by_name})" if looks_so else ""


def _checked_rules(rules: Sequence[tuple[Pattern, str] | RouteCallable]) -> list:
    for rule in [rules] if isinstance(rules, str) else rules:
        pair = isinstance(rule, tuple | list) and len(rule) == 2
        if not callable(rule) and not (pair and isinstance(rule[0], str | re.Pattern)):
            raise InvalidArgumentError(
                f"route: {rule!r} is neither a function nor (pattern, route)"
            )
    return list(rules)


class Router:
    """Applies rules in order, then the defaults."""

    def __init__(
        self,
        rules: RouteRules | None,
        views: matrix_views.Views | None,
        include_frozen: bool = False,
        conv: str = "adamw",
    ) -> None:
        """include_frozen: parameters without requires_grad are routed as the others are.

        conv: the route of convolutions' kernels, by default.
        """
        if conv not in ("adamw", "muon"):
            raise InvalidArgumentError(f"conv={conv!r} is neither 'adamw' nor 'muon'")
        self._include_frozen = include_frozen
        self._conv = conv
        self._rules = [rules] if callable(rules) else _checked_rules(rules or ())
        if not isinstance(views or {}, Mapping):
            raise InvalidArgumentError(f"views={views!r} is not a dict of pattern and view")
        self._views = dict(views or {})
        self._used: set[int] = set()
        self._used_views: set[Pattern] = set()
        self._neighbours = fused.Neighbours(())
        self._vocabularies: set[int] = set()

    def route(self, parameters: Iterable[Named]) -> list[Routed]:
        found = list(parameters)
        self._neighbours = fused.Neighbours(found)
        self._vocabularies |= {
            named.parameter.shape[0]
            for named in found
            if named.parameter.ndim == 2
            and _embedding_reason(named)
            and not _POSITIONS.search(named.name)
        }
        routed = [self._route_one(named) for named in found]
        self._check_all_used()
        return routed

    def _route_one(self, named: Named) -> Routed:
        if isinstance(named.parameter, nn.parameter.UninitializedTensorMixin):
            raise InvalidArgumentError(
                f"'{named.name}' of a lazy module has no shape yet: run the model once before "
                "making the optimizer"
            )
        if not named.parameter.requires_grad and not self._include_frozen:
            return Routed(named, "trainer", "frozen (include_frozen=True registers it)")
        view = self._view_of(named)
        flattens = matrix_views.flattens(view)
        route, reason = self._by_rule(named) or self._by_default(named, view)
        if route not in ROUTES:
            raise InvalidArgumentError(
                f"route of '{named.name}' is '{route}'; there are {', '.join(ROUTES)}"
            )
        shape = tuple(named.parameter.shape)
        if route == "muon" and len(shape) < 2:
            raise InvalidArgumentError(
                f"route of '{named.name}' is muon, but its shape is {list(shape)}: Muon needs "
                "matrices"
            )
        if view is not None and route != "muon":
            remedy = (
                'flatten all convolutions by conv="muon", or the others one by one'
                if flattens and named.kind not in _CONVOLUTIONS
                else "give it the route muon, or take the view away"
            )
            raise InvalidArgumentError(
                f"'{named.name}' has a view but its route is {route} ({reason}); {remedy}"
            )
        if route != "muon" or (view is None and named.kind not in _CONVOLUTIONS):
            return Routed(named, route, reason)
        if view is None or flattens:
            if ungrouped := self._grouped(named):
                raise InvalidArgumentError(
                    f"'{named.name}' cannot be flattened: {ungrouped}; it can have the route adamw"
                )
            rows = int(named.kind is Kind.TRANSPOSED_CONVOLUTION)
            whole = types.MatrixView(kind=types.MatrixView.KIND_WHOLE)
            return Routed(named, route, reason, whole, rows)
        if wrong := fused.refusal(named, view, self._neighbours):
            raise InvalidArgumentError(f"views: {view!r} would cut '{named.name}' wrongly: {wrong}")
        return Routed(named, route, reason, matrix_views.parse(view, named.name, shape))

    def _by_rule(self, named: Named) -> tuple[str, str] | None:
        for index, rule in enumerate(self._rules):
            if callable(rule):
                result = rule(named.name, named.parameter)
                if result is None:
                    continue
                if isinstance(result, str):
                    return result, "rule of the caller"
                if not isinstance(result, tuple) or len(result) != 2:
                    raise InvalidArgumentError(
                        f"route: the rule answers {result!r} for '{named.name}'; it must be a "
                        "route, (route, reason) or None"
                    )
                return result
            pattern, route = rule
            if matches(pattern, named.name):
                self._used.add(index)
                text = pattern.pattern if isinstance(pattern, re.Pattern) else pattern
                return route, f"rule '{text}'"
        return None

    def _by_default(self, named: Named, view: matrix_views.View | str | None) -> tuple[str, str]:
        parameter, kind = named.parameter, named.kind
        if parameter.ndim < 2:
            return "adamw", "bias, norm or scalar"
        if _is_magnitude(named):
            return "adamw", "magnitudes of weight_norm"
        if kind in (Kind.FOREIGN, Kind.BARE) and named.is_bias:
            return "adamw", f"bias ({named.guessed_by_name})"
        if embedding := _embedding_reason(named):
            return "adamw", embedding
        if kind in _CONVOLUTIONS:
            return self._of_convolution(named, view)
        if head := self._head_reason(named):
            return "adamw", head
        if matrix_views.flattens(view) and parameter.ndim > 2:
            return "muon", f"{parameter.ndim}-D, flattened{_SIDE_UNKNOWN}"
        if kind is Kind.BARE and view is not None:
            return "muon", f"{parameter.ndim}-D with a view"
        if parameter.ndim == 2:
            return self._of_two_dimensions(named, view)
        if view is not None:
            return "muon", f"{parameter.ndim}-D with a view"
        if "expert" in named.name.lower():
            return "muon", self._with_advice(f"stack of experts ({named.guessed_by_name})", named)
        if self._conv == "muon" and named.layer is None and kind is Kind.FOREIGN:
            raise InvalidArgumentError(
                f"conv='muon': names alone do not tell whether '{named.name}' is a convolution's: "
                "pass the model, or give it the view 'flatten' or the route adamw"
            )
        return "adamw", f"{parameter.ndim}-D without a view (see views=)"

    def _of_convolution(
        self, named: Named, view: matrix_views.View | str | None
    ) -> tuple[str, str]:
        what = f"{named.parameter.ndim}-D"
        if view is not None and not matrix_views.flattens(view):
            return "muon", f"{what} with a view"
        if view is None and self._conv == "adamw":
            return (
                "adamw",
                "convolution kernel (conv= or the view 'flatten' makes a matrix of it)",
            )
        if view is None and (grouped := self._grouped(named)):
            return "adamw", grouped
        if view is None and (head := self._head_reason(named)):
            return "adamw", head
        if named.kind is Kind.TRANSPOSED_CONVOLUTION:
            return "muon", f"{what}, flattened: transposed, its outputs are dimension 1"
        return "muon", f"{what}, flattened"

    def _grouped(self, named: Named) -> str:
        """Why a kernel is no matrix with a row for each output. Empty: it is one."""
        grouped = named.kind is Kind.TRANSPOSED_CONVOLUTION and named.layer.groups > 1
        return "a transposed convolution of groups, whose outputs are no rows" if grouped else ""

    def _of_two_dimensions(
        self, named: Named, view: matrix_views.View | str | None
    ) -> tuple[str, str]:
        reason, kind = "2-D hidden weight", named.kind
        if kind is Kind.BARE and not _MATRIX.search(named.tensor_name):
            return "adamw", "2-D, and no layer's weight (guess: no hidden matrix; see route=)"
        if kind is Kind.FOREIGN and named.layer is not None:
            reason += f" (guess: by its class, {type(named.layer).__name__})"
        elif kind in (Kind.FOREIGN, Kind.BARE):
            reason += f" ({named.guessed_by_name})"
        elif named.end in _MAYBE_A_HEAD and named.tensor_name == "weight":
            reason += f" ({_MAYBE_A_HEAD[named.end]})"
        return "muon", reason if view is not None else self._with_advice(reason, named)

    def _with_advice(self, reason: str, named: Named) -> str:
        advice = fused.advice(named, self._neighbours)
        return f"{reason}; {advice}" if advice else reason

    def _head_reason(self, named: Named) -> str:
        """Empty: it is none. A layer's class never tells: all of this is guessing."""
        if named.kind is Kind.BARE or named.tensor_name != "weight":
            return ""
        if named.end is End.HEAD:
            return f"output head ({named.guessed_by_name})"
        # A projection to the vocabulary has any name, but follows the blocks: inside them, as many
        # rows are a coincidence, as in models of bytes.
        rows, columns = named.parameter.shape[0], named.parameter.shape[1]
        projection = named.layer is None or "Linear" in type(named.layer).__name__
        if not named.in_block and projection and rows in self._vocabularies and rows > columns:
            return f"output head ({_GUESSED_BY_ROWS})"
        if named.end is not End.MODEL:
            return ""
        return f"output head ({_LAST_NAME if named.module is None else _LAST_LAYER})"

    def _view_of(self, named: Named) -> matrix_views.View | str | None:
        for pattern, view in self._views.items():
            if matches(pattern, named.name):
                self._used_views.add(pattern)
                return view
        return None

    def _check_all_used(self) -> None:
        for index, rule in enumerate(self._rules):
            if not callable(rule) and index not in self._used:
                raise InvalidArgumentError(f"route: no trainable parameter matches {rule[0]!r}")
        for pattern in self._views:
            if pattern not in self._used_views:
                raise InvalidArgumentError(f"views: no trainable parameter matches {pattern!r}")
