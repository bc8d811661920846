"""What `gyre plan` says of the task `rows`: its file, held-out rows, lengths, and what the reward needs of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gyre.api.cli import main

ROWS = [{"prompt": f"{n} and one is ", "answer": str(n + 1), "level": n} for n in range(10)]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of `gyre init`, with other rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(
        "ray.is_initialized", lambda: False
    )  # another test's cluster may stand in this process
    assert CliRunner().invoke(main, ["init"]).exit_code == 0
    write(tmp_path, ROWS)
    return tmp_path


def write(folder: Path, rows: list[dict[str, object]]) -> None:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def planned(*changes: str, options: tuple[str, ...] = ()) -> Result:
    words = [word for change in changes for word in ("--set", change)]
    return CliRunner().invoke(main, ["plan", "job.yaml", "--strict", *words, *options])


def test_rows_that_fit_are_planned(folder: Path) -> None:
    assert planned("run.held_out=2").exit_code == 0, planned("run.held_out=2").output


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("run.held_out=3", "run.held_out: 3 given, but rows.jsonl has 2 held-out rows"),
        ("config.model.max_positions=12", "with the longest prompt of rows.jsonl, 14 tokens, is more than"),
        ("config.task.file=row.jsonl", "config.task.file: row.jsonl: no such file, looked up in "),
        ("config.task.file=job.yaml", "config.task.file: job.yaml is no .jsonl file"),
    ],
)
def test_what_does_not_fit_is_refused(folder: Path, change: str, sentence: str) -> None:
    refused = planned("run.held_out=2", change)
    assert refused.exit_code == 2
    assert sentence in refused.stderr


def test_what_the_reward_needs_is_in_every_row(folder: Path) -> None:
    (folder / "reward.py").write_text("def score(completion, level):\n    return float(level)\n")
    assert planned("run.held_out=2").exit_code == 0
    write(folder, [*ROWS, {"prompt": "and one more", "answer": "x"}])
    refused = planned("run.held_out=2")
    assert refused.exit_code == 2
    assert "reward.py:score needs 'level', and the rows in rows.jsonl have no such column" in refused.stderr


def test_a_reward_that_compares_needs_an_answer_in_every_row(folder: Path) -> None:
    write(folder, [*ROWS, {"prompt": "and one more"}])
    exact = "config.reward.function=exact_match"
    refused = planned("run.held_out=2", exact)
    assert refused.exit_code == 2
    assert "config.task.file: 1 of the 11 rows in rows.jsonl have no answer" in refused.stderr
    assert "Give each row an 'answer'" in refused.stderr


def test_a_file_on_the_clusters_machines_is_a_note(folder: Path) -> None:
    (folder / "rows.jsonl").unlink()
    elsewhere = planned(options=("--ray-address", "head:6379"))
    assert elsewhere.exit_code == 0, elsewhere.output
    assert "note: config.task.file: rows.jsonl is no file on this machine" in elsewhere.stderr
