"""Checkpoints that are written while training goes on: committed when every gang has said that its part is there."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from gyre.workloads.gang.gang import GangLost
from gyre.workloads.trainer.learning.checkpoints import MARKER, Checkpoints, problem_with
from tests.workloads.reported import Reported


class Groups:
    """The part of `GroupState` that checkpoints need."""

    def __init__(self) -> None:
        self.step = 0
        self.checkpoint_step: int | None = None
        self.checkpoint_path: Path | None = None
        self.kept_since: int | None = None

    def record_checkpoint(self, step: int, path: Path, *, older: int | None = None) -> None:
        assert problem_with(path) == "", "it is whole when the ledger hears of it"
        assert json.loads((path / MARKER).read_text())["files"]
        self.checkpoint_step, self.checkpoint_path = step, path
        self.kept_since = older

    def go_back(self, step: int, path: Path) -> bool:
        self.checkpoint_step, self.checkpoint_path = step, path
        return True


class Answers:
    """A call on its way."""

    def __init__(self, values: list[Any], *, lost: bool) -> None:
        self.values, self.lost = values, lost

    def results(self, *, timeout_s: float) -> list[Any]:
        if self.lost:
            raise GangLost
        return self.values


class Ranks:
    """A gang of two. `writes` is how often it says that it is not done yet; None: it writes while it is called."""

    def __init__(self, writes: int | None = None) -> None:
        self.number = 1
        self.writes = writes
        self.left = 0
        self.begun = 0
        self.lost = False

    def checkpoint(self, path: Path, *, background: bool) -> Answers:
        if not self.lost:
            (path / "part").write_text("here")
            self.begun += 1
            self.left = self.writes or 0
        return Answers([None, None] if self.writes is None else [background] * 2, lost=self.lost)

    def checkpoint_written(self, *, wait: bool) -> Answers:
        self.left = -1 if wait else self.left - 1
        return Answers([True, self.left < 0], lost=self.lost)


@pytest.fixture
def groups() -> Groups:
    return Groups()


@pytest.fixture
def checkpoints(groups: Groups, tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path, groups, term=1, timeout_s=1.0, reports=Reported())  # type: ignore[arg-type]


def test_ranks_that_write_at_once_are_committed_at_once(checkpoints: Checkpoints, groups: Groups) -> None:
    checkpoints.write(Ranks(), {}, wait=False)  # type: ignore[arg-type]
    assert groups.checkpoint_step == 0


def test_a_checkpoint_is_committed_for_its_own_step_when_the_slowest_gang_has_written(
    checkpoints: Checkpoints, groups: Groups
) -> None:
    actor, critic = Ranks(writes=1), Ranks(writes=2)
    groups.step = 4
    checkpoints.write(actor, {"critic": critic}, wait=False)  # type: ignore[dict-item,arg-type]
    groups.step = 5
    checkpoints.settle(wait=False)
    assert groups.checkpoint_step is None, "it is not there before everybody has written"
    checkpoints.settle(wait=False)
    checkpoints.settle(wait=False)
    assert groups.checkpoint_step == 4
    assert groups.checkpoint_path is not None
    assert (groups.checkpoint_path / "critic" / "part").exists()
    assert [path.name for path in groups.checkpoint_path.parent.iterdir()] == ["step_00000004"]


def test_the_next_one_waits_for_it_and_so_does_the_last(checkpoints: Checkpoints, groups: Groups) -> None:
    gang = Ranks(writes=10)
    checkpoints.write(gang, {}, wait=False)  # type: ignore[arg-type]
    groups.step = 2
    checkpoints.write(gang, {}, wait=False)  # type: ignore[arg-type]
    assert groups.checkpoint_step == 0
    groups.step = 3
    checkpoints.write(gang, {}, wait=True)  # type: ignore[arg-type]
    assert groups.checkpoint_step == 3


def test_what_a_lost_gang_was_writing_is_never_committed(
    checkpoints: Checkpoints, groups: Groups, tmp_path: Path
) -> None:
    gang = Ranks(writes=1)
    checkpoints.write(gang, {}, wait=False)  # type: ignore[arg-type]
    gang.lost = True
    with pytest.raises(GangLost):
        checkpoints.settle(wait=False)
    checkpoints.give_up()
    checkpoints.settle(wait=True)
    assert groups.checkpoint_step is None
    groups.step = 1
    checkpoints.write(Ranks(), {}, wait=False)  # type: ignore[arg-type]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_one_that_is_due_while_another_is_written_follows_it_and_holds_nobody_up(
    checkpoints: Checkpoints, groups: Groups
) -> None:
    gang = Ranks(writes=4)
    told = []
    for step in range(9):
        groups.step = step
        checkpoints.keep_up(gang, {}, every=2)  # type: ignore[arg-type]
        told.append(groups.checkpoint_step)
    assert told == [None] * 4 + [0] * 4 + [4], "what was due at step 2 was begun when the other was there"
    assert gang.begun == 3


def test_one_that_a_death_prevented_is_overdue(checkpoints: Checkpoints, groups: Groups) -> None:
    gang = Ranks(writes=4)
    checkpoints.write(gang, {}, wait=True)  # type: ignore[arg-type]
    groups.step = 3
    checkpoints.keep_up(gang, {}, every=2)  # type: ignore[arg-type]
    checkpoints.give_up()
    groups.step = 5
    checkpoints.keep_up(Ranks(), {}, every=2)  # type: ignore[arg-type]
    assert groups.checkpoint_step == 5
    checkpoints.keep_up(Ranks(), {}, every=2)  # type: ignore[arg-type]
    assert groups.checkpoint_step == 5


@pytest.mark.parametrize(("begun", "last", "calls"), [(4, 4, 1), (3, 4, 2)])
def test_the_last_one_waits_for_no_other(
    checkpoints: Checkpoints, groups: Groups, tmp_path: Path, begun: int, last: int, calls: int
) -> None:
    gang = Ranks(writes=10)
    groups.step = begun
    checkpoints.keep_up(gang, {}, every=2)  # type: ignore[arg-type]
    groups.step = last
    checkpoints.write_last(gang, {})  # type: ignore[arg-type]
    assert groups.checkpoint_step == last
    assert gang.begun == calls
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [f"step_{last:08d}"]


def test_the_newest_two_are_kept_and_the_ledger_what_was_trained_since_the_older(
    checkpoints: Checkpoints, groups: Groups, tmp_path: Path
) -> None:
    since = []
    for groups.step in (0, 2, 4, 6):
        checkpoints.write(Ranks(), {}, wait=True)  # type: ignore[arg-type]
        since.append(groups.kept_since)
    assert since == [None, 0, 2, 4]
    root = tmp_path / "checkpoints"
    assert sorted(path.name for path in root.iterdir()) == ["step_00000004", "step_00000006"]
    assert checkpoints.go_back("a bit is flipped") == (4, root / "step_00000004")
    assert checkpoints.go_back("and so is another") is None, "there is no third one"


@pytest.mark.parametrize("harm", ["short", "missing", "gone"])
def test_what_is_not_whole_shows(checkpoints: Checkpoints, groups: Groups, tmp_path: Path, harm: str) -> None:
    checkpoints.write(Ranks(), {"critic": Ranks()}, wait=True)  # type: ignore[dict-item,arg-type]
    folder = tmp_path / "checkpoints" / "step_00000000"
    assert problem_with(folder) == ""
    if harm == "short":
        (folder / "critic" / "part").write_text("her")
    elif harm == "missing":
        (folder / "critic" / "part").unlink()
    else:
        shutil.rmtree(folder)
    assert ("critic/part" in problem_with(folder)) is (harm != "gone")
    assert problem_with(folder)


@pytest.mark.parametrize(
    "text", ["", "[]", "7", '{"files": ["a"]}', '{"files": "a"}', '{"files": 7}', "[" * 100_000]
)
def test_a_list_of_files_that_is_damaged_is_a_problem(tmp_path: Path, text: str) -> None:
    (tmp_path / MARKER).write_text(text)
    assert f"{MARKER} cannot be read" in problem_with(tmp_path)
