"""Checkpoints of the gangs: every rank writes, a renaming and the ledger's row commit, newer ones replace older.

A rank may say that it still writes; training then goes on, and the checkpoint is committed at the end of a later step.
Until then the one before is what a restart begins from.

Invariants:
- *whole or not there*: a folder `step_…` that the ledger knows has every rank's part;
- *one at a time*: a checkpoint begins when the one before is committed, or given up with its gang.

This module must not know what a rank writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gyre.workloads.gang.gang import Gang
from gyre.workloads.trainer.group_state import GroupState

KEPT_CHECKPOINTS = 2


@dataclass(slots=True)
class _Unfinished:
    step: int
    folder: Path
    writing: list[Gang]
    """Gangs that have not said that all of their part is on the disk."""


class Checkpoints:
    """`report` tells the journal of an event; `term` is the trainer's."""

    def __init__(
        self, directory: Path, book: GroupState, *, term: int, timeout_s: float, report: Callable[..., None]
    ) -> None:
        self._root = directory / "checkpoints"
        self._book = book
        self._term = term
        self._timeout_s = timeout_s
        self._report = report
        self._unfinished: _Unfinished | None = None
        self._remove_old()

    def tell_earlier(self) -> None:
        """The last one of earlier trainers, as `OptimizerSteps.tell_earlier`."""
        step, path = self._book.checkpoint_step, self._book.checkpoint_path
        if step is not None:
            self._report("CheckpointCommitted", step=step, path=str(path), again=True)

    def write(self, gang: Gang, beside: Mapping[str, Gang], *, wait: bool) -> None:
        """Of the book's last step; gangs beside the leading one below a folder of their role's name. Without `wait`
        ranks may go on writing when this returns: see `settle`. Raises as the gangs' calls."""
        self.settle(wait=True)
        step = self._book.step
        partial = self._root / f".partial_{step:08d}_{self._term}_{gang.number}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        unfinished = _Unfinished(step, partial, [])
        for role, each in {"": gang, **beside}.items():
            (partial / role).mkdir(exist_ok=True)
            background = each.call(
                "checkpoint", partial / role, _gyre_background=not wait, timeout_s=self._timeout_s
            )
            if any(background):
                unfinished.writing.append(each)
        self._unfinished = unfinished
        self.settle(wait=wait)

    def settle(self, *, wait: bool) -> None:
        """Commit the checkpoint that was begun, if it is written by now; with `wait`, when it is. Raises as the gangs'
        calls."""
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
        self._book.checkpointed(unfinished.step, final)
        self._report("CheckpointCommitted", step=unfinished.step, path=str(final))
        self._remove_old()

    def give_up(self) -> None:
        """A gang is no more: what it was writing will not be whole."""
        self._unfinished = None

    def _remove_old(self) -> None:
        """Those that newer ones replace, and what deaths left unfinished."""
        final = self._book.checkpoint_path
        if final is None:
            return
        kept = sorted(path for path in final.parent.glob("step_*") if path <= final)
        for old in (*kept[:-KEPT_CHECKPOINTS], *final.parent.glob(".partial_*")):
            shutil.rmtree(old, ignore_errors=True)
