"""A stored history folded into the state that it leads to, each part of it over the spec that was in force.

Invariant *the same decisions*: the fold is the coordinator's own, over the spec with which the master decided. This
module must not know what a state is wanted for.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from gyre.config import JobSpec, parse_job
from gyre.config.changes import undone
from gyre.failover import Decision, FailoverCoordinator, JobState
from gyre.failover.events import Event, JobContinued, event_from
from gyre.graph import compile_job
from gyre.store import EventRow

DAMAGED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a history raises that says other things than a master would."""


class Folded(NamedTuple):
    """One event, the state before it, and what was decided."""

    row: EventRow
    event: Event
    before: JobState
    decision: Decision


class Coordinators:
    """The coordinators of a job, by the events over which each of them decided. They are made when they are wanted, for
    compiling a job takes longer than folding hundreds of events."""

    def __init__(self, spec: dict[str, Any], continued: Sequence[EventRow]) -> None:
        """`spec` is the last one; `continued` are all events of its kind, which tell how it came about."""
        self._from = [0, *(event.seq for event in continued)]
        self._specs = [spec]
        for event in reversed(continued):
            self._specs.insert(0, undone(self._specs[0], event.body["changes"]))
        self._made: dict[int, FailoverCoordinator] = {}

    def of(self, seq: int) -> FailoverCoordinator:
        """The one that decided event `seq`."""
        part = bisect.bisect_right(self._from, seq) - 1
        if part not in self._made:
            self._made[part] = coordinator_of(parse_job(self._specs[part]))
        return self._made[part]

    def fold(self, history: Iterable[EventRow], state: JobState) -> JobState:
        for folded in self.steps(history, state):
            state = folded.decision.state
        return state

    def steps(self, history: Iterable[EventRow], state: JobState) -> Iterator[Folded]:
        """Each event's decision, from this state on."""
        for row in history:
            event = event_from(row.kind, row.body)
            decision = self.of(row.seq).decide(state, event, row.at)
            yield Folded(row, event, state, decision)
            state = decision.state


def fold_by_parts(
    spec: dict[str, Any],
    everything: list[EventRow],
    history: list[EventRow],
    state: JobState | None = None,
) -> JobState:
    """Fold a history from a state, each part of it over the spec that was in force. `spec` is the last one, and
    `everything` tells how it came about."""
    continued = [event for event in everything if event.kind == JobContinued.__name__]
    return Coordinators(spec, continued).fold(history, JobState() if state is None else state)


def coordinator_of(spec: JobSpec) -> FailoverCoordinator:
    """The coordinator of a job as its master has it, from the spec alone."""
    compiled = compile_job(spec)
    return FailoverCoordinator(compiled.spec, compiled.graph.region_or_alone)
