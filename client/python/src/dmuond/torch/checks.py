"""Checks of what callers hand over; errors name the option and its value."""

from __future__ import annotations

import math
from typing import Any

from dmuond.errors import InvalidArgumentError


def checked_number(name: str, value: Any) -> float:
    """The value, which is a finite number and not negative."""
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise InvalidArgumentError(f"{name}={value!r} is not a number") from None
    if not (number >= 0.0 and math.isfinite(number)):
        raise InvalidArgumentError(f"{name}={value!r}: must be finite and not negative")
    return number


def checked_fraction(name: str, value: Any) -> float:
    """The value, which is a number of [0, 1)."""
    number = checked_number(name, value)
    if number >= 1.0:
        raise InvalidArgumentError(f"{name}={value!r}: must be less than 1")
    return number
