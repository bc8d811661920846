"""Budgets of repairs: how often one may happen without progress and within a sliding window, and how long to wait
before the next.

Invariant *no fault outlives its attempts*: however slowly a fault comes back, it is repaired at most `attempts` times
in each scope without progress between, and then the job ends. The window is a second limit, for faults that come back
quickly although the job makes progress.

What is progress of what:
- of a vertex, a gang, the trainer, the whole job, and of a role whose user code raises: a step of the job. All that one
  step needs may have to be done again in another, so less than a step proves nothing;
- of a rollout instance also a token that it generated: tokens are kept, so that a step needs only so many, and a sample
  that ends its engine again and again is quarantined;
- of a call that is repeated: that it succeeds, as the trainer counts it (`OperatorFailed.attempt`);
- of an engine: that it starts (`gyre.failover.handlers.engines`).

Not counted, because nothing could have made progress: what happens while the job is paused or while a vertex waits for
room, unless a vertex does not start. A script's step is one that its `fit()` reports by `report_progress(step=…)`,
larger than all before. Of a script that reports none no progress can be seen: a vertex and a gang have
`silent_attempts` over the whole job. A rollout instance whose machine was taken away has not failed; once the window's
uses are spent it waits for the window to move on.
"""

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
