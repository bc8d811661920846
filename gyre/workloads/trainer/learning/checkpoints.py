"""Checkpoints of the gangs: every rank writes its part, then a rename and a row of the ledger commit the checkpoint.

A rank may answer that it is still writing. Training then goes on, and the checkpoint is committed at the end of a later
step; until then a restart begins from the checkpoint before it. Of the committed ones the newest few are kept.

Invariants:
- *complete or absent*: a folder `step_…` that the ledger knows has every rank's part;
- *one at a time*: a checkpoint begins after the one before was committed, or given up with its gang.

This module must not know what a rank writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gyre.workloads.gang.gang import Gang
from gyre.workloads.trainer.groups.group_state import GroupState

KEPT_CHECKPOINTS = 2


@dataclass(slots=True)
class _Unfinished:
    step: int
    folder: Path
    writing: list[Gang]
    """Gangs that have not answered yet that all of their part is on the disk."""


class Checkpoints:
    """`report` sends an event to the journal; `term` is the trainer's."""

    def __init__(
        self, directory: Path, groups: GroupState, *, term: int, timeout_s: float, report: Callable[..., None]
    ) -> None:
        self._root = directory / "checkpoints"
        self._groups = groups
        self._term = term
        self._timeout_s = timeout_s
        self._report = report
        self._unfinished: _Unfinished | None = None
        self._remove_old()

    def report_earlier(self) -> None:
        """Report the last checkpoint of earlier trainers again, as `OptimizerSteps.report_earlier` does with steps."""
        step, path = self._groups.checkpoint_step, self._groups.checkpoint_path
        if step is not None:
            self._report("CheckpointCommitted", step=step, path=str(path), again=True)

    def write(self, leader: Gang, auxiliary: Mapping[str, Gang], *, wait: bool) -> None:
        """Checkpoint the last step. Each auxiliary gang writes into a subfolder named after its role. Without `wait`
        ranks may still be writing when this returns; `settle` commits then. Raises like the gangs' calls."""
        self.settle(wait=True)
        step = self._groups.step
        partial = self._root / f".partial_{step:08d}_{self._term}_{leader.number}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        unfinished = _Unfinished(step, partial, [])
        for role, each in {"": leader, **auxiliary}.items():
            (partial / role).mkdir(exist_ok=True)
            background = each.call(
                "checkpoint", partial / role, _gyre_background=not wait, timeout_s=self._timeout_s
            )
            if any(background):
                unfinished.writing.append(each)
        self._unfinished = unfinished
        self.settle(wait=wait)

    def settle(self, *, wait: bool) -> None:
        """Commit the checkpoint that was begun, if it is written by now; `wait` waits until it is. Raises like the
        gangs' calls."""
        unfinished = self._unfinished
        if unfinished is None:
            return
        for gang in list(unfinished.writing):
            if not all(gang.call("checkpoint_written", wait=wait, timeout_s=self._timeout_s)):
                return
            unfinished.writing.remove(gang)
        self._unfinished = None
        final = self._root / f"step_{unfinished.step:08d}"
        if final.exists():
            shutil.rmtree(final)  # renamed by a trainer that died before the ledger knew of it
        unfinished.folder.rename(final)
        self._groups.record_checkpoint(unfinished.step, final)
        self._report("CheckpointCommitted", step=unfinished.step, path=str(final))
        self._remove_old()

    def give_up(self) -> None:
        """Forget the checkpoint that was begun: a gang that was writing it is lost."""
        self._unfinished = None

    def _remove_old(self) -> None:
        """Delete the checkpoints that newer ones replace, and the unfinished folders that deaths left behind."""
        final = self._groups.checkpoint_path
        if final is None:
            return
        kept = sorted(path for path in final.parent.glob("step_*") if path <= final)
        for old in (*kept[:-KEPT_CHECKPOINTS], *final.parent.glob(".partial_*")):
            shutil.rmtree(old, ignore_errors=True)
