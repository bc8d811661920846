"""The task `rows`: prompts of a small file, the same in every process, and held-out rows that are never drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gyre.config.sections import WorkloadSettings
from gyre.errors import ConfigError
from gyre.workloads.tasks.rows import RowsTask
from gyre.workloads.tasks.task import task_of


def config_of(folder: Path, rows: list[Any], **settings: Any) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"task": {"name": "rows", "file": str(file), "held_out_every": 4, **settings}}


ROWS = [{"prompt": f"double {n}: ", "answer": 2 * n, "source": "mine"} for n in range(8)]


def test_rows_are_prompts_with_their_columns(tmp_path: Path) -> None:
    task = task_of(config_of(tmp_path, ROWS))
    assert isinstance(task, RowsTask)
    group = task.prompt(0)
    row = group.meta["row"]
    assert task.prompt_text(group) == f"double {row}: "
    own = {"prompt": f"double {row}: ", "answer": str(2 * row), "source": "mine"}
    assert group.meta == {**own, "row": row, "epoch": 0}
    assert task.tokenizer.decode([*task.tokenizer.encode("12"), task.tokenizer.eos_id]) == "12"


def test_an_epoch_has_every_training_row_once_and_the_next_another_order(tmp_path: Path) -> None:
    config = config_of(tmp_path, ROWS)
    task, again = task_of(config), task_of(config)
    drawn = [task.prompt(index).meta["row"] for index in range(12)]
    assert sorted(drawn[:6]) == sorted(drawn[6:]) == [0, 1, 2, 4, 5, 6]
    assert drawn[:6] != drawn[6:]
    assert [again.prompt(index).meta["row"] for index in range(12)] == drawn


def test_a_prompt_that_is_there_twice_is_held_out_twice(tmp_path: Path) -> None:
    task = RowsTask(config_of(tmp_path, [*ROWS, ROWS[3], ROWS[0]]))
    assert [group.meta["row"] for group in task.held_out(3)] == [3, 7, 8]
    assert {task.prompt(index).meta["row"] for index in range(7)} == {0, 1, 2, 4, 5, 6, 9}
    assert [group.id for group in task.held_out(2)] == [-1, -2]


def test_other_rows_are_another_data_set(tmp_path: Path) -> None:
    first = RowsTask(config_of(tmp_path, ROWS)).identity
    assert RowsTask(config_of(tmp_path, ROWS)).identity == first
    assert RowsTask(config_of(tmp_path, ROWS[:-1])).identity != first


def test_more_held_out_rows_than_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"run\.held_out: 3 given, but .*rows\.jsonl has 2 held-out rows"):
        RowsTask(config_of(tmp_path, ROWS)).held_out(3)


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"promt": "x"}, r"row 1 of .*rows\.jsonl has no text under 'prompt'; did you mean 'promt'"),
        ({"prompt": 3}, r"row 1 of .* has no text under 'prompt'"),
        ({"prompt": "x", "answer": [1]}, r"row 1 of .* has an 'answer' of type list"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path: Path, row: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        RowsTask(config_of(tmp_path, [row]))


def test_a_file_that_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"config\.task\.file: rows\.jsonl: no such file, looked up in /"):
        RowsTask({"task": {"name": "rows", "file": "rows.jsonl"}})
    with pytest.raises(ConfigError, match="has no row"):
        RowsTask(config_of(tmp_path, []))


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ({"name": "rows"}, "needs a file"),
        ({"name": "rows", "file": "x.jsonl", "digits": 2}, "the task 'rows' takes no digits"),
        ({"file": "x.jsonl"}, "the task 'arithmetic' takes no file"),
        ({"name": "mine:Task", "file": "x.jsonl"}, "file is a setting of a built-in task"),
    ],
)
def test_each_task_has_its_own_settings(task: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        WorkloadSettings.read({"task": task})
