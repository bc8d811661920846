"""The built-in trainer: it walks whatever graph it is given, until every step is trained and checkpointed.

The loop forms the gangs, starts the firings that the graph's flow enables (`gyre.graph.flow`), handles the messages
that results arrive as, and reports progress. It holds no recipe: GRPO is the graph in `gyre.graph.recipes`.

A sample's way, with the module of this folder that takes it to each station:

    drawn ──▶ requested ──▶ assigned ──▶ generated ──▶ delivered ──▶ scored ──▶ trained
      │           │         └── by the rollout plane ──┘   │            │          │
      │           └──────── firings.plane_firings ─────────┘            │          └ learning.optimizer_steps
      └ firings.firing_scheduler                         firings.results ─┘

Without a rollout plane, a rollout class generates drawn groups in one call (`firings.vertex_firings`). A scored group
waits in `groups.group_state` until it is part of a micro-batch (`groups.micro_batches`), which `learning.gang_dispatch`
sends to the gangs. A group that nobody can generate, or whose samples are too old, is replaced (`groups.replacements`).

Invariants, beside those of the modules that are named here:
- *written before trained*, *batches are recorded*, *nothing vanishes*: see `gyre.rollouts.trainer.sample_ledger`;
- *one thread*: results come in on other threads, and go into the inbox as messages (`inbox_messages`); everything else
  is read and changed by the thread of `fit()` alone.
"""

from __future__ import annotations

import contextlib
import importlib
import queue
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, assert_never

from gyre.config.sections import HELD_OUT
from gyre.errors import UserCodeError, VertexDied
from gyre.graph.elements import Dispatch
from gyre.rollouts.samples import Group
from gyre.rollouts.trainer.sample_ledger import SampleLedger
from gyre.workloads.base import BaseTrainer
from gyre.workloads.gang.gang import Gang, GangLost, Outcome
from gyre.workloads.gang.learner_gang import ActorGang
from gyre.workloads.runtime import TrainerRuntime
from gyre.workloads.tasks.task import task_of
from gyre.workloads.trainer.inbox_messages import (
    DevicesRegained,
    EvaluationAnswered,
    EvaluationScored,
    GangCallEnded,
    GroupsDelivered,
    MembershipChanged,
    Message,
    PublicationAnswered,
    RolloutsFailed,
    SamplesFinished,
    ScoringEnded,
    SpreadCallEnded,
    VertexCallEnded,
)
from gyre.workloads.trainer.learning.gang_dispatch import GangCall
from gyre.workloads.trainer.learning.publishing import PendingPublication
from gyre.workloads.trainer.training_run import TrainingRun
from gyre.workloads.trainer.wait_causes import SCORING, Shares, activities

SAMPLES_S = 10.0
"""How long the end of a run waits for its last samples to be written; a disk that takes longer keeps them from being
read, and nothing else."""

IDLE_POLL_S = 0.25
"""How long the loop waits for a message; it bounds how late a pause or a stop is noticed."""


