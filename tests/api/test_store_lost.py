"""What clients say while a job's store is lost: what its master answers, or what was last known and since when."""

from __future__ import annotations

import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from click.testing import CliRunner

from gyre.api.cli import main
from gyre.api.home import Home
from gyre.api.reader import JobReader
from gyre.api.rest import create_app
from gyre.errors import StoreLost
from gyre.master.store_notes import NOTE_FILE, LostNote, notes_below, write_note
from tests.doubles.standing_job import StandingJob

LAST_KNOWN = r"Last known of small: running, step 0, \d+ s ago \(since [\d-]+ [\d:]+ UTC\)"


def lose(folder: Path) -> None:
    (folder / "away").mkdir()
    for file in folder.glob("gyre.db*"):
        os.rename(file, folder / "away" / file.name)


@contextmanager
def served(job: StandingJob) -> Iterator[str]:
    """The master's REST interface at a port."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(create_app(job.master, token=None), log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        thread.join(10.0)


def noted(home: Home, store: Path, url: str) -> None:
    directory = home.job_directory("standing-1")
    write_note(directory, LostNote(str(store), "standing-1", "small", "running", 0, url, 1_700_000_000.0))


def test_rest_tells_that_the_store_is_lost_until_it_is_back(job: StandingJob, http: Any) -> None:
    lose(job.directory)
    job.run_until(lambda view: view["store"]["error"])
    view = http.get("/api/v1/jobs/small").json()
    assert "is gone: it was deleted or moved" in view["store"]["error"]
    assert (view["job"]["phase"], view["job"]["reason"]) == ("running", "store_lost")
    assert view["bottleneck"] == ""
    now = http.get("/api/v1/jobs/small/now").json()
    assert now["sentence"].startswith("The store is out of reach, and training waits for it: The store")
    assert now["tone"] == "bad"
    response = http.get("/api/v1/jobs/small/events")
    assert (response.status_code, response.json()["code"]) == (503, "store.lost")
    assert json.loads((job.directory / NOTE_FILE).read_text())["phase"] == "running"
    for file in (job.directory / "away").iterdir():
        os.rename(file, job.directory / file.name)
    job.run_until(lambda view: not view["store"]["error"] and view["incidents"])
    (incident,) = http.get("/api/v1/jobs/small").json()["incidents"]
    assert (incident["cause"], incident["outcome"]) == ("store_lost", "recovered")
    assert not (job.directory / NOTE_FILE).exists()


def test_show_and_ls_ask_the_master_that_noted_where_it_is(job: StandingJob, home: Home) -> None:
    """The commands are new processes: no store tells them of the job."""
    lose(job.directory)
    job.run_until(lambda view: view["store"]["error"])
    with served(job) as url:
        noted(home, home.path / "gyre.db", url)
        shown = CliRunner().invoke(main, ["show", "small"])
        listed = CliRunner().invoke(main, ["ls"])
        logs = CliRunner().invoke(main, ["logs", "small"])
    assert shown.exit_code == 0, shown.output
    assert "is gone: it was deleted or moved" in " ".join(shown.stdout.split())
    assert listed.exit_code == 0, listed.output
    assert "small" in listed.stdout
    assert logs.exit_code == 0, logs.output


@pytest.mark.parametrize("command", [["show"], ["show", "small"], ["show", "standing-1"], ["ls"]])
def test_without_a_master_they_say_what_was_last_known_and_since_when(home: Home, command: list[str]) -> None:
    noted(home, home.path / "gyre.db", "http://127.0.0.1:9")
    result = CliRunner().invoke(main, command)
    assert result.exit_code != 0
    assert re.search(LAST_KNOWN, " ".join(result.stderr.split())), result.stderr
    assert "There is no store at" in " ".join(result.stderr.split())
    assert not (home.path / "gyre.db").exists()


def test_a_note_of_another_store_is_no_news(home: Home) -> None:
    noted(home, home.path / "another.db", "http://127.0.0.1:9")
    with JobReader(home.database_url(), at=home) as reader:
        with pytest.raises(StoreLost, match=r"^There is no store at"):
            reader.find("small")
        with pytest.raises(StoreLost, match=r"^There is no store at"):
            reader.jobs()


def test_a_note_that_cannot_be_read_or_written_is_none(tmp_path: Path) -> None:
    for name, content in (("a", "{"), ("b", "[]"), ("c", '{"path": "x"}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / NOTE_FILE).write_text(content)
    assert notes_below(tmp_path) == []
    assert notes_below(tmp_path / "none") == []
    write_note(tmp_path / "none", LostNote("p", "j", "n", "running", 0, "", 1.0))
    assert not (tmp_path / "none").exists()
