"""Decisions about progress: steps, policy versions, evaluations, checkpoints and restores, as the trainer reports them.

Invariant *the version never falls*: the published policy version only grows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace

from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.budget import NO_STEP_JOB, NO_STEP_VERTEX
from gyre.failover.draft import Draft
from gyre.failover.evaluation import Evaluation
from gyre.failover.incidents import Fault, open_incident
from gyre.failover.layout import JobLayout
from gyre.failover.state import Cause, Incident, LearningWarning, Scope

KEPT_EVALUATIONS = 200
"""Number of results of a set that the snapshot keeps beside its first one; the others are still in the events."""

MOST_TOKENS = 2**40
"""More tokens than a step can have."""


def step_completed(
    layout: JobLayout, draft: Draft, event: e.StepCompleted, now: float
) -> Iterable[c.Command]:
    if event.step > draft.job.step:
        draft.set_job(step=event.step)
        _sum_up(draft, event)
        _give_back(draft)
    return ()


def step_reported(layout: JobLayout, draft: Draft, event: e.StepReported, now: float) -> Iterable[c.Command]:
    if event.step > draft.job.step:
        draft.set_job(step=event.step)
        _give_back(draft)
    return ()


def _give_back(draft: Draft) -> None:
    """What a new step gives back: all attempts, and the restarts for want of a step."""
    for key in (NO_STEP_VERTEX, NO_STEP_JOB):
        if draft.uses.get(key):
            draft.set_uses(key, ())
    for key in list(draft.attempts):
        draft.set_attempts(key, 0)


def _sum_up(draft: Draft, event: e.StepCompleted) -> None:
    before, tokens = draft.training, event.metrics.get("tokens", 0)
    if not 0 <= tokens < MOST_TOKENS:  # a trainer of the user's own may call anything so
        tokens = 0
    metrics = {**event.metrics, "step": event.step, "version": event.version}
    first_since = before.continued_at is not None and before.continued_reward is None
    draft.set_training(
        first=before.first or metrics,
        last=metrics,
        tokens=before.tokens + int(tokens),
        continued_reward=event.metrics.get("reward_mean") if first_since else before.continued_reward,
    )


def learning_warned(
    layout: JobLayout, draft: Draft, event: e.LearningWarned, now: float
) -> Iterable[c.Command]:
    known = draft.warnings.get(event.code)
    if event.holds:
        step = known.step if known is not None and known.holds else event.step
        draft.set_warning(LearningWarning(event.code, step, event.message))
    elif known is not None:
        draft.set_warning(replace(known, holds=False))
    return ()


def batch_skipped(layout: JobLayout, draft: Draft, event: e.BatchSkipped, now: float) -> Iterable[c.Command]:
    """An incident that needs no repair, so that people hear of it."""
    first = draft.vertices.get(f"{event.role}-0")
    if first is not None:
        told = {"error": event.error, "step": event.step, "groups": event.groups, "tokens": event.tokens}
        decision = f"step {event.step} leaves the weights as they are; its {event.groups} groups are dropped"
        fault = Fault(Cause.NOT_FINITE, told)
        open_incident(draft, first, now, fault, scope=Scope.RETRY, decision=decision, recovered=True)
    return ()


def passes_halved(layout: JobLayout, draft: Draft, event: e.PassesHalved, now: float) -> Iterable[c.Command]:
    """An incident beside that of the failure, so that people hear that training is slower from now on."""
    if event.number:
        draft.set_job(halved={**draft.job.halved, event.role: event.number})
    first = draft.vertices.get(f"{event.role}-0")
    if first is not None:
        if event.pass_tokens:
            size, words = {"pass_tokens": event.pass_tokens}, f"passes of at most {event.pass_tokens} tokens"
        else:
            size, words = {"passes": event.passes}, f"{event.passes} passes a micro-batch"
        if event.recompute:
            size["recompute"], words = True, f"{words} whose activations are computed again"
        fault = Fault(Cause.OUT_OF_MEMORY, {"error": event.error, **size})
        decision = f"{event.role} trains in {words} from now on"
        open_incident(draft, first, now, fault, scope=Scope.RETRY, decision=decision, recovered=True)
    return ()


def weights_published(
    layout: JobLayout, draft: Draft, event: e.WeightsPublished, now: float
) -> Iterable[c.Command]:
    if event.version > draft.job.version:
        draft.set_job(version=event.version)
    return ()


def checkpoint_committed(
    layout: JobLayout, draft: Draft, event: e.CheckpointCommitted, now: float
) -> Iterable[c.Command]:
    if event.step > draft.job.checkpoint_step:
        draft.set_job(checkpoint_step=event.step, checkpoint_path=event.path)
    return ()


def checkpoint_damaged(
    layout: JobLayout, draft: Draft, event: e.CheckpointDamaged, now: float
) -> Iterable[c.Command]:
    """An incident of whoever found out, so that people hear of a disk that loses what it was given."""
    finder = draft.vertices.get(e.reporter_of(event))
    if finder is not None:
        open_incident(
            draft,
            finder,
            now,
            Fault(Cause.CHECKPOINT_DAMAGED, {"error": event.problem, "step": event.step, "path": event.path}),
            scope=Scope.REGION,
            decision=f"the checkpoint of step {event.step} cannot be used; the ranks go on from that of step "
            f"{event.older}, and train the steps since again from the ledger",
            recovered=True,
        )
    return ()


def step_diverged(layout: JobLayout, draft: Draft, event: e.StepDiverged, now: float) -> Iterable[c.Command]:
    """An incident of the first rank: what is trained from now on is not what an undisturbed run would have trained."""
    first = draft.vertices.get(f"{event.role}-0")
    if first is not None:
        open_incident(
            draft,
            first,
            now,
            Fault(Cause.STEP_DIVERGED, {"error": event.error, "step": event.step}),
            scope=Scope.REGION,
            decision=f"{event.role} goes on from the weights that the replay of step {event.step} gave",
            recovered=True,
        )
    return ()


def gang_restored(layout: JobLayout, draft: Draft, event: e.GangRestored, now: float) -> Iterable[c.Command]:
    """Note where the state came from in the incident that made the restore necessary. If the optimizer's state was
    lost, open an incident of its own."""
    told = {
        "source": event.source,
        "step": event.step,
        "checkpoint_step": event.checkpoint_step,
        "seconds": event.seconds,
    }
    if event.number:
        draft.set_job(restored={**draft.job.restored, event.role: event.number})
    first = draft.vertices.get(f"{event.role}-0")
    if first is None:
        return ()
    about = [
        incident
        for incident in draft.incidents.values()
        if first.id in incident.region and not _ended_gang(layout, incident, event.gang, first.id)
    ]
    last = max(about, key=lambda incident: (incident.at, incident.id), default=None)
    if last is not None and "restored" not in last.evidence:
        draft.set_incident(replace(last, evidence={**last.evidence, "restored": told}))
    if event.source == "instance":
        open_incident(
            draft,
            first,
            now,
            Fault(Cause.CHECKPOINT_LOST, told),
            scope=Scope.REGION,
            decision=f"{event.role} goes on from the weights of policy {event.step} that instances have; what its "
            "optimizer had learnt is lost, as run.lost_checkpoint permits",
            recovered=True,
        )
    return ()


def evaluated(layout: JobLayout, draft: Draft, event: e.Evaluated, now: float) -> Iterable[c.Command]:
    """Keep the first result of a set by a version, for people."""
    found = Evaluation(**{one.name: getattr(event, one.name) for one in fields(Evaluation)})
    if not is_known_evaluation(draft.evaluations, found.set, found.version):
        draft.add_evaluation(found)
        kept = _versions_of(draft.evaluations, found.set)
        for version in kept[1 : max(1, len(kept) - KEPT_EVALUATIONS)]:
            draft.remove_evaluation(f"{found.set}/{version}")
    return ()


def is_known_evaluation(evaluations: Mapping[str, Evaluation], name: str, version: int) -> bool:
    """Whether the set `name` has a result by this version, or had one that is no longer in the snapshot."""
    if f"{name}/{version}" in evaluations:
        return True
    kept = _versions_of(evaluations, name)
    return len(kept) > KEPT_EVALUATIONS and version < kept[1]


def _versions_of(evaluations: Mapping[str, Evaluation], name: str) -> list[int]:
    """The versions by which the set has a result, oldest first."""
    return sorted(one.version for one in evaluations.values() if one.set == name)


def recorded(layout: JobLayout, draft: Draft, event: e.Event, now: float) -> Iterable[c.Command]:
    """Nothing: the journal keeps the event, and no decision follows from it."""
    return ()


def _ended_gang(layout: JobLayout, incident: Incident, gang: int, first: str) -> bool:
    """Whether the incident ended the gang with this incarnation or a later one; a gang's ranks restart together."""
    return 0 < gang <= incident.incarnation and incident.vertex in layout.regions(first)
