"""Which optimizer a parameter gets, and why: every route has a reason."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn

from dmuond import types
from dmuond.errors import InvalidArgumentError
from dmuond.torch import views as matrix_views

ROUTES = {
    "muon": types.ROUTE_MUON,
    "adamw": types.ROUTE_ADAMW,
    "trainer": types.ROUTE_TRAINER,
}
RouteResult = str | tuple[str, str] | None
RouteCallable = Callable[[str, Tensor], RouteResult]
Pattern = str | re.Pattern
RouteRules = RouteCallable | Sequence[tuple[Pattern, str] | RouteCallable]

_HEAD_NAMES = {
    "lm_head",
    "head",
    "heads",
    "output",
    "output_layer",
    "output_projection",
    "embed_out",
    "classifier",
    "score",
    "unembed",
    "unembedding",
}
# Of heads that only their name tells, where they are no part of a numbered block.
_HEAD_NAMES_OUTSIDE_BLOCKS = {"out", "fc_out", "proj_out", "logits", "to_logits", "decoder"}
_EMBEDDING = re.compile(r"embed", re.IGNORECASE)
_EMBEDDING_PART = re.compile(r"embed|(^|_)emb(s|_|$)|^w[tp]e$", re.IGNORECASE)
_EMBEDDING_OUTSIDE_BLOCKS = re.compile(r"^(tok|token|pos|position|vocab)_", re.IGNORECASE)
_POSITIONS = re.compile(r"(^|[._])(pos|position|positions|positional|wpe)([._]|$)", re.IGNORECASE)
_GUESSED_BY_NAME = "guess: by its name"
_GUESSED_BY_NAME_ALONE = "guess: by its name alone; pass the model, or route="
_GUESSED_WITHOUT_NAME = "guess: a layer that is a group by itself has no name; see route="
_GUESSED_BY_ROWS = "guess: as many rows as the embedding has; route= says otherwise"
# torch.nn.utils.parametrizations.weight_norm calls its magnitudes original0; the older
# torch.nn.utils.weight_norm calls them weight_g, and what they scale weight_v.
_MAGNITUDE_NAMES = ("original0", "weight_g")
_WEIGHT_NAMES = ("weight", "weight_v")
_FUSED_NAMES = re.compile(r"(qkv|c_attn|in_proj_weight|query_key_value|wqkv)", re.IGNORECASE)


@dataclass
class Named:
    """A parameter with its place in the model."""

    name: str
    parameter: Tensor
    module: nn.Module | None = None  # that holds it; None where only names were given
    attribute: str = ""
    # Its layer is a group by itself, so that nobody knows what the model calls it.
    nameless: bool = False

    @property
    def guessed_by_name(self) -> str:
        """How a reason says that it goes by the name."""
        return _GUESSED_BY_NAME_ALONE if self.module is None else _GUESSED_BY_NAME


@dataclass
class Routed:
    """A parameter with its route."""

    named: Named
    route: str
    reason: str
    view: types.MatrixView = field(default_factory=types.MatrixView)
    flattened: bool = False  # registered as a matrix: rows, and all the rest


def matches(pattern: Pattern, name: str) -> bool:
    """Regular expressions search; strings are shell patterns of the whole name."""
    if isinstance(pattern, re.Pattern):
        return pattern.search(name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def _parts(named: Named) -> list[str]:
    """Of the path, as far as the module that holds the parameter, or the bare parameter."""
    parts = named.name.split(".")
    if "parametrizations" in parts[-3:-2]:
        parts[-3:] = parts[-2:-1]  # of head.parametrizations.weight.original1, head.weight
    return parts[:-1] if len(parts) > 1 and parts[-1] in _WEIGHT_NAMES else parts


def _is_magnitude(named: Named) -> bool:
    """Whether it has weight_norm's lengths, one number for each row (or what `dim` says)."""
    wide = [size for size in named.parameter.shape if size != 1]
    return named.name.rpartition(".")[2] in _MAGNITUDE_NAMES and len(wide) < 2


def _in_block(named: Named) -> bool:
    """A module that is numbered itself, as the last of an nn.Sequential, is in no block by that."""
    return any(part.isdigit() for part in _parts(named)[:-1])


