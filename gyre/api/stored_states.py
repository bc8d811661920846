"""The states of a store's jobs, each read once for as long as its journal does not grow.

A snapshot of 10,000 vertices takes a third of a second of CPU to read, and a page asks five questions of it at once.

Invariant: *never behind the journal*: a state is kept with the sequence number that was read before it, so that an
event that came meanwhile is seen by the next question.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gyre.config import FLEET
from gyre.failover import JobPhase, JobRecord, JobState, Reason, state_from
from gyre.master.master_api import View, view_of
from gyre.store import JobRow, Store

JOBS_KEPT = 8
"""Jobs whose states are kept, those that were asked for last."""


@dataclass(slots=True)
class _Kept:
    seq: int
    state: JobState
    view: View | None = None


class StoredStates:
    """Safe to use from many threads: who asks for what another reads waits for it."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, _Kept] = OrderedDict()

    def state(self, row: JobRow) -> JobState:
        """The snapshot's state, which has no job where the journal is still empty. Raises StoreCorrupt."""
        with self._lock:
            journal = self._store.journal(row.job_id)
            seq = journal.last_seq()
            kept = self._kept.get(row.job_id)
            if kept is None or kept.seq != seq:
                kept = self._kept[row.job_id] = _Kept(seq, state_from(journal.snapshot()))
            self._kept.move_to_end(row.job_id)
            while len(self._kept) > JOBS_KEPT:
                self._kept.popitem(last=False)
        return kept.state

    def view(self, row: JobRow, state: JobState) -> View:
        """The view of the job without its master, in this state: what `state` returned, or another. Nobody may change
        it: while it is of what `state` returned, all have the same."""
        with self._lock:
            kept = self._kept.get(row.job_id)
            if kept is None or kept.state is not state:
                return self._view_of(row, state, self._store.journal(row.job_id).last_seq())
            if kept.view is None:
                kept.view = self._view_of(row, state, kept.seq)
            return kept.view

    def _view_of(self, row: JobRow, state: JobState, seq: int) -> View:
        progress: dict[str, Any] = {"step": state.job.step, "version": state.job.version, **state.job.result}
        if state.job.phase.ended:
            from gyre.observe.series import (
                spent_by_role,  # numpy, which a list of jobs that run has no use for
            )

            spent = spent_by_role(self._store.series(row.job_id))
            progress |= {"spent_s": spent} if spent else {}
        return view_of(state, seq=seq, progress=progress, answering=False, asked=steps_asked(row.spec))


def steps_asked(spec: Mapping[str, Any]) -> int | None:
    """The steps that a job with this spec is to make; None where its trainer says what a step is."""
    if spec.get("recipe") in (None, FLEET):
        return None
    steps = (spec.get("run") or {}).get("steps")
    return steps if isinstance(steps, int) else None


def with_job(state: JobState, row: JobRow) -> JobState:
    """The state; with the directory's fields of the job where its master has written nothing yet."""
    if state.job.job_id:
        return state
    job = JobRecord(
        job_id=row.job_id,
        name=row.name,
        phase=JobPhase(row.phase if row.phase in set(JobPhase) else JobPhase.SUBMITTED),
        reason=Reason(row.reason if row.reason in set(Reason) else Reason.NONE),
        message=row.message,
        submitted_at=row.created_at,
        ended_at=row.ended_at,
    )
    return replace(state, job=job)
