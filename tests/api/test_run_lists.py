"""The list of runs by the store, by REST and on the command line: one answer, whoever gives it."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from click.testing import CliRunner, Result
from sqlalchemy import delete

from gyre.api.cli import main
from gyre.api.home import Home
from gyre.api.quick_list import _newest_revision, ended_jobs
from gyre.api.reader import JobReader
from gyre.api.rest import schemas
from gyre.api.rest.app import create_app, create_store_app
from gyre.api.resume import _label
from gyre.api.stored_jobs import StoredJobs
from gyre.config import parse_job
from gyre.errors import ConfigError, NotFound
from gyre.observe.run_lines import FORM
from gyre.store import Labels, StepRow, open_store, tables
from tests.api.conftest import Connect, Seed
from tests.doubles.standing_job import StandingJob
from tests.waits import GENEROUS_S


def gyre(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def out(*arguments: str) -> str:
    result = gyre(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def three(seed: Seed, home: Home) -> str:
    """Three jobs that have ended, of which one was evaluated and has steps in its ledger; the store's url."""
    url = seed("evaluated", job_id="seen-1", at=1.0)
    seed("user_code", job_id="broken-1", at=2.0)
    seed("undisturbed", job_id="plain-1", at=3.0)
    with open_store(url) as store:
        ledger = store.ledger("seen-1")
        ledger.take_over(term=1)
        metrics = ({"reward_mean": step / 10, "tokens_per_s": 100.0 * step} for step in range(1, 6))
        ledger.write(
            1, steps=[StepRow(at, at, None, [], row, 1.0) for at, row in enumerate(metrics, start=1)]
        )
        store.listing.label("seen-1", add=["ablation"], notes="the good one")
    return url


@pytest.fixture
def http(three: str, home: Home, connect: Connect) -> Iterator[httpx.Client]:
    with (
        JobReader(three, at=home) as reader,
        connect(create_store_app(StoredJobs(reader), token=None)) as http,
    ):
        yield http


# -- the store ----------------------------------------------------------------------------------------


def test_a_line_is_the_same_from_what_is_kept_and_from_the_journal(three: str, home: Home) -> None:
    with JobReader(three, at=home) as reader:
        assert ended_jobs(three, 10) is None, "nothing is summed up yet"
        made = reader.jobs()
        with open_store(three) as store:
            assert all(job.summary is not None for job in store.listing.jobs(form=FORM))
        assert reader.jobs() == made
        assert ended_jobs(three, 10) == made, "what needs no package of the store says the same"
    seen = next(one for one in made if one["job_id"] == "seen-1")
    assert seen["rewards"] == [0.1, 0.2, 0.3, 0.4, 0.5]
    assert (seen["tokens_per_s"], seen["tags"], seen["notes"]) == (300.0, ["ablation"], "the good one")
    assert [(one["set"], one["unit"], one["value"], one["version"]) for one in seen["held_out"]] == [
        ("aime", "reward", 0.625, 2),
        ("math500", "accuracy", 0.5, 2),
    ]
    assert seen["cost"] is None
    with open_store(three) as store, store._database.write() as connection:
        connection.execute(delete(tables.job_summaries))
    with JobReader(three, at=home) as reader:
        assert reader.jobs() == made


def test_what_needs_no_package_of_the_store_stays_silent_in_doubt(three: str, home: Home, seed: Seed) -> None:
    with JobReader(three, at=home) as reader:
        reader.jobs()
    assert ended_jobs(three, 10) is not None
    assert ended_jobs("postgresql+psycopg://x/y", 10) is None
    assert ended_jobs("sqlite:////nowhere/at/all.db", 10) is None
    assert _newest_revision() == tables.HEAD
    with open_store(three) as store:
        store.update_job("plain-1", ended_at=None)
    assert ended_jobs(three, 10) is None, "a job runs"
    with open_store(three) as store:
        store.update_job("plain-1", ended_at=4.0)
        with store._database.write() as connection:
            connection.exec_driver_sql(f"UPDATE {tables.VERSION_TABLE} SET version_num = '9999'")
    assert ended_jobs(three, 10) is None, "a newer Gyre wrote it"


