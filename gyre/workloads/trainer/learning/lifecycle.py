"""The lifecycle of the gangs: formed when their ranks run, brought up to the ledger's last step, dropped when one dies.

Auxiliary gangs (a critic) come and go with the leader: all gangs are formed, checkpointed, restored and replayed
together, since a step of the job is a step of each.

Invariants:
- *exactly the ledger's state*: a gang that was brought up has trained what the ledger says, in the same micro-batches,
  and nothing else, whatever state its ranks were in before. Ranks that are out of step with each other are not brought
  up (`gyre.workloads.gang.alignment`);
- *a replay is compared*: a step that is trained again has the weights that the ledger knows, or the difference is
  reported (`StepDiverged`). Where calls carry the weights, each such step is compared; where instances fetch them, the
  last one is, whose weights are made of all before it;
- *somebody serves the newest version*: a gang that was brought up publishes the ledger's last step again unless the
  rank that published it is one of its own. Instances may have nobody else to fetch that version from, and without it
  they generate nothing, so no newer version comes.

This module must not know how micro-batches are made, or how samples are generated.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TypeVar

from gyre.workloads import protocols
from gyre.workloads.gang.alignment import align
from gyre.workloads.gang.gang import GangLost, operator_failed
from gyre.workloads.gang.learner_gang import ActorGang, LearnerGang
from gyre.workloads.gang.weight_copy import WeightCopies
from gyre.workloads.runtime import TrainerRuntime
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.groups.micro_batches import is_made
from gyre.workloads.trainer.job_graph import TrainedGang
from gyre.workloads.trainer.learning.checkpoints import Checkpoints
from gyre.workloads.trainer.learning.optimizer_steps import OptimizerSteps
from gyre.workloads.trainer.learning.pass_sizes import PassSizes
from gyre.workloads.trainer.learning.publishing import PreparedVersion, ServedPolicies, VersionDiverged
from gyre.workloads.trainer.learning.recovery import Recovery
from gyre.workloads.trainer.retries import pause_s
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.messages import Failure

END_WITHIN_S = 10.0
"""Deadline for the ranks to forget what they keep in memory, at the end of a job. They have nothing else to do then, or
are stuck, and the job's result waits for them."""

G = TypeVar("G", bound=LearnerGang)


