"""Shares of waiting: how each role has spent its recent time, summed up from what `wait_causes` says of each moment;
and how long the trainer had nothing to do but wait for samples, as it reports to the rollout manager.

Invariants:
- *whole*: the shares of a role add up to 1, whatever was looked at and whenever;
- *since the look before*: the time up to a look was spent as the look before it found.

This module must not know how a moment is looked at, or what the manager makes of the trainer's waiting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from gyre.clock import Clock
from gyre.graph.elements import Dispatch, Operator
from gyre.graph.flow import Flow
from gyre.rollouts.protocol.frames import TrainerStatus
from gyre.workloads.trainer.wait_causes import Shares

HALF_LIFE_S = 10.0
"""Half-life of a share's past, so that shares describe the present rather than the whole run."""

LOOK_S = 0.02
"""Shortest time between two looks; the loop turns more often, and a look costs it up to a millisecond."""

LEAST_WAIT = 0.01
"""Smallest share of a wait that is reported by itself."""

WAITS = "waits for "
"""What the activities begin with that are waits."""


class WaitStats:
    """`first` is the role that is listed first: the one that the others work for."""

    def __init__(self, first: str, *, clock: Clock = time) -> None:
        self._first = first
        self._clock = clock
        self._at: float | None = None
        self._look: dict[str, Shares] = {}
        self._is_stale = True
        """Whether the next look must not be left out."""
        self._spent: dict[str, dict[str, float]] = {}
        self._total: dict[str, dict[str, float]] = {}

    def observe(self, look: Callable[[], dict[str, Shares]]) -> None:
        """Look what each role does now, unless the last look was a moment ago."""
        now = self._clock.monotonic()
        if self._at is not None and now - self._at < LOOK_S and not self._is_stale:
            return
        self._settle(now)
        self._look, self._is_stale = look(), False

    @contextmanager
    def doing(self, role: str, what: str) -> Iterator[None]:
        """A block in which the trainer stands still because the role does this; whoever is idle waits for it."""
        self._settle(self._clock.monotonic())
        self._look = {
            other: shares if other != role and _works(shares) else {f"{WAITS}{role} ({what})": 1.0}
            for other, shares in self._look.items()
        } | {role: {what: 1.0}}
        try:
            yield
        finally:
            self._settle(self._clock.monotonic())
            self._is_stale = True

    def _settle(self, now: float) -> None:
        """Put the time since the last look down to what it found."""
        if self._at is not None and now > self._at:
            passed = now - self._at
            keep = 0.5 ** (passed / HALF_LIFE_S)
            for role, shares in self._look.items():
                before = self._spent.get(role, {})
                spent = self._spent[role] = {
                    what: kept for what, s in before.items() if (kept := s * keep) > 1e-6
                }
                total = self._total.setdefault(role, {})
                for what, share in shares.items():
                    spent[what] = spent.get(what, 0.0) + share * passed
                    total[what] = total.get(what, 0.0) + share * passed
        self._at = now

    def times(self) -> dict[str, Shares]:
        """`{"actor": {"training": 0.43, "waits for rollout (generating)": 0.57}, …}`: the share of recent time of each
        activity of each role, the largest first."""
        return {
            role: _rounded(self._spent[role])
            for role in sorted(self._spent, key=lambda role: role != self._first)
            if any(self._spent[role].values())
        }

    def totals(self) -> dict[str, dict[str, float]]:
        """The seconds that each role has spent on each activity since this trainer began: between two readings, the
        difference is what was done in that time, and nothing of before."""
        return {
            role: {what: round(seconds, 3) for what, seconds in spent.items()}
            for role, spent in self._total.items()
        }


def _rounded(spent: Mapping[str, float]) -> Shares:
    """Seconds as shares of three digits, the largest first; what rounding leaves over is the largest's."""
    total = sum(spent.values())
    largest, *others = sorted(spent, key=lambda what: -spent[what])
    shares = {what: share for what in others if (share := round(spent[what] / total, 3))}
    return {largest: round(1.0 - sum(shares.values()), 3), **shares}


def waits_in(times: Mapping[str, Shares]) -> dict[str, float]:
    """The waits among the activities of all roles: `{"actor waits for rollout (generating)": 0.57, …}`."""
    return {
        f"{role} {what}": share
        for role, shares in times.items()
        for what, share in shares.items()
        if what.startswith(WAITS) and share >= LEAST_WAIT
    }


def _works(shares: Shares) -> bool:
    return not any(what.startswith(WAITS) for what in shares)


STATUS_EACH_S = 0.5
"""Time between two reports."""


class Starvation:
    def __init__(self) -> None:
        self._observed_at: float | None = None
        self._sent_at: float | None = None
        self._starves = False
        """As of the last look. What is seen after a call that blocked says nothing about the time before it."""
        self._waited_s = 0.0

    def observe(
        self, flow: Flow, operators: Mapping[str, Operator], *, wanted: Mapping[str, int], now: float
    ) -> TrainerStatus | None:
        """Called in every turn of the trainer's loop; `now` is monotonic seconds, `wanted` how many vertices each role
        of instances should have. Returns what is to be sent to the manager, every half second."""
        if self._observed_at is not None and self._starves:
            self._waited_s += now - self._observed_at
        self._observed_at = now
        running = {operator.dispatch for ref, operator in operators.items() if flow.running(ref)}
        self._starves = running == {Dispatch.PLANE}
        if self._sent_at is not None and now - self._sent_at < STATUS_EACH_S:
            return None
        self._sent_at = now
        return TrainerStatus(at_s=now, waited_s=self._waited_s, wanted=dict(wanted))
