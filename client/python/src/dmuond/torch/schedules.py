"""What torch's schedulers write into groups of which some are on Muon and some on AdamW."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dmuond.errors import InvalidArgumentError

# Under these keys OneCycleLR and CyclicLR keep their range where they cycle momentum.
_CYCLED = ("max_momentum", "base_momentum")


class Schedules:
    """Looks at the groups before each step.

    A scheduler that is given one learning rate for several groups gives AdamW's parameters Muon's:
    `check` refuses that where the optimizer was made with different ones.

    Schedulers that cycle momentum write group["momentum"], since the optimizer's defaults have
    momentum and no betas. That is right for Muon; AdamW's momentum is beta1, as it is to torch:
    `apply` carries it over.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self.begin(groups, [{}] * len(groups))

    def begin(self, groups: Sequence[dict[str, Any]], loaded: Sequence[Mapping[str, Any]]) -> None:
        """The groups are as the caller wants them: just made, or with options that were loaded.

        Options are saved after `apply`.
        """
        self._rates = [float(group.get("initial_lr", group["lr"])) for group in groups]
        # The momentum of each group that has been carried over already.
        self._carried = [each.get("momentum") if _is_cycled(each) else None for each in loaded]

    def check(self, groups: Sequence[dict[str, Any]]) -> None:
        if len(set(self._rates)) == 1:
            return
        # Zero updates nothing: schedules may begin or end there.
        started_alike = _one_value(groups, "initial_lr") and _one_value(groups, "lr")
        if not started_alike and not _one_value(groups, "swa_lr"):
            return
        made = ", ".join(
            f"{rate:g} on {group['route']}" for rate, group in zip(self._rates, groups, strict=True)
        )
        now = groups[0]["swa_lr"] if _one_value(groups, "swa_lr") else groups[0]["lr"]
        raise InvalidArgumentError(
            f"a scheduler gives every group the learning rate {float(now):g}; the optimizer has "
            f"{made}. Give the scheduler a value for each group, as OneCycleLR(optimizer, "
            f"max_lr={self._rates!r}, ...); CyclicLR takes such a list for base_lr, too, and SWALR "
            "for swa_lr. If one is meant for all, make the optimizer with one (adamw_lr=lr)"
        )

    def apply(self, groups: Sequence[dict[str, Any]]) -> None:
        for index, group in enumerate(groups):
            if group["route"] != "adamw" or not _is_cycled(group):
                continue
            if group["momentum"] != self._carried[index]:
                self._carried[index] = group["momentum"]
                group["betas"] = (group["momentum"], group["betas"][1])


def _is_cycled(group: Mapping[str, Any]) -> bool:
    return all(key in group for key in _CYCLED)


def _one_value(groups: Sequence[dict[str, Any]], key: str) -> bool:
    """Whether all groups have the same under this key, and not zero."""
    values = {float(group.get(key, 0.0)) for group in groups}
    return len(values) == 1 and 0.0 not in values
