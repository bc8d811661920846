"""The table of runs in a real Chromium, over the real server and a store of many jobs that have ended."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gyre.api.home import Home
from gyre.api.reader import JobReader
from gyre.api.rest import RestServer
from gyre.api.rest.app import create_store_app
from gyre.api.stored_jobs import StoredJobs
from gyre.failover import JobState
from gyre.observe.run_lines import FORM
from gyre.observe.run_summary import summary_of
from gyre.store import Labels, StepRow, open_store
from tests.ui.conftest import Reader

JOBS = 120
LONG = "KeyError: " + "a reward function that failed has much to say; " * 30
"""Why the newest job failed."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def _fill(url: str) -> None:
    """Jobs of three tags; of each the reward is its number in percent."""
    with open_store(url) as store:
        for number in range(JOBS):
            job_id, reward = f"run-{number:03d}", number / 100
            spec = {"name": job_id, "recipe": "grpo", "run": {"steps": 40}, "config": {"seed": number % 4}}
            labels = Labels(
                (("ablation", "baseline", "lr sweep")[number % 3],), "a note" if number == 7 else ""
            )
            store.create_job(job_id=job_id, name=job_id, spec=spec, now=1000.0 + number, labels=labels)
            failed = {"phase": "failed", "message": LONG} if number == JOBS - 1 else {"phase": "succeeded"}
            store.update_job(job_id, ended_at=2000.0, **failed)
            steps = [
                {"step": at, "reward_mean": reward * at / 25, "tokens_per_s": 100.0} for at in range(1, 26)
            ]
            ledger = store.ledger(job_id)
            ledger.take_over(term=1)
            ledger.write(1, steps=[StepRow(row["step"], row["step"], None, [], row, 1.0) for row in steps])
            state = JobState()
            training = replace(state.training, last={"reward_mean": reward, "step": 25})
            state = replace(state, training=training, job=replace(state.job, step=25))
            store.listing.keep_summary(job_id, seq=0, form=FORM, body=summary_of(state, spec, steps))


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("home")
    folder.chmod(0o700)
    home = Home(folder)
    _fill(home.database_url())
    with JobReader(home.database_url(), at=home) as reader:
        server = RestServer(create_store_app(StoredJobs(reader), token=None))
        yield f"{server.start()}/"
        server.stop()


@pytest.fixture
def reader(browser: Any, url: str) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(30_000)
    yield Reader(context.new_page(), url)
    context.close()


def _first(page: Any, wanted: str) -> None:
    page.locator(f"tr.run:first-of-type td:nth-child(2):has-text('{wanted}')").wait_for()


def test_a_click_on_a_heading_sorts_and_the_address_says_so(reader: Any) -> None:
    page = reader.open("jobs")
    _first(page, "run-119")
    page.get_by_role("heading", name="120 jobs").wait_for()
    row = page.locator("tr.run").first.inner_text()
    assert "25 of 40" in row
    assert "1.19" in row
    page.get_by_role("button", name="Job", exact=True).click()
    _first(page, "run-000")
    page.get_by_role("button", name="Reward", exact=True).click()
    _first(page, "run-119")
    assert page.locator("th[aria-sort=descending]").inner_text().startswith("Reward")
    page.get_by_role("button", name="Reward", exact=True).click()
    _first(page, "run-000")
    assert "sort=reward" in page.url
    page.reload()
    _first(page, "run-000")
    assert reader.errors == []


def test_of_a_long_table_the_lines_in_sight_exist(reader: Any) -> None:
    page = reader.open("jobs")
    _first(page, "run-119")
    assert page.locator("tr.run").count() < 60
    assert page.locator("table").get_attribute("aria-rowcount") == str(JOBS + 1)
    page.locator(".runs").evaluate("element => element.scrollTop = element.scrollHeight")
    page.get_by_role("link", name="run-000").wait_for()
    assert page.locator("tr.run").count() < 60


