"""`gyre export`: which checkpoint is meant, and a sentence where there is none or Megatron is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from gyre.api.cli import main
from gyre.api.home import Home
from gyre.workloads.gang.state_files import sealed


def gyre(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_a_folder_above_the_checkpoints_names_the_newest_of_them(tmp_path: Path) -> None:
    for step in (10, 20):
        (tmp_path / "checkpoints" / f"step_{step:08}").mkdir(parents=True)
    refused = gyre("export", str(tmp_path / "checkpoints"), str(tmp_path / "out"))
    assert refused.exit_code == 4
    assert refused.stderr == (
        f"error: {tmp_path}/checkpoints is no checkpoint: it has neither rank_00000.pt nor actor.json.\n"
        f"       Give one of the checkpoints in it, such as {tmp_path}/checkpoints/step_00000020.\n"
    )


def test_without_megatron_its_checkpoint_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "actor.json").write_text(json.dumps(sealed({"format": 2})))
    monkeypatch.setattr("gyre.api.cli.packages.installed", lambda name: None)
    refused = gyre("export", str(tmp_path), str(tmp_path / "out"))
    assert refused.exit_code == 2
    assert "is a checkpoint of Megatron's ranks, and megatron-core is not installed" in refused.stderr
    assert "pip install 'gyre-rl[megatron]'" in refused.stderr


def test_a_job_without_a_checkpoint_and_what_is_neither_job_nor_folder(
    seed: object, home: Home, tmp_path: Path
) -> None:
    assert callable(seed)
    missing = gyre("export", "nothere", str(tmp_path / "out"))
    assert missing.exit_code == 4
    assert "There is no folder" in missing.stderr
    seed("user_code")
    assert "There is no job 'golde'" in gyre("export", "golde", str(tmp_path / "out")).stderr
    of_job = gyre("export", "golden", str(tmp_path / "out"))
    assert of_job.exit_code == 4
    assert "golden-1" in of_job.stderr
    assert "checkpoint" in of_job.stderr
    assert "There is no folder /nowhere/x" in gyre("export", "/nowhere/x", str(tmp_path / "out")).stderr
