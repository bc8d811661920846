"""The incidents and the ends of a job, from the fold of its journal, for the sinks that receive them.

Invariants:
- *the same incidents*: they are those of the fold (`gyre.observe.folding`), so what a sink receives is what `gyre show`
  shows;
- *folded once*: whoever follows has the state; another one begins at the keyframe before it.

This module must not know what sink is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gyre.failover import Incident, JobState
from gyre.observe.chapters import changed_incidents
from gyre.observe.folding import DAMAGED, Folded
from gyre.observe.history import JobHistory, unfoldable
from gyre.observe.sinks.sink import SinkEnd, SinkIncident
from gyre.store import EventRow, Store

LONGEST_ERROR = 300


class IncidentNews:
    """What the events of a job say of incidents and of its end."""

    def __init__(self, store: Store, job_id: str) -> None:
        self._history = JobHistory(store, job_id)
        self._state = JobState()
        self._seq = -1

    def of(self, rows: Sequence[EventRow]) -> dict[int, list[SinkIncident | SinkEnd]]:
        """By the number of the event, what it led to. `rows` follow each other. Raises StoreError for a history that
        this Gyre cannot fold."""
        if not rows:
            return {}
        if self._seq != rows[0].seq - 1:
            self._state, self._seq = self._history.at(rows[0].seq - 1).state, rows[0].seq - 1
        found: dict[int, list[SinkIncident | SinkEnd]] = {}
        try:
            for folded in self._history.coordinators().steps(rows, self._state):
                news: list[SinkIncident | SinkEnd] = [*_incidents(folded), *_end(folded)]
                if news:
                    found[folded.row.seq] = news
                self._state, self._seq = folded.decision.state, folded.row.seq
        except DAMAGED as error:
            self._seq = -1
            raise unfoldable(self._history.job_id, error) from error
        return found


def _incidents(folded: Folded) -> Iterator[SinkIncident]:
    changed = sorted(changed_incidents(folded), key=lambda pair: (pair[1].at, pair[1].id))
    for before, incident in changed:
        yield SinkIncident(
            id=incident.id,
            vertex=incident.vertex,
            cause=incident.cause,
            decision=incident.decision,
            outcome=incident.outcome,
            at=folded.row.at,
            seq=folded.row.seq,
            is_new=before is None,
            error=_sentence(incident),
            user_code=incident.user_code,
            recovery_s=incident.recovery_s,
        )


def _sentence(incident: Incident) -> str:
    """The first line of the error: the rest of the evidence may be long, and quotes prompts and answers."""
    lines = str(incident.evidence.get("error") or "").strip().splitlines()
    return lines[0][:LONGEST_ERROR] if lines else ""


def _end(folded: Folded) -> Iterator[SinkEnd]:
    job = folded.decision.state.job
    if job.phase.ended and not folded.before.job.phase.ended:
        yield SinkEnd(
            job.phase.value, job.reason.value, job.message or job.error, folded.row.at, folded.row.seq
        )
