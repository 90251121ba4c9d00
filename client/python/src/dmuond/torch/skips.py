"""Steps that were skipped for a gradient that is not finite: told to whoever trains."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable
from typing import Any

from dmuond import types
from dmuond.torch.notices import warn

log = logging.getLogger("dmuond")

_TOLD_EVERY_S = 30.0


class SkippedSteps:
    """Counts them, and tells of the first by a warning and of others in the log, at a bounded rate.

    It tells when their number is a power of two, and else at most once in 30 s.
    """

    def __init__(self, tells: bool, clock: Callable[[], float] = time.monotonic) -> None:
        """tells: on one rank; all ranks skip the same steps."""
        self._tells, self._clock = tells, clock
        self._in_a_row = self._in_all = 0
        self._told_at = 0.0

    def after_step(self, outcome: types.Outcome) -> None:
        if outcome.kind != types.Outcome.KIND_SKIPPED:
            self._in_a_row = 0
            return
        _tell_accelerate()
        self._in_a_row += 1
        self._in_all += 1
        now = self._clock()
        power_of_two = self._in_all & (self._in_all - 1) == 0
        if not self._tells or (not power_of_two and now - self._told_at < _TOLD_EVERY_S):
            return
        self._told_at = now
        text = (
            f"step {outcome.step} was skipped on all ranks: {outcome.detail}; skipped in a row: "
            f"{self._in_a_row}, since the optimizer was made: {self._in_all}"
        )
        if self._in_all == 1:
            warn(f"dmuond: {text}. More are told in the log 'dmuond', not each of them")
        else:
            log.warning("%s", text)


def _tell_accelerate() -> None:
    """Makes accelerate's `step_was_skipped`, by which its schedules go, true of steps skipped here.

    It takes a step for skipped whose step() was not called. Here the ranks find out together,
    inside of step(), with a GradScaler and without.
    """
    module: Any = sys.modules.get("accelerate.optimizer")
    if module is None or hasattr(module.AcceleratedOptimizer, "_step_was_skipped_by_accelerate"):
        return
    wrapper = module.AcceleratedOptimizer
    wrapper._step_was_skipped_by_accelerate = wrapper.step_was_skipped

    def step_was_skipped(self: Any) -> bool:
        """Whether the optimizer step was skipped."""
        told = getattr(self.optimizer, "step_was_skipped", False)
        return told or self._step_was_skipped_by_accelerate

    wrapper.step_was_skipped = property(step_was_skipped)
