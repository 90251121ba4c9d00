"""Warnings that name the caller's line."""

from __future__ import annotations

import sys
import warnings

_PASSED_OVER = ("dmuond", "torch")


def warn(text: str) -> None:
    """Of the innermost line that is neither this package's nor torch's, which wraps step()."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] in _PASSED_OVER:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, stacklevel=level)
