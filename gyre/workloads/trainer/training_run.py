"""One run of a graph: its parts, wired together and put where the ledger says the last trainer stood.

Each part owns one concern and is given what it needs; this module alone knows all of them. What a part hears on another
thread it posts to the loop as a message (`gyre.workloads.trainer.inbox_messages`).

Invariant *resumed, not repeated*: nothing that the ledger, the log of evaluations or a checkpoint has is done again.

This module must not know in which order the loop drives the parts.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gyre.config import JobSpec
from gyre.config.estimators import ESTIMATORS
from gyre.config.sections import LossSettings
from gyre.graph import local_roles
from gyre.graph.elements import Dispatch
from gyre.rollouts.trainer.arrival import ArrivalOrder
from gyre.rollouts.trainer.sample_ledger import SampleLedger
from gyre.rollouts.trainer.staleness import StalenessPolicy
from gyre.workloads.base import WorkloadContext
from gyre.workloads.runtime import TrainerRuntime
from gyre.workloads.trainer.evaluation.evaluations import Evaluations
from gyre.workloads.trainer.evaluation.log import EvaluationLog
from gyre.workloads.trainer.evaluation.results import evaluation_of
from gyre.workloads.trainer.firings.firing_scheduler import FiringRunner, FiringScheduler
from gyre.workloads.trainer.firings.plane_firings import PlaneFirings
from gyre.workloads.trainer.firings.result_checks import SCORE, Expectations
from gyre.workloads.trainer.firings.results import FiringResults
from gyre.workloads.trainer.firings.sample_scoring import SampleScoring
from gyre.workloads.trainer.firings.spread_firings import SpreadFirings
from gyre.workloads.trainer.firings.vertex_calls import VertexCalls
from gyre.workloads.trainer.firings.vertex_firings import VertexFirings
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.groups.micro_batches import (
    FixedBatches,
    StepAssembly,
    StreamedBatches,
)
from gyre.workloads.trainer.groups.replacements import Replacements
from gyre.workloads.trainer.inbox_messages import Inbox
from gyre.workloads.trainer.job_graph import JobGraph
from gyre.workloads.trainer.learning.checkpoints import Checkpoints
from gyre.workloads.trainer.learning.gang_dispatch import GangDispatch
from gyre.workloads.trainer.learning.job_devices import JobDevices
from gyre.workloads.trainer.learning.learning_watch import LearningWatch
from gyre.workloads.trainer.learning.lifecycle import GangLifecycle
from gyre.workloads.trainer.learning.optimizer_steps import OptimizerSteps
from gyre.workloads.trainer.learning.publishing import ServedPolicies
from gyre.workloads.trainer.learning.sample_writer import is_own, recorded_steps, sample_writer
from gyre.workloads.trainer.learning.step_log import MetricsFile, StepLog
from gyre.workloads.trainer.progress_report import ProgressReport, ShowsProgress
from gyre.workloads.trainer.prompts import BringsPrompts, CheckedPrompts
from gyre.workloads.trainer.retries import Retries
from gyre.workloads.trainer.rollout_requests import RolloutRequests
from gyre.workloads.trainer.wait_stats import WaitStats

CLOSE_S = 2.0
"""How long a run that has failed waits for the samples of its last steps, which people want to see most."""


class Trainer(BringsPrompts, ShowsProgress, Protocol):
    """What a run needs of its trainer."""

    runtime: TrainerRuntime
    context: WorkloadContext

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The tokens that end an answer."""


