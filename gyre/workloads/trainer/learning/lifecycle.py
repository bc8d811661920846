"""The gang's life: formed when its ranks are there, brought to the ledger's last step, dropped when a rank dies.

Gangs that are trained beside the leading one (a critic) come and go with it: all of them are formed, checkpointed,
restored and replayed together, for a step of the job is a step of each.

Invariant *exactly the ledger's state*: a gang that was brought up has trained what the ledger says, in the same
micro-batches, and nothing else; whatever state its ranks were in before. Ranks that are out of step with each other
are not brought up (`gyre.workloads.gang.alignment`).

Invariant *somebody serves the newest version*: a gang that was brought up publishes the ledger's last step again unless
the rank that published it is one of its own. Instances may have nobody else to fetch that version from, and without it
they generate nothing, so that no newer one comes.

This module must not know how micro-batches are made, or what runs beside the gang.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gyre.workloads.gang.alignment import muster
from gyre.workloads.gang.gang import Gang, GangLost
from gyre.workloads.gang.weight_copy import newest_copy
from gyre.workloads.trainer.group_state import GroupState
from gyre.workloads.trainer.learning.checkpoints import Checkpoints
from gyre.workloads.trainer.learning.learners import Learner
from gyre.workloads.trainer.learning.optimizer_steps import OptimizerSteps
from gyre.workloads.trainer.learning.publishing import OtherBytes, ServedPolicies
from gyre.workloads.trainer.learning.recovery import Recovery
from gyre.workloads.trainer.retries import pause_s
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.messages import Failure

END_WITHIN_S = 10.0
"""For ranks to let go of what they keep: they have nothing else to do, or are stuck, and the job's result waits."""

Blame = Callable[[Member, str, Failure], None]


