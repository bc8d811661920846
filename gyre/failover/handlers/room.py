"""Decisions about vertices that no machine has room for.

Invariant *waiting is not failing*: a vertex that waits for room takes from no budget and widens no repair. It has a
deadline of its own, `failover.wait_for_room_s`, after which the job has failed; where its role is elastic and enough of
the others run, the job goes on with these, and there is no deadline.
"""

from __future__ import annotations

from collections.abc import Iterable

from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.draft import Draft
from gyre.failover.handlers.ending import end_job
from gyre.failover.handlers.repair import go_on_without, is_dispensable
from gyre.failover.handlers.startup import first_start
from gyre.failover.incidents import Fault, open_incident
from gyre.failover.layout import JobLayout
from gyre.failover.state import Cause, JobPhase, Reason, Scope, VertexPhase, VertexRecord
from gyre.failover.vertices import current, is_wanted, roles_that_can_wait

ROOM_TIMER = "room/"
"""Prefix of the timers that end the waiting; the vertex and its incarnation follow."""


def vertex_waits_for_room(
    layout: JobLayout, draft: Draft, event: e.VertexWaitsForRoom, now: float
) -> Iterable[c.Command]:
    record = current(draft, event.vertex, event.incarnation)
    if record is None or record.phase is not VertexPhase.STARTING or draft.job.phase is JobPhase.STOPPING:
        return
    lacks = f"required {event.required}, available {event.available}"
    if is_dispensable(layout, draft, record):  # only the policy asked for it, and will ask again
        yield from go_on_without(layout, draft, record, now, Fault(Cause.NO_ROOM, {"error": lacks}))
        return
    waited = draft.wait_for_room(record.id, now, f"{lacks}. {event.hint}".rstrip())
    if not waited:
        yield c.SetTimer(
            f"{ROOM_TIMER}{record.id}/{record.incarnation}", now + layout.spec.failover.wait_for_room_s
        )
    yield from first_start(layout, draft, now)


def vertex_found_room(
    layout: JobLayout, draft: Draft, event: e.VertexFoundRoom, now: float
) -> Iterable[c.Command]:
    record = current(draft, event.vertex, event.incarnation)
    if record is not None and record.no_room:
        draft.found_room(record.id)
    return ()


def lack_of_room(draft: Draft) -> str:
    """The job's message while vertices wait for room; "" if none does."""
    waiting = [vertex for vertex in draft.vertices.values() if vertex.no_room and is_wanted(draft, vertex.id)]
    if not waiting:
        return ""
    first = min(waiting, key=lambda vertex: vertex.id)
    others = f", and {len(waiting) - 1} more" if len(waiting) > 1 else ""
    return f"no room for {first.id}{others}: {first.no_room}"


def waited_too_long(layout: JobLayout, draft: Draft, timer: str, now: float) -> Iterable[c.Command]:
    vertex, _, incarnation = timer.removeprefix(ROOM_TIMER).rpartition("/")
    record = current(draft, vertex, int(incarnation))
    if record is None or not record.no_room or draft.job.phase is JobPhase.STOPPING:
        return []
    if record.role in roles_that_can_wait(layout, draft):
        return []  # it costs nothing to wait on
    return _give_up(layout, draft, record, now)


def _give_up(layout: JobLayout, draft: Draft, record: VertexRecord, now: float) -> list[c.Command]:
    error = f"no room for {now - record.no_room_since:.0f} s: {record.no_room}"
    open_incident(
        draft,
        record,
        now,
        Fault(Cause.NO_ROOM, {"error": error}),
        scope=Scope.GIVE_UP,
        decision=f"give up: failover.wait_for_room_s is {layout.spec.failover.wait_for_room_s:g}",
        outcome="gave up",
    )
    return end_job(
        draft,
        now,
        outcome=JobPhase.FAILED,
        reason=Reason.NO_ROOM,
        message=f"{record.id}: {error}",
        error=error,
    )
