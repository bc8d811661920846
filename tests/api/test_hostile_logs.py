"""Logs with what a terminal would obey, and folders with what is no log: text is written, and no link followed."""

from __future__ import annotations

import json
import os
import tarfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from gyre.api.cli import main
from gyre.api.debug_bundle import write_bundle
from gyre.api.home import Home
from gyre.api.reader import JobReader
from gyre.api.terminal.plain_text import plain, plain_json
from gyre.logs.reading import LogQuery, list_parts
from tests.api.conftest import Seed

HOSTILE = (
    "\x1b]0;OWNED\x07\x1b[2J\x1b[31mred\x1b[0m \x1b]8;;http://evil.example\x07link\x1b]8;;\x07 \x9b31m \r over \x00 "
    "\u202e rtl \u2066 \x7f \x85 end"
)
OBEYED = [chr(one) for one in (*range(0x20), *range(0x7F, 0xA0)) if chr(one) not in "\n\t"] + [
    "\u202e",
    "\u2066",
]


def test_text_of_others_tells_a_terminal_nothing() -> None:
    shown = plain(f"a\tb\n{HOSTILE}")
    assert shown == (
        "a\tb\n\\x1b]0;OWNED\\x07\\x1b[2Jred \\x1b]8;;http://evil.example\\x07link\\x1b]8;;\\x07 \\x9b31m \\x0d over "
        "\\x00 \\u202e rtl \\u2066 \\x7f \\x85 end"
    )
    for kept in ("日本語 é 👩\u200d👧 ñ", "plain", ""):
        assert plain(kept) == kept
    told = plain_json(json.dumps({"a": HOSTILE}, ensure_ascii=False, indent=2))
    assert json.loads(told) == {"a": HOSTILE}
    assert not any(one in told for one in OBEYED)


@pytest.fixture
def logs(home: Home, seed: Seed) -> Path:
    seed("actor_lost")
    folder = home.jobs_folder / "golden-1" / "logs"
    folder.mkdir(parents=True)
    (folder / "trainer-0.1.log").write_text(f"2026-01-01T00:00:00.000Z I {HOSTILE}\n")
    return folder


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_logs_are_text(logs: Path, home: Home, more: list[str]) -> None:
    shown = CliRunner().invoke(main, ["logs", "golden", *more], env={"GYRE_HOME": str(home.path)})
    assert shown.exit_code == 0, shown.output
    assert "OWNED" in shown.output
    assert not any(one in shown.output for one in OBEYED)


def test_a_link_or_a_pipe_among_logs_is_none(logs: Path, home: Home, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").write_text("2026-01-01T00:00:00.000Z I of another file\n")
    (logs / "link-0.1.log").symlink_to(tmp_path / "elsewhere")
    (logs / "trainer-0.1.log.1").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(logs / "pipe-0.1.log")
    assert [part.file for part in list_parts(logs, LogQuery())] == ["trainer-0.1.log"]
    shown = CliRunner().invoke(main, ["logs", "golden"], env={"GYRE_HOME": str(home.path)})
    assert "of another file" not in shown.output
    with JobReader(f"sqlite:///{home.path}/gyre.db", at=home) as reader:
        written = write_bundle(reader, "golden-1", tmp_path / "out.tar.gz", logs=logs)
    assert {"logs/link-0.1.log", "logs/pipe-0.1.log", "logs/trainer-0.1.log.1"} <= {*written["missing"]}
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert not any(b"of another file" in archive.extractfile(one).read() for one in archive)  # type: ignore[union-attr]
