"""One run of a graph: its parts, wired together and put where the ledger says the last trainer stood.

Each part owns one concern and is given what it needs; this module alone knows all of them. What a part hears on another
thread it posts to the loop as a message (`gyre.workloads.trainer.inbox_messages`).

Invariant *resumed, not repeated*: nothing that the ledger, the log of evaluations or a checkpoint has is done again.

This module must not know in which order the loop drives the parts.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gyre.config import JobSpec
from gyre.config.sections import EvaluationSettings, read_section
from gyre.errors import UserCodeError
from gyre.graph import local_roles, pools_of
from gyre.graph.elements import Dispatch
from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.arrival import ArrivalOrder
from gyre.rollouts.trainer.sample_ledger import SampleLedger
from gyre.rollouts.trainer.staleness import StalenessPolicy
from gyre.workloads.base import WorkloadContext
from gyre.workloads.gang.gang import operator_failed
from gyre.workloads.runtime import TrainerRuntime
from gyre.workloads.trainer import inbox_messages
from gyre.workloads.trainer.evaluation.evaluations import Evaluations
from gyre.workloads.trainer.evaluation.held_out import numbered
from gyre.workloads.trainer.evaluation.log import EvaluationLog
from gyre.workloads.trainer.firings.firing_scheduler import FiringScheduler, Runner
from gyre.workloads.trainer.firings.plane_firings import PlaneFirings
from gyre.workloads.trainer.firings.result_checks import SCORE
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
    check_staleness,
)
from gyre.workloads.trainer.groups.replacements import Replacements
from gyre.workloads.trainer.job_graph import JobGraph
from gyre.workloads.trainer.learning.checkpoints import Checkpoints
from gyre.workloads.trainer.learning.gang_dispatch import GangDispatch
from gyre.workloads.trainer.learning.lifecycle import GangLifecycle
from gyre.workloads.trainer.learning.optimizer_steps import OptimizerSteps
from gyre.workloads.trainer.learning.publishing import ServedPolicies
from gyre.workloads.trainer.progress_report import ProgressReport
from gyre.workloads.trainer.retries import Retries
from gyre.workloads.trainer.rollout_requests import RolloutRequests
from gyre.workloads.trainer.wait_stats import WaitStats
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.messages import Failure


class Trainer(Protocol):
    """What a run needs of its trainer."""

    runtime: TrainerRuntime
    context: WorkloadContext

    @property
    def config(self) -> dict[str, Any]: ...

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The tokens that end an answer."""

    def prompt(self, index: int) -> Group: ...

    def held_out_sets(self, count: int) -> Mapping[str, list[Group]]: ...

    def report_progress(self, **fields: Any) -> None: ...


