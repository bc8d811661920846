"""Decisions about starts: a job is submitted, a master takes it over, a vertex comes up, a lost store is back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gyre.config import TRAINER
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.draft import Draft
from gyre.failover.incidents import close_incidents
from gyre.failover.layout import JobLayout
from gyre.failover.state import Cause, Incident, JobPhase, Reason, Scope, VertexPhase, VertexRecord
from gyre.failover.vertices import (
    announce,
    current,
    is_coming,
    roles_that_can_wait,
    start_commands,
    start_trainer,
    wanted,
)


def job_submitted(layout: JobLayout, draft: Draft, event: e.JobSubmitted, now: float) -> Iterable[c.Command]:
    if draft.job.job_id:
        return ()
    draft.set_job(
        job_id=event.job_id,
        name=event.name,
        phase=JobPhase.STARTING,
        reason=Reason.SUBMITTED,
        submitted_at=now,
        roles=dict(event.roles),
        weights_from=event.weights_from,
    )
    for role, count in event.roles.items():
        for rank in range(count):
            draft.add_vertex(VertexRecord(f"{role}-{rank}", role, rank, since=now))
    return start_commands(layout, draft, draft.vertices)


def job_continued(layout: JobLayout, draft: Draft, event: e.JobContinued, now: float) -> Iterable[c.Command]:
    """Bring an ended job back: every vertex starts as a later incarnation than all before, every budget is full, and
    what the ledger and the checkpoints hold is gone on with."""
    if not draft.job.phase.ended:
        return ()
    draft.set_job(
        phase=JobPhase.STARTING,
        reason=Reason.CONTINUED,
        message="",
        outcome=None,
        ended_at=None,
        paused=False,
        trainer_started=False,
        master_pid=0,
        result={},
        error="",
        roles=dict(event.roles),
    )
    draft.set_training(continued_at=now, continued_step=draft.job.step, continued_reward=None)
    for key in list(draft.uses):
        draft.set_uses(key, ())
        draft.set_attempts(key, 0)
    started = []
    for role, count in event.roles.items():
        for rank in range(count):
            before = draft.vertices.get(f"{role}-{rank}")
            if before is None:
                draft.add_vertex(
                    VertexRecord(f"{role}-{rank}", role, rank, reason=Reason.CONTINUED, since=now)
                )
            else:
                draft.move(
                    before.id,
                    VertexPhase.STARTING,
                    now,
                    reason=Reason.CONTINUED,
                    incarnation=before.incarnation + 1,
                    pid=0,
                    node="",
                    reported=0,
                )
            started.append(f"{role}-{rank}")
    return start_commands(layout, draft, started)


def master_started(
    layout: JobLayout, draft: Draft, event: e.MasterStarted, now: float
) -> Iterable[c.Command]:
    if event.epoch <= draft.job.epoch:
        return
    takes_over = event.epoch > 1 and draft.job.reason is not Reason.CONTINUED
    draft.set_job(
        epoch=event.epoch,
        master_pid=event.pid,
        master_node=event.node,
        master_url=event.url or draft.job.master_url,
    )
    if takes_over and not draft.job.phase.ended:
        incident = Incident(
            id=f"master-{event.epoch}",
            at=now,
            vertex="master",
            incarnation=event.epoch - 1,
            cause=Cause.DIED,
            scope=Scope.VERTEX,
            decision="the master took its job over from the journal; the data plane went on",
            recovered_at=now,
            outcome="recovered",
        )
        draft.set_incident(incident)
        if draft.job.trainer_started:
            yield announce(draft)


def master_hung(layout: JobLayout, draft: Draft, event: e.MasterHung, now: float) -> Iterable[c.Command]:
    """Correct the cause in the incident that the successor opened: the old master hung, and a vertex ended it."""
    incident = draft.incidents.get(f"master-{draft.job.epoch}")
    if incident is not None:
        evidence = {"error": f"silent for {event.silent_s:g} s", "stack": event.stack, "pid": event.pid}
        draft.set_incident(
            replace(incident, cause=Cause.SILENT, evidence=evidence, detected_after_s=event.silent_s)
        )
    return ()


def vertex_started(
    layout: JobLayout, draft: Draft, event: e.VertexStarted, now: float
) -> Iterable[c.Command]:
    record = current(draft, event.vertex, event.incarnation)
    if record is None or record.phase is not VertexPhase.STARTING:
        return
    draft.move(
        record.id,
        VertexPhase.RUNNING,
        now,
        reason=record.reason,
        message=record.message,
        pid=event.pid,
        node=event.node,
        avoids="",
    )
    close_incidents(draft, now)
    if not draft.job.trainer_started:
        yield from first_start(layout, draft, now)
    elif record.role == TRAINER:
        yield start_trainer(draft)
    else:
        yield announce(draft)


def first_start(layout: JobLayout, draft: Draft, now: float) -> Iterable[c.Command]:
    """`fit()` begins when every wanted vertex runs for the first time, but for those that wait for room and that the
    job can do without."""
    if draft.job.trainer_started:
        return
    # Vertices start in order, so the last one tells soonest that not all of them run: a job has thousands.
    if any(is_coming(vertex) for vertex in reversed(draft.vertices.values())):
        return
    missing = [vertex for vertex in wanted(draft) if vertex.phase is not VertexPhase.RUNNING]
    can_wait = roles_that_can_wait(layout, draft)
    if not all(vertex.role in can_wait for vertex in missing):
        return
    draft.set_job(trainer_started=True, started_at=now)
    yield start_trainer(draft)


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
