"""Checkpoints of the gangs: every rank writes, a renaming and the ledger's row commit, newer ones replace older.

Invariant *whole or not there*: a folder `step_…` that the ledger knows has every rank's part.

This module must not know what a rank writes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from gyre.workloads.gang import Gang
from gyre.workloads.group_book import GroupBook

KEPT_CHECKPOINTS = 2


class Checkpoints:
    """`report` tells the journal of an event; `term` is the trainer's."""

    def __init__(
        self, directory: Path, book: GroupBook, *, term: int, timeout_s: float, report: Callable[..., None]
    ) -> None:
        self._root = directory / "checkpoints"
        self._book = book
        self._term = term
        self._timeout_s = timeout_s
        self._report = report
        self._remove_old()

    def write(self, gang: Gang, beside: Mapping[str, Gang]) -> None:
        """Of the book's last step; gangs beside the leading one below a folder of their role's name. Raises as the
        gangs' calls."""
        step = self._book.step
        final = self._root / f"step_{step:08d}"
        partial = self._root / f".partial_{step:08d}_{self._term}_{gang.number}"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        gang.call("checkpoint", partial, timeout_s=self._timeout_s)
        for role, other in beside.items():
            (partial / role).mkdir()
            other.call("checkpoint", partial / role, timeout_s=self._timeout_s)
        if final.exists():
            shutil.rmtree(final)  # renamed by a trainer that died before the ledger knew of it
        partial.rename(final)
        self._book.checkpointed(step, final)
        self._report("CheckpointCommitted", step=step, path=str(final))
        self._remove_old()

    def _remove_old(self) -> None:
        """Those that newer ones replace, and what deaths left unfinished."""
        final = self._book.checkpoint_path
        if final is None:
            return
        kept = sorted(path for path in final.parent.glob("step_*") if path <= final)
        for old in (*kept[:-KEPT_CHECKPOINTS], *final.parent.glob(".partial_*")):
            shutil.rmtree(old, ignore_errors=True)