class GangLifecycle:
    """`leader` is whose weights go out, `followers` are trained beside it. `blame` tells of a failed call."""

    def __init__(
        self,
        runtime: Any,
        book: GroupState,
        *,
        leader: Learner,
        followers: Sequence[Learner],
        checkpoints: Checkpoints,
        policies: ServedPolicies,
        steps: OptimizerSteps,
        keeps_initial: bool,
        blame: Blame,
    ) -> None:
        self._runtime = runtime
        self._run = runtime.spec.run
        self._book = book
        self._leader = leader
        self._followers = {follower.role: follower for follower in followers}
        self._checkpoints = checkpoints
        self._policies = policies
        self._steps = steps
        self._keeps_initial = keeps_initial
        self._blame = blame
        self._find_copy = partial(newest_copy, runtime.context.directory)
        self._restoring = Recovery(
            book,
            timeout_s=self._run.call_timeout_s,
            takes_weights=self._run.lost_checkpoint == "weights",
            find_copy=self._find_copy,
            report=runtime.report,
        )
        self._failures = 0
        self._not_before = 0.0
        self.gang: Gang | None = None
        """The leader's ranks; None while any learner's are not all there."""
        self._beside: dict[str, Gang] = {}

    # -- coming and going ---------------------------------------------------------------------------

    def form(self) -> bool:
        """Try, where there is none. True where one was formed and brought up."""
        if self.gang is not None or time.monotonic() < self._not_before:
            return False
        runtime = self._runtime
        whole: dict[str, list[Member]] = {}
        for role in (self._leader.role, *self._followers):
            members = runtime.membership.complete(role)
            if members is None:
                return False
            whole[role] = members
        number = next(runtime.gang_numbers)
        gangs = {
            role: Gang(number, role, tuple(members), runtime.membership, runtime.transport, runtime.waiting)
            for role, members in whole.items()
        }
        gang = gangs.pop(self._leader.role)
        self._beside = beside = gangs
        try:
            for each in (gang, *beside.values()):
                muster(each, timeout_s=self._run.call_timeout_s)
            self._bring_up(gang)
            if self._book.checkpoint_step != self._book.step:
                self.checkpoint_if_due(gang)  # one that an earlier gang or trainer did not live to write
        except GangLost as lost:
            self.drop(lost)
            return False
        self.gang = gang
        self._steps.begin_clock()
        return True

    def gang_of(self, role: str) -> Gang | None:
        """The ranks of a learner, while all learners' are there."""
        return self.gang if self.gang is None or role == self._leader.role else self._beside[role]

    def is_current(self) -> bool:
        """Whether nobody has left; also where there is no gang."""
        return self.gang is None or all(gang.is_current() for gang in (self.gang, *self._beside.values()))

    def drop(self, lost: GangLost) -> None:
        self.gang = None
        self._checkpoints.give_up()
        self._not_before = 0.0
        if lost.blamed is not None:
            self._failures += 1
            self._not_before = time.monotonic() + pause_s(self._failures)
            self._blame(*lost.blamed)

    def step_was_good(self) -> None:
        """Only when all of a step is done: what fails may come after calls that succeed."""
        self._failures = 0

    def checkpoint_if_due(self, gang: Gang) -> None:
        """And commit an earlier one, if it is written by now. The last one of the job is waited for."""
        last = self._book.step == self._run.steps
        self._checkpoints.settle(wait=last)
        if last or self._book.step % self._run.checkpoint_every == 0:
            self._checkpoints.write(gang, self._beside, wait=last)

    def checkpoint(self, gang: Gang) -> None:
        """Written when this returns."""
        self._checkpoints.write(gang, self._beside, wait=True)

    def end(self) -> None:
        """The job ends here, its last state on the disk: what ranks keep in memory goes. Raises GangLost."""
        until = time.monotonic() + END_WITHIN_S
        for gang in (self.gang, *self._beside.values()) if self.gang is not None else ():
            states = gang.call("state", timeout_s=until - time.monotonic())
            if all(state.get("memory") for state in states):
                gang.call("forget_memory", timeout_s=until - time.monotonic())

    # -- from whatever state to the ledger's --------------------------------------------------------

    def _bring_up(self, gang: Gang) -> None:
        book, timeout_s = self._book, self._run.call_timeout_s
        if book.checkpoint_step is None or book.checkpoint_path is None:
            gang.call("warm_start", timeout_s=timeout_s)
            if self._keeps_initial:
                self._policies.keep_initial(gang)
                self._policies.serve_initial()
            for role, beside in self._beside.items():
                self._begin_with_policy(self._followers[role], beside)
            self.checkpoint(gang)
        else:
            found = book.checkpoint_path, book.checkpoint_step
            at = self._catch_up(self._leader, gang, *found, book.step)
            for role, beside in self._beside.items():
                self._catch_up(self._followers[role], beside, found[0] / role, found[1], at, exactly=True)
            if at == book.step + 1:
                # The optimizer stepped, but the trainer died before the ledger had it.
                method = self._leader.pace.method
                again = gang.call(
                    method, _gyre_step=at, _gyre_indices=0, _gyre_group_ids=[], timeout_s=timeout_s
                )
                self._steps.ended(gang, again[0])
                self.checkpoint_if_due(gang)
            if not book.checkpoint_path.is_dir():
                self.checkpoint(gang)  # the next death would find nothing on the disk
        self._policies.serve_initial()
        for each in (gang, *self._beside.values()):
            each.call("begin", book.step + 1, timeout_s=timeout_s)
        published = self._policies.published
        if published is None or published.version < book.step:
            self._publish_last(gang)
        elif not self._policies.are_served(gang):
            self._publish_again(gang)

    def _publish_last(self, gang: Gang) -> None:
        manifest, buffer = self._export(gang)
        problem = self._problem_with(manifest)
        if problem:
            self._diverged(gang, problem)
        self._policies.publish(gang, manifest, buffer)

    def _publish_again(self, gang: Gang) -> None:
        """The rank that served the last version has gone. Where the replay gave other weights (training may be set to
        be quick rather than deterministic), the version stays what the instances have; if none of them has it, it is
        lost, and the gang is to blame."""
        manifest, buffer = self._export(gang)
        problem = self._problem_with(manifest)
        if not problem:
            try:
                self._policies.publish(gang, manifest, buffer)
                return
            except OtherBytes as error:
                problem = str(error)
        copy = self._find_copy()
        if copy is None or copy.version < self._book.step:
            self._diverged(gang, f"{problem}; no instance has that version any more")

    def _export(self, gang: Gang) -> tuple[dict[str, Any], bytes]:
        exported: tuple[dict[str, Any], bytes] = gang.call_rank0(
            "export_weights", version=self._book.step, timeout_s=self._run.call_timeout_s
        )
        return exported

    def _problem_with(self, manifest: dict[str, Any]) -> str:
        """How the weights that were brought up differ from those that the ledger knows; "" where they do not."""
        step, known = self._book.step, self._book.digests.get(self._book.step)
        if known is None or known == manifest["checksum"]:
            return ""
        return f"replaying step {step} gave weights {manifest['checksum']}, the ledger has {known}"

    def _diverged(self, gang: Gang, problem: str) -> None:
        self._blame(gang.members[0], "restore", Failure(error=problem, traceback="", user_code=False))

    def _begin_with_policy(self, learner: Learner, gang: Gang) -> None:
        initial = self._policies.initial
        if learner.begins_with_policy and initial is not None:
            gang.call("state", bundle=initial.bundle, timeout_s=self._run.call_timeout_s)

    def _catch_up(
        self,
        learner: Learner,
        gang: Gang,
        checkpoint: Path,
        checkpoint_step: int,
        target: int,
        *,
        exactly: bool = False,
    ) -> int:
        """Bring the ranks to step `target`, or leave them one further unless it is to be `exactly` that; returns where
        they are. Their state comes from elsewhere (`gyre.workloads.trainer.learning.recovery`) only where they
        cannot go on from where
        they stand: ranks that are at no step may be new ones, with another beginning."""
        timeout_s = self._run.call_timeout_s
        states = gang.call("state", timeout_s=timeout_s)
        steps = {state["step"] for state in states}
        living = len(steps) == 1 and len({state["digest"] for state in states}) == 1
        at: int = max(steps)
        goes_on = living and max(checkpoint_step, 1) <= at <= target + (not exactly)
        self._restoring.tell_earlier(gang, at if goes_on else None)
        if not goes_on:
            at = self._restoring.restore(
                gang,
                states,
                checkpoint,
                checkpoint_step,
                at_most=target + (not exactly),
                has_copies=learner is self._leader and not self._followers,
            )
        for step in range(at + 1, target + 1):
            self._replay(learner, gang, step)
        return max(at, target)

    def _replay(self, learner: Learner, gang: Gang, step: int) -> None:
        """Train a step again that the restored checkpoint does not cover: same groups, same micro-batches."""
        book, timeout_s = self._book, self._run.call_timeout_s
        gang.call("begin", step, timeout_s=timeout_s)
        batches = book.batches[step]
        for batch in batches:
            per_rank = [(share,) for share in book.shares(batch, gang.size)]
            futures = gang.submit(learner.taker.method, per_rank, _gyre_step=step, _gyre_index=batch.index)
            gang.gather(learner.taker.method, futures, timeout_s=timeout_s)
        gang.call(
            learner.pace.method,
            _gyre_step=step,
            _gyre_indices=len(batches),
            _gyre_group_ids=book.ids_of(step),
            timeout_s=timeout_s,
        )
        self._runtime.context.progress.tick(replayed_step=step)
