"""Every decision of the control plane: `decide(state, event, now) -> Decision(state', commands)`.

Pure: it reads no clock, draws no random number, imports no Ray. The master carries its commands out, `gyre
replay` folds old histories with it, the simulator drives it under a virtual clock, and all three run this code.

Invariants, each with a test of its name:
- *old news is no news*: an event about an incarnation that is not the current one changes nothing;
- *one repair at a time*: a region under repair is not repaired again for what its repair caused;
- *the version never falls*: the published policy version only grows;
- *ended is ended*: after SUCCEEDED, FAILED or STOPPED no command is issued;
- *every repair is paid for*: each restart takes from a budget, so that no fault repeats for ever.

The scope of a repair comes from the graph: the region of the culprit, that is, itself and its peers in a
collective. When a budget is spent the next wider scope is tried: retry, vertex, region, job, give up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from gyre.config import TRAINER, Budget, JobSpec
from gyre.errors import ConfigError, Conflict, NotFound, nearest
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.budget import affordable, backoff_s, within
from gyre.failover.draft import Draft
from gyre.failover.state import (
    Cause,
    Incident,
    JobPhase,
    JobState,
    Reason,
    RowKey,
    Scope,
    VertexPhase,
    VertexRecord,
)

KEPT_INCIDENTS = 200
"""Closed incidents kept in the snapshot; older ones are still in the events."""

_NO_STEP_VERTEX, _NO_STEP_JOB = "no_step:vertex", "no_step:job"

Regions = Callable[[str], frozenset[str]]


@dataclass(frozen=True, slots=True)
class Decision:
    """`changed` names the snapshot rows that differ between the old state and the new."""

    state: JobState
    commands: tuple[c.Command, ...] = ()
    changed: frozenset[RowKey] = frozenset()


class FailoverCoordinator:
    """The decisions of one job. It keeps nothing between calls: all there is to know is in the state."""

    def __init__(self, spec: JobSpec, regions: Regions) -> None:
        self.spec = spec
        self._regions = regions

    def region(self, vertex: str) -> frozenset[str]:
        """What restarts together with the vertex, itself included."""
        return self._regions(vertex)

    # -- the one entry ------------------------------------------------------------------------------

    def decide(self, state: JobState, event: e.Event, now: float) -> Decision:
        draft = Draft(state)
        if state.job.phase.ended and not isinstance(event, e.MasterStarted):
            return Decision(state)
        if self.is_repeated(state, event):
            return Decision(state)
        if isinstance(event, e.REPORTED) and event.report:
            draft.set_vertex(e.reporter_of(event), reported=event.report)
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise TypeError(f"no decision for {type(event).__name__}")
        out = list(handler(self, draft, event, now))
        if draft.moved or draft.job.paused is not state.job.paused:
            self._derive_phase(draft)
        return Decision(draft.done(), tuple(out), draft.changed())

    @staticmethod
    def is_repeated(state: JobState, event: e.Event) -> bool:
        """A report that is already in the journal, one of a vertex that has been replaced, or one that its
        predecessor made already."""
        if isinstance(event, e.MasterHung):
            incident = state.incidents.get(f"master-{state.job.epoch}")
            return incident is None or incident.cause == Cause.SILENT
        if not isinstance(event, e.REPORTED) or not event.report:
            return False
        if isinstance(event, e.GangRestored) and 0 < event.number <= state.job.restored.get(event.role, 0):
            return True
        if isinstance(event, e.StepCompleted) and event.again and event.step <= state.job.step:
            return True
        if (
            isinstance(event, e.CheckpointCommitted)
            and event.again
            and event.step <= state.job.checkpoint_step
        ):
            return True
        teller = state.vertices.get(e.reporter_of(event))
        return teller is None or teller.incarnation != event.incarnation or event.report <= teller.reported

    def check_scale(self, state: JobState, role: str, count: int) -> None:
        """Raises NotFound, ConfigError or Conflict where `role` cannot have `count` vertices."""
        if role not in self.spec.roles:
            raise NotFound(f"role {role!r} is not in job {state.job.name}; {nearest(role, self.spec.roles)}")
        spec = self.spec.roles[role]
        if spec.gang or role == TRAINER:
            raise Conflict(
                f"role {role!r} cannot be scaled while the job runs: its ranks are peers of a collective."
                if spec.gang
                else "the trainer is one controller; it cannot be scaled.",
                hint="Stop the job and submit it with another total.",
            )
        low, high = (spec.elastic.min, spec.elastic.max) if spec.elastic else (1, 10_000)
        if not low <= count <= high:
            raise ConfigError(f"role {role!r}: {count} vertices asked for, permitted are {low} to {high}.")
        if state.job.phase.ended or state.job.phase is JobPhase.STOPPING:
            raise Conflict(f"job {state.job.name} is {state.job.phase}; it cannot be scaled.")

    # -- life of the job ----------------------------------------------------------------------------

    def _submitted(self, draft: Draft, event: e.JobSubmitted, now: float) -> Iterable[c.Command]:
        if draft.job.job_id:
            return ()
        draft.set_job(
            job_id=event.job_id,
            name=event.name,
            phase=JobPhase.STARTING,
            reason=Reason.SUBMITTED,
            submitted_at=now,
            roles=dict(event.roles),
        )
        for role, count in event.roles.items():
            for rank in range(count):
                draft.add_vertex(VertexRecord(f"{role}-{rank}", role, rank, since=now))
        return self._start_commands(draft, draft.vertices)

    def _master_started(self, draft: Draft, event: e.MasterStarted, now: float) -> Iterable[c.Command]:
        if event.epoch <= draft.job.epoch:
            return
        draft.set_job(
            epoch=event.epoch,
            master_pid=event.pid,
            master_node=event.node,
            master_url=event.url or draft.job.master_url,
        )
        if event.epoch > 1 and not draft.job.phase.ended:
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
                yield self._announce(draft)

    def _master_hung(self, draft: Draft, event: e.MasterHung, now: float) -> Iterable[c.Command]:
        """The successor's incident gets its cause: the master did not die by itself."""
        incident = draft.incidents.get(f"master-{draft.job.epoch}")
        if incident is not None:
            evidence = {"error": f"silent for {event.silent_s:g} s", "stack": event.stack, "pid": event.pid}
            draft.set_incident(
                replace(incident, cause=Cause.SILENT, evidence=evidence, detected_after_s=event.silent_s)
            )
        return ()

    def _derive_phase(self, draft: Draft) -> None:
        job = draft.job
        if job.phase.ended or job.phase is JobPhase.STOPPING:
            return
        reason = job.reason
        if not job.trainer_started:
            phase = JobPhase.STARTING
        elif any(vertex.phase is not VertexPhase.RUNNING for vertex in self._wanted(draft)):
            phase = JobPhase.RECOVERING
        elif job.paused:
            phase, reason = JobPhase.PAUSED, Reason.PAUSE_REQUESTED
        else:
            phase, reason = JobPhase.RUNNING, Reason.NONE
        if phase is not job.phase:
            draft.set_job(phase=phase, reason=reason, message="")

    @staticmethod
    def _wanted(draft: Draft) -> list[VertexRecord]:
        gone = (VertexPhase.STOPPING, VertexPhase.STOPPED)
        return [vertex for vertex in draft.vertices.values() if vertex.phase not in gone]

    # -- vertices come up ---------------------------------------------------------------------------

    def _vertex_started(self, draft: Draft, event: e.VertexStarted, now: float) -> Iterable[c.Command]:
        record = self._current(draft, event.vertex, event.incarnation)
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
        )
        self._close_incidents(draft, now)
        if not draft.job.trainer_started:
            yield from self._first_start(draft, now)
        elif record.role == TRAINER:
            yield self._start_trainer(draft)
        else:
            yield self._announce(draft)

    def _first_start(self, draft: Draft, now: float) -> Iterable[c.Command]:
        """`fit()` begins when everything that is wanted runs for the first time."""
        if not draft.job.trainer_started and all(
            vertex.phase is VertexPhase.RUNNING for vertex in self._wanted(draft)
        ):
            draft.set_job(trainer_started=True, started_at=now)
            yield self._start_trainer(draft)

    def _start_trainer(self, draft: Draft) -> c.Command:
        serial = self._next_serial(draft)
        return c.StartTrainer(
            incarnation=draft.vertices[f"{TRAINER}-0"].incarnation,
            paused=draft.job.paused,
            serial=serial,
            running=self._running(draft),
            roles=dict(draft.job.roles),
        )

    def _announce(self, draft: Draft) -> c.Command:
        serial = self._next_serial(draft)
        trainer = draft.vertices.get(f"{TRAINER}-0")
        return c.AnnounceRoster(
            serial, self._running(draft), dict(draft.job.roles), trainer.incarnation if trainer else 0
        )

    @staticmethod
    def _next_serial(draft: Draft) -> int:
        draft.set_job(serial=draft.job.serial + 1)
        return draft.job.serial

    @staticmethod
    def _running(draft: Draft) -> dict[str, int]:
        return {
            vertex.id: vertex.incarnation
            for vertex in draft.vertices.values()
            if vertex.phase is VertexPhase.RUNNING and vertex.role != TRAINER
        }

    # -- vertices go down ---------------------------------------------------------------------------

    def _vertex_lost(self, draft: Draft, event: e.VertexLost, now: float) -> Iterable[c.Command]:
        record = self._current(draft, event.vertex, event.incarnation)
        if record is None or record.phase in (VertexPhase.STOPPING, VertexPhase.STOPPED):
            # What hangs is not gone: only the answer to StopVertex says that no process is left.
            return ()
        return self._repair(
            draft,
            record,
            now,
            cause=Cause(event.cause),
            evidence=event.evidence,
            detected_after_s=event.detected_after_s,
        )

    def _job_stalled(self, draft: Draft, event: e.JobStalled, now: float) -> Iterable[c.Command]:
        """All vertices run, and no step comes. While anything moves, the incident is for people alone: work that takes
        longer than it ever did must not be thrown away for that.

        What stands still is repaired in two scopes, each as often as `failover.no_step` allows. First the trainer: all
        of its state is in the ledger, it asks everybody for everything again, and no other process is lost. If no step
        comes of that, somebody else waits for what will not come, which cannot be told from here: the whole job, from
        the journal. Then the job has failed.
        """
        trainer = draft.vertices.get(f"{TRAINER}-0")
        if trainer is None or draft.job.phase is not JobPhase.RUNNING or event.step != draft.job.step:
            return ()
        error = f"no step after step {event.step} for {event.after_s:.0f} s (limit {event.limit_s:.0f} s)"
        evidence = {"error": error, **event.evidence}
        budget = self.spec.failover.no_step
        if not event.stands_still:
            self._open_incident(
                draft,
                trainer,
                now,
                cause=Cause.NO_STEP,
                scope=Scope.RETRY,
                decision="wait: the job is at work, or its trainer is a script",
                evidence=evidence,
                detected_after_s=event.after_s,
                outcome="left alone",
            )
            return ()
        return self._repair(
            draft,
            trainer,
            now,
            cause=Cause.NO_STEP,
            evidence=evidence,
            detected_after_s=event.after_s,
            ladder=[(Scope.VERTEX, _NO_STEP_VERTEX, budget), (Scope.JOB, _NO_STEP_JOB, budget)],
        )

    def _vertex_start_failed(
        self, draft: Draft, event: e.VertexStartFailed, now: float
    ) -> Iterable[c.Command]:
        record = self._current(draft, event.vertex, event.incarnation)
        if record is None or record.phase is not VertexPhase.STARTING:
            return ()
        return self._repair(
            draft,
            record,
            now,
            cause=Cause.USER_ERROR if event.user_code else Cause.START_FAILED,
            evidence={"error": event.error, "traceback": event.traceback},
            user_code=event.user_code,
        )

    def _operator_failed(self, draft: Draft, event: e.OperatorFailed, now: float) -> Iterable[c.Command]:
        record = self._current(draft, event.vertex, event.vertex_incarnation)
        if record is None or record.phase is not VertexPhase.RUNNING:
            return ()
        evidence = {"operator": event.operator, "error": event.error, "traceback": event.traceback}
        gang = len(self._regions(record.id)) > 1
        if not gang or event.user_code:
            key = f"retry:{record.role}"
            if self._pay(draft, key, self.spec.failover.retry, now):
                self._open_incident(
                    draft,
                    record,
                    now,
                    cause=Cause.USER_ERROR if event.user_code else Cause.CALL_FAILED,
                    scope=Scope.RETRY,
                    decision=f"call {event.operator} again",
                    evidence=evidence,
                    user_code=event.user_code,
                    recovered=True,
                )
                return ()
        return self._repair(
            draft,
            record,
            now,
            cause=Cause.USER_ERROR if event.user_code else Cause.COLLECTIVE if gang else Cause.CALL_FAILED,
            evidence=evidence,
            user_code=event.user_code,
        )

    def _repair(
        self,
        draft: Draft,
        record: VertexRecord,
        now: float,
        *,
        cause: Cause,
        evidence: dict[str, Any],
        user_code: bool = False,
        detected_after_s: float | None = None,
        ladder: list[tuple[Scope, str, Budget]] | None = None,
    ) -> list[c.Command]:
        """Restart the narrowest scope that its budget still pays for. `ladder` is which scopes and budgets, narrowest
        first, where they are not those of the vertex."""
        if draft.job.phase is JobPhase.STOPPING:
            # The job is on its way out: what is lost now is not replaced, and ended if it still lives.
            if record.role == TRAINER:
                return self._stop_all(draft, now)  # no step is left whose end is worth waiting for
            draft.move(record.id, VertexPhase.STOPPING, now, reason=draft.job.reason)
            return [c.StopVertex(record.id, record.incarnation)]
        region = sorted(v for v in self._regions(record.id) if self._is_wanted(draft, v))
        failover = self.spec.failover
        if ladder is not None:
            pass
        elif user_code:
            ladder = [
                (
                    Scope.REGION if len(region) > 1 else Scope.VERTEX,
                    f"user_error:{record.role}",
                    failover.user_error,
                )
            ]
        elif len(region) > 1:
            ladder = [
                (Scope.REGION, f"region:{region[0]}", failover.region),
                (Scope.JOB, "job", failover.job),
            ]
        else:
            ladder = [
                (Scope.VERTEX, f"vertex:{record.id}", failover.vertex),
                (Scope.JOB, "job", failover.job),
            ]

        if not user_code and self._can_do_without(draft, record):
            ladder = ladder[
                :1
            ]  # the job goes on with fewer, rather than to start all anew for one that is not had
        for scope, key, budget in ladder:
            earlier = len(within(draft.uses.get(key, ()), budget, now))
            if not self._pay(draft, key, budget, now):
                continue
            wait_s = backoff_s(earlier, failover)
            # In the vertices' own order: a state that was loaded holds them in another than one that was folded.
            members = (
                region
                if scope is not Scope.JOB
                else sorted((v.id for v in self._wanted(draft)), key=_rank_of)
            )
            self._open_incident(
                draft,
                record,
                now,
                cause=cause,
                scope=scope,
                decision=_sentence(scope, record.id, members, wait_s),
                evidence=evidence,
                user_code=user_code,
                region=tuple(members),
                detected_after_s=detected_after_s,
            )
            return self._restart(draft, members, record.id, scope, now, wait_s)

        if not user_code and self._can_do_without(draft, record):
            count = record.rank
            sentence = f"go on with {count} of {record.role}: {record.id} cannot be had"
            self._open_incident(
                draft,
                record,
                now,
                cause=cause,
                scope=Scope.GIVE_UP,
                decision=sentence,
                evidence=evidence,
                detected_after_s=detected_after_s,
                outcome="scaled away",
            )
            return list(self._set_count(draft, record.role, count, now, message=sentence))

        last = ladder[-1][2]
        why = (
            "user code raised"
            if user_code
            else f"{cause.value} more than {last.max} times in {last.window_s:g} s"
        )
        self._open_incident(
            draft,
            record,
            now,
            cause=cause,
            scope=Scope.GIVE_UP,
            decision="give up: every budget is spent",
            evidence=evidence,
            user_code=user_code,
            detected_after_s=detected_after_s,
            outcome="gave up",
        )
        traceback = str(evidence.get("traceback", "") or evidence.get("stack", ""))
        return self._end(
            draft,
            now,
            outcome=JobPhase.FAILED,
            reason=Reason.USER_ERROR if user_code else Reason.BUDGET_SPENT,
            message=f"{record.id}: {why}: {evidence.get('error', cause.value)}",
            error=traceback or str(evidence.get("error", "")),
        )

    def _can_do_without(self, draft: Draft, record: VertexRecord) -> bool:
        """Whether it is the last of an elastic role, and only the policy asked for it: it has its sentence."""
        elastic = self.spec.roles[record.role].elastic
        count = draft.job.roles.get(record.role, 0)
        return bool(elastic and record.message and count > elastic.min and record.rank == count - 1)

    def _restart(
        self, draft: Draft, members: list[str], culprit: str, scope: Scope, now: float, wait_s: float
    ) -> list[c.Command]:
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
                restarts=record.restarts + 1,
                pid=0,
                reported=0,
            )
        out: list[c.Command] = []
        for region in self._regions_of(members):
            out.append(
                c.StartRegion(
                    region=region[0],
                    vertices={vertex: draft.vertices[vertex].incarnation for vertex in region},
                    replaces={vertex: replaces[vertex] for vertex in region},
                    not_before=now + wait_s if wait_s else 0.0,
                )
            )
        if draft.job.trainer_started and f"{TRAINER}-0" not in members:
            out.insert(0, self._announce(draft))
        return out

    # -- scaling, pausing, stopping -----------------------------------------------------------------

    def _scale(self, draft: Draft, event: e.ScaleRequested, now: float) -> Iterable[c.Command]:
        try:
            self.check_scale(draft.done(), event.role, event.count)
        except (NotFound, ConfigError, Conflict):
            return  # refused where it was asked; in a history it may stand after what made it impossible
        yield from self._set_count(draft, event.role, event.count, now)

    def _advised(self, draft: Draft, event: e.ScaleAdvised, now: float) -> Iterable[c.Command]:
        """Followed as far as the bounds and the cluster allow. An advice about another number than the present one
        has been overtaken; it stays in the journal."""
        present = draft.job.roles.get(event.role)
        spec = self.spec.roles.get(event.role)
        if spec is None or spec.elastic is None or present != event.seen:
            return
        count = event.count if event.possible is None else min(event.count, event.possible)
        count = max(spec.elastic.min, min(spec.elastic.max, count))
        if (count > present) != (event.count > present) or count == present:
            return  # there is no room, and what runs is not taken down for it
        if draft.job.phase is not JobPhase.STOPPING:
            yield from self._set_count(draft, event.role, count, now, message=event.reason)

    def _set_count(
        self, draft: Draft, role: str, count: int, now: float, *, message: str = ""
    ) -> Iterable[c.Command]:
        """`message` says why, on the vertices that come or go for it."""
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
                self._return(draft, vertex, now, message)
                new.append(vertex.id)
        yield from self._start_commands(draft, new)
        leaving = [v for rank, v in present.items() if rank >= count and self._is_wanted(draft, v.id)]
        for vertex in leaving:
            draft.move(vertex.id, VertexPhase.STOPPING, now, reason=Reason.SCALED, message=message)
        if leaving and draft.job.trainer_started:
            yield self._announce(draft)
        for vertex in leaving:
            yield c.StopVertex(vertex.id, vertex.incarnation, grace_s=self.spec.failover.drain_timeout_s)
        if leaving:
            self._close_incidents(draft, now)
            yield from self._first_start(draft, now)

    @staticmethod
    def _return(draft: Draft, record: VertexRecord, now: float, message: str = "") -> None:
        """A vertex that was scaled away is wanted again."""
        draft.move(
            record.id,
            VertexPhase.STARTING,
            now,
            reason=Reason.SCALED,
            message=message,
            incarnation=record.incarnation + 1,
            pid=0,
            reported=0,
        )

    def _pause(self, draft: Draft, event: e.PauseRequested, now: float) -> Iterable[c.Command]:
        if draft.job.paused or draft.job.phase is JobPhase.STOPPING:
            return
        draft.set_job(paused=True)
        if (trainer := self._live_trainer(draft)) is not None:
            yield c.PauseTrainer(trainer.incarnation)

    def _resume(self, draft: Draft, event: e.ResumeRequested, now: float) -> Iterable[c.Command]:
        if not draft.job.paused or draft.job.phase is JobPhase.STOPPING:
            return
        draft.set_job(paused=False)
        if (trainer := self._live_trainer(draft)) is not None:
            yield c.ResumeTrainer(trainer.incarnation)

    def _stop(self, draft: Draft, event: e.StopRequested, now: float) -> Iterable[c.Command]:
        if draft.job.phase is JobPhase.STOPPING:
            return []
        trainer = self._live_trainer(draft)
        if trainer is None:
            return self._end(
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
            c.SetTimer("drain", now + self.spec.failover.drain_timeout_s),
        ]

    def _timer(self, draft: Draft, event: e.TimerFired, now: float) -> Iterable[c.Command]:
        if event.timer == "drain" and draft.job.phase is JobPhase.STOPPING:
            return self._stop_all(draft, now)
        return ()

    def _live_trainer(self, draft: Draft) -> VertexRecord | None:
        trainer = draft.vertices.get(f"{TRAINER}-0")
        running = trainer is not None and trainer.phase is VertexPhase.RUNNING
        return trainer if running and draft.job.trainer_started else None

    # -- what the trainer reports -------------------------------------------------------------------

    def _trainer_finished(self, draft: Draft, event: e.TrainerFinished, now: float) -> Iterable[c.Command]:
        if self._current(draft, f"{TRAINER}-0", event.incarnation) is None:
            return ()
        draft.set_job(result=event.result)
        if draft.job.phase is JobPhase.STOPPING:
            return self._stop_all(draft, now)
        return self._end(
            draft,
            now,
            outcome=JobPhase.STOPPED if event.stopped else JobPhase.SUCCEEDED,
            reason=Reason.FINISHED,
            message="",
        )

    def _trainer_failed(self, draft: Draft, event: e.TrainerFailed, now: float) -> Iterable[c.Command]:
        record = self._current(draft, f"{TRAINER}-0", event.incarnation)
        if record is None or record.phase is not VertexPhase.RUNNING:
            return ()
        return self._repair(
            draft,
            record,
            now,
            cause=Cause.USER_ERROR if event.user_code else Cause.CALL_FAILED,
            evidence={"error": event.error, "traceback": event.traceback},
            user_code=event.user_code,
        )

    def _step(self, draft: Draft, event: e.StepCompleted, now: float) -> Iterable[c.Command]:
        if event.step > draft.job.step:
            draft.set_job(step=event.step)
            for key in (_NO_STEP_VERTEX, _NO_STEP_JOB):
                if draft.uses.get(key):
                    draft.set_uses(key, ())
        return ()

    def _published(self, draft: Draft, event: e.WeightsPublished, now: float) -> Iterable[c.Command]:
        if event.version > draft.job.version:
            draft.set_job(version=event.version)
        return ()

    def _checkpoint(self, draft: Draft, event: e.CheckpointCommitted, now: float) -> Iterable[c.Command]:
        if event.step > draft.job.checkpoint_step:
            draft.set_job(checkpoint_step=event.step, checkpoint_path=event.path)
        return ()

    def _restored(self, draft: Draft, event: e.GangRestored, now: float) -> Iterable[c.Command]:
        """The incident that made it necessary says where the state came from; a lost optimizer is one of its own."""
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
            one
            for one in draft.incidents.values()
            if first.id in one.region and not self._took_away(one, event.gang, first.id)
        ]
        last = max(about, key=lambda incident: (incident.at, incident.id), default=None)
        if last is not None and "restored" not in last.evidence:
            draft.set_incident(replace(last, evidence={**last.evidence, "restored": told}))
        if event.source == "instance":
            self._open_incident(
                draft,
                first,
                now,
                cause=Cause.CHECKPOINT_LOST,
                scope=Scope.REGION,
                decision=f"{event.role} goes on from the weights of policy {event.step} that instances have; what its "
                "optimizer had learnt is lost, as run.lost_checkpoint permits",
                evidence=told,
                recovered=True,
            )
        return ()

    def _took_away(self, incident: Incident, gang: int, first: str) -> bool:
        """Whether the incident ended the gang of this incarnation, or a later one; its ranks restart together."""
        return 0 < gang <= incident.incarnation and incident.vertex in self._regions(first)

    def _evaluated(self, draft: Draft, event: e.Evaluated, now: float) -> Iterable[c.Command]:
        return ()

    def _left_out(self, draft: Draft, event: e.EvaluationLeftOut, now: float) -> Iterable[c.Command]:
        """The journal keeps the reason."""
        return ()

    def _set_aside(self, draft: Draft, event: e.GroupSetAside, now: float) -> Iterable[c.Command]:
        """The trainer has replaced it; the journal keeps the evidence."""
        return ()

    def _rollouts(self, draft: Draft, event: e.RolloutsChanged, now: float) -> Iterable[c.Command]:
        """The rollout plane repairs itself; the journal keeps what happened."""
        return ()

    def _told(self, draft: Draft, event: e.Reported | e.ReportRefused, now: float) -> Iterable[c.Command]:
        """The journal keeps what was said."""
        return ()

    def _vertex_stopped(self, draft: Draft, event: e.VertexStopped, now: float) -> Iterable[c.Command]:
        record = self._current(draft, event.vertex, event.incarnation)
        if record is None or record.phase is not VertexPhase.STOPPING:
            return ()
        return self._gone(draft, record, now)

    # -- the end ------------------------------------------------------------------------------------

    def _end(
        self, draft: Draft, now: float, *, outcome: JobPhase, reason: Reason, message: str, error: str = ""
    ) -> list[c.Command]:
        draft.set_job(phase=JobPhase.STOPPING, reason=reason, message=message, outcome=outcome, error=error)
        return self._stop_all(draft, now)

    def _cluster_lost(self, draft: Draft, event: e.ClusterLost, now: float) -> Iterable[c.Command]:
        """Ends the job without a command, for nobody is left to carry one out. A job that was ending ends as it
        would have."""
        if draft.job.outcome is None:
            draft.set_job(outcome=JobPhase.FAILED, reason=Reason.CLUSTER_LOST, message=event.detail)
        draft.set_job(phase=JobPhase.STOPPING)
        for vertex in list(draft.vertices.values()):
            if vertex.phase in (VertexPhase.STARTING, VertexPhase.RUNNING):
                draft.move(vertex.id, VertexPhase.STOPPING, now, reason=draft.job.reason)
            if vertex.phase is not VertexPhase.STOPPED:
                draft.move(vertex.id, VertexPhase.STOPPED, now, reason=draft.job.reason, pid=0)
        self._finish_if_empty(draft, now)
        return ()

    def _stop_all(self, draft: Draft, now: float) -> list[c.Command]:
        out: list[c.Command] = []
        for vertex in list(draft.vertices.values()):
            if vertex.phase in (VertexPhase.STARTING, VertexPhase.RUNNING):
                draft.move(vertex.id, VertexPhase.STOPPING, now, reason=draft.job.reason)
                out.append(c.StopVertex(vertex.id, vertex.incarnation))
        return out + self._finish_if_empty(draft, now)

    def _gone(self, draft: Draft, record: VertexRecord, now: float) -> list[c.Command]:
        if draft.job.phase is not JobPhase.STOPPING and record.rank < draft.job.roles.get(record.role, 0):
            self._return(draft, record, now)  # asked for again before it was gone
            return self._start_commands(draft, [record.id])
        draft.move(record.id, VertexPhase.STOPPED, now, reason=record.reason, message=record.message, pid=0)
        return self._finish_if_empty(draft, now)

    @staticmethod
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

    # -- small things -------------------------------------------------------------------------------

    @staticmethod
    def _current(draft: Draft, vertex: str, incarnation: int) -> VertexRecord | None:
        """The record, if the news is about its current incarnation."""
        record = draft.vertices.get(vertex)
        return record if record is not None and record.incarnation == incarnation else None

    @staticmethod
    def _is_wanted(draft: Draft, vertex: str) -> bool:
        record = draft.vertices.get(vertex)
        return record is not None and record.phase not in (VertexPhase.STOPPING, VertexPhase.STOPPED)

    def _start_commands(self, draft: Draft, vertices: Iterable[str]) -> list[c.Command]:
        return [
            c.StartRegion(region[0], {vertex: draft.vertices[vertex].incarnation for vertex in region})
            for region in self._regions_of(vertices)
        ]

    def _regions_of(self, vertices: Iterable[str]) -> list[list[str]]:
        """The vertices, region by region, in the order in which the regions first appear."""
        given = list(vertices)
        members = set(given)
        seen: set[str] = set()
        out = []
        for vertex in given:
            if vertex in seen:
                continue
            region = sorted(self._regions(vertex) & members, key=_rank_of)
            seen.update(region)
            out.append(region)
        return out

    def _pay(self, draft: Draft, key: str, budget: Budget, now: float) -> bool:
        uses = draft.uses.get(key, ())
        if not affordable(uses, budget, now):
            return False
        draft.set_uses(key, (*within(uses, budget, now), now))
        return True

    def _open_incident(
        self,
        draft: Draft,
        record: VertexRecord,
        now: float,
        *,
        cause: Cause,
        scope: Scope,
        decision: str,
        evidence: dict[str, Any],
        user_code: bool = False,
        region: tuple[str, ...] = (),
        detected_after_s: float | None = None,
        recovered: bool = False,
        outcome: str = "open",
    ) -> None:
        identity = f"{record.id}/{record.incarnation}/{scope.value}"
        known = [key for key in draft.incidents if key == identity or key.startswith(f"{identity}/")]
        number = 1 + max((int(key[len(identity) + 1 :] or 0) for key in known), default=-1)
        draft.set_incident(
            Incident(
                id=f"{identity}/{number}" if number else identity,
                at=now,
                vertex=record.id,
                incarnation=record.incarnation,
                cause=cause.value,
                scope=scope,
                decision=decision,
                evidence=evidence,
                user_code=user_code,
                region=region,
                detected_after_s=detected_after_s,
                recovered_at=now if recovered else None,
                outcome="recovered" if recovered else outcome,
            )
        )
        closed = [incident for incident in draft.incidents.values() if incident.outcome != "open"]
        # By time, never by place in the table: a state that was loaded holds them in another order.
        closed.sort(key=lambda incident: (incident.at, incident.id))
        for incident in closed[: max(0, len(closed) - KEPT_INCIDENTS)]:
            draft.remove_incident(incident.id)

    def _close_incidents(self, draft: Draft, now: float) -> None:
        """A repair is over when those of its vertices that are still wanted run."""
        for incident in list(draft.incidents.values()):
            if incident.outcome != "open":
                continue
            wanted = [draft.vertices[vertex] for vertex in incident.region if self._is_wanted(draft, vertex)]
            if not wanted:
                draft.set_incident(replace(incident, outcome="scaled away"))
            elif all(vertex.phase is VertexPhase.RUNNING for vertex in wanted):
                draft.set_incident(replace(incident, recovered_at=now, outcome="recovered"))


