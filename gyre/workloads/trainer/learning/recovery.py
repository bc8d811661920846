"""Where ranks that cannot go on from where they stand get their state back from. In this order:

| source | what comes back | when |
| --- | --- | --- |
| `memory` | all of it, of the last step that all ranks have in memory | that is no older than the checkpoint |
| `disk` | all of it, of the last checkpoint; the steps since are trained again | it is there |
| `instance` | weights, and an optimizer that has seen nothing | it is lost, and `run.lost_checkpoint` is `weights` |

Invariants:
- *never a mixture*: a source gives all ranks a state of one step, or is not used;
- *nothing is lost in silence*: which source it was is an event, `GangRestored`, and stands in the incident; a lost
  optimizer is an incident of its own;
- *told once*: also where the trainer dies in between, or before the master has heard of it. The ledger knows of it
  before anything is done to the ranks; a later trainer finds out how it ended and tells it again, by its number, of
  which the master takes one.

This module must not know how ranks keep or read a state.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre.rollouts.trainer.sample_ledger import Restore
from gyre.workloads.gang.gang import Gang, GangLost
from gyre.workloads.gang.weight_copy import WeightCopy
from gyre.workloads.trainer.group_state import GroupState

COPY_WITHIN_S = 30.0
"""For an instance to be found that has the weights: those that live are connected within seconds."""


class Recovery:
    """`find_copy()` is the newest policy version that instances have; None where there is none. `report` tells the
    journal of an event."""

    def __init__(
        self,
        book: GroupState,
        *,
        timeout_s: float,
        takes_weights: bool,
        find_copy: Callable[[], WeightCopy | None],
        report: Callable[..., None],
        copy_within_s: float = COPY_WITHIN_S,
    ) -> None:
        self._book = book
        self._timeout_s = timeout_s
        self._takes_weights = takes_weights
        self._find_copy = find_copy
        self._report = report
        self._copy_within_s = copy_within_s
        self._told: set[int] = set()
        """The numbers of what this trainer has told."""

    def tell_earlier(self, gang: Gang, at: int | None) -> None:
        """Tell what an earlier trainer may not have lived to tell. `at` is the step of the ranks where they can go on
        from it, None where they cannot. When a restore of these ranks began they could not: so it came to its end."""
        last = self._book.restores.get(gang.role)
        if last is None or last.number in self._told:
            return
        if last.step is None and at is not None and last.gang == gang.members[0][1]:
            last = self._book.restored(last, at, None)
        if last.step is not None:
            self._tell(last)

    def restore(
        self,
        gang: Gang,
        states: Sequence[dict[str, Any]],
        checkpoint: Path,
        checkpoint_step: int,
        *,
        at_most: int,
        has_copies: bool,
    ) -> int:
        """Bring all ranks to one step beyond or at `checkpoint_step`, at most `at_most`; which. `states` are the ranks'
        own; `has_copies`: the policy is these ranks' alone, so that instances have all that there is to train. Raises
        as the gang's calls."""
        began, why_not, at = time.monotonic(), "", None

        def begin(source: str) -> Restore:
            return self._book.restoring(gang.role, gang.members[0][1], source, checkpoint_step)

        if all(state.get("memory") for state in states):
            restore = begin("memory")
            at = self._from_memory(gang, checkpoint_step, at_most)
        if at is None and has_copies and self._takes_weights and not checkpoint.is_dir():
            copy, why_not = self._wait_for_copy(gang, checkpoint_step)
            if copy is not None:
                restore = begin("instance")
                at = self._from_copy(gang, copy)
        if at is None:
            restore, at = begin("disk"), checkpoint_step
            try:
                gang.call("restore", checkpoint, timeout_s=self._timeout_s)
            except GangLost as lost:
                if lost.blamed is None or not why_not:
                    raise
                member, method, failure = lost.blamed
                told = f"{failure.error}\nNo weights of an instance were taken instead: {why_not}."
                raise GangLost((member, method, replace(failure, error=told))) from lost
        self._tell(self._book.restored(restore, at, round(time.monotonic() - began, 3)))
        return at

    def _tell(self, restore: Restore) -> None:
        self._told.add(restore.number)
        self._report(
            "GangRestored",
            role=restore.role,
            source=restore.source,
            step=restore.step,
            checkpoint_step=restore.checkpoint_step,
            seconds=restore.seconds,
            gang=restore.gang,
            number=restore.number,
        )

    def _from_memory(self, gang: Gang, checkpoint_step: int, at_most: int) -> int | None:
        found = gang.call(
            "restore_from_memory", newer_than=checkpoint_step - 1, at_most=at_most, timeout_s=self._timeout_s
        )
        at: int | None = found[0]
        return at

    # -- what instances have -------------------------------------------------------------------------

    def _wait_for_copy(self, gang: Gang, checkpoint_step: int) -> tuple[WeightCopy | None, str]:
        """A copy that can be gone on from, or None and why."""
        until = time.monotonic() + self._copy_within_s
        with gang.waiting():
            while True:
                copy = self._find_copy()
                why_not = self._problem_with(copy, checkpoint_step)
                if not why_not:
                    return copy, ""
                if time.monotonic() > until:
                    return None, why_not
                time.sleep(0.25)

    def _problem_with(self, copy: WeightCopy | None, checkpoint_step: int) -> str:
        if copy is None:
            return "no instance has a policy version"
        step = self._book.step
        if not checkpoint_step <= copy.version <= step:
            return (
                f"instances have version {copy.version}, which this ledger, at step {step}, cannot go on from"
            )
        if copy.version < step and copy.newest > copy.version:
            # The steps between would come out otherwise without the optimizer; a number stands for one policy.
            return f"version {copy.newest} was published, and instances have {copy.version} only"
        return ""

    def _from_copy(self, gang: Gang, copy: WeightCopy) -> int:
        book = self._book
        told: dict[str, Any] = {"version": copy.version, "checksum": copy.checksum}
        sources = [(address, "") for address in copy.sources]
        first = gang.call_rank0("fetch_weights", **told, sources=sources, timeout_s=self._timeout_s)
        book.forget_digests(copy.version)  # of weights not rounded yet, or made by the optimizer that is lost
        gang.call(
            "restore_weights",
            **told,
            sources=[tuple(first), *sources],
            trained=book.trained_by(copy.version),
            timeout_s=self._timeout_s,
        )
        return copy.version
