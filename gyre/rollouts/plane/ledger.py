"""The plane and its ledger: what is restored from it, what goes into it next, and what follows once it is there.

Invariants:
- *acknowledged means durable*: an agent's progress is acknowledged, and a group is delivered, after the commit that
  holds it. An agent keeps what was not acknowledged, so this process can be killed at any moment;
- *published means durable*: a version is sent out after the commit that holds it, so instances never hear of a version
  that the next manager does not know.

This module must not know how rows are stored, or when they are written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.rollouts.plane import instances, updates
from gyre.rollouts.plane.events import Committed, LedgerFree, Restored
from gyre.rollouts.plane.instructions import Commit, Write
from gyre.rollouts.plane.requesters import owned, owner_of, report_failures

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane


def restore(plane: Plane, event: Restored) -> None:
    rows = event.rows
    plane.versions.restore(rows.counters)
    plane.groups.newest_version = plane.versions.newest
    if plane.versions.served is not None:
        plane.groups.promote(plane.versions.served.version)
    plane.groups.restore(rows.counters, rows.groups, rows.deltas)
    plane.placing.committed_seq = max((seq for seq, _ in rows.deltas), default=0)
    for one in plane.requesters:
        one.restore(plane, rows.sessions)
    updates.promote(plane)  # what they restored may pin a policy
    report_failures(plane)
    # Complete groups were not delivered yet; they are when the trainer attaches.
    plane.commit(Commit.NOW)
    if any(not state.finish for state in plane.groups.samples()):
        plane.placing.hold_until = plane.now + plane.settings.restart_grace_s


def collect(plane: Plane, event: LedgerFree) -> None:
    plane.take_in()
    if not plane.groups.is_dirty and not plane.versions.changed:
        return
    batch = plane.groups.take_batch()
    batch.counters |= plane.versions.take_counters()
    finished = [state for key in batch.finished if (state := plane.groups.sample(key)) is not None]
    for one in plane.requesters:
        one.collect(plane, batch, owned(plane, one, finished))
    plane.instructions.append(Write(batch))


def committed(plane: Plane, event: Committed) -> None:
    batch = event.batch
    if batch.deltas:
        plane.placing.committed_seq = batch.deltas[-1].seq
    instances.committed(plane, batch)
    complete = [one for number in batch.complete if (one := plane.groups.requests.get(number)) is not None]
    for who in plane.requesters:
        who.committed(plane, batch, [request for request in complete if owner_of(plane, request) is who])
    if plane.versions.committed(batch.counters) or any(request.pinned for request in complete):
        updates.promote(plane)
