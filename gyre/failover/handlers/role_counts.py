"""Decisions about how many vertices a role has: a user's request, and the elasticity policy's advice."""

from __future__ import annotations

from collections.abc import Iterable

from gyre.config import TRAINER
from gyre.errors import ConfigError, Conflict, NotFound, nearest
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.draft import Draft
from gyre.failover.handlers.startup import first_start
from gyre.failover.incidents import close_incidents
from gyre.failover.layout import JobLayout
from gyre.failover.state import JobPhase, JobState, Reason, VertexPhase, VertexRecord
from gyre.failover.vertices import announce, is_wanted, start_commands

_UNBOUNDED = (1, 10_000)
"""Limits of a role without `elastic`: enough for any cluster, and a typing error is still refused."""


def check_scale(layout: JobLayout, state: JobState, role: str, count: int) -> None:
    """Raises NotFound, ConfigError or Conflict if `role` cannot have `count` vertices."""
    roles = layout.spec.roles
    if role not in roles:
        raise NotFound(f"role {role!r} is not in job {state.job.name}; {nearest(role, roles)}")
    spec = roles[role]
    if spec.gang or role == TRAINER:
        raise Conflict(
            f"role {role!r} cannot be scaled while the job runs: its ranks are peers of a collective."
            if spec.gang
            else "the trainer is one controller; it cannot be scaled.",
            hint="Stop the job and submit it with another total.",
        )
    low, high = (spec.elastic.min, spec.elastic.max) if spec.elastic else _UNBOUNDED
    if not low <= count <= high:
        raise ConfigError(f"role {role!r}: {count} vertices asked for, permitted are {low} to {high}.")
    if state.job.phase.ended or state.job.phase is JobPhase.STOPPING:
        raise Conflict(f"job {state.job.name} is {state.job.phase}; it cannot be scaled.")


def scale_requested(
    layout: JobLayout, draft: Draft, event: e.ScaleRequested, now: float
) -> Iterable[c.Command]:
    try:
        check_scale(layout, draft.done(), event.role, event.count)
    except (NotFound, ConfigError, Conflict):
        # The user was told so before the event was written. In a history, an event that made the request impossible
        # may stand before it.
        return
    yield from set_count(layout, draft, event.role, event.count, now)


def scale_advised(layout: JobLayout, draft: Draft, event: e.ScaleAdvised, now: float) -> Iterable[c.Command]:
    """Follow the advice as far as the role's bounds and the cluster allow. An advice that was given for another number
    of vertices than the present one is out of date; only the journal keeps it."""
    present = draft.job.roles.get(event.role)
    spec = layout.spec.roles.get(event.role)
    if spec is None or spec.elastic is None or present != event.seen:
        return
    count = event.count if event.possible is None else min(event.count, event.possible)
    count = max(spec.elastic.min, min(spec.elastic.max, count))
    if (count > present) != (event.count > present) or count == present:
        return  # the cluster has no room for more, which is no reason to stop vertices that run
    if draft.job.phase is not JobPhase.STOPPING:
        yield from set_count(layout, draft, event.role, count, now, message=event.reason)


def set_count(
    layout: JobLayout, draft: Draft, role: str, count: int, now: float, *, message: str = ""
) -> Iterable[c.Command]:
    """Start or stop vertices until the role has `count`. `message` is the reason, kept with each vertex that comes or
    goes."""
    draft.set_job(roles={**draft.job.roles, role: count})
    present = {vertex.rank: vertex for vertex in draft.vertices.values() if vertex.role == role}
    new = []
    for rank in range(count):
        vertex = present.get(rank)
        if vertex is None:
            record = VertexRecord(
                f"{role}-{rank}", role, rank, reason=Reason.SCALED, message=message, since=now
            )
            draft.add_vertex(record)
            new.append(record.id)
        elif vertex.phase is VertexPhase.STOPPED:
            bring_back(draft, vertex, now, message)
            new.append(vertex.id)
    yield from start_commands(layout, draft, new)
    leaving = [v for rank, v in present.items() if rank >= count and is_wanted(draft, v.id)]
    for vertex in leaving:
        draft.move(vertex.id, VertexPhase.STOPPING, now, reason=Reason.SCALED, message=message)
    if leaving and draft.job.trainer_started:
        yield announce(draft)
    for vertex in leaving:
        yield c.StopVertex(vertex.id, vertex.incarnation, grace_s=layout.spec.failover.drain_timeout_s)
    if leaving:
        close_incidents(draft, now)
        yield from first_start(layout, draft, now)


def bring_back(draft: Draft, record: VertexRecord, now: float, message: str = "") -> None:
    """Want a vertex again that was scaled away or drained, as its next incarnation; its place was given back."""
    drained = record.phase is VertexPhase.STOPPING and record.reason is Reason.DRAINED
    draft.move(
        record.id,
        VertexPhase.STARTING,
        now,
        reason=Reason.DRAINED if drained else Reason.SCALED,
        message=message,
        incarnation=record.incarnation + 1,
        pid=0,
        node="",
        reported=0,
    )
