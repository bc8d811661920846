"""The store was lost and is back: an incident that is over when it can be written."""

from __future__ import annotations

from collections.abc import Iterable

from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.draft import Draft
from gyre.failover.layout import JobLayout
from gyre.failover.state import Cause, Incident, Scope


def store_returned(
    layout: JobLayout, draft: Draft, event: e.StoreReturned, now: float
) -> Iterable[c.Command]:
    draft.set_incident(
        Incident(
            id=f"store-{draft.job.epoch}-{event.lost_at:.3f}",
            at=event.lost_at or now,
            vertex="store",
            incarnation=draft.job.epoch,
            cause=Cause.STORE_LOST,
            scope=Scope.VERTEX,
            decision="nothing was committed until the store was back; the data plane went on",
            evidence={"error": event.sentence, "kind": event.kind, "away_s": event.away_s},
            recovered_at=now,
            outcome="recovered",
        )
    )
    return ()
