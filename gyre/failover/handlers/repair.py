"""Repairs: restart the narrowest scope that its budget still pays for; when none is left, go on with less or give up.

Invariant *every repair is paid for*: each restart takes from a budget, but for what a full disk did. That no fault
repeats for ever is the invariant *no fault outlives its attempts* of `gyre.failover.budget`, which says what counts as
progress.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gyre.config import SPARE_ROLLOUT, TRAINER, Budget
from gyre.failover import commands as c
from gyre.failover.budget import affordable, backoff_s, within
from gyre.failover.causes import as_told, record_of
from gyre.failover.draft import Draft
from gyre.failover.handlers import full_disk
from gyre.failover.handlers.ending import end_job, stop_all
from gyre.failover.handlers.role_counts import set_count
from gyre.failover.incidents import Fault, open_incident
from gyre.failover.layout import JobLayout, role_and_rank
from gyre.failover.state import Cause, JobPhase, Reason, Scope, VertexPhase, VertexRecord
from gyre.failover.vertices import TRAINER_VERTEX, announce, is_wanted, wanted
from gyre.graph import is_instance

SAID_CHARS = 500
"""Characters of what failed said that the job's message begins with; the whole is in the job's error."""


class Rung(NamedTuple):
    """A scope of repair, with the budget that pays for it and the key that the budget's uses are counted under."""

    scope: Scope
    key: str
    budget: Budget


def repair(
    layout: JobLayout,
    draft: Draft,
    record: VertexRecord,
    now: float,
    fault: Fault,
    ladder: Sequence[Rung] = (),
) -> list[c.Command]:
    """Restart the vertex, or the narrowest scope around it that can still be paid. `ladder` replaces the vertex's own
    scopes and budgets, narrowest first."""
    if draft.job.phase is JobPhase.STOPPING:
        # The job is ending: a lost vertex is not replaced, and its process is stopped if it still lives.
        if record.role == TRAINER:
            return stop_all(draft, now)  # no step is left to wait for
        draft.move(record.id, VertexPhase.STOPPING, now, reason=draft.job.reason)
        return [c.StopVertex(record.id, record.incarnation)]
    region = sorted(vertex for vertex in layout.regions(record.id) if is_wanted(draft, vertex))
    fault = as_told(fault)
    rungs = list(ladder) or _ladder_of(layout, record, region, fault)
    excused = _excused(layout, draft, record, now, fault)
    if excused is not None:
        restarted = _repair_in(
            layout, draft, record, now, fault, rungs[0].scope, region, layout.spec.failover.backoff_s
        )
        return [*excused, *restarted]
    dispensable = not fault.user_code and is_dispensable(layout, draft, record)
    if dispensable:
        rungs = rungs[:1]  # the job goes on without this vertex rather than start anew because of it
    elif _is_no_failure(layout, record, fault):
        return _replace_in_time(layout, draft, record, now, fault)
    counted, silent = _is_attempt(layout, draft, record, fault), _is_silent(layout, draft, fault)
    if silent:
        narrowest = rungs[0].budget.model_copy(update={"attempts": layout.spec.failover.silent_attempts})
        rungs = [rungs[0]._replace(budget=narrowest), *rungs[1:]]
    for rung in rungs:
        earlier = len(within(draft.uses.get(rung.key, ()), rung.budget, now))
        if not pay(draft, rung.key, rung.budget, now, counted=counted):
            continue
        wait_s = backoff_s(earlier, layout.spec.failover)
        # Sorted, because a state loaded from rows holds the vertices in another order than a folded one.
        members = (
            region
            if rung.scope is not Scope.JOB
            else sorted((v.id for v in wanted(draft)), key=role_and_rank)
        )
        return _repair_in(layout, draft, record, now, fault, rung.scope, members, wait_s)
    if dispensable:
        return go_on_without(layout, draft, record, now, fault)
    return _budgets_are_spent(draft, record, now, fault, rungs[-1], counted=counted, silent=silent)


def pay(draft: Draft, key: str, budget: Budget, now: float, *, counted: bool) -> bool:
    """Take one use from the budget, which is an attempt if it is `counted`. Returns False if none is left."""
    uses, attempts = draft.uses.get(key, ()), draft.attempts.get(key, 0)
    if not affordable(uses, budget, now) or (counted and attempts >= budget.most_attempts):
        return False
    draft.set_uses(key, (*within(uses, budget, now), now))
    if counted:
        draft.set_attempts(key, attempts + 1)
    return True