class TrainingRun:
    """`trainer` brings the prompts and shows progress; `inbox` is the loop's."""

    def __init__(self, trainer: Trainer, ledger: SampleLedger, inbox: Inbox) -> None:
        self._trainer = trainer
        self._runtime = trainer.runtime
        self._inbox = inbox
        self.spec: JobSpec = self._runtime.spec
        self.ledger = ledger
        self.graph = JobGraph(self.spec)
        self.devices = JobDevices(self.spec, self._runtime.membership)
        self.flow = self.graph.flow()
        self._expectations = Expectations.of(self.spec, self.graph.leader.role)
        self._prompts = CheckedPrompts(trainer, self.spec.run, self._expectations.vocabulary)
        self.groups = GroupState(
            ledger, per_step=self.graph.per_step, vocabulary=self._expectations.vocabulary
        )
        self.arrival = self._arrival_order()
        self.waits = WaitStats(self.graph.leader.role)
        self.retries = Retries()
        self.calls = VertexCalls(self._runtime.membership, self._runtime.transport)
        trainer.context.directory.mkdir(parents=True, exist_ok=True)
        self._scores_samples = self.graph.scores_each_sample(self.spec)
        self.samples = sample_writer(self.spec, trainer, trainer.context.directory, self.graph.leader.role)
        self.plane = self._rollout_requests() if self.graph.uses_plane else None
        try:
            self._wire_learning()
            self._wire_firings()
            self.progress = ProgressReport(
                self.groups,
                self.steps,
                self.policies,
                self.evaluations,
                self.replacements.tokens_discarded,
                steps_planned=self.spec.run.steps,
                prompts_per_step=self.spec.run.prompts_per_step,
                shown_by=trainer,
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.samples.end(within_s=CLOSE_S)
        if self.plane is not None:
            self.plane.close()

    def resume(self) -> None:
        """Mark the firings whose results are known, so that only the others start. Raises ConfigError where prompts
        would come from other data than before."""
        identity = getattr(getattr(self._trainer, "data", None), "identity", None)
        if isinstance(identity, str):
            self.ledger.check_data(identity)
        groups = self.groups
        self.samples.begin(recorded_steps(groups))
        for group_id, (tokens, problem) in groups.redrawn.items():
            self._runtime.report("GroupRedrawn", group=group_id, tokens=tokens, evidence=problem)
        drawn = groups.step * self.graph.per_step
        while drawn < self.spec.run.steps * self.graph.per_step and groups.is_drawn(drawn):
            drawn += 1
        self.graph.mark_scored(self.flow, drawn, [groups.slot_of(group_id) for group_id in groups.unscored])
        self.evaluations.resume()
        self.gang_dispatch.rewind()

    # -- the parts ----------------------------------------------------------------------------------

    def _rollout_requests(self) -> RolloutRequests:
        run, trainer = self.spec.run, self._trainer
        return RolloutRequests(
            trainer.context.directory,
            trainer.config,
            term=self._runtime.term,
            stop_token_ids=trainer.stop_token_ids,
            inbox=self._inbox,
            wants_samples=self._scores_samples,
            last_share=run.groups_per_micro_batch / run.prompts_per_step if local_roles(self.spec) else None,
        )

    def _arrival_order(self) -> ArrivalOrder | None:
        """None where a step trains the groups in its own slots."""
        staleness = self.spec.staleness
        if self.graph.in_order:
            return None
        judge = None
        if staleness.function is not None:
            module = importlib.import_module(staleness.function.module)
            judge = getattr(module, staleness.function.name)
        order = ArrivalOrder(
            StalenessPolicy(self.spec.max_staleness, judge),
            per_step=self.graph.per_step,
            keeps_slots=staleness.policy == "wait",
        )
        for group_id, version in self.groups.min_versions.items():
            order.requested(group_id, version)
        return order

    def _wire_learning(self) -> None:
        graph, groups, run = self.graph, self.groups, self.spec.run
        directory, timeout_s = self._trainer.context.directory, run.call_timeout_s
        learners = (graph.leader, *graph.auxiliary)
        self.policies = ServedPolicies(
            directory,
            self._runtime.transport,
            reports=self._runtime,
            inbox=self._inbox,
            plane=self.plane,
            in_calls=graph.weights_in_calls,
            timeout_s=timeout_s,
        )
        self._discarded = self.ledger.account().discarded
        self.step_log = self._step_log()
        self.steps = OptimizerSteps(
            groups,
            self.policies,
            role=graph.leader.role,
            discarded=self._discarded,
            reports=self._runtime,
            log=self.step_log,
            samples=self.samples,
            devices=self.devices,
            knows_logprobs=is_own(self.spec, graph.leader.role),
        )
        checkpoints = Checkpoints(
            directory, groups, term=self._runtime.term, timeout_s=timeout_s, reports=self._runtime
        )
        self.steps.report_earlier()
        checkpoints.report_earlier()
        self.gangs = GangLifecycle(
            self._runtime,
            groups,
            leader=graph.leader,
            auxiliary=graph.auxiliary,
            checkpoints=checkpoints,
            policies=self.policies,
            steps=self.steps,
            keeps_initial_policy=graph.keeps_initial_policy,
        )
        self.assembly = self._assembly()
        self.gang_dispatch = GangDispatch(
            groups,
            self.flow,
            self.gangs,
            self.assembly,
            learners,
            streamed=run.micro_batches == "streamed",
            skips_at_most=self.spec.failover.not_finite.skip_batch,
            max_staleness=self.spec.max_staleness if self.spec.staleness.function is None else None,
            inbox=self._inbox,
        )

    def _step_log(self) -> StepLog:
        groups, spec = self.groups, self.spec
        earlier, groups.metrics_by_step = groups.metrics_by_step, {}
        return StepLog(
            MetricsFile(self._trainer.context.directory, earlier),
            LearningWatch(
                group_baseline=compares_in_group(spec.config),
                not_evaluated="" if spec.run.evaluate_every else "run.evaluate_every is 0",
                never_trained=getattr(getattr(self._trainer, "data", None), "never_trained", ""),
            ),
            earlier=earlier,
            steps_planned=spec.run.steps,
            waits=self.waits,
            reports=self._runtime,
        )

    def _assembly(self) -> StepAssembly:
        run, ranks = self.spec.run, self.spec.roles[self.graph.leader.role].total
        if run.micro_batches == "streamed":
            return StreamedBatches(self.groups, run, ranks=ranks, arrival=self.arrival)
        return FixedBatches(self.groups, run, ranks=ranks, ordered=self.graph.accumulate_op.ordered)

    def _wire_firings(self) -> None:
        graph, flow, groups, run = self.graph, self.flow, self.groups, self.spec.run
        staleness = self.spec.staleness
        self.replacements = Replacements(
            groups,
            flow,
            refs_before_training=graph.refs_before_training,
            arrival=self.arrival,
            redraw_stale=staleness.dropped == "again",
            dynamic_sampling=run.dynamic_sampling,
            tokens_discarded=self._discarded,
            prompts=self._prompts,
            reports=self._runtime,
            samples=self.samples,
        )
        results = FiringResults(
            graph,
            flow,
            groups,
            self.retries,
            max_staleness=self.spec.max_staleness,
            reports=self._runtime,
            keeper=self.plane,
        )
        self.evaluations = Evaluations(
            graph,
            flow,
            groups,
            self.calls,
            self.policies,
            self.retries,
            EvaluationLog.of(self._trainer.context.directory),
            evaluation_of(self.spec),
            groups_per_call=run.groups_per_firing,
            scores_each_sample=self._scores_samples,
            prompts=self._prompts,
            expectations=self._expectations,
            plane=self.plane,
            samples=self.samples,
            reports=self._runtime,
            inbox=self._inbox,
        )
        self.evaluations.report_earlier()
        self.vertex_firings = VertexFirings(
            graph,
            flow,
            groups,
            self.calls,
            self.policies,
            results,
            self.evaluations,
            arrival=self.arrival,
            groups_per_call=run.groups_per_firing,
            inbox=self._inbox,
            expectations=self._expectations,
        )
        self.sample_scoring = self._sample_scoring(results) if self._scores_samples else None
        self.spread_firings = SpreadFirings(
            flow,
            groups,
            self.gangs,
            results,
            groups_per_call=run.groups_per_firing,
            inbox=self._inbox,
            expectations=self._expectations,
        )
        runners: dict[Dispatch, FiringRunner] = {
            Dispatch.ONE: self.vertex_firings,
            Dispatch.SPREAD: self.spread_firings,
        }
        if self.plane is not None:
            # Only a graph with the plane's operators has it, and only it is sent the plane's messages.
            runners[Dispatch.PLANE] = self.plane_firings = PlaneFirings(
                graph,
                flow,
                groups,
                self.plane,
                self.policies,
                results,
                self.evaluations,
                self.replacements,
                arrival=self.arrival,
                max_staleness=self.spec.max_staleness,
                vocabulary=self._expectations.vocabulary,
            )
        self.scheduler = FiringScheduler(
            graph,
            flow,
            groups,
            self.retries,
            runners,
            gangs=self.gang_dispatch,
            prompts=self._prompts,
            own_runners={SCORE: self.sample_scoring} if self.sample_scoring is not None else {},
        )

    def _sample_scoring(self, results: FiringResults) -> SampleScoring:
        return SampleScoring(
            self.graph.operators[SCORE],
            self.flow,
            self.groups,
            self.calls,
            results,
            self.retries,
            reports=self._runtime,
            inbox=self._inbox,
            expectations=self._expectations,
        )


def compares_in_group(config: Mapping[str, Any]) -> bool:
    """Whether a sample's baseline are the others of its group. (A learner of the user's own may have any `loss`.)"""
    loss, sampling = config.get("loss") or {}, config.get("sampling") or {}
    default = LossSettings.model_fields["adv_estimator"].default
    alone = isinstance(sampling, dict) and sampling.get("n") == 1  # then one takes the rewards as they are
    own = ESTIMATORS.get(loss.get("adv_estimator", default)) if isinstance(loss, dict) else None
    return own is not None and own.compares and not alone
