"""Budgets of repairs: how often one may happen within a sliding window, and how long to wait before the next."""

from __future__ import annotations

from gyre.config import Budget, FailoverSpec

NO_STEP_VERTEX, NO_STEP_JOB = "no_step:vertex", "no_step:job"
"""Keys of the budgets for a job that makes no step: the trainer's restart and the job's. A new step resets both."""

_MOST_DOUBLINGS = 64
"""Limit of the exponent: the wait is past any sensible maximum, and the float is far from its own limit."""


def within(uses: tuple[float, ...], budget: Budget, now: float) -> tuple[float, ...]:
    """The uses that still count at `now`."""
    return tuple(at for at in uses if now - at < budget.window_s)


def affordable(uses: tuple[float, ...], budget: Budget, now: float) -> bool:
    return len(within(uses, budget, now)) < budget.max


def backoff_s(earlier_uses: int, spec: FailoverSpec) -> float:
    """Returns the wait before a repair: none before the first in a window, then `backoff_s`, doubled each time up to
    the maximum."""
    if earlier_uses <= 0:
        return 0.0
    return min(spec.backoff_max_s, spec.backoff_s * 2.0 ** min(earlier_uses - 1, _MOST_DOUBLINGS))
