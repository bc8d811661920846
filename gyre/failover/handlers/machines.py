"""Decisions about machines: what dies on them, and notices that they go.

Invariants:
- *a bad machine is left alone*: where more died than `failover.machine` permits, or the pre-flight found something
  wrong, nobody new is placed for a time, which doubles each time that it happens again;
- *a move is not a failure*: who leaves a machine because of a notice takes from no budget.

Vertices that can leave in order do: they hand over what they have, release their place, and start where there is room.
Ranks of a gang, the trainer and the rollout manager are started elsewhere, and go on from the ledger and the last
checkpoint as after a death.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gyre.config import ROLLOUT_MANAGER, TRAINER
from gyre.errors import Conflict, NotFound, nearest
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.budget import within
from gyre.failover.causes import record_of
from gyre.failover.draft import Draft
from gyre.failover.handlers.repair import restart
from gyre.failover.incidents import Fault, open_incident
from gyre.failover.layout import JobLayout
from gyre.failover.state import (
    Cause,
    JobPhase,
    JobState,
    MachineRecord,
    Reason,
    Scope,
    VertexPhase,
    VertexRecord,
)
from gyre.failover.vertices import announce

LONGEST_S = 3600.0
"""A machine is left alone for so long at most."""


def blame(layout: JobLayout, draft: Draft, record: VertexRecord, node: str, fault: Fault, now: float) -> None:
    """Count a death on a machine, and have the machine left alone if it is one too many."""
    if not node or fault.user_code or not record_of(fault.cause).blames_machine:
        return
    budget = layout.spec.failover.machine
    machine = draft.machines.get(node) or MachineRecord(node)
    deaths = (*within(machine.deaths, budget, now), now)
    if len(deaths) < budget.max:
        draft.set_machine(node, deaths=deaths)
        return
    longest = _leave_alone(layout, draft, node, now, deaths=())
    evidence = {
        "error": f"{len(deaths)} vertices died on machine {node} in {now - deaths[0]:.0f} s",
        "machine": node,
    }
    open_incident(
        draft,
        record,
        now,
        Fault(Cause.BAD_PLACE, evidence),
        scope=Scope.RETRY,
        decision=f"leave machine {node} alone for {longest:g} s",
        outcome="left alone",
    )


def machine_examined(
    layout: JobLayout, draft: Draft, event: e.MachineExamined, now: float
) -> Iterable[c.Command]:
    """Leave an unfit machine alone. Who works there goes on; the machine is examined again after the time."""
    known = draft.machines.get(event.node)
    if event.found:
        _leave_alone(layout, draft, event.node, now, found=event.found)
    elif known is not None and known.found:
        draft.set_machine(event.node, found="")
    return ()


def _leave_alone(layout: JobLayout, draft: Draft, node: str, now: float, **fields: Any) -> float:
    """Returns for how long, in seconds."""
    machine = draft.machines.get(node) or MachineRecord(node)
    longest = min(layout.spec.failover.leave_machine_s * 2.0**machine.times_left, LONGEST_S)
    draft.set_machine(node, times_left=machine.times_left + 1, left_until=now + longest, **fields)
    return longest


def drain_requested(
    layout: JobLayout, draft: Draft, event: e.DrainRequested, now: float
) -> Iterable[c.Command]:
    """Move one vertex, or all vertices of a machine, elsewhere."""
    if draft.job.phase is JobPhase.STOPPING:
        return
    if event.node:
        draft.set_machine(event.node, draining=event.reason or f"{event.by} asked for it")
        moving = [
            one for one in draft.vertices.values() if one.node == event.node and _can_leave(layout, one)
        ]
    elif event.vertex in draft.vertices and _can_leave(layout, draft.vertices[event.vertex]):
        moving = [draft.vertices[event.vertex]]
        draft.set_vertex(event.vertex, avoids=moving[0].node)
    else:
        return
    yield from _leave(layout, draft, [one for one in moving if _leaves_in_order(layout, one)], now)
    regions = {layout.regions(one.id): one for one in moving if not _leaves_in_order(layout, one)}
    for region, first in regions.items():
        yield from _move(draft, layout, sorted(region), first, event, now)


def undrain_requested(
    layout: JobLayout, draft: Draft, event: e.UndrainRequested, now: float
) -> Iterable[c.Command]:
    """Use a machine again that was drained or is left alone, or let a vertex go back to where it was."""
    if event.vertex in draft.vertices:
        draft.set_vertex(event.vertex, avoids="")
    elif event.node in draft.machines:
        draft.set_machine(event.node, deaths=(), left_until=0.0, draining="", found="")
        for record in list(draft.vertices.values()):
            if record.avoids == event.node:
                draft.set_vertex(record.id, avoids="")
    return ()


def to_drain_again(layout: JobLayout, state: JobState) -> list[str]:
    """The machines that are drained, and where vertices run that came up there meanwhile and can leave."""
    drained = {machine.id for machine in state.machines.values() if machine.draining}
    if not drained or state.job.phase is JobPhase.STOPPING:
        return []
    return sorted(
        {one.node for one in state.vertices.values() if one.node in drained and _can_leave(layout, one)}
    )


def check_drain(layout: JobLayout, state: JobState, vertex: str) -> None:
    """Raises NotFound or Conflict if the vertex cannot be drained."""
    if vertex not in state.vertices:
        raise NotFound(
            f"there is no vertex or machine {vertex!r} in job {state.job.name}; {nearest(vertex, state.vertices)}"
        )
    record = state.vertices[vertex]
    if state.job.phase is JobPhase.STOPPING or record.phase is not VertexPhase.RUNNING:
        raise Conflict(f"{vertex} is {record.phase}, and cannot be drained.")
    if not _can_leave(layout, record):
        raise Conflict(
            f"{vertex} stays on its machine: with SQLite the file of its ledger is there.",
            hint="With PostgreSQL as the store it could move.",
        )


def _can_leave(layout: JobLayout, record: VertexRecord) -> bool:
    """Whether it runs and may move. With SQLite, who writes a ledger stays where the file is."""
    url = layout.spec.store.url
    stays = record.role in (TRAINER, ROLLOUT_MANAGER) and (url is None or url.startswith("sqlite"))
    return record.phase is VertexPhase.RUNNING and not stays


def _leaves_in_order(layout: JobLayout, record: VertexRecord) -> bool:
    return record.role not in (TRAINER, ROLLOUT_MANAGER) and len(layout.regions(record.id)) == 1


def _leave(layout: JobLayout, draft: Draft, leaving: list[VertexRecord], now: float) -> Iterable[c.Command]:
    for record in leaving:
        draft.move(record.id, VertexPhase.STOPPING, now, reason=Reason.DRAINED, message=record.message)
    if leaving and draft.job.trainer_started:
        yield announce(draft)
    for record in leaving:
        yield c.StopVertex(record.id, record.incarnation, grace_s=layout.spec.failover.drain_timeout_s)


def _move(
    draft: Draft,
    layout: JobLayout,
    region: list[str],
    first: VertexRecord,
    event: e.DrainRequested,
    now: float,
) -> list[c.Command]:
    """Start a region elsewhere that cannot leave in order."""
    scope = Scope.REGION if len(region) > 1 else Scope.VERTEX
    fault = Fault(Cause.DRAINED, {"error": f"machine {first.node} is drained: {event.reason or event.by}"})
    open_incident(
        draft,
        first,
        now,
        fault,
        scope=scope,
        decision=f"start {', '.join(region)} elsewhere",
        region=tuple(region),
    )
    return restart(layout, draft, region, first.id, scope, now, 0.0, moved=True)