def _is_attempt(layout: JobLayout, draft: Draft, record: VertexRecord, fault: Fault) -> bool:
    """Whether the fault counts as one without progress; `gyre.failover.budget` says why."""
    if fault.generated and is_instance(layout.spec, record.role):
        return False
    starts = record.phase is VertexPhase.STARTING
    return starts or not (draft.job.paused or any(vertex.no_room for vertex in wanted(draft)))


def _is_silent(layout: JobLayout, draft: Draft, fault: Fault) -> bool:
    """Whether the trainer is a script that has reported no step, so that progress cannot be seen."""
    return layout.spec.counts_own_steps and not draft.job.step and not fault.user_code


def _excused(
    layout: JobLayout, draft: Draft, record: VertexRecord, now: float, fault: Fault
) -> list[c.Command] | None:
    """None if the fault has to be paid for; otherwise the commands that follow from its being a full disk's."""
    if full_disk.is_in_the_way(draft, now):
        return []
    said = fault.cause is Cause.DISK_FULL
    if not said or not pay(draft, f"disk:{record.id}", full_disk.SAID, now, counted=True):
        return None
    return full_disk.begin_by_words(layout, draft, record, fault, now)


def _is_no_failure(layout: JobLayout, record: VertexRecord, fault: Fault) -> bool:
    """Whether the job goes on as well however often this happens: a rollout instance whose machine was taken away, or a
    spare, for which nobody waits."""
    return (
        (fault.cause is Cause.NODE_LOST or record.role == SPARE_ROLLOUT)
        and is_instance(layout.spec, record.role)
        and layout.spec.failover.vertex.max > 0
    )


def _replace_in_time(
    layout: JobLayout, draft: Draft, record: VertexRecord, now: float, fault: Fault
) -> list[c.Command]:
    """Restart the rollout instance: at once while the window's uses last, then when the oldest of them no longer
    counts."""
    key, budget = f"vertex:{record.id}", layout.spec.failover.vertex
    uses = within(draft.uses.get(key, ()), budget, now)
    wait_s = backoff_s(len(uses), layout.spec.failover)
    if len(uses) >= budget.max:
        wait_s = max(wait_s, uses[-budget.max] + budget.window_s - now)
    draft.set_uses(key, (*uses, now)[-budget.max :])
    return _repair_in(layout, draft, record, now, fault, Scope.VERTEX, [record.id], wait_s)


def _repair_in(
    layout: JobLayout,
    draft: Draft,
    record: VertexRecord,
    now: float,
    fault: Fault,
    scope: Scope,
    members: list[str],
    wait_s: float,
) -> list[c.Command]:
    decision = _restart_sentence(scope, record.id, members, wait_s)
    open_incident(draft, record, now, fault, scope=scope, decision=decision, region=tuple(members))
    return restart(layout, draft, members, record.id, scope, now, wait_s)


def _ladder_of(layout: JobLayout, record: VertexRecord, region: list[str], fault: Fault) -> list[Rung]:
    failover = layout.spec.failover
    together = len(region) > 1
    narrowest = Scope.REGION if together else Scope.VERTEX
    if fault.user_code:
        return [Rung(narrowest, f"user_code:{record.role}", failover.user_code)]
    first = (
        Rung(narrowest, f"region:{region[0]}", failover.region)
        if together
        else Rung(narrowest, f"vertex:{record.id}", failover.vertex)
    )
    return [first, Rung(Scope.JOB, "job", failover.job)]


def is_dispensable(layout: JobLayout, draft: Draft, record: VertexRecord) -> bool:
    """Whether the vertex is the last of an elastic role above its minimum, and only the policy asked for it. A vertex
    that the policy asked for carries the policy's sentence."""
    elastic = layout.spec.roles[record.role].elastic
    count = draft.job.roles.get(record.role, 0)
    return bool(elastic and record.message and count > elastic.min and record.rank == count - 1)