class GraphTrainer(BaseTrainer):
    """Subclass it to bring other prompts: override `prompt` and `held_out`, or `held_out_sets` for several sets."""

    runtime: TrainerRuntime
    data: Any = None
    """Where prompts come from, unless a subclass brings its own."""

    # -- data ---------------------------------------------------------------------------------------

    def setup(self) -> None:
        given = self.runtime.spec.run.data
        if given is not None:
            module, _, name = given.partition(":")
            self.data = getattr(importlib.import_module(module), name)(self.config)
        elif type(self).prompt is GraphTrainer.prompt:
            self.data = task_of(self.config)

    def prompt(self, index: int) -> Group:
        group: Group = self.data.prompt(index)
        return group

    def held_out(self, count: int) -> list[Group]:
        groups: list[Group] = self.data.held_out(count)
        return groups

    def held_out_sets(self, count: int) -> Mapping[str, list[Group]]:
        """At most `count` held-out prompts of each set, by its name: those of `data.held_out_sets`, or one set of
        `held_out`."""
        of_data = getattr(self.data, "held_out_sets", None)
        if of_data is None or type(self).held_out is not GraphTrainer.held_out:
            return {HELD_OUT: self.held_out(count)}
        sets: Mapping[str, list[Group]] = of_data(count)
        return sets

    def held_out_at_most(self, count: int) -> int:
        """How many held-out prompts there are, counted up to `count`; `count` where nobody can say."""
        own = type(self)
        if own.held_out is not GraphTrainer.held_out or own.held_out_sets is not GraphTrainer.held_out_sets:
            return count
        of_data = getattr(self.data, "held_out_at_most", None)
        return count if of_data is None else int(of_data(count))

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """The tokens that end an answer; none where `data` names none."""
        return getattr(self.data, "stop_token_ids", ())

    # -- the run ------------------------------------------------------------------------------------

    def fit(self) -> dict[str, Any]:
        """Runs the graph to its end. The result holds the account of every prompt."""
        runtime, binding = self.runtime, self.runtime.binding
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        with SampleLedger.at(
            binding.store_url, binding.job_id, runtime.term, hold_s=binding.store_hold_s
        ) as ledger:
            self._run = TrainingRun(self, ledger, self._inbox)
            with contextlib.closing(self._run):
                runtime.membership.listen(lambda: self._inbox.put(MembershipChanged()))
                self._run.resume()
                self._loop()
                return self._finish()

    def _loop(self) -> None:
        while not self._is_complete() and not self._is_stopped():
            self._form_gangs()
            self._start_firings()
            for message in self._messages():
                self._handle(message)
            self._check_gangs()
            self._report_progress()

    def _is_complete(self) -> bool:
        """Whether every firing is done, and a checkpoint covers the last step."""
        groups = self._run.groups
        return self._run.flow.finished and groups.checkpoint_step == groups.step

    def _is_stopped(self) -> bool:
        """Whether the run is to stop, and no call is in flight. Nobody waits for what the rollout plane generates: it
        stays in the plane's own ledger. An evaluation of which a part is still to be called for is made again."""
        run = self._run
        return (
            self.runtime.should_stop
            and not run.evaluations.has_calls
            and not any(
                run.flow.running(ref)
                for ref, operator in run.graph.operators.items()
                if operator.dispatch is not Dispatch.PLANE and not run.graph.is_evaluation(operator)
            )
            and self._has_devices()
        )

    def _finish(self) -> dict[str, Any]:
        """The result. Where the run was stopped, the last step is checkpointed first."""
        run = self._run
        # Without that checkpoint the next trainer replays the step from the ledger, and what ranks keep in memory goes
        # with their processes: a gang that is lost here costs nothing.
        with contextlib.suppress(GangLost):
            if run.gangs.leader is not None and run.groups.checkpoint_step != run.groups.step:
                run.gangs.checkpoint_last(run.gangs.leader)
            run.gangs.end()
        run.step_log.ended()
        run.samples.end(within_s=SAMPLES_S)
        result = run.progress.result(run.ledger.account(), stopped=self.runtime.should_stop)
        self._report_progress()
        return result

    # -- starting -----------------------------------------------------------------------------------

    def _has_devices(self) -> bool:
        """Whether the trainer has its devices. Those that are lent to local engines are asked for, and are back in a
        moment."""
        return self._run.plane is None or self._run.plane.take_back_devices()

    def _form_gangs(self) -> None:
        run = self._run
        if run.gangs.leader is None and self._has_devices():
            with run.waits.doing(run.graph.leader.role, "getting ready"):
                formed = run.gangs.form()
            if formed:
                run.gang_dispatch.rewind()

    def _start_firings(self) -> None:
        run = self._run
        if self.runtime.paused or self.runtime.should_stop:
            if run.sample_scoring is not None:
                run.sample_scoring.withdraw()
            return
        now = time.monotonic()
        run.evaluations.send(now)
        self._train()
        run.scheduler.start_enabled(now)
        if run.sample_scoring is not None:
            run.sample_scoring.pump(now, step=run.groups.step + 1)
        self._raise_on_deadlock()

    def _train(self) -> None:
        """Send the gangs micro-batches, after the groups that are too old or useless are replaced."""
        run = self._run
        if run.gangs.leader is None or (run.plane is not None and run.plane.devices_lent):
            return
        for group_id, verdict in run.assembly.refresh():
            run.replacements.drop(group_id, verdict)
        run.gang_dispatch.send_micro_batches()

    def _raise_on_deadlock(self) -> None:
        """Raises UserCodeError where a user's staleness function lets every group wait, and nothing else can happen
        that would change its mind."""
        run = self._run
        if run.arrival is None or run.spec.staleness.function is None or run.gangs.leader is None:
            return
        if run.gang_dispatch.has_calls or any(run.flow.running(ref) for ref in run.graph.operators):
            return
        could_start = any(firing.operator != run.graph.accumulate_op.ref for firing in run.flow.enabled())
        if run.arrival.waiting and not could_start:
            raise UserCodeError(
                f"{run.spec.staleness.policy} lets {run.arrival.waiting} groups wait, and there is nothing to wait "
                f"for: no step can be made from policy version {run.groups.step}.",
                hint="Let it train or drop some of what is there.",
            )

    # -- messages -----------------------------------------------------------------------------------

    def _messages(self) -> Iterator[Message]:
        """Every message that is there, or the first one that arrives within `IDLE_POLL_S`."""
        with contextlib.suppress(queue.Empty):
            yield self._inbox.get(timeout=IDLE_POLL_S)
            while True:
                yield self._inbox.get_nowait()

    def _handle(self, message: Message) -> None:
        run = self._run
        try:
            match message:
                case VertexCallEnded(call, outcome):
                    run.vertex_firings.ended(call, outcome)
                case GangCallEnded(call, rank, outcome):
                    call.outcomes[rank] = outcome
                    if run.gang_dispatch.is_current(call):
                        self._raise_if_lost(call.gang, rank, outcome)
                        self._gang_call_ended(call)
                case PublicationAnswered(publication, method, outcome):
                    if run.policies.is_current(publication):
                        self._publication_answered(publication, method, outcome)
                case SpreadCallEnded(call, rank, outcome):
                    call.outcomes[rank] = outcome
                    if run.spread_firings.is_current(call):
                        self._raise_if_lost(call.gang, rank, outcome)
                        run.spread_firings.rank_ended(call)
                case SamplesFinished(samples):
                    if run.sample_scoring is not None:
                        run.sample_scoring.finished(samples)
                case ScoringEnded(call, outcome):
                    if run.sample_scoring is not None:
                        run.sample_scoring.ended(call, outcome)
                case GroupsDelivered(purpose, groups):
                    run.plane_firings.delivered(purpose, groups)
                case RolloutsFailed(error):
                    run.plane_firings.failed(error)
                case EvaluationAnswered(call, outcome):
                    run.evaluations.called(call, outcome)
                case EvaluationScored(call, member, outcome):
                    run.evaluations.scored(call, member, outcome)
                case MembershipChanged():
                    if not run.gangs.is_current():
                        raise GangLost
                case DevicesRegained():
                    pass  # the loop forms gangs and trains in its next turn
                case _:
                    assert_never(message)
        except GangLost as lost:
            self._drop_gangs(lost)

    def _raise_if_lost(self, gang: Gang, rank: int, outcome: Outcome | VertexDied) -> None:
        """Raises GangLost where the rank died in its call: the others' results are not waited for."""
        if isinstance(outcome, VertexDied):
            self.runtime.membership.doubt(*gang.members[rank])
            raise GangLost

    def _gang_call_ended(self, call: GangCall) -> None:
        """Handle a gang's call that every rank has ended. Raises GangLost and Fenced."""
        run = self._run
        try:
            values = run.gang_dispatch.results_of(call)
        except GangLost:
            run.steps.why_skipped = run.gang_dispatch.skip_batch(call)
            if not run.steps.why_skipped:
                raise
            return
        if values is None:
            return
        if call.batch is not None:
            run.gang_dispatch.micro_batch_taken(call.gang.role, call.batch)
        elif isinstance(call.gang, ActorGang):  # the leader has stepped
            # The ledger has the step while the rank makes its weights ready, and before anybody is told of them.
            run.policies.begin(call.gang, run.groups.step + 1, call.firing)
            run.steps.leader_stepped(call.gang, values[0])
            run.gangs.settle_checkpoint()
            run.gang_dispatch.begin_step()
        else:
            run.steps.auxiliary_stepped(call.gang.role, values[0])
            run.flow.complete(call.firing)

    def _publication_answered(
        self, publication: PendingPublication, method: str, outcome: Outcome | VertexDied
    ) -> None:
        """Handle an answer of the first rank. When the step's weights are out, the step is done. Raises GangLost and
        Fenced."""
        run, gang = self._run, publication.gang
        if isinstance(outcome, VertexDied):
            self.runtime.membership.doubt(*gang.members[0])
            raise GangLost
        prepared = run.policies.answered(publication, method, outcome)
        if prepared is None:
            return
        if publication.firing is None:
            run.gangs.published_again(gang, prepared)
            return
        run.steps.publish(gang, prepared)
        run.flow.complete(publication.firing)
        run.gangs.step_succeeded()
        if not (self.runtime.paused or self.runtime.should_stop):
            # Instances wait for requests from now on; a checkpoint waits for micro-batches that the gang has.
            run.scheduler.start_enabled(time.monotonic(), optimizer=False)
        with run.waits.doing(gang.role, "writing a checkpoint"):
            run.gangs.checkpoint_if_due(gang, settled=True)

    # -- gangs and progress -------------------------------------------------------------------------

    def _check_gangs(self) -> None:
        """Give up gangs in which one rank failed a call and others do not leave it."""
        now = time.monotonic()
        try:
            self._run.gang_dispatch.check_failed(now)
            self._run.spread_firings.check_failed(now)
            self._run.policies.check_late(now)
        except GangLost as lost:
            self._drop_gangs(lost)

    def _drop_gangs(self, lost: GangLost) -> None:
        self._run.gangs.drop(lost)
        self._run.spread_firings.cancel()
        self._run.gang_dispatch.rewind()

    def _report_progress(self) -> None:
        run = self._run
        run.waits.observe(self._activities)
        if run.plane is not None:
            run.plane.observe(
                run.flow,
                run.graph.operators,
                wanted=run.devices.wanted(),
                could_train=run.gang_dispatch.could_train,
            )
        run.progress.report(run.waits.times(), run.waits.totals())

    def _activities(self) -> dict[str, Shares]:
        """What each role does now."""
        run = self._run
        held = "the trainer stops" if self.runtime.should_stop else "paused" if self.runtime.paused else ""
        return activities(
            run.flow,
            run.graph.operators,
            generating=run.plane.generating if run.plane is not None else None,
            publishing=() if run.gang_dispatch.is_stepping else (run.graph.apply_op.ref,),
            beside=dict.fromkeys(run.calls.roles_at_work, SCORING),  # samples whose groups are not whole
            held=held,
        )
