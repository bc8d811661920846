"""Decisions about pauses and ends: the trainer holds after its step until it is resumed; the job is stopped, finishes,
fails or loses its cluster, and its vertices go.

A job ends in two moves. First it is STOPPING, with the outcome that it will have, while its vertices are stopped; when
the last vertex is gone it takes the outcome as its phase and the master is commanded to finish.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.draft import Draft
from gyre.failover.handlers.role_counts import bring_back
from gyre.failover.layout import JobLayout
from gyre.failover.state import JobPhase, Reason, VertexPhase
from gyre.failover.vertices import TRAINER_VERTEX, current, live_trainer, start_commands

DRAIN_TIMER = "drain"
"""The timer that ends a graceful stop."""


def stop_requested(
    layout: JobLayout, draft: Draft, event: e.StopRequested, now: float
) -> Iterable[c.Command]:
    """Let the trainer end its step, for at most `failover.drain_timeout_s`; without a live trainer, or where that is
    asked for, stop at once."""
    if draft.job.phase is JobPhase.STOPPING:
        return stop_all(draft, now) if event.at_once else []
    trainer = live_trainer(draft)
    if trainer is None or event.at_once:
        return end_job(
            draft, now, outcome=JobPhase.STOPPED, reason=Reason.STOP_REQUESTED, message=event.reason
        )
    draft.set_job(
        phase=JobPhase.STOPPING,
        reason=Reason.STOP_REQUESTED,
        message=event.reason,
        outcome=JobPhase.STOPPED,
    )
    return [
        c.StopTrainer(trainer.incarnation),
        c.SetTimer(DRAIN_TIMER, now + layout.spec.failover.drain_timeout_s),
    ]


def timer_fired(layout: JobLayout, draft: Draft, event: e.TimerFired, now: float) -> Iterable[c.Command]:
    if event.timer == DRAIN_TIMER and draft.job.phase is JobPhase.STOPPING:
        return stop_all(draft, now)
    return ()


def trainer_finished(
    layout: JobLayout, draft: Draft, event: e.TrainerFinished, now: float
) -> Iterable[c.Command]:
    if current(draft, TRAINER_VERTEX, event.incarnation) is None:
        return ()
    draft.set_job(result=event.result)
    if draft.job.phase is JobPhase.STOPPING:
        return stop_all(draft, now)
    return end_job(
        draft,
        now,
        outcome=JobPhase.STOPPED if event.stopped else JobPhase.SUCCEEDED,
        reason=Reason.FINISHED,
        message="",
    )


def cluster_lost(layout: JobLayout, draft: Draft, event: e.ClusterLost, now: float) -> Iterable[c.Command]:
    """End the job without a command, because nothing is left to carry one out. A job that was already stopping keeps
    its outcome."""
    if draft.job.outcome is None:
        draft.set_job(outcome=JobPhase.FAILED, reason=Reason.CLUSTER_LOST, message=event.detail)
    draft.set_job(phase=JobPhase.STOPPING)
    for vertex in list(draft.vertices.values()):
        if vertex.phase in (VertexPhase.STARTING, VertexPhase.RUNNING):
            draft.move(vertex.id, VertexPhase.STOPPING, now, reason=draft.job.reason)
        if vertex.phase is not VertexPhase.STOPPED:
            draft.move(vertex.id, VertexPhase.STOPPED, now, reason=draft.job.reason, pid=0)
    _finish_if_empty(draft, now)
    return ()


def vertex_stopped(
    layout: JobLayout, draft: Draft, event: e.VertexStopped, now: float
) -> Iterable[c.Command]:
    record = current(draft, event.vertex, event.incarnation)
    if record is None or record.phase is not VertexPhase.STOPPING:
        return ()
    if draft.job.phase is not JobPhase.STOPPING and record.rank < draft.job.roles.get(record.role, 0):
        # The role was scaled up again before the vertex was gone, or the vertex was drained.
        bring_back(draft, record, now, record.message)
        return start_commands(layout, draft, [record.id])
    draft.move(record.id, VertexPhase.STOPPED, now, reason=record.reason, message=record.message, pid=0)
    return _finish_if_empty(draft, now)


def end_job(
    draft: Draft, now: float, *, outcome: JobPhase, reason: Reason, message: str, error: str = ""
) -> list[c.Command]:
    """Stop every vertex at once; the job then ends with `outcome`."""
    draft.set_job(phase=JobPhase.STOPPING, reason=reason, message=message, outcome=outcome, error=error)
    return stop_all(draft, now)


def stop_all(draft: Draft, now: float) -> list[c.Command]:
    out: list[c.Command] = []
    for vertex in list(draft.vertices.values()):
        if vertex.phase in (VertexPhase.STARTING, VertexPhase.RUNNING):
            draft.move(vertex.id, VertexPhase.STOPPING, now, reason=draft.job.reason)
            out.append(c.StopVertex(vertex.id, vertex.incarnation))
    return out + _finish_if_empty(draft, now)


def _finish_if_empty(draft: Draft, now: float) -> list[c.Command]:
    outcome = draft.job.outcome
    if draft.job.phase is not JobPhase.STOPPING or outcome is None:
        return []
    if any(vertex.phase is not VertexPhase.STOPPED for vertex in draft.vertices.values()):
        return []
    for incident in list(draft.incidents.values()):
        if incident.outcome == "open":
            draft.set_incident(replace(incident, outcome="job ended"))
    draft.set_job(phase=outcome, ended_at=now)
    return [c.FinishJob(outcome.value)]


def pause_requested(
    layout: JobLayout, draft: Draft, event: e.PauseRequested, now: float
) -> Iterable[c.Command]:
    if draft.job.paused or draft.job.phase is JobPhase.STOPPING:
        return
    draft.set_job(paused=True)
    if (trainer := live_trainer(draft)) is not None:
        yield c.PauseTrainer(trainer.incarnation)


def resume_requested(
    layout: JobLayout, draft: Draft, event: e.ResumeRequested, now: float
) -> Iterable[c.Command]:
    if not draft.job.paused or draft.job.phase is JobPhase.STOPPING:
        return
    draft.set_job(paused=False)
    if (trainer := live_trainer(draft)) is not None:
        yield c.ResumeTrainer(trainer.incarnation)
