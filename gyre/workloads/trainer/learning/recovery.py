"""The sources that ranks are restored from, where they cannot go on from the state that they have. In this order:

| source | what comes back | when it is used |
| --- | --- | --- |
| `memory` | everything, of the last step that all ranks keep in memory | that step is not older than the checkpoint |
| `disk` | everything, of the last checkpoint; later steps are trained again | the checkpoint is there and whole |
| `disk` | everything, of the checkpoint before it | the last one is damaged or gone |
| `instance` | the weights; the optimizer begins anew | the checkpoint is lost and `run.lost_checkpoint` is `weights` |

Invariants:
- *a damaged checkpoint is told, and costs only time*: files that are missing or of another size show it, or the ranks,
  which all refuse it (`CheckpointMismatch`) and live on;
- *never a mixture*: a source gives all ranks the state of one step, or is not used;
- *nothing is lost in silence*: the event `GangRestored` names the source, and the incident shows it; a lost optimizer
  is an incident of its own;
- *reported once*: also where the trainer dies during a restore, or before the master has heard of it. The ledger has
  the restore before the ranks are changed. A later trainer finds out how it ended and reports it again under the same
  number, which the master accepts once.

This module must not know how ranks keep or read a state.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from gyre.rollouts.trainer.sample_ledger import Restore
from gyre.workloads.gang.gang import GangLost
from gyre.workloads.gang.learner_gang import ActorGang, LearnerGang
from gyre.workloads.gang.weight_copy import WeightCopy
from gyre.workloads.learner.errors import CheckpointMismatch
from gyre.workloads.owner import HearsEvents
from gyre.workloads.trainer.groups.group_state import GroupState
from gyre.workloads.trainer.learning.checkpoints import problem_with

COPY_WITHIN_S = 30.0
"""Deadline for finding an instance that has the weights. Instances that live are connected within seconds."""


class HasOlder(Protocol):
    def go_back(self, problem: str) -> tuple[int, Path] | None:
        """Make the checkpoint before the last one the last. Its step and folder; None where there is none."""


class KnowsCopies(Protocol):
    def newest(self) -> WeightCopy | None:
        """The newest policy version that instances have."""


class Recovery:
    def __init__(
        self,
        groups: GroupState,
        *,
        timeout_s: float,
        takes_weights: bool,
        copies: KnowsCopies,
        checkpoints: HasOlder,
        reports: HearsEvents,
        copy_within_s: float = COPY_WITHIN_S,
    ) -> None:
        self._groups = groups
        self._timeout_s = timeout_s
        self._takes_weights = takes_weights
        self._copies = copies
        self._checkpoints = checkpoints
        self._reports = reports
        self._copy_within_s = copy_within_s
        self._reported: set[int] = set()
        """The numbers of the restores that this trainer has reported."""

    def report_earlier(self, gang: LearnerGang, at: int | None) -> None:
        """Report a restore that an earlier trainer may not have reported. `at` is the step of the ranks where they can
        go on from it, None where they cannot. These ranks could not when their restore began, so if they can now, that
        restore ended."""
        last = self._groups.restores.get(gang.role)
        if last is None or last.number in self._reported:
            return
        if last.step is None and at is not None and last.gang == gang.members[0][1]:
            last = self._groups.record_restored(last, at, None)
        if last.step is not None:
            self._report_restore(last)

    def restore(
        self,
        gang: LearnerGang,
        states: Sequence[dict[str, Any]],
        folder: Path,
        checkpoint_step: int,
        *,
        at_most: int,
        actor: ActorGang | None,
        part: str = "",
    ) -> int:
        """Bring all ranks to one step up to `at_most`, and return it: not before `checkpoint_step`, unless that
        checkpoint, in `folder`, is damaged. This gang's is in the subfolder `part`. `states` are what the ranks
        answered to `state`. `actor` is the gang where the policy is all that the job trains, so that an instance has
        everything worth restoring; else None. Raises like the gang's calls."""
        began, why_not, at = time.monotonic(), "", None

        def begin(source: str, covered: int) -> Restore:
            return self._groups.record_restore_begun(gang.role, gang.members[0][1], source, covered)

        if all(state.get("memory") for state in states):
            restore = begin("memory", checkpoint_step)
            at = self._from_memory(gang, checkpoint_step, at_most)
        problem, lost = "", None
        if at is None:
            problem = problem_with(folder)
        if at is None and not problem:
            restore, at = begin("disk", checkpoint_step), checkpoint_step
            try:
                gang.restore(folder / part).results(timeout_s=self._timeout_s)
            except GangLost as error:
                if not _is_damage(error):
                    raise
                lost, at = error, None
                problem = error.blamed[2].error if error.blamed else ""
        if at is None and (older := self._checkpoints.go_back(problem)) is not None:
            at = older[0]
            restore = begin("disk", at)
            gang.restore(older[1] / part).results(timeout_s=self._timeout_s)
        if at is None and actor is not None and self._takes_weights and not folder.is_dir():
            copy, why_not = self._wait_for_copy(gang, checkpoint_step)
            if copy is not None:
                restore = begin("instance", checkpoint_step)
                at = self._from_copy(actor, copy)
        if at is None:
            restore, at = begin("disk", checkpoint_step), checkpoint_step
            try:
                if lost is not None:
                    raise lost
                gang.restore(folder / part).results(timeout_s=self._timeout_s)
            except GangLost as error:
                if error.blamed is None or not why_not:
                    raise
                member, method, failure = error.blamed
                text = f"{failure.error}\nNo weights of an instance were taken instead: {why_not}."
                raise GangLost((member, method, replace(failure, error=text))) from error
        self._report_restore(self._groups.record_restored(restore, at, round(time.monotonic() - began, 3)))
        return at

    def _report_restore(self, restore: Restore) -> None:
        self._reported.add(restore.number)
        self._reports.report(
            "GangRestored",
            role=restore.role,
            source=restore.source,
            step=restore.step,
            checkpoint_step=restore.checkpoint_step,
            seconds=restore.seconds,
            gang=restore.gang,
            number=restore.number,
        )

    def _from_memory(self, gang: LearnerGang, checkpoint_step: int, at_most: int) -> int | None:
        sent = gang.restore_from_memory(newer_than=checkpoint_step - 1, at_most=at_most)
        return sent.first(timeout_s=self._timeout_s)

    # -- the weights that instances have -------------------------------------------------------------------------

    def _wait_for_copy(self, gang: LearnerGang, checkpoint_step: int) -> tuple[WeightCopy | None, str]:
        """A copy that the job can go on from, or None and the reason."""
        until = time.monotonic() + self._copy_within_s
        with gang.owner.waiting():
            while True:
                copy = self._copies.newest()
                why_not = self._problem_with(copy, checkpoint_step)
                if not why_not:
                    return copy, ""
                if time.monotonic() > until:
                    return None, why_not
                time.sleep(0.25)

    def _problem_with(self, copy: WeightCopy | None, checkpoint_step: int) -> str:
        if copy is None:
            return "no instance has a policy version"
        step = self._groups.step
        if not checkpoint_step <= copy.version <= step:
            return (
                f"instances have version {copy.version}, which this ledger, at step {step}, cannot go on from"
            )
        if copy.version < step and copy.newest > copy.version:
            # Without the optimizer the steps between would give other weights, and a version number stands for one
            # policy.
            return f"version {copy.newest} was published, and instances have {copy.version} only"
        return ""

    def _from_copy(self, actor: ActorGang, copy: WeightCopy) -> int:
        groups, version, checksum = self._groups, copy.version, copy.checksum
        sources = [(address, "") for address in copy.sources]
        fetching = actor.fetch_weights(version=version, checksum=checksum, sources=sources)
        address, folder = fetching.first(timeout_s=self._timeout_s)
        groups.forget_digests(copy.version)  # they are of weights before rounding, or of the lost optimizer's
        restoring = actor.restore_weights(
            version=version,
            checksum=checksum,
            sources=[(address, folder), *sources],
            trained=groups.trained_by(version),
        )
        restoring.results(timeout_s=self._timeout_s)
        return copy.version


def _is_damage(lost: GangLost) -> bool:
    """Whether ranks refused a checkpoint, and all of them are there to be given another."""
    return lost.ended and lost.blamed is not None and lost.blamed[2].code == CheckpointMismatch.code
