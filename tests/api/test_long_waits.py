"""Who waits for something is told so: a command that no master takes, a long history that is read; and a database that
a full disk left without a byte has no job."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from click.testing import CliRunner

from gyre.api import reader as reader_module
from gyre.api.cli import main
from gyre.api.home import Home
from gyre.api.reader import JobReader
from gyre.errors import NotFound, Unreachable
from tests.api.conftest import Seed


def test_a_command_that_waits_says_so(seed: Seed, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "SILENT_S", 0.05)
    told: list[str] = []
    heard = threading.Event()

    def slow(*_: Any) -> Any:
        heard.wait(20)
        return Unreachable("the journal cannot be written")

    def hear(sentence: str) -> None:
        told.append(sentence)
        heard.set()

    with JobReader(seed("actor_lost"), at=home) as reader:
        reader.on_wait = hear
        monkeypatch.setattr(
            reader, "find", lambda job: reader_module.Found(job, "golden", True, "http://h", "running")
        )
        monkeypatch.setattr(reader, "_try_command", slow)
        with pytest.raises(Unreachable, match="the journal cannot be written"):
            reader.create_token("golden-1", "lab", deadline_s=0.2)
        assert told == ["No master took the create_token yet; it is asked for up to 0.2 s."]
        monkeypatch.setattr(reader, "_try_command", lambda *_: 7)
        monkeypatch.setattr(reader_module, "SILENT_S", 5.0)
        assert reader.command("golden-1", "stop") == 7
    assert len(told) == 1


def test_a_long_history_is_announced_once(seed: Seed, home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    with JobReader(seed("actor_lost"), at=home) as reader:
        reader.on_wait = told.append
        reader.at("golden-1")
        assert told == []
    monkeypatch.setattr(reader_module, "LONG_HISTORY", 5)
    with JobReader(f"sqlite:///{home.path}/gyre.db", at=home) as reader:
        reader.on_wait = told.append
        reader.at("golden-1")
        reader.at("golden-1")
    assert len(told) == 1
    assert "events of job golden-1" in told[0]


def test_a_database_without_a_byte_has_no_job(home: Home) -> None:
    home.path.mkdir(parents=True, exist_ok=True)
    (home.path / "gyre.db").touch()
    runner = CliRunner()
    env = {"GYRE_HOME": str(home.path)}
    listed = runner.invoke(main, ["ls", "--json"], env=env)
    assert (listed.exit_code, listed.stdout.strip()) == (0, "[]")
    shown = runner.invoke(main, ["show"], env=env, standalone_mode=False)
    assert isinstance(shown.exception, NotFound) or "There is no job" in shown.output
