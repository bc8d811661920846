"""Every decision of the control plane: `decide(state, event, now) -> Decision(state', commands)`.

Pure: `decide` reads no clock, draws no random number and imports no Ray. The master carries the commands out, `gyre
replay` folds old histories, the simulator runs under a virtual clock, and all three run this code.

Invariants, each with a test of its name:
- *old news is no news*: an event about an incarnation that is not the current one changes nothing;
- *one repair at a time*: a region under repair is not repaired again for what its repair caused;
- *the version never falls*: the published policy version only grows;
- *ended is ended*: after SUCCEEDED, FAILED or STOPPED no command is issued, unless somebody has the job go on;
- *every repair is paid for*: each restart takes from a budget;
- *no fault outlives its attempts*: without progress a budget pays so many times only, however slowly they come
  (`gyre.failover.budget`).

The graph gives the scope of a repair: the region of the culprit, that is, itself and its peers in a collective. When a
budget is spent the next wider scope is tried: retry, vertex, region, job, give up.

This module holds the entry and the table of handlers. `gyre.failover.handlers` has a module for each subject: startup,
deaths, repair, engines, machines, room, full_disk, training_progress, role_counts, join_tokens, ending. A handler takes
`(layout, draft, event, now)`, changes the draft, and returns commands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gyre.config import JobSpec
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.costs import cost_of
from gyre.failover.draft import Draft
from gyre.failover.handlers import (
    deaths,
    ending,
    engines,
    full_disk,
    join_tokens,
    machines,
    role_counts,
    room,
    startup,
    training_progress,
)
from gyre.failover.layout import JobLayout, Regions
from gyre.failover.state import Cause, JobPhase, JobState, JoinToken, Reason, RowKey, VertexPhase, fields_of
from gyre.failover.vertices import roles_that_can_wait, wanted
from gyre.graph.devices import rate_per_hour


@dataclass(frozen=True, slots=True)
class Decision:
    """The new state, the commands to carry out, and the keys of the snapshot rows that changed."""

    state: JobState
    commands: tuple[c.Command, ...] = ()
    changed: frozenset[RowKey] = frozenset()


class FailoverCoordinator:
    """The decisions of one job. A coordinator remembers nothing between calls: the state holds everything."""

    def __init__(self, spec: JobSpec, regions: Regions) -> None:
        self.layout = JobLayout(spec, regions)

    @property
    def spec(self) -> JobSpec:
        return self.layout.spec

    def region(self, vertex: str) -> frozenset[str]:
        """The vertices that restart together with the given one, itself included."""
        return self.layout.regions(vertex)

    def decide(self, state: JobState, event: e.Event, now: float) -> Decision:
        draft = Draft(state)
        if state.job.phase.ended and not isinstance(event, e.MasterStarted | e.JobContinued):
            return Decision(state)
        if self.is_repeated(state, event):
            return Decision(state)
        if isinstance(event, e.ReportedEvent) and event.report:
            draft.set_vertex(e.reporter_of(event), reported=event.report)
        handler = _HANDLERS.get(type(event))
        if handler is None:
            raise TypeError(f"no decision for {type(event).__name__}")
        commands = tuple(handler(self.layout, draft, event, now))
        if draft.moved or draft.job.paused is not state.job.paused:
            _derive_phase(self.layout, draft)
        _charge(self.layout, draft, now)
        return Decision(draft.done(), commands, draft.changed())

    @staticmethod
    def is_repeated(state: JobState, event: e.Event) -> bool:
        """Whether the report is already in the journal, comes from a replaced incarnation, or repeats what an earlier
        trainer reported."""
        if isinstance(event, e.MasterHung):
            incident = state.incidents.get(f"master-{state.job.epoch}")
            return incident is None or incident.cause == Cause.SILENT
        if not isinstance(event, e.ReportedEvent) or not event.report:
            return False
        if isinstance(event, e.GangRestored) and 0 < event.number <= state.job.restored.get(event.role, 0):
            return True
        if isinstance(event, e.PassesHalved) and 0 < event.number <= state.job.halved.get(event.role, 0):
            return True
        if isinstance(event, e.StepCompleted) and event.again and event.step <= state.job.step:
            return True
        if isinstance(event, e.Evaluated) and training_progress.is_known_evaluation(
            state.evaluations, event.set, event.version
        ):
            return True
        if isinstance(event, e.LearningWarned):
            known = state.warnings.get(event.code)
            if known is None or not known.holds:
                if not event.holds:
                    return True
            elif event.holds and (event.again or event.message == known.message):
                return True  # a later trainer's words are of the steps at which the warning began
        if (
            isinstance(event, e.CheckpointCommitted)
            and event.again
            and event.step <= state.job.checkpoint_step
        ):
            return True
        reporter = state.vertices.get(e.reporter_of(event))
        return (
            reporter is None or reporter.incarnation != event.incarnation or event.report <= reporter.reported
        )

    def to_drain_again(self, state: JobState) -> list[str]:
        """The machines that are drained, and where vertices run that came up there meanwhile and can leave."""
        return machines.to_drain_again(self.layout, state)

    def check_drain(self, state: JobState, vertex: str) -> None:
        """Raises NotFound or Conflict if `vertex` cannot be drained."""
        machines.check_drain(self.layout, state, vertex)

    def check_scale(self, state: JobState, role: str, count: int) -> None:
        """Raises NotFound, ConfigError or Conflict if `role` cannot have `count` vertices."""
        role_counts.check_scale(self.layout, state, role, count)

    def join_tokens(self, state: JobState) -> dict[str, JoinToken]:
        """The job's join tokens by name, with the one that the rollout manager made."""
        return join_tokens.join_tokens(self.layout, state)

    def check_token(
        self, state: JobState, event: e.JoinTokenCreated | e.JoinTokenRevoked, now: float
    ) -> None:
        """Raises NotFound, ConfigError or Conflict if the token cannot be created or revoked."""
        if isinstance(event, e.JoinTokenCreated):
            join_tokens.check_create(self.layout, state, event, now)
        else:
            join_tokens.check_revoke(self.layout, state, event.name)


