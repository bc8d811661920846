"""Decisions about faults: a vertex is lost or does not start, a call or the trainer raises, the job stalls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gyre.config import TRAINER
from gyre.errors import is_configuration
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.budget import NO_STEP_JOB, NO_STEP_VERTEX
from gyre.failover.causes import as_told, cause_of_code
from gyre.failover.draft import Draft
from gyre.failover.handlers import full_disk, machines
from gyre.failover.handlers.repair import Rung, give_up, pay, repair
from gyre.failover.incidents import Fault, open_incident
from gyre.failover.layout import JobLayout
from gyre.failover.state import Cause, JobPhase, Scope, VertexPhase, VertexRecord
from gyre.failover.vertices import TRAINER_VERTEX, current


def vertex_lost(layout: JobLayout, draft: Draft, event: e.VertexLost, now: float) -> Iterable[c.Command]:
    record = current(draft, event.vertex, event.incarnation)
    if record is None or record.phase in (VertexPhase.STOPPING, VertexPhase.STOPPED):
        # A vertex that hangs is not gone: only the answer to StopVertex says that no process is left.
        return ()
    fault = Fault(
        Cause(event.cause),
        event.evidence,
        detected_after_s=event.detected_after_s,
        generated=event.generated,
    )
    _blame(layout, draft, record, event.node, fault, now)
    return repair(layout, draft, record, now, fault)


def vertex_fell_silent(
    layout: JobLayout, draft: Draft, event: e.VertexFellSilent, now: float
) -> Iterable[c.Command]:
    if current(draft, event.vertex, event.incarnation) is not None:
        draft.set_vertex(event.vertex, silent=event.life, silent_since=now - event.silent_s)
    return ()


def vertex_heard_again(
    layout: JobLayout, draft: Draft, event: e.VertexHeardAgain, now: float
) -> Iterable[c.Command]:
    record = current(draft, event.vertex, event.incarnation)
    if record is not None and record.silent:
        draft.set_vertex(event.vertex, silent="", silent_since=0.0, false_alarms=record.false_alarms + 1)
    return ()


def vertex_start_failed(
    layout: JobLayout, draft: Draft, event: e.VertexStartFailed, now: float
) -> Iterable[c.Command]:
    record = current(draft, event.vertex, event.incarnation)
    if record is None or record.phase is not VertexPhase.STARTING:
        return ()
    fault = _fault_of(event, Cause.START_FAILED)
    if is_configuration(event.code) and (not draft.job.trainer_started or record.role == TRAINER):
        return _configured_wrong(draft, record, now, fault)
    # Of a role that has started with this configuration: its machine lacks something.
    _blame(layout, draft, record, event.node, fault, now)
    return repair(layout, draft, record, now, fault)


def trainer_failed(
    layout: JobLayout, draft: Draft, event: e.TrainerFailed, now: float
) -> Iterable[c.Command]:
    record = current(draft, TRAINER_VERTEX, event.incarnation)
    if record is None or record.phase is not VertexPhase.RUNNING:
        return ()
    fault = _fault_of(event, Cause.CALL_FAILED)
    if is_configuration(event.code):
        return _configured_wrong(draft, record, now, fault)
    return repair(layout, draft, record, now, fault)


def _fault_of(event: e.VertexStartFailed | e.TrainerFailed, otherwise: Cause) -> Fault:
    """What failed: the user's code, or Gyre's for the cause `otherwise`."""
    evidence = {"error": event.error, "traceback": event.traceback, **_place_of(event)}
    if cause_of_code(event.code) is Cause.DISK_FULL:
        return Fault(Cause.DISK_FULL, evidence)
    return Fault(Cause.USER_CODE if event.user_code else otherwise, evidence, event.user_code)


def _blame(
    layout: JobLayout, draft: Draft, record: VertexRecord, node: str, fault: Fault, now: float
) -> None:
    """Count the death against its machine, unless a full disk is to blame."""
    if not full_disk.is_in_the_way(draft, now):
        machines.blame(layout, draft, record, node, as_told(fault), now)


def _place_of(event: e.VertexStartFailed | e.TrainerFailed | e.OperatorFailed) -> dict[str, str]:
    """Where in the user's code it was, as far as that is known."""
    return {key: value for key, value in (("place", event.place), ("method", event.method)) if value}