def test_runs_are_filtered_grouped_and_given_as_csv(reader: Any, tmp_path: Path) -> None:
    page = reader.open("jobs")
    page.get_by_label("Filter").fill("tag=ablation reward>0.5 reward<0.8")
    page.get_by_role("heading", name="10 of 120 jobs").wait_for()
    page.get_by_label("Group by").select_option("experiment")
    group = page.get_by_role("region", name="Groups").locator("tr.group")
    group.get_by_role("link", name="Compare").wait_for()
    assert "0.65 ±0.09" in group.inner_text(), "mean and spread of 0.51, 0.54 … 0.78"
    page.get_by_role("link", name="run-078", exact=True).wait_for()  # by its name, as without a filter
    group.get_by_role("link", name="Compare").click()
    page.get_by_role("group", name="With which jobs").get_by_label("run-075", exact=True).wait_for()
    names = page.get_by_role("group", name="With which jobs").locator("label").all_inner_texts()
    assert len(names) == len(set(names)), "no job is offered twice"
    page.go_back()
    with page.expect_download() as download:
        page.get_by_role("link", name="CSV").click()
    download.value.save_as(tmp_path / "runs.csv")
    rows = list(csv.DictReader((tmp_path / "runs.csv").read_text().splitlines()))
    assert [row["name"] for row in rows] == [f"run-{number:03d}" for number in range(78, 50, -3)]
    assert reader.errors == []
    page.get_by_label("Filter").fill("rewrd>1")
    page.get_by_role("alert").get_by_text("There is no column 'rewrd'").wait_for()
    page.get_by_label("Filter").fill("tag=none")
    page.get_by_text("No job is like that").wait_for()


def test_one_long_reason_makes_no_table_wider_and_the_box_ends_with_the_screen(
    browser: Any, url: str
) -> None:
    """Of a run that failed with a long sentence all that matters is seen on 1440 pixels."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    page = Reader(context.new_page(), url).open("jobs")
    long = page.locator("tr.run", has=page.get_by_role("link", name="run-119", exact=True)).get_by_title(
        "KeyError"
    )
    long.wait_for()
    assert len(long.get_attribute("title")) == len(LONG), "whole under the cursor"
    for heading in ("Took", "Why", "Note"):
        box = page.get_by_role("button", name=heading, exact=True).bounding_box()
        assert box["x"] + box["width"] < 1440, heading
    table = page.locator(".runs")
    assert table.evaluate("one => one.scrollWidth") < 2 * 1440
    ends = table.evaluate("one => one.getBoundingClientRect().bottom")
    assert 850 < ends <= 900
    context.close()


def test_tags_and_notes_are_written_and_a_tag_filters(reader: Any) -> None:
    page = reader.open("jobs?filter=id%3Drun-007")
    page.get_by_role("button", name="Tags and note of run-007").click()
    dialog = page.get_by_role("dialog")
    assert dialog.get_by_label("Note").input_value() == "a note"
    dialog.get_by_label("Tags").fill("a=b")
    dialog.get_by_role("button", name="Save").click()
    dialog.get_by_role("alert").get_by_text("cannot be a tag").wait_for()
    dialog.get_by_label("Tags").fill("baseline, the best")
    dialog.get_by_label("Note").fill("another")
    dialog.get_by_role("button", name="Save").click()
    dialog.wait_for(state="detached")
    page.locator("tr.run").get_by_text("another").wait_for()
    page.get_by_role("button", name="the best").click()
    page.get_by_role("heading", name="1 of 120 jobs").wait_for()
    assert "the+best" in page.url


def test_twelve_runs_are_in_one_chart_with_log_axes_as_png_and_csv(reader: Any, tmp_path: Path) -> None:
    page = reader.open("jobs")
    for number in range(12):
        page.get_by_label(f"Compare run-{119 - number}", exact=True).check()
    page.get_by_role("button", name="Compare 12").click()
    page.locator("main .chart canvas").first.wait_for()
    assert page.get_by_role("region", name="Outcomes").locator("tbody tr").count() == 12
    page.get_by_label("Log x").check()
    page.get_by_label("Log y").check()
    assert "logx=1" in page.url
    with page.expect_download() as download:
        page.get_by_role("button", name="Reward as PNG").first.click()
    download.value.save_as(tmp_path / "reward.png")
    assert (tmp_path / "reward.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with page.expect_download() as download:
        page.get_by_role("link", name="Curves as CSV").click()
    download.value.save_as(tmp_path / "curves.csv")
    rows = list(csv.DictReader((tmp_path / "curves.csv").read_text().splitlines()))
    assert len(rows) == 12 * 25
    assert reader.errors == []