def _embedding_reason(named: Named) -> str:
    """Empty: it is none. Where the module's type does not tell, the name does: fail closed."""
    module = named.module
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return "embedding"
    if isinstance(module, nn.Linear | nn.modules.conv._ConvNd):
        return ""
    kind = type(module).__name__
    if module is not None and _EMBEDDING.search(kind) and named.attribute == "weight":
        return f"embedding (guess: by its class, {kind})"
    parts = _parts(named)
    looks_so = any(_EMBEDDING_PART.search(part) for part in parts) or (
        _EMBEDDING_OUTSIDE_BLOCKS.search(parts[-1]) and not _in_block(named)
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
    ) -> None:
        """include_frozen: parameters without requires_grad are routed as the others are."""
        self._include_frozen = include_frozen
        self._rules = [rules] if callable(rules) else _checked_rules(rules or ())
        if not isinstance(views or {}, Mapping):
            raise InvalidArgumentError(f"views={views!r} is not a dict of pattern and view")
        self._views = dict(views or {})
        self._used: set[int] = set()
        self._used_views: set[Pattern] = set()
        self._vocabularies: set[int] = set()

    def route(self, parameters: Iterable[Named]) -> list[Routed]:
        found = list(parameters)
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
        route, reason = self._by_rule(named) or self._by_default(named)
        if route not in ROUTES:
            raise InvalidArgumentError(
                f"route of '{named.name}' is '{route}'; there are {', '.join(ROUTES)}"
            )
        if route == "muon" and named.parameter.ndim < 2:
            raise InvalidArgumentError(
                f"route of '{named.name}' is muon, but its shape is {list(named.parameter.shape)}: "
                "Muon needs matrices"
            )
        view = self._view_of(named)
        if view is not None and route != "muon":
            raise InvalidArgumentError(
                f"'{named.name}' has a view but its route is {route} ({reason}); give it the route "
                "muon, or take the view away"
            )
        if view is None:
            return Routed(named, route, reason)
        parsed = matrix_views.parse(view, named.name, tuple(named.parameter.shape))
        return Routed(named, route, reason, parsed, matrix_views.flattens(view))

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

    def _by_default(self, named: Named) -> tuple[str, str]:
        parameter, module = named.parameter, named.module
        if parameter.ndim < 2:
            return "adamw", "bias, norm or scalar"
        if _is_magnitude(named):
            return "adamw", "magnitudes of weight_norm"
        if embedding := _embedding_reason(named):
            return "adamw", embedding
        if head := self._head_reason(named):
            return "adamw", head
        view = self._view_of(named)
        if view is not None and matrix_views.flattens(view):
            return "muon", f"{parameter.ndim}-D, flattened"
        if isinstance(module, nn.modules.conv._ConvNd):
            return "adamw", "convolution kernel (the view 'flatten' makes a matrix of it)"
        if parameter.ndim == 2:
            return "muon", self._two_dimensional_reason(named, view)
        if view is not None:
            return "muon", f"{parameter.ndim}-D with a view"
        if "expert" in named.name.lower():
            return "muon", f"stack of experts ({named.guessed_by_name})"
        return "adamw", f"{parameter.ndim}-D without a view (see views=)"

    def _head_reason(self, named: Named) -> str:
        """Empty: it is none. A module's type never tells: all of this is guessing."""
        owner = _parts(named)[-1]
        outside = not _in_block(named)
        if owner in _HEAD_NAMES or (
            named.module is None and outside and owner in _HEAD_NAMES_OUTSIDE_BLOCKS
        ):
            return f"output head ({named.guessed_by_name})"
        # A projection to the vocabulary has any name, but follows the blocks: inside them, as many
        # rows are a coincidence, as in models of bytes.
        rows, columns = named.parameter.shape[0], named.parameter.shape[1]
        projection = named.module is None or "Linear" in type(named.module).__name__
        if outside and projection and rows in self._vocabularies and rows > columns:
            return f"output head ({_GUESSED_BY_ROWS})"
        return ""

    def _two_dimensional_reason(self, named: Named, view: matrix_views.View | str | None) -> str:
        fused = _FUSED_NAMES.search(named.name) and view is None
        reason = "2-D hidden weight"
        if named.nameless:  # it may be an output head
            reason += f" ({_GUESSED_WITHOUT_NAME})"
        return reason + ("; looks fused: see views=" if fused else "")

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