def restart(
    layout: JobLayout,
    draft: Draft,
    members: list[str],
    culprit: str,
    scope: Scope,
    now: float,
    wait_s: float,
    *,
    moved: bool = False,
) -> list[c.Command]:
    """End the members' processes and start their next incarnations, after `wait_s`. Those that are `moved` did not
    fail, and it is no restart of theirs."""
    replaces: dict[str, int] = {}
    reasons = {Scope.JOB: Reason.JOB_RESTARTED, Scope.REGION: Reason.REGION_RESTARTED}
    for vertex in members:
        record = draft.vertices[vertex]
        replaces[vertex] = record.incarnation
        draft.move(
            vertex,
            VertexPhase.STARTING,
            now,
            reason=Reason.RESTARTED if vertex == culprit else reasons.get(scope, Reason.RESTARTED),
            message=record.message,
            incarnation=record.incarnation + 1,
            restarts=record.restarts + (not moved),
            pid=0,
            reported=0,
        )
    out: list[c.Command] = []
    for region in layout.split(members):
        out.append(
            c.StartRegion(
                region=region[0],
                vertices={vertex: draft.vertices[vertex].incarnation for vertex in region},
                replaces={vertex: replaces[vertex] for vertex in region},
                not_before=now + wait_s if wait_s else 0.0,
            )
        )
    if draft.job.trainer_started and TRAINER_VERTEX not in members:
        out.insert(0, announce(draft))
    return out


def go_on_without(
    layout: JobLayout, draft: Draft, record: VertexRecord, now: float, fault: Fault
) -> list[c.Command]:
    """Scale the role down to what is below the dispensable vertex."""
    count = record.rank
    sentence = f"go on with {count} of {record.role}: {record.id} cannot be had"
    open_incident(draft, record, now, fault, scope=Scope.GIVE_UP, decision=sentence, outcome="scaled away")
    return list(set_count(layout, draft, record.role, count, now, message=sentence))


def _budgets_are_spent(
    draft: Draft, record: VertexRecord, now: float, fault: Fault, last: Rung, *, counted: bool, silent: bool
) -> list[c.Command]:
    budget = last.budget
    if fault.user_code:
        why = "user code raised"
    elif counted and draft.attempts.get(last.key, 0) >= budget.most_attempts:
        why = f"{fault.cause.value} again and again, with no step between"
        if silent:
            why += (
                ": this job's script reports none. Let fit() call report_progress(step=…), or raise "
                "failover.silent_attempts"
            )
    else:
        why = f"{fault.cause.value} more than {budget.max} times in {budget.window_s:g} s"
    return give_up(draft, record, now, fault, why, decision="give up: every budget is spent")


def give_up(
    draft: Draft, record: VertexRecord, now: float, fault: Fault, why: str, *, decision: str = "give up"
) -> list[c.Command]:
    """End the job. Its message begins with the words of what failed, as far as they fit; `why` follows."""
    error = str(fault.evidence.get("error", fault.cause.value))
    said = error if len(error) <= SAID_CHARS else f"{error[:SAID_CHARS]} …"
    place, method = fault.evidence.get("place", ""), fault.evidence.get("method", "")
    who = record.id
    if place and place not in said:
        said = f"{place}: {said}"
    if method and method not in said:
        who = f"{method} on {record.id}"
    if "attempts" in fault.evidence:
        why = f"{why}, {fault.evidence['attempts']} attempts"
    open_incident(
        draft,
        record,
        now,
        fault,
        scope=Scope.GIVE_UP,
        decision=decision,
        outcome="gave up",
    )
    traceback = str(fault.evidence.get("traceback", "") or fault.evidence.get("stack", ""))
    # A sentence that is complete: no traceback of ours adds to it, nor it to itself.
    complete = fault.cause is Cause.CONFIG or (place and not traceback)
    return end_job(
        draft,
        now,
        outcome=JobPhase.FAILED,
        reason=record_of(fault.cause).ends_by
        or (Reason.USER_CODE if fault.user_code else Reason.BUDGET_SPENT),
        message=f"{said} ({who}: {why})",
        error="" if complete else traceback or error,
    )


def _restart_sentence(scope: Scope, culprit: str, members: list[str], wait_s: float) -> str:
    after = f" after {wait_s:g} s" if wait_s else ""
    if scope is Scope.VERTEX:
        return f"restart {culprit}{after}"
    if scope is Scope.REGION:
        return f"restart the region {', '.join(members)}{after}: its ranks are peers of a collective"
    return f"restart all {len(members)} vertices{after}: the narrower budgets are spent"
