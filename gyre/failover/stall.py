"""Stalls: whether the job as a whole makes no steps, whatever its vertices say. Pure.

Each vertex may be healthy and the job not, when all of them wait for each other. The absence of steps shows it.

Invariants:
- *only what runs can stall*: no time counts in which the job starts, is paused, ends, lacks a vertex that it wants, or
  has a role that was scaled to none. Each of these begins the count anew;
- *measured by the job itself*: the limit is a multiple of the slowest of its latest steps, and never less than
  `failover.step_timeout_s`;
- *unmeasured work is only judged when it stands still*: before a first step was measured, which covers a supervised
  start, and after the last step, the job stalls only if nothing that its vertices count has grown either.

This module must not know what a step is made of, or what is done about a stall.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gyre.config import TRAINER, JobSpec
from gyre.failover.state import JobPhase, JobState
from gyre.failover.suspicions import Observation

STEPS_REMEMBERED = 16
"""Steps whose slowest sets the limit: enough for one with an evaluation or a checkpoint to be among them."""


STILL_SHARE = 0.5
"""Share of the limit for which nothing may have moved before a job counts as standing still. It is below 1 because a
restarted vertex moves once, at its start."""


@dataclass(frozen=True, slots=True)
class Stall:
    """A stall: no step after `step` for `after_s`, while `limit_s` are allowed. `stands_still` says that nothing else
    moved for long, and that a graph's trainer runs, which has no work of its own that nobody sees."""

    step: int
    after_s: float
    limit_s: float
    stands_still: bool


class StepWatch:
    """Watches one job. `now` is monotonic seconds, and never falls."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._step: int | None = None
        """The last step that was seen; None while nothing counts."""
        self._step_at = 0.0
        self._moved_at = 0.0
        self._told_at = 0.0
        self._counted: dict[str, dict[str, int]] = {}
        self._durations: deque[float] = deque(maxlen=STEPS_REMEMBERED)

    @property
    def limit_s(self) -> float:
        failover = self._spec.failover
        slowest_s = max(self._durations, default=0.0)
        return max(failover.step_timeout_s, failover.step_timeout_factor * slowest_s)

    def look(
        self,
        state: JobState,
        observations: Mapping[str, Observation],
        fields: Mapping[str, Mapping[str, Any]],
        now: float,
    ) -> Stall | None:
        """Returns the stall to be reported at `now`, if there is one; at most one each `limit_s`. `fields` is what
        vertices report, by id."""
        job = state.job
        if job.phase is not JobPhase.RUNNING or 0 in job.roles.values():
            self._step = None
            return None
        counted = {vertex: _counters(told) for vertex, told in fields.items()}
        works_at = max((one.progressed_at for one in observations.values() if _works(one)), default=0.0)
        if self._step is None:
            self._step, self._step_at, self._told_at = job.step, now, now
            self._moved_at = now
        elif job.step > self._step:
            self._durations.append(now - self._step_at)
            self._step, self._step_at, self._told_at = job.step, now, now
        if counted != self._counted:
            self._counted, self._moved_at = counted, now
        self._moved_at = max(self._moved_at, min(works_at, now))
        limit_s = self.limit_s
        still_s = now - max(self._step_at, self._moved_at)
        measured = bool(self._durations) and job.step < self._spec.run.steps
        if now - self._told_at <= limit_s or (not measured and still_s <= limit_s):
            return None
        self._told_at = now
        built_in = not self._spec.counts_own_steps
        return Stall(job.step, now - self._step_at, limit_s, built_in and still_s > STILL_SHARE * limit_s)


def _works(seen: Observation) -> bool:
    return bool(seen.busy) and seen.role != TRAINER


def _counters(told: Mapping[str, Any]) -> dict[str, int]:
    """Whole numbers count work (steps, tokens, samples, versions); fractions are shares and times, which always
    change."""
    return {key: value for key, value in told.items() if type(value) is int}