def _charge(layout: JobLayout, draft: Draft, now: float) -> None:
    """Note what an hour costs from now on, where that has changed, and what was spent until now."""
    job = draft.job
    rate = 0.0 if job.phase.ended else rate_per_hour(layout.spec, job.roles) or 0.0
    if rate != job.price_per_hour:
        draft.set_job(price_per_hour=rate, priced_at=now, spent=cost_of(fields_of(job), now))


def _derive_phase(layout: JobLayout, draft: Draft) -> None:
    """Set the job's phase from its vertices', by the rank that `gyre.failover.state` documents."""
    job = draft.job
    if job.phase.ended or job.phase is JobPhase.STOPPING:
        return
    reason = job.reason
    disk = full_disk.lack_of_disk(job)
    lack = disk or room.lack_of_room(draft)
    if not job.trainer_started:
        phase = JobPhase.STARTING
    elif _is_held_up(layout, draft):
        phase = JobPhase.RECOVERING
    elif job.paused:
        phase, reason = JobPhase.PAUSED, Reason.PAUSE_REQUESTED
    else:
        phase, reason = JobPhase.RUNNING, Reason.NONE
    if lack and phase is not JobPhase.PAUSED:
        reason = Reason.DISK_FULL if disk else Reason.NO_ROOM
    elif reason in (Reason.NO_ROOM, Reason.DISK_FULL):
        reason = Reason.SUBMITTED if phase is JobPhase.STARTING else Reason.NONE
    if phase is not job.phase or reason is not job.reason or (lack and lack != job.message):
        draft.set_job(phase=phase, reason=reason, message=lack)


def _is_held_up(layout: JobLayout, draft: Draft) -> bool:
    """Whether a wanted vertex does not run, other than those that wait for room and that the job can do without."""
    missing = [vertex for vertex in wanted(draft) if vertex.phase is not VertexPhase.RUNNING]
    if not missing:
        return False
    can_wait = roles_that_can_wait(layout, draft, at_least=1)
    return not all(vertex.no_room and vertex.role in can_wait for vertex in missing)


def _timer_fired(layout: JobLayout, draft: Draft, event: e.TimerFired, now: float) -> Iterable[c.Command]:
    if event.timer.startswith(room.ROOM_TIMER):
        return room.waited_too_long(layout, draft, event.timer, now)
    if event.timer.startswith(full_disk.DISK_TIMER):
        return full_disk.waited_too_long(layout, draft, event.timer, now)
    return ending.timer_fired(layout, draft, event, now)


_HANDLERS: dict[type[e.Event], Callable[..., Iterable[c.Command]]] = {
    e.JobSubmitted: startup.job_submitted,
    e.JobContinued: startup.job_continued,
    e.MasterStarted: startup.master_started,
    e.MasterHung: startup.master_hung,
    e.StoreReturned: startup.store_returned,
    e.VertexStarted: startup.vertex_started,
    e.VertexStartFailed: deaths.vertex_start_failed,
    e.VertexWaitsForRoom: room.vertex_waits_for_room,
    e.VertexFoundRoom: room.vertex_found_room,
    e.DiskFilled: full_disk.disk_filled,
    e.DiskHasRoom: full_disk.disk_has_room,
    e.VertexLost: deaths.vertex_lost,
    e.VertexFellSilent: deaths.vertex_fell_silent,
    e.VertexHeardAgain: deaths.vertex_heard_again,
    e.DrainRequested: machines.drain_requested,
    e.MachineExamined: machines.machine_examined,
    e.UndrainRequested: machines.undrain_requested,
    e.OperatorFailed: deaths.operator_failed,
    e.TrainerFailed: deaths.trainer_failed,
    e.JobStalled: deaths.job_stalled,
    e.StepCompleted: training_progress.step_completed,
    e.StepReported: training_progress.step_reported,
    e.LearningWarned: training_progress.learning_warned,
    e.WeightsPublished: training_progress.weights_published,
    e.CheckpointCommitted: training_progress.checkpoint_committed,
    e.CheckpointDamaged: training_progress.checkpoint_damaged,
    e.StepDiverged: training_progress.step_diverged,
    e.GangRestored: training_progress.gang_restored,
    e.Evaluated: training_progress.evaluated,
    e.EvaluationLeftOut: training_progress.recorded,
    e.BatchSkipped: training_progress.batch_skipped,
    e.PassesHalved: training_progress.passes_halved,
    e.GroupRedrawn: training_progress.recorded,  # the trainer asks for it again by itself
    e.GroupReplaced: training_progress.recorded,  # the trainer has replaced the group
    e.RolloutsChanged: engines.rollouts_changed,
    e.Reported: training_progress.recorded,
    e.ReportRefused: training_progress.recorded,
    e.ScaleAdvised: role_counts.scale_advised,
    e.ScaleRequested: role_counts.scale_requested,
    e.JoinTokenCreated: join_tokens.join_token_created,
    e.JoinTokenRevoked: join_tokens.join_token_revoked,
    e.PauseRequested: ending.pause_requested,
    e.ResumeRequested: ending.resume_requested,
    e.StopRequested: ending.stop_requested,
    e.TimerFired: _timer_fired,
    e.TrainerFinished: ending.trainer_finished,
    e.VertexStopped: ending.vertex_stopped,
    e.ClusterLost: ending.cluster_lost,
}