def test_a_list_of_ended_jobs_imports_nothing_of_weight(three: str, home: Home) -> None:
    with JobReader(three, at=home) as reader:
        reader.jobs()
    code = (
        "import sys\nfrom gyre.api.cli import main\n"
        "try:\n    main(['ls', '--all', '--sort', '-reward'])\nexcept SystemExit as end:\n    assert end.code == 0\n"
        "print([name for name in ('sqlalchemy', 'pydantic', 'httpx', 'numpy', 'ray') if name in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GENEROUS_S)
    assert done.stdout.splitlines()[-1] == "[]", done
    assert "seen-1" in done.stdout


def test_a_master_keeps_the_line_of_its_job_at_the_end() -> None:
    with StandingJob(step_s=1.0) as job:
        url = f"sqlite:///{job.directory / 'gyre.db'}"
        job.master.label(add=["while it ran"])
        job.command("stop", reason="enough")
        job.run_until(lambda view: view["job"]["phase"] == "stopped")
        with open_store(url) as store:
            for _ in range(200):
                (listed,) = store.listing.jobs(form=FORM)
                if listed.summary is not None:
                    break
                job.run_until(lambda view: True)
        assert listed.summary is not None, "the journal's last event is summed up"
        assert listed.labels.tags == ("while it ran",)
        assert job.master.listed().items() >= listed.summary.items()


# -- REST ---------------------------------------------------------------------------------------------


def _names(http: httpx.Client, **query: str) -> list[str]:
    return [one["job_id"] for one in http.get("/api/v1/jobs", params=query).json()["jobs"]]


def test_rest_filters_sorts_and_groups(http: httpx.Client) -> None:
    answer = http.get("/api/v1/jobs", params={"group": "tag"}).json()
    assert schemas.JobList.model_validate(answer).total == 3
    assert [(one["key"], one["jobs"]) for one in answer["groups"]] == [
        ("", ["plain-1", "broken-1"]),
        ("ablation", ["seen-1"]),
    ]
    assert _names(http) == ["plain-1", "broken-1", "seen-1"]
    assert _names(http, sort="started") == ["seen-1", "broken-1", "plain-1"]
    assert _names(http, filter="phase=failed") == ["broken-1"]
    assert _names(http, filter="held_out.math500>=50%") == ["seen-1"]
    for query in ({"filter": "rewrd>1"}, {"sort": "rewrd"}, {"group": "sed"}):
        refused = http.get("/api/v1/jobs", params=query)
        assert (refused.status_code, refused.json()["code"]) == (422, "config"), query


def test_tables_are_files(http: httpx.Client) -> None:
    answer = http.get("/api/v1/jobs.csv", params={"filter": "tag=ablation", "columns": "name,reward,tags"})
    assert answer.headers["content-type"].startswith("text/csv")
    assert "attachment" in answer.headers["content-disposition"]
    assert next(csv.reader(io.StringIO(answer.text))) == ["name", "reward", "tags"]
    curves = list(csv.DictReader(io.StringIO(http.get("/api/v1/curves.csv", params={"jobs": "seen-1"}).text)))
    assert [row["reward_mean"] for row in curves] == ["0.1", "0.2", "0.3", "0.4", "0.5"]
    assert http.get("/api/v1/curves.csv", params={"jobs": "no-such"}).status_code == 404
    assert http.get("/api/v1/curves.csv", params={"jobs": ",".join("j" * 30)}).status_code == 422


def test_labels_are_written_by_rest_under_the_checks_of_every_change(
    three: str, home: Home, connect: Connect, http: httpx.Client
) -> None:
    answer = http.post("/api/v1/jobs/broken-1:label", json={"add": ["b", "a"], "notes": "why"})
    assert answer.json() == {"tags": ["a", "b"], "notes": "why"}
    assert http.post("/api/v1/jobs/broken-1:label", json={"remove": ["a"]}).json() == {
        "tags": ["b"],
        "notes": "why",
    }
    bad = http.post("/api/v1/jobs/broken-1:label", json={"add": ["a=b"]})
    assert (bad.status_code, "cannot be a tag" in bad.json()["detail"]) == (422, True)
    assert http.post("/api/v1/jobs/broken-1:label", json={"tags": ["x"]}).status_code == 422
    assert http.post("/api/v1/jobs/no-such:label", json={}).status_code == 404
    foreign = http.post(
        "/api/v1/jobs/broken-1:label", json={"add": ["x"]}, headers={"Sec-Fetch-Site": "cross-site"}
    )
    assert foreign.status_code == 403
    with (
        JobReader(three, at=home) as reader,
        connect(create_store_app(StoredJobs(reader), token="s")) as locked,
    ):
        assert locked.post("/api/v1/jobs/broken-1:label", json={"add": ["x"]}).status_code == 401
        assert reader.label("broken-1") == {"tags": ["b"], "notes": "why"}


def test_a_master_lists_its_job_as_the_store_does(shared_http: httpx.Client) -> None:
    (run,) = schemas.JobList.model_validate(shared_http.get("/api/v1/jobs").json()).jobs
    assert (run.phase, run.tags, run.rewards, run.cost) == ("running", [], [], None)
    assert shared_http.get("/api/v1/jobs", params={"filter": "phase=failed"}).json()["jobs"] == []


def test_a_master_that_runs_is_labelled(job: StandingJob, connect: Connect) -> None:
    before = job.view()["seq"]
    with connect(create_app(job.master, token=None)) as http:
        assert http.post("/api/v1/jobs/small:label", json={"add": ["x"]}).json()["tags"] == ["x"]
        assert http.get("/api/v1/jobs").json()["jobs"][0]["tags"] == ["x"]
    assert job.view()["seq"] == before, "no event tells of it"


# -- the command line ---------------------------------------------------------------------------------


def test_ls_filters_sorts_groups_and_chooses_columns(three: str) -> None:
    for _ in range(2):  # from the journals, and from what they came to
        lines = out("ls", "-a", "--sort", "name,started").splitlines()
        assert [line.split()[1] for line in lines[1:]] == ["seen-1", "broken-1", "plain-1"]
        assert "aime reward 0.62 (v2)" in lines[1]
        assert "▁" in lines[1]
        assert "ablation" in lines[1]
        only = json.loads(out("ls", "-a", "--filter", "tag=ablation", "--json"))
        assert [one["job_id"] for one in only] == ["seen-1"]
    table = out("ls", "-a", "--columns", "id,notes,held_out.math500", "--sort", "-held_out.math500")
    assert table.splitlines()[1].split() == ["seen-1", "the", "good", "one", "0.5"]
    rows = list(csv.DictReader(io.StringIO(out("ls", "-a", "--csv", "--columns", "id,tag"))))
    assert {row["id"]: row["tags"] for row in rows}["seen-1"] == "ablation"
    grouped = out("ls", "-a", "--group", "tag").splitlines()
    assert grouped[0].split()[:3] == ["TAG", "RUNS", "NAMES"]
    groups: list[dict[str, Any]] = json.loads(out("ls", "-a", "--group", "phase", "--json"))
    assert {one["key"]: one["values"]["took"]["count"] for one in groups} == {"succeeded": 2, "failed": 1}


def test_ls_says_why_it_shows_nothing(three: str) -> None:
    assert "No job is running; --all" in gyre("ls").stderr
    assert "--all looks at those that have ended" in gyre("ls", "--filter", "tag=x").stderr
    assert "No job is like that" in gyre("ls", "-a", "--filter", "tag=x").stderr
    for wrong in (["--filter", "rewrd>1"], ["--sort", "-rewrd"], ["--columns", "rewrd"]):
        result = gyre("ls", "-a", *wrong)
        assert (result.exit_code, "did you mean 'reward'" in result.stderr) == (2, True), wrong
    assert gyre("ls", "--json", "--csv").exit_code == 2


def test_tag_and_note(three: str, home: Home) -> None:
    assert "ablation, lr sweep" in gyre("tag", "seen-1", "lr sweep").stderr
    assert out("tag", "seen-1") == "ablation\nlr sweep\n"
    assert "ablation" in gyre("tag", "--remove", "seen-1", "lr sweep").stderr
    assert json.loads(out("note", "seen-1", "twice\nas good", "--json")) == {
        "tags": ["ablation"],
        "notes": "twice\nas good",
    }
    assert out("note", "seen-1") == "twice\nas good\n"
    assert "removed" in gyre("note", "seen-1", "").stderr
    assert "has no note" in gyre("note", "seen-1").stderr
    refused = gyre("tag", "seen-1", "a=b")
    assert (refused.exit_code, "cannot be a tag" in refused.stderr) == (2, True)
    assert gyre("tag", "--remove", "seen-1").exit_code == 2
    assert gyre("tag", "nobody", "x").exit_code == 4
    with JobReader(three, at=home) as reader:
        with pytest.raises(ConfigError, match="at most 32"):
            reader.label("seen-1", add=[f"t{number}" for number in range(32)])
        with pytest.raises(NotFound):
            reader.label("nobody", notes="x")


def test_curves_of_jobs_are_csv(three: str) -> None:
    rows = list(csv.DictReader(io.StringIO(out("compare", "seen-1", "broken-1", "--csv"))))
    assert [(row["job"], row["step"]) for row in rows] == [("seen-1", str(step)) for step in range(1, 6)]
    assert gyre("compare", "seen-1", "broken-1", "--csv", "--json").exit_code == 2
    assert gyre("compare", *[f"j{number}" for number in range(21)]).exit_code == 2


def test_a_job_that_goes_on_with_other_tags_keeps_those_it_was_given_since(three: str) -> None:
    with open_store(three) as store:
        store.listing.label("seen-1", add=["since"])
        again = parse_job({"tags": ["ablation", "longer"], "notes": "more steps"})
        _label(store, "seen-1", again, {"tags": [["ablation"], ["ablation", "longer"]]})
        assert store.listing.labels("seen-1") == Labels(("ablation", "longer", "since"), "the good one")
        _label(store, "seen-1", again, {"notes": ["", "more steps"]})
        assert store.listing.labels("seen-1").notes == "more steps"
        _label(store, "seen-1", parse_job({}), {"run.steps": [1, 2]})
        assert store.listing.labels("seen-1").notes == "more steps"


def test_a_list_of_jobs_that_run_imports_nothing_of_weight() -> None:
    """Imports are most of what `gyre ls` takes: what reads samples and numbers over time is none of its business."""
    code = """
import sys
import gyre.api.cli.runs, gyre.api.client, gyre.api.reader, gyre.api.runs
heavy = {"numpy", "pyarrow", "torch", "ray", "fastapi", "gyre.rollouts", "gyre.models"}
assert not heavy & sys.modules.keys(), heavy & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
