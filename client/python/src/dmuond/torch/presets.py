"""What the client must know of a preset itself; docs/maths.md has the whole table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from dmuond import types
from dmuond.errors import InvalidArgumentError
from dmuond.torch.checks import checked_number

_F = types.GroupConfig
MOMENTUM_FORMS = {"sum": _F.MOMENTUM_SUM, "ema": _F.MOMENTUM_EMA}
SCALES = {
    "match_rms_adamw": _F.SCALE_MATCH_RMS_ADAMW,
    "original": _F.SCALE_ORIGINAL,
    "spectral": _F.SCALE_SPECTRAL,
    "none": _F.SCALE_NONE,
}
FORMS = {"standard": _F.FORM_STANDARD, "gram": _F.FORM_GRAM}
NORMS = {
    "exact": _F.NORM_EXACT,
    "plus_eps": _F.NORM_PLUS_EPS,
    "clamped_eps": _F.NORM_CLAMPED_EPS,
    "schatten4": _F.NORM_SCHATTEN4,
}
NS_DTYPES = {
    "float32": types.ELEMENT_TYPE_FLOAT32,
    "bfloat16": types.ELEMENT_TYPE_BFLOAT16,
    "float16": types.ELEMENT_TYPE_FLOAT16,
}
_SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Preset:
    """Defaults of a preset that show in the optimizer's groups."""

    momentum_form: str
    nesterov: bool
    scale: str
    weight_decay: float


PRESETS = {
    "dmuon": Preset("sum", True, "match_rms_adamw", 0.0),
    "torch": Preset("ema", True, "original", 0.1),
    "keller": Preset("ema", True, "original", 0.0),
    "moonlight": Preset("sum", True, "match_rms_adamw", 0.1),
}

# Group options that are fixed when the parameters are registered, with their words.
_CHOICES = {
    "momentum_form": ("momentum", MOMENTUM_FORMS),
    "scale": ("scale", SCALES),
    "ns_form": ("form", FORMS),
    "ns_norm": ("norm", NORMS),
    "ns_dtype": ("newton_schulz_type", NS_DTYPES),
}
FIXED_OPTIONS = (
    *_CHOICES,
    "preset",
    "nesterov",
    "ns_eps",
    "ns_coefficients",
    "ns_restarts",
    "maximize",
)
# As torch.optim.Muon calls what has another name or form here.
TORCH_OPTIONS = ("adjust_lr_fn", "ns_steps")
_JORDAN = (3.4445, -4.7750, 2.0315)  # each step of every preset but "dmuon"
_TORCH_STEPS = 5
# Maps torch.optim.Muon's values of adjust_lr_fn to the scales that compute the same.
_ADJUST_LR_FNS = {
    "original": "original",
    "match_rms_adamw": "match_rms_adamw",
    "spectral_unclamped": "spectral",
}


def preset_named(name: str) -> Preset:
    if name not in PRESETS:
        raise InvalidArgumentError(f"preset '{name}' is unknown; there are {', '.join(PRESETS)}")
    return PRESETS[name]


def with_own_scale(given: dict[str, Any]) -> dict[str, Any]:
    """The options with adjust_lr_fn as the scale that it means."""
    options = dict(given)
    torchs = options.pop("adjust_lr_fn", None)
    if torchs is None:
        return options
    if torchs not in _ADJUST_LR_FNS:
        raise InvalidArgumentError(
            f"adjust_lr_fn={torchs!r} is unknown; there are {', '.join(_ADJUST_LR_FNS)}, as in "
            "torch, and scale= has more"
        )
    scale = _ADJUST_LR_FNS[torchs]
    if options.get("scale") not in (None, scale):
        raise InvalidArgumentError(
            f"adjust_lr_fn={torchs!r} is scale={scale!r}, and scale={options['scale']!r} is "
            "given, too: take one of them away"
        )
    return options | {"scale": scale}


def coefficients(options: dict[str, Any]) -> Any:
    """One (a, b, c) for each step, where there is one for all, as torch has it."""
    steps = options.get("ns_steps")
    found = options.get("ns_coefficients")
    one_for_all = isinstance(found, tuple | list) and bool(found) and np.isscalar(found[0])
    if steps is None:
        return [tuple(found)] * _TORCH_STEPS if one_for_all else found
    if not isinstance(steps, int) or steps < 1:
        raise InvalidArgumentError(f"ns_steps={steps!r} is no number of steps")
    if found is None:
        if options["preset"] == "dmuon":
            raise InvalidArgumentError(
                f"ns_steps={steps}: each step of the preset 'dmuon' has coefficients of its own. "
                "Give ns_coefficients, an (a, b, c) for each step, or one for all"
            )
        return [_JORDAN] * steps
    if one_for_all:
        return [tuple(found)] * steps
    if len(found) != steps:
        raise InvalidArgumentError(
            f"ns_steps={steps}, and ns_coefficients has {len(found)} steps: leave ns_steps out"
        )
    return found


def group_config(options: dict) -> types.GroupConfig:
    """The registration of a group from its options; what is None comes from the preset."""
    config = types.GroupConfig(preset=options["preset"])
    for option, (field, words) in _CHOICES.items():
        value = options.get(option)
        if value is None:
            continue
        word = str(value).removeprefix("torch.")
        word = _SHORT_DTYPES.get(word, word)
        if word not in words:
            raise InvalidArgumentError(
                f"{option}={value!r} is unknown; there are {', '.join(words)}"
            )
        setattr(config, field, words[word])
    if options.get("nesterov") is not None:
        config.nesterov = bool(options["nesterov"])
    if options.get("ns_eps") is not None:
        config.eps = checked_number("ns_eps", options["ns_eps"])
    _add_steps(config, options.get("ns_coefficients"), options.get("ns_restarts"))
    return config


def _add_steps(config: types.GroupConfig, coefficients: Any, restarts: Any) -> None:
    try:
        for a, b, c in () if coefficients is None else coefficients:
            config.coefficients.add(a=a, b=b, c=c)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"ns_coefficients={coefficients!r}: (a, b, c) for each step"
        ) from None
    if coefficients is not None and not config.coefficients:
        raise InvalidArgumentError("ns_coefficients has no steps")
    try:
        config.restarts.extend(() if restarts is None else restarts)
    except (TypeError, ValueError):
        raise InvalidArgumentError(
            f"ns_restarts={restarts!r}: the steps before which X is made anew, as (2, 4)"
        ) from None
    if restarts is not None and not config.restarts and coefficients is None:
        raise InvalidArgumentError(
            f"ns_restarts={restarts!r} has no steps: leave it out for the preset's own restarts; "
            "to have none, give ns_coefficients, too"
        )