def _rank_of(vertex: str) -> tuple[str, int]:
    role, _, rank = vertex.rpartition("-")
    return role, int(rank)


def _sentence(scope: Scope, culprit: str, members: list[str], wait_s: float) -> str:
    after = f" after {wait_s:g} s" if wait_s else ""
    if scope is Scope.VERTEX:
        return f"restart {culprit}{after}"
    if scope is Scope.REGION:
        return f"restart the region {', '.join(members)}{after}: its ranks are peers of a collective"
    return f"restart all {len(members)} vertices{after}: the narrower budgets are spent"


_HANDLERS: dict[type[e.Event], Callable[..., Iterable[c.Command]]] = {
    e.JobSubmitted: FailoverCoordinator._submitted,
    e.MasterStarted: FailoverCoordinator._master_started,
    e.VertexStarted: FailoverCoordinator._vertex_started,
    e.VertexStartFailed: FailoverCoordinator._vertex_start_failed,
    e.VertexLost: FailoverCoordinator._vertex_lost,
    e.VertexStopped: FailoverCoordinator._vertex_stopped,
    e.JobStalled: FailoverCoordinator._job_stalled,
    e.OperatorFailed: FailoverCoordinator._operator_failed,
    e.TrainerFinished: FailoverCoordinator._trainer_finished,
    e.TrainerFailed: FailoverCoordinator._trainer_failed,
    e.StepCompleted: FailoverCoordinator._step,
    e.WeightsPublished: FailoverCoordinator._published,
    e.CheckpointCommitted: FailoverCoordinator._checkpoint,
    e.GangRestored: FailoverCoordinator._restored,
    e.Evaluated: FailoverCoordinator._evaluated,
    e.EvaluationLeftOut: FailoverCoordinator._left_out,
    e.GroupSetAside: FailoverCoordinator._set_aside,
    e.MasterHung: FailoverCoordinator._master_hung,
    e.RolloutsChanged: FailoverCoordinator._rollouts,
    e.ScaleAdvised: FailoverCoordinator._advised,
    e.Reported: FailoverCoordinator._told,
    e.ReportRefused: FailoverCoordinator._told,
    e.ScaleRequested: FailoverCoordinator._scale,
    e.PauseRequested: FailoverCoordinator._pause,
    e.ResumeRequested: FailoverCoordinator._resume,
    e.StopRequested: FailoverCoordinator._stop,
    e.ClusterLost: FailoverCoordinator._cluster_lost,
    e.TimerFired: FailoverCoordinator._timer,
}