class GangLifecycle:
    """`leader` is the learner whose weights are published, `auxiliary` are the others."""

    def __init__(
        self,
        runtime: TrainerRuntime,
        groups: GroupState,
        *,
        leader: TrainedGang,
        auxiliary: Sequence[TrainedGang],
        checkpoints: Checkpoints,
        policies: ServedPolicies,
        steps: OptimizerSteps,
        keeps_initial_policy: bool,
    ) -> None:
        self._runtime = runtime
        self._run = runtime.spec.run
        self._groups = groups
        self._leading_learner = leader
        self._auxiliary_learners = {learner.role: learner for learner in auxiliary}
        self._checkpoints = checkpoints
        self._policies = policies
        self._steps = steps
        self._keeps_initial_policy = keeps_initial_policy
        self._copies = WeightCopies(runtime.context.directory)
        self._recovery = Recovery(
            groups,
            timeout_s=self._run.call_timeout_s,
            takes_weights=self._run.lost_checkpoint == "weights",
            copies=self._copies,
            checkpoints=checkpoints,
            reports=runtime,
        )
        self._passes = PassSizes(groups, runtime.spec.failover.out_of_memory.smaller_passes, runtime)
        self._replaying: int | None = None
        """The step that is trained again while the gangs are brought up."""
        self._replayed = False
        """Whether the leading gang was brought up by training steps again."""
        self._diverged_at: set[tuple[int, int]] = set()
        """Gangs, by number, and steps whose weights came out differently and were reported."""
        self._failures = 0
        self._not_before = 0.0
        self.leader: ActorGang | None = None
        """The leading learner's gang; None while a rank of any learner is missing."""
        self._auxiliary: dict[str, LearnerGang] = {}

    # -- coming and going ---------------------------------------------------------------------------

    def form(self) -> bool:
        """Form the gangs where every rank runs, and bring them up. Whether there are new gangs now."""
        if self.leader is not None or time.monotonic() < self._not_before:
            return False
        runtime = self._runtime
        complete: dict[str, list[Member]] = {}
        for role in (self._leading_learner.role, *self._auxiliary_learners):
            members = runtime.membership.complete(role)
            if members is None:
                return False
            complete[role] = members
        number = next(runtime.gang_numbers)

        def gang(kind: type[G], learner: TrainedGang) -> G:
            return kind(
                number,
                learner.role,
                tuple(complete[learner.role]),
                runtime.membership,
                runtime.transport,
                runtime,
                accumulate_name=learner.accumulate_op.method,
                apply_name=learner.apply_op.method,
            )

        leader = gang(ActorGang, self._leading_learner)
        self._auxiliary = {
            role: gang(LearnerGang, learner) for role, learner in self._auxiliary_learners.items()
        }
        try:
            for each in (leader, *self._auxiliary.values()):
                align(each, timeout_s=self._run.call_timeout_s)
            self._bring_up(leader)
            if self._groups.checkpoint_step != self._groups.step:
                self.checkpoint_if_due(leader)  # one that an earlier gang or trainer did not live to write
        except GangLost as lost:
            self.drop(lost)
            return False
        self.leader = leader
        self._steps.begin_clock()
        return True

    def gang_of(self, role: str) -> LearnerGang | None:
        """The gang of a learner; None while a rank of any learner is missing."""
        if self.leader is None or role == self._leading_learner.role:
            return self.leader
        return self._auxiliary[role]

    def is_current(self) -> bool:
        """Whether every rank of the gangs still runs; True where there are no gangs."""
        return self.leader is None or all(gang.is_current() for gang in self._gangs())

    @property
    def published_step(self) -> int:
        """The last step whose weights are out. Those of the ledger's last may be on their way, or lost with the gang
        that made them ready: the next gang publishes them when it is brought up."""
        published, step = self._policies.published, self._groups.step
        return step if published is None else min(published.version, step)

    def _gangs(self) -> tuple[LearnerGang, ...]:
        return () if self.leader is None else (self.leader, *self._auxiliary.values())

    def drop(self, lost: GangLost) -> None:
        """The gangs cannot go on. Where a rank failed, the next ones are formed after a pause."""
        self.leader = None
        self._checkpoints.give_up()
        self._policies.give_up()
        self._not_before = 0.0
        if lost.blamed is not None:
            self._failures += 1
            self._not_before = time.monotonic() + pause_s(self._failures)
            self._passes.failed(lost.blamed, self._replaying or self._groups.step + 1)
            self._report_failed(*lost.blamed, self._failures)

    def _report_failed(self, member: Member, operator: str, failure: Failure, attempt: int) -> None:
        self._runtime.report("OperatorFailed", **operator_failed(member, operator, failure, attempt))

    def step_succeeded(self) -> None:
        """A whole step is done, so the next failure is a first one. A call that succeeds is not enough: a step may fail
        in a later call every time."""
        self._failures = 0

    def settle_checkpoint(self) -> None:
        """Commit a checkpoint that is written by now. Called when the gangs have nothing else to do."""
        self._checkpoints.settle(wait=False)

    def checkpoint_if_due(self, leader: ActorGang, *, settled: bool = False) -> None:
        """Begin a checkpoint where one is due or overdue, and unless that was `settled`, commit an earlier one that is
        written by now. The last checkpoint of the job is complete when this returns."""
        if self._groups.step == self._run.steps:
            self._checkpoints.write_last(leader, self._auxiliary)
        elif settled:
            self._checkpoints.begin_if_due(leader, self._auxiliary, every=self._run.checkpoint_every)
        else:
            self._checkpoints.keep_up(leader, self._auxiliary, every=self._run.checkpoint_every)

    def checkpoint_last(self, leader: ActorGang) -> None:
        """Have a checkpoint of the last step, which is complete when this returns."""
        self._checkpoints.write_last(leader, self._auxiliary)

    def end(self) -> None:
        """The job ends with its last state on disk: let the ranks forget what they keep in memory. Raises GangLost."""
        until = time.monotonic() + END_WITHIN_S
        for gang in self._gangs():
            states = gang.state().results(timeout_s=until - time.monotonic())
            if all(state.get("memory") for state in states):
                gang.forget_memory().results(timeout_s=until - time.monotonic())

    # -- from any state to the ledger's --------------------------------------------------------------

    def _bring_up(self, leader: ActorGang) -> None:
        groups, timeout_s = self._groups, self._run.call_timeout_s
        self._replaying = None
        if groups.checkpoint_step is None or groups.checkpoint_path is None:
            leader.warm_start().results(timeout_s=timeout_s)
            if self._keeps_initial_policy:
                self._policies.keep_initial(leader)
                self._policies.serve_initial()
            for role, gang in self._auxiliary.items():
                self._begin_with_policy(self._auxiliary_learners[role], gang)
            self._checkpoints.write(leader, self._auxiliary, wait=True)
        else:
            newest, self._replayed = groups.checkpoint_step, False
            # Only a step whose micro-batches are all recorded can have been applied without the ledger's knowing.
            exactly = not is_made(groups, groups.step + 1)
            at = self._catch_up(leader, "", groups.step, exactly=exactly)
            for role, gang in self._auxiliary.items():
                self._catch_up(gang, role, at, exactly=True)
            if at == groups.step + 1:
                # The optimizer stepped, but the trainer died before the ledger had it.
                again = leader.apply(step=at, indices=0, group_ids=[]).first(timeout_s=timeout_s)
                step = self._steps.leader_stepped(leader, again)
                self._steps.publish(leader, self._policies.prepare(leader, step))
                self.checkpoint_if_due(leader)
            if not groups.checkpoint_path.is_dir():  # the next death would find nothing on the disk
                self._checkpoints.write(leader, self._auxiliary, wait=True)
            elif groups.checkpoint_step < newest:  # nor would it find a second one
                self._checkpoints.write(leader, self._auxiliary, wait=False)
        self._policies.serve_initial()
        for gang in (leader, *self._auxiliary.values()):
            self._begin(gang, groups.step + 1)
        published = self._policies.published
        if published is None or published.version < groups.step:
            self._publish_last(leader)
        elif not self._policies.are_served(leader):
            if self._replayed:
                self.published_again(leader, self._policies.prepare(leader, groups.step))
            else:  # the weights are the published ones: beside the next step is soon enough
                self._policies.begin(leader, groups.step)
        elif (
            self._replayed and not self._policies.in_calls
        ):  # else each step was compared when it was replayed
            self._problem_with(leader, self._policies.prepare(leader, groups.step))

    def _begin(self, gang: LearnerGang, step: int) -> None:
        while True:
            halved = self._passes.halved(gang.role, step)
            begun = gang.begin(step, halved=halved).results(timeout_s=self._run.call_timeout_s)
            if self._passes.begun(gang.role, step, begun):
                return

    def _publish_last(self, gang: ActorGang) -> None:
        prepared = self._policies.prepare(gang, self._groups.step)
        problem = self._problem_with(gang, prepared)
        if problem:
            self._diverged(gang, problem)
        restore = self._groups.restores.get(gang.role)
        if restore is not None and (restore.source, restore.step) == ("instance", self._groups.step):
            self._policies.publish(
                gang, prepared
            )  # the ledger forgot its digest: these weights are those of instances
        else:
            self._steps.publish(gang, prepared)

    def published_again(self, gang: ActorGang, prepared: PreparedVersion) -> None:
        """The rank that served the last version has gone, and another has it ready. Where the replay gave other weights
        (training may be set to be quick rather than deterministic), the version stays what the instances have; if none
        of them has it, it is lost, and the gang is to blame."""
        problem = self._problem_with(gang, prepared)
        if not problem:
            try:
                self._policies.publish(gang, prepared)
                return
            except VersionDiverged as error:
                problem = str(error)
        copy = self._copies.newest()
        if copy is None or copy.version < self._groups.step:
            self._diverged(gang, f"{problem}; no instance has that version any more")

    def _problem_with(self, gang: ActorGang, prepared: PreparedVersion) -> str:
        """How the weights that were brought up differ from those that the ledger knows; "" where they do not. A
        difference is reported, once for each gang and step."""
        step, known = prepared.version, self._groups.digests.get(prepared.version)
        if known is None or known == prepared.checksum:
            return ""
        problem = f"replaying step {step} gave weights {prepared.checksum}, the ledger has {known}"
        if (gang.number, step) not in self._diverged_at:
            self._diverged_at.add((gang.number, step))
            self._runtime.report(
                "StepDiverged",
                role=gang.role,
                step=step,
                expected=known,
                found=prepared.checksum,
                error=problem,
            )
        return problem

    def _diverged(self, gang: ActorGang, problem: str) -> None:
        self._report_failed(
            gang.members[0],
            protocols.Learner.restore.__name__,
            Failure(error=problem, traceback="", user_code=False),
            0,
        )

    def _begin_with_policy(self, learner: TrainedGang, gang: LearnerGang) -> None:
        initial = self._policies.initial
        if learner.begins_with_policy and initial is not None:
            gang.take_policy(initial.bundle).results(timeout_s=self._run.call_timeout_s)

    def _catch_up(
        self,
        gang: LearnerGang,
        part: str,
        target: int,
        *,
        exactly: bool = False,
    ) -> int:
        """Bring the ranks, whose checkpoints are in the subfolder `part`, to step `target`; unless `exactly`, leave
        them where they are one step further. Returns the step that they are at. Their state is restored
        (`gyre.workloads.trainer.learning.recovery`) only where they cannot go on from their own: ranks at step 0 may be
        new ones that began differently."""
        timeout_s, groups = self._run.call_timeout_s, self._groups
        actor = gang if isinstance(gang, ActorGang) else None
        assert groups.checkpoint_step is not None
        assert groups.checkpoint_path is not None
        states = gang.state().results(timeout_s=timeout_s)
        steps = {state["step"] for state in states}
        living = len(steps) == 1 and len({state["digest"] for state in states}) == 1
        at: int = max(steps)
        goes_on = living and max(groups.checkpoint_step, 1) <= at <= target + (not exactly)
        self._recovery.report_earlier(gang, at if goes_on else None)
        if not goes_on:
            at = self._recovery.restore(
                gang,
                states,
                groups.checkpoint_path,
                groups.checkpoint_step,
                at_most=target + (not exactly),
                actor=actor if not self._auxiliary_learners else None,
                part=part,
            )
        for step in range(at + 1, target + 1):
            self._replay(gang, step)
            if actor is not None:
                self._replayed = True
                if self._policies.in_calls:
                    self._problem_with(actor, self._policies.prepare(actor, step))
        return max(at, target)

    def _replay(self, gang: LearnerGang, step: int) -> None:
        """Train a step again that the restored state lacks: the same groups in the same micro-batches."""
        groups, timeout_s = self._groups, self._run.call_timeout_s
        self._replaying = step
        gang.begin(step, halved=self._passes.halved(gang.role, step)).results(timeout_s=timeout_s)
        if step in groups.skipped:
            skipping = gang.apply(step=step, indices=0, group_ids=[], skip=True)  # its groups are gone
            skipping.results(timeout_s=timeout_s)
            return
        batches = groups.batches[step]
        for batch in batches:
            shares = groups.shares(batch, gang.size)
            gang.accumulate(shares, step=step, index=batch.index).results(timeout_s=timeout_s)
        applying = gang.apply(step=step, indices=len(batches), group_ids=groups.ids_of(step))
        applying.results(timeout_s=timeout_s)
        self._replaying = None
        self._runtime.context.progress.tick(replayed_step=step)
