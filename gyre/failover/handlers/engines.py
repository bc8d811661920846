"""Decisions about engines that die or do not start: the instance's vertex runs, and the engine beside it does not.

A death is an incident of its own, with the engine's last words, and needs nothing: the agent starts another engine. It
is open until that has started.

The agent starts its engine again by itself, after pauses; the coordinator counts. All failures in a row of one vertex
are one incident, whatever process of agent, manager or master lives meanwhile; a start that succeeds closes it and
resets the count. When `failover.engine_start` is spent the job goes on without the instance if another one can do its
work, and ends if none can.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.budget import within
from gyre.failover.draft import Draft
from gyre.failover.handlers import full_disk
from gyre.failover.handlers.ending import end_job
from gyre.failover.handlers.machines import blame
from gyre.failover.handlers.repair import go_on_without, is_dispensable
from gyre.failover.incidents import Fault, open_incident
from gyre.failover.layout import JobLayout
from gyre.failover.state import Cause, Incident, JobPhase, Reason, Scope, VertexRecord
from gyre.failover.vertices import wanted
from gyre.graph import is_instance, rollouts_of

STARTED, START_FAILED, DIED = "EngineStarted", "EngineStartFailed", "EngineDied"
"""What the rollout manager says of an instance's engine, in `RolloutsChanged`."""

NOT_SERVED, SERVED = "PolicyNotServed", "PolicyServed"
"""What it says of a policy version that no instance could load, and of one that is served after that."""

SAID_CHARS = 200
"""Characters of the engine's last sentence in the job's message."""


def rollouts_changed(
    layout: JobLayout, draft: Draft, event: e.RolloutsChanged, now: float
) -> Iterable[c.Command]:
    """Count the starts of a placed instance's engine, and note versions that no instance serves. Whatever else the
    rollout plane tells it has repaired itself, and the journal keeps it."""
    if event.what in (NOT_SERVED, SERVED):
        _policy(draft, event, now)
        return ()
    if event.what not in (STARTED, START_FAILED, DIED) or draft.job.phase is JobPhase.STOPPING:
        return ()
    record = next((one for one in wanted(draft) if one.id == event.details.get("instance")), None)
    if record is None or not is_instance(layout.spec, record.role):
        return ()  # an instance that nobody placed ends by itself
    if event.what == STARTED:
        _started(draft, record, now)
        return ()
    if event.what == DIED:
        _died(draft, record, event.details, now)
        return ()
    return _start_failed(layout, draft, record, event, now)


def _policy(draft: Draft, event: e.RolloutsChanged, now: float) -> None:
    """A version that nobody serves is an incident of the manager's, until one is served."""
    record = draft.vertices.get(event.vertex)
    before = _open_incident_of(draft, event.vertex, Cause.POLICY_NOT_SERVED)
    if before is not None:
        draft.set_incident(replace(before, recovered_at=now, outcome="recovered"))
    if record is None or event.what == SERVED:
        return
    version = event.details.get("version")
    refused = event.details.get("refused")
    words = refused if isinstance(refused, dict) else {}
    said = "; ".join(f"{name}: {why}" for name, why in words.items())
    evidence = {"error": f"No instance could load version {version}. {said}", **event.details}
    open_incident(
        draft,
        record,
        now,
        Fault(Cause.POLICY_NOT_SERVED, evidence),
        scope=Scope.RETRY,
        decision="serve the version before, and try this one again after ever longer pauses",
        region=(record.id,),
    )


def _started(draft: Draft, record: VertexRecord, now: float) -> None:
    if draft.uses.get(_key(record.id)):
        draft.set_uses(_key(record.id), ())
    for cause in (Cause.ENGINE_START_FAILED, Cause.ENGINE_DIED):
        while (incident := _open_incident_of(draft, record.id, cause)) is not None:
            draft.set_incident(replace(incident, recovered_at=now, outcome="recovered"))


def _died(draft: Draft, record: VertexRecord, told: dict[str, Any], now: float) -> None:
    if "words" not in told:
        return  # in the journals of earlier releases a death was no incident, and must not become one
    fault = Fault(Cause.ENGINE_DIED, {"error": str(told.get("error", "")), "last_words": str(told["words"])})
    others = told.get("others")
    if not isinstance(others, list):  # in the journals of earlier releases it was over at once
        decision = "start another engine; its samples go on elsewhere"
        open_incident(draft, record, now, fault, scope=Scope.RETRY, decision=decision, recovered=True)
        return
    where = "go on elsewhere" if others else "wait for it"
    decision = f"start another engine; its samples {where}"
    open_incident(draft, record, now, fault, scope=Scope.RETRY, decision=decision, region=(record.id,))


