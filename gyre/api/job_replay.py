"""A job's history folded again, from the store alone: what `gyre replay` prints, and what a test asserts.

Invariants:
- *the same decisions*: the fold is the coordinator's own, over the spec that was in force;
- *one moment*: of a job that runs, history and snapshot are compared at the same sequence number;
- *the whole is not believed*: without an end that is asked for every event is folded, and no keyframe is used;
- *the cluster is not needed*: only the store is read.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gyre.errors import StoreError
from gyre.failover import Difference, JobState, differences
from gyre.master.master_api import View, view_of
from gyre.observe.folding import DAMAGED, coordinator_of, fold_by_parts
from gyre.observe.history import JobHistory, unfoldable
from gyre.store import Store

__all__ = ["Replay", "coordinator_of", "fold_by_parts", "replay_job"]

_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Replay:
    """The state of so many `events`. `differences` is None where the fold was cut short, for there is no snapshot to
    compare with."""

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
    if until is not None or until_time is not None:
        moment = JobHistory(store, job_id).at(until, time=until_time)
        return Replay(moment.state, moment.seq, moment.seq, None)
    seq, snapshot = _moment(store, job_id)
    history = store.journal(job_id).events(until=seq)
    try:
        state = fold_by_parts(store.job(job_id).spec, history, history)
        found = differences(state, snapshot)
    except DAMAGED as error:
        raise unfoldable(job_id, error) from error
    return Replay(state, seq, len(history), found)


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
