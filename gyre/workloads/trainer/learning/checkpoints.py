"""Checkpoints of the gangs: every rank writes its part, then a rename and a row of the ledger commit the checkpoint.

A rank may answer that it is still writing. Training then goes on, and the checkpoint is committed at the end of a later
step; until then a restart begins from the checkpoint before it. Of the committed ones the newest two are kept: where
the newest turns out to be damaged, the one before it is gone back to.

Invariants:
- *complete or absent*: a folder `step_…` that the ledger knows has every rank's part, and a file `COMPLETE` that lists
  its files with their sizes. Both are on the disk, names and all, before the ledger knows;
- *one at a time*: a checkpoint begins after the one before was committed, or given up. One that is due while another is
  being written waits for it, and training for neither: it is begun after the step at which the other one is committed;
- *back to what can be gone on from*: the ledger keeps what was trained since the older of the two.

This module must not know what a rank writes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from gyre.workloads.gang.learner_gang import LearnerGang
from gyre.workloads.gang.state_files import sync_folder, write_json
from gyre.workloads.owner import HearsEvents
from gyre.workloads.trainer.groups.group_state import GroupState

KEPT_CHECKPOINTS = 2
MARKER = "COMPLETE"


@dataclass(slots=True)
class _Unfinished:
    step: int
    folder: Path
    writing: list[LearnerGang]
    """Gangs that have not answered yet that all of their part is on the disk."""


class Checkpoints:
    """`term` is the trainer's."""

    def __init__(
        self, directory: Path, groups: GroupState, *, term: int, timeout_s: float, reports: HearsEvents
    ) -> None:
        self._root = directory / "checkpoints"
        self._groups = groups
        self._term = term
        self._timeout_s = timeout_s
        self._reports = reports
        self._unfinished: _Unfinished | None = None
        self._remove_old()

    def report_earlier(self) -> None:
        """Report the last checkpoint of earlier trainers again, as `OptimizerSteps.report_earlier` does with steps."""
        step, path = self._groups.checkpoint_step, self._groups.checkpoint_path
        if step is not None:
            self._reports.report("CheckpointCommitted", step=step, path=str(path), again=True)

    # -- writing -------------------------------------------------------------------------------------

    def keep_up(self, leader: LearnerGang, auxiliary: Mapping[str, LearnerGang], *, every: int) -> None:
        """Commit the checkpoint that was begun, if it is written by now, and `begin_if_due`. Raises like the gangs'
        calls."""
        with self._if_room():
            self.settle(wait=False)
        self.begin_if_due(leader, auxiliary, every=every)

    def begin_if_due(self, leader: LearnerGang, auxiliary: Mapping[str, LearnerGang], *, every: int) -> None:
        """Unless one is still being written, begin a checkpoint of the last step where a multiple of `every` steps has
        passed since the last. Nothing is waited for. Raises like the gangs' calls."""
        step, last = self._groups.step, self._groups.checkpoint_step
        if self._unfinished is None and (last is None or step // every > last // every):
            with self._if_room():
                self.write(leader, auxiliary, wait=False)

    @contextlib.contextmanager
    def _if_room(self) -> Iterator[None]:
        """Give the checkpoint up where this process finds no room for its names: it is due after the next step."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.give_up()

    def write_last(self, leader: LearnerGang, auxiliary: Mapping[str, LearnerGang]) -> None:
        """Have a checkpoint of the last step, since nothing comes after it. One of an earlier step that is still being
        written is given up, for it would be waited for and be of no use. Raises like the gangs' calls."""
        step = self._groups.step
        self.settle(wait=self._unfinished is not None and self._unfinished.step == step)
        self.give_up()
        if self._groups.checkpoint_step != step:
            self.write(leader, auxiliary, wait=True)

    def write(self, leader: LearnerGang, auxiliary: Mapping[str, LearnerGang], *, wait: bool) -> None:
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
            sent = each.checkpoint(partial / role, background=not wait)
            if any(sent.results(timeout_s=self._timeout_s)):
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
            if not all(gang.checkpoint_written(wait=wait).results(timeout_s=self._timeout_s)):
                return
            unfinished.writing.remove(gang)
        self._unfinished = None
        final = self._root / f"step_{unfinished.step:08d}"
        _mark_complete(unfinished.folder, unfinished.step)
        if final.exists():
            shutil.rmtree(final)  # renamed by a trainer that died before the ledger knew of it, or damaged
        unfinished.folder.rename(final)
        sync_folder(self._root)
        older = self._before(unfinished.step)
        self._groups.record_checkpoint(unfinished.step, final, older=older[0] if older else None)
        self._reports.report("CheckpointCommitted", step=unfinished.step, path=str(final))
        self._remove_old()

    def give_up(self) -> None:
        """Forget the checkpoint that was begun: a gang that was writing it is lost, or a later one takes its place."""
        self._unfinished = None

    # -- reading -------------------------------------------------------------------------------------

    def go_back(self, problem: str) -> tuple[int, Path] | None:
        """The last checkpoint cannot be used, for this reason: have the one before it as the last. Returns its step and
        folder; None where there is none that the ledger could go on from."""
        step, path = self._groups.checkpoint_step, self._groups.checkpoint_path
        older = None if step is None else self._before(step)
        if older is None or problem_with(older[1]) or not self._groups.go_back(*older):
            return None
        self._reports.report("CheckpointDamaged", step=step, path=str(path), problem=problem, older=older[0])
        return older

    def _before(self, step: int) -> tuple[int, Path] | None:
        """The newest committed checkpoint before that of `step`."""
        found = [(at, path) for at, path in self._committed() if at < step]
        return found[-1] if found else None

    def _committed(self) -> list[tuple[int, Path]]:
        """Step and folder of the checkpoints that are there, the oldest first."""
        found = []
        for path in self._root.glob("step_*"):
            number = path.name.removeprefix("step_")
            if number.isdecimal() and path.is_dir():
                found.append((int(number), path))
        return sorted(found)

    def _remove_old(self) -> None:
        """Delete the checkpoints that newer ones replace, and the unfinished folders that deaths left behind."""
        last = self._groups.checkpoint_step
        if last is None:
            return
        kept = [path for step, path in self._committed() if step <= last]
        for old in (*kept[:-KEPT_CHECKPOINTS], *self._root.glob(".partial_*")):
            shutil.rmtree(old, ignore_errors=True)


def problem_with(folder: Path) -> str:
    """What shows that a committed checkpoint is not whole: it is gone, or a file that `COMPLETE` lists is missing or
    has another size; "" where nothing shows. A model's folder has no such list."""
    if not folder.is_dir():
        return f"{folder} is gone"
    try:
        listed = dict(json.loads((folder / MARKER).read_text())["files"])
    except FileNotFoundError:
        return ""
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        return f"{folder / MARKER} cannot be read: {error!r}"
    found = _files(folder)
    for name, size in listed.items():
        if name not in found:
            return f"{folder / name} is missing"
        if found[name] != size:
            return f"{folder / name} has {found[name]} bytes, {size} were written"
    return ""


def _mark_complete(folder: Path, step: int) -> None:
    """List what the ranks have written, and have all names on the disk; the bytes are there already."""
    files = _files(folder)
    for inner in {(folder / name).parent for name in files}:
        sync_folder(inner)
    write_json(folder / MARKER, {"step": step, "files": files})


def _files(folder: Path) -> dict[str, int]:
    """The files below a folder, by their paths in it, with their sizes in bytes."""
    return {
        str((Path(inside) / name).relative_to(folder)): (Path(inside) / name).stat().st_size
        for inside, _, names in os.walk(folder)
        for name in names
        if name != MARKER
    }