def _start_failed(
    layout: JobLayout, draft: Draft, record: VertexRecord, event: e.RolloutsChanged, now: float
) -> list[c.Command]:
    told = event.details
    if full_disk.is_in_the_way(draft, now):
        return []  # the agent tries again by itself, and it counts for nothing
    budget = layout.spec.failover.engine_start
    failures = (*within(draft.uses.get(_key(record.id), ()), budget, now), now)[-budget.max :]
    draft.set_uses(_key(record.id), failures)
    before = _open_incident_of(draft, record.id, Cause.ENGINE_START_FAILED)
    attempts = (before.evidence.get("attempts", 0) if before is not None else 0) + 1
    evidence = {
        "error": str(told.get("said") or told.get("error") or "the engine printed nothing"),
        "traceback": str(told.get("words") or told.get("error") or ""),
        "reason": str(told.get("error") or ""),
        "attempts": attempts,
    }
    fault = Fault(Cause.ENGINE_START_FAILED, evidence)
    blame(layout, draft, record, event.node, fault, now)
    if len(failures) < budget.max:
        decision = f"start it again: {attempts} of {budget.max} attempts have failed"
        _record(draft, record, before, fault, decision, now)
        return []
    others = _others(layout, draft, record, told, now)
    if not others:
        decision = f"give up: {attempts} attempts have failed, and no other instance can do the work"
        _record(draft, record, before, fault, decision, now, outcome="gave up")
        return _end(layout, draft, record, evidence, now)
    if is_dispensable(layout, draft, record):
        if before is not None:
            draft.set_incident(replace(before, outcome="scaled away"))
        draft.set_uses(_key(record.id), ())
        return go_on_without(layout, draft, record, now, fault)
    decision = f"go on with {', '.join(others[:3])}{' …' if len(others) > 3 else ''}, and try it now and then"
    _record(draft, record, before, fault, decision, now)
    return []


def _others(
    layout: JobLayout, draft: Draft, record: VertexRecord, told: dict[str, Any], now: float
) -> list[str]:
    """The other instances that can do the work: vertices whose starts have not failed too often, and working instances
    that joined by themselves."""
    budget = layout.spec.failover.engine_start
    working = told.get("others")
    names = working if isinstance(working, list) else []
    joined = [name for name in names if isinstance(name, str) and name not in draft.vertices]
    placed = [
        one.id
        for one in wanted(draft)
        if one.id != record.id
        and is_instance(layout.spec, one.role)
        and len(within(draft.uses.get(_key(one.id), ()), budget, now)) < budget.max
    ]
    return [*sorted(placed), *joined]


def _record(
    draft: Draft,
    record: VertexRecord,
    before: Incident | None,
    fault: Fault,
    decision: str,
    now: float,
    *,
    outcome: str = "open",
) -> None:
    """Note another failure in the vertex's one incident."""
    if before is not None:
        draft.set_incident(replace(before, evidence=fault.evidence, decision=decision, outcome=outcome))
    else:
        open_incident(
            draft,
            record,
            now,
            fault,
            scope=Scope.RETRY,
            decision=decision,
            region=(record.id,),
            outcome=outcome,
        )


def _end(
    layout: JobLayout, draft: Draft, record: VertexRecord, evidence: dict[str, Any], now: float
) -> list[c.Command]:
    engine, attempts = rollouts_of(layout.spec, record.role).engine, evidence["attempts"]
    error = "\n".join(
        (
            evidence["traceback"] or evidence["error"],
            "",
            f"So said the engine of {record.id} ({engine}) last. {evidence['reason']}",
            f"Tried: {attempts} starts in a row, with pauses. No other rollout instance can do the work.",
            _advice(rollouts_of(layout.spec, record.role).engine_python, evidence["error"]),
        )
    )
    return end_job(
        draft,
        now,
        outcome=JobPhase.FAILED,
        reason=Reason.ENGINE_NOT_STARTED,
        message=f"{evidence['error'][:SAID_CHARS]} (the engine of {record.id}, which did not start in {attempts} "
        "attempts; no other instance can do the work)",
        error=error,
    )


def _advice(python: str, said: str) -> str:
    if said.startswith(("ModuleNotFoundError", "ImportError")):
        where = (
            f"for {python} (rollouts.engine_python)" if python else "for the Python of the rollout vertices"
        )
        return f"To do: install what is missing {where}, or name another Python in rollouts.engine_python."
    return (
        "To do: see that rollouts.engine, rollouts.engine_args and rollouts.engine_python are right and that the "
        "machine has what the engine needs; then run the job again."
    )


def _open_incident_of(draft: Draft, vertex: str, cause: Cause) -> Incident | None:
    for incident in draft.incidents.values():
        if (incident.vertex, incident.outcome) == (vertex, "open") and incident.cause == cause:
            return incident
    return None


def _key(vertex: str) -> str:
    return f"engine_start:{vertex}"