def _open_retry(draft: Draft, record: VertexRecord, now: float, fault: Fault, decision: str) -> None:
    open_incident(draft, record, now, fault, scope=Scope.RETRY, decision=decision, recovered=True)


def _configured_wrong(draft: Draft, record: VertexRecord, now: float, fault: Fault) -> Iterable[c.Command]:
    """End the job at once: what is written is wrong, and is wrong the next time too."""
    return give_up(
        draft,
        record,
        now,
        replace(fault, cause=Cause.CONFIG, user_code=False),
        "the configuration is wrong, so it is not tried again",
    )


def operator_failed(
    layout: JobLayout, draft: Draft, event: e.OperatorFailed, now: float
) -> Iterable[c.Command]:
    """The trainer repeats a failed call by itself while the budget of retries lasts, and counts the attempts. A gang
    that failed in Gyre's own code is restarted at once: its ranks no longer agree on where they are. What fails while a
    disk is full counts for nothing. A gradient that is not finite ends the job."""
    record = current(draft, event.vertex, event.vertex_incarnation)
    if record is None or record.phase is not VertexPhase.RUNNING:
        return ()
    evidence: dict[str, Any] = {
        "operator": event.operator,
        "error": event.error,
        "traceback": event.traceback,
        **_place_of(event),
    }
    if is_configuration(event.code):
        return _configured_wrong(draft, record, now, Fault(Cause.CONFIG, evidence))
    said = cause_of_code(event.code)
    if said is Cause.NOT_FINITE:
        # The trainer has skipped as many batches as it may. From the same state the same batch gives the same again.
        return give_up(draft, record, now, Fault(Cause.NOT_FINITE, evidence), "the gradient is not finite")
    gang = len(layout.regions(record.id)) > 1
    retried = said or (Cause.USER_CODE if event.user_code else Cause.CALL_FAILED)
    fault, again = Fault(retried, evidence, event.user_code), f"call {event.operator} again"
    if (not gang or event.user_code) and full_disk.is_in_the_way(draft, now):
        if event.attempt <= 1:
            _open_retry(draft, record, now, fault, f"{again}: a disk is full, so it counts for nothing")
        return ()
    budget = layout.spec.failover.retry
    retriable = (not gang or event.user_code) and event.attempt <= budget.most_attempts
    if retriable and pay(draft, f"retry:{record.role}", budget, now, counted=False):
        _open_retry(draft, record, now, fault, again)
        return ()
    unknown = gang and retried is Cause.CALL_FAILED
    cause = Cause.COLLECTIVE if unknown else retried
    if event.attempt > 1:
        evidence["attempts"] = event.attempt
    return repair(layout, draft, record, now, Fault(cause, evidence, event.user_code))


def job_stalled(layout: JobLayout, draft: Draft, event: e.JobStalled, now: float) -> Iterable[c.Command]:
    """All vertices run, and no step comes. While anything moves, the incident only informs people: work that takes
    longer than ever before must not be thrown away because of it.

    A job that stands still is repaired in two scopes, each as often as `failover.no_step` allows. The first is the
    trainer: all of its state is in the ledger, it asks everybody for everything again, and no other process is lost. If
    no step comes of that, another vertex waits for something that will not come, and the master cannot tell which; so
    the second scope is the whole job, from the journal. After that the job has failed.
    """
    trainer = draft.vertices.get(TRAINER_VERTEX)
    if trainer is None or draft.job.phase is not JobPhase.RUNNING or event.step != draft.job.step:
        return ()
    if full_disk.is_in_the_way(draft, now, over_s=event.after_s):
        return ()  # that explains it
    error = f"no step after step {event.step} for {event.after_s:.0f} s (limit {event.limit_s:.0f} s)"
    fault = Fault(Cause.NO_STEP, {"error": error, **event.evidence}, detected_after_s=event.after_s)
    if not event.stands_still:
        open_incident(
            draft,
            trainer,
            now,
            fault,
            scope=Scope.RETRY,
            decision="wait: the job is at work, or its trainer is a script",
            outcome="left alone",
        )
        return ()
    budget = layout.spec.failover.no_step
    ladder = [Rung(Scope.VERTEX, NO_STEP_VERTEX, budget), Rung(Scope.JOB, NO_STEP_JOB, budget)]
    return repair(layout, draft, trainer, now, fault, ladder)