class TrainingRun:
    """`trainer` brings the prompts and shows progress; `post` puts a message into the loop's inbox, from any thread."""

    def __init__(
        self, trainer: Trainer, ledger: SampleLedger, post: Callable[[inbox_messages.Message], None]
    ) -> None:
        self._trainer = trainer
        self._runtime = trainer.runtime
        self._post = post
        self.spec: JobSpec = self._runtime.spec
        self.ledger = ledger
        self.graph = JobGraph(self.spec)
        self.pools = tuple(pools_of(self.spec))
        """The roles of instances that stand on machines of their own."""
        self.flow = self.graph.flow()
        self.groups = GroupState(ledger, per_step=self.graph.per_step)
        self.arrival = self._arrival_order()
        self.waits = WaitStats(self.graph.leader.role, now=time.monotonic)
        self.retries = Retries()
        self.calls = VertexCalls(self._runtime.membership, self._runtime.transport)
        trainer.context.directory.mkdir(parents=True, exist_ok=True)
        self._scores_samples = self.graph.scores_each_sample(self.spec)
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
                report_progress=trainer.report_progress,
            )
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.plane is not None:
            self.plane.close()

    def resume(self) -> None:
        """Mark the firings whose results are known, so that only the others start. Raises ConfigError where prompts
        would come from other data than before."""
        identity = getattr(getattr(self._trainer, "data", None), "identity", None)
        if isinstance(identity, str):
            self.ledger.check_data(identity)
        groups = self.groups
        drawn = groups.step * self.graph.per_step
        while drawn < self.spec.run.steps * self.graph.per_step and groups.is_drawn(drawn):
            drawn += 1
        self.graph.mark_scored(self.flow, drawn, [groups.slot_of(group_id) for group_id in groups.unscored])
        self.evaluations.resume()
        self.gang_dispatch.rewind()

    # -- the parts ----------------------------------------------------------------------------------

    def _posts(self, message: Callable[..., inbox_messages.Message]) -> Callable[..., None]:
        """A callback that posts a message of this type, made of the callback's arguments."""
        return lambda *content: self._post(message(*content))

    def _rollout_requests(self) -> RolloutRequests:
        run, trainer = self.spec.run, self._trainer
        return RolloutRequests(
            trainer.context.directory,
            trainer.config,
            term=self._runtime.term,
            stop_token_ids=trainer.stop_token_ids,
            on_groups=self._posts(inbox_messages.GroupsDelivered),
            on_error=self._posts(inbox_messages.RolloutsFailed),
            on_devices=self._posts(inbox_messages.DevicesRegained),
            on_finished=self._posts(inbox_messages.SamplesFinished) if self._scores_samples else None,
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
        graph, groups, run, report = self.graph, self.groups, self.spec.run, self._runtime.report
        directory, timeout_s = self._trainer.context.directory, run.call_timeout_s
        learners = (graph.leader, *graph.auxiliary)
        self.policies = ServedPolicies(
            directory,
            self._runtime.transport,
            report=report,
            plane=self.plane,
            in_calls=graph.weights_in_calls,
            timeout_s=timeout_s,
            on_answer=self._posts(inbox_messages.PublicationAnswered),
        )
        self._discarded = self.ledger.account().discarded
        self.steps = OptimizerSteps(
            groups, self.policies, role=graph.leader.role, discarded=self._discarded, report=report
        )
        checkpoints = Checkpoints(
            directory, groups, term=self._runtime.term, timeout_s=timeout_s, report=report
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
            report_failure=self._report_failure,
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
            check=self._check_staleness,
            on_result=self._posts(inbox_messages.GangCallEnded),
        )

    def _assembly(self) -> StepAssembly:
        run, ranks = self.spec.run, self.spec.roles[self.graph.leader.role].total
        if run.micro_batches == "streamed":
            return StreamedBatches(self.groups, run, ranks=ranks, arrival=self.arrival)
        return FixedBatches(self.groups, run, ranks=ranks, ordered=self.graph.accumulate_op.ordered)

    def _wire_firings(self) -> None:
        graph, flow, groups, run = self.graph, self.flow, self.groups, self.spec.run
        report, staleness = self._runtime.report, self.spec.staleness
        self.replacements = Replacements(
            groups,
            flow,
            refs_before_training=graph.refs_before_training,
            arrival=self.arrival,
            redraw_stale=staleness.dropped == "again",
            dynamic_sampling=run.dynamic_sampling,
            tokens_discarded=self._discarded,
            prompt=self._prompt,
            report=report,
        )
        results = FiringResults(
            graph,
            flow,
            groups,
            self.retries,
            max_staleness=self.spec.max_staleness,
            report_failure=self._report_failure,
            on_scored=self._scored,
        )
        self.evaluations = Evaluations(
            graph,
            flow,
            groups,
            self.calls,
            self.policies,
            self.retries,
            EvaluationLog.of(self._trainer.context.directory),
            read_section(EvaluationSettings, self._trainer.config, "evaluation"),
            groups_per_call=run.groups_per_firing,
            held_out=lambda: numbered(self._trainer.held_out_sets(run.held_out)),
            plane=self.plane,
            report=report,
            report_failure=self._report_failure,
            on_called=self._posts(inbox_messages.EvaluationAnswered),
            on_scored=self._posts(inbox_messages.EvaluationScored),
        )
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
            on_result=self._posts(inbox_messages.VertexCallEnded),
        )
        self.sample_scoring = self._sample_scoring(results) if self._scores_samples else None
        self.spread_firings = SpreadFirings(
            flow,
            groups,
            self.gangs,
            results,
            groups_per_call=run.groups_per_firing,
            on_result=self._posts(inbox_messages.SpreadCallEnded),
        )
        runners: dict[Dispatch, Runner] = {
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
            )
        self.scheduler = FiringScheduler(
            graph,
            flow,
            groups,
            self.retries,
            runners,
            step_optimizer=self.gang_dispatch.step_optimizer,
            prompt=self._prompt,
            own_runners={SCORE: self.sample_scoring} if self.sample_scoring is not None else {},
        )

    def _sample_scoring(self, results: FiringResults) -> SampleScoring:
        operator, membership = self.graph.operators[SCORE], self._runtime.membership
        return SampleScoring(
            operator,
            self.flow,
            self.groups,
            self.calls,
            results,
            self.retries,
            vertices=lambda: len(membership.members(operator.role)),
            report_failure=self._report_failure,
            on_result=self._posts(inbox_messages.ScoringEnded),
        )

    # -- what the parts call ------------------------------------------------------------------------

    def _prompt(self, group_id: int) -> Group:
        group = self._trainer.prompt(group_id)
        if group.id != group_id:
            raise UserCodeError(
                f"prompt({group_id}) gave a group with the id {group.id}.",
                hint="A group's id is the index that it was asked for by.",
            )
        return group

    def _scored(self, ids: Sequence[int]) -> None:
        if self.plane is not None:
            self.plane.acknowledge(ids)

    def _check_staleness(self, shares: list[list[Group]], step: int) -> None:
        if self.spec.staleness.function is None:  # a user's function has judged these groups itself
            check_staleness(shares, step, max_staleness=self.spec.max_staleness)

    def _report_failure(self, member: Member, operator: str, failure: Failure, attempt: int) -> None:
        self._runtime.report("OperatorFailed", **operator_failed(member, operator, failure, attempt))
