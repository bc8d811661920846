"""The log of evaluations: a disk without room, and what stays in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from gyre.workloads.trainer.evaluation.held_out import EvaluationKey
from gyre.workloads.trainer.evaluation.log import KEPT_ROWS, EvaluationLog
from tests.machine import fill, small_disk


def test_a_line_that_finds_no_room_leaves_the_others_and_is_written_later() -> None:
    with small_disk(1 << 10) as disk:
        folder = disk.path
        log = EvaluationLog.of(folder)
        assert log.leave_out(EvaluationKey(0, "held_out"), "first " * 100)
        fill(folder / "ballast")
        with pytest.raises(OSError, match="No space"):
            log.leave_out(EvaluationKey(1, "held_out"), "no room " * 1000)
        again = EvaluationLog.of(folder)
        assert set(again.left_out) == {EvaluationKey(0, "held_out")}
        (folder / "ballast").unlink()
        assert again.leave_out(EvaluationKey(1, "held_out"), "second")
        assert len(EvaluationLog.of(folder).left_out) == 2


def test_a_line_that_was_cut_short_is_cut_off_though_there_is_no_room() -> None:
    with small_disk(1 << 10) as disk:
        folder = disk.path
        log = EvaluationLog.of(folder)
        assert log.leave_out(EvaluationKey(0, "held_out"), "first")
        with log.path.open("a") as file:
            file.write('{"version": 1, "se')
        fill(folder / "ballast")
        assert set(EvaluationLog.of(folder).left_out) == {EvaluationKey(0, "held_out")}
        assert log.path.read_text().count("\n") == 1


def test_the_first_and_the_newest_results_stay_in_memory_and_the_file_has_all(tmp_path: Path) -> None:
    log = EvaluationLog.of(tmp_path)
    assert log.add({"version": 0, "set": "math500"})
    for version in range(2 * KEPT_ROWS):
        assert log.add({"version": version, "set": "aime"})
    for one in (log, EvaluationLog.of(tmp_path)):
        assert KEPT_ROWS <= len(one.rows) < 2 * KEPT_ROWS
        assert [(row["set"], row["version"]) for row in one.rows[:2]] == [("math500", 0), ("aime", 0)]
        assert one.rows[-1]["version"] == 2 * KEPT_ROWS - 1
        assert not one.add({"version": 500, "set": "aime"}), "it is settled all the same"
    assert len(log.path.read_text().splitlines()) == 2 * KEPT_ROWS + 1
