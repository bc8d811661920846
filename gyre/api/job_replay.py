"""A job's history folded again, from the store alone: what `gyre replay` prints, and what a test asserts.

Invariants:
- *the same decisions*: the fold is the coordinator's own, over the spec that was in force;
- *one moment*: of a job that runs, history and snapshot are compared at the same sequence number;
- *the cluster is not needed*: only the store is read.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gyre.config import JobSpec, parse_job
from gyre.config.changes import undone
from gyre.errors import StoreError
from gyre.failover import Difference, FailoverCoordinator, JobState, differences, fold
from gyre.failover.events import JobContinued
from gyre.graph import compile_job
from gyre.master.master_api import View, view_of
from gyre.store import EventRow, Store

_DAMAGED = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What a history raises that says other things than a master would."""

_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Replay:
    """`differences` is None where the fold was cut short, for then there is no snapshot to compare with."""

    state: JobState
    seq: int
    events: int
    differences: list[Difference] | None

    def as_dict(self) -> dict[str, Any]:
        """Plain data: `seq`, `events`, `state` (a view), `compared`, `differences`."""
        view: View = view_of(self.state, seq=self.seq, answering=False)
        return {
            "seq": self.seq,
            "events": self.events,
            "state": view,
            "compared": self.differences is not None,
            "differences": [asdict(difference) for difference in self.differences or ()],
        }


def replay_job(
    store: Store, job_id: str, *, until: int | None = None, until_time: float | None = None
) -> Replay:
    """Fold a stored job's history up to a sequence number or a time, or all of it.

    Raises NotFound for an unknown job, StoreError for a history that this Gyre cannot fold.
    """
    journal = store.journal(job_id)
    snapshot: Mapping[tuple[str, str], dict[str, Any]] | None = None
    if until is None and until_time is None:
        until, snapshot = _moment(store, job_id)
    history = journal.events(until=until, until_time=until_time)
    try:
        state = fold_by_parts(store.job(job_id).spec, journal.events(), history)
        found = None if snapshot is None else differences(state, snapshot)
    except _DAMAGED as error:
        raise StoreError(
            f"The history of job {job_id} does not fold: {error}.",
            hint="A newer Gyre wrote it, or it was changed outside Gyre.",
        ) from error
    return Replay(state, history[-1].seq if history else 0, len(history), found)


def fold_by_parts(
    spec: dict[str, Any],
    everything: list[EventRow],
    history: list[EventRow],
    state: JobState | None = None,
) -> JobState:
    """Fold a history from a state, each part of it over the spec that was in force. `spec` is the last one, and
    `everything` tells how it came about."""
    continued = [event for event in everything if event.kind == JobContinued.__name__]
    specs = [spec]
    for event in reversed(continued):
        specs.insert(0, undone(specs[0], event.body["changes"]))
    for number, one in enumerate(specs):
        first = continued[number - 1].seq if number else 0
        last = continued[number].seq if number < len(continued) else sys.maxsize
        part = [event for event in history if first <= event.seq < last]
        state = fold(coordinator_of(parse_job(one)), part, state)
    assert state is not None
    return state


def coordinator_of(spec: JobSpec) -> FailoverCoordinator:
    """The coordinator of a job as its master has it, from the spec alone."""
    compiled = compile_job(spec)
    return FailoverCoordinator(compiled.spec, compiled.graph.region_or_alone)


def _moment(store: Store, job_id: str) -> tuple[int, dict[tuple[str, str], dict[str, Any]]]:
    """A sequence number and the snapshot of that very moment, also while the job writes on."""
    journal = store.journal(job_id)
    seq = journal.last_seq()
    for _ in range(_ATTEMPTS):
        snapshot = journal.snapshot()
        now = journal.last_seq()
        if now == seq:
            return seq, snapshot
        seq = now
    raise StoreError(
        f"Job {job_id} writes its journal faster than its snapshot can be read.",
        hint="Pause it, or give --until.",
    )
