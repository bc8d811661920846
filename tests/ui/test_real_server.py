"""The page on the real server: a recorded job with kills whose cluster is gone, and a job that runs."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from gyre.api.rest import RestServer
from gyre.api.rest.app import create_app
from tests.doubles.standing_job import StandingJob
from tests.ui.conftest import Reader, RecordedHome
from tests.ui.views import OF_ANY_JOB, go_to

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture
def of_recorded(browser: Any, recorded: RecordedHome) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 900}, reduced_motion="reduce")
    context.set_default_timeout(30_000)
    yield Reader(context.new_page(), recorded.url)
    context.close()


@pytest.mark.landing
def test_somebody_walks_through_every_view_of_an_ended_job(of_recorded: Any, recorded: RecordedHome) -> None:
    """From the list of jobs, by links and clicks in one open page. Each view shows its data, and nothing goes wrong;
    the sentence is the one of REST."""
    import httpx

    url, job = recorded.url, recorded.job
    page = of_recorded.open("jobs?all=1")
    page.locator("main td a", has_text=job).first.click()
    for view, shown in OF_ANY_JOB.items():
        go_to(page, view)
        page.locator(shown).first.wait_for()
        of_recorded.settle()
        assert page.locator("main h1").count() == 1, view
        if view == "now":
            told = httpx.get(f"{url}api/v1/jobs/{job}/now").json()["sentence"]
            assert told.startswith("Succeeded after")
            page.locator("main .sentence", has_text=told).wait_for()
            page.get_by_text("0 lost, 0 twice").first.wait_for()
    assert of_recorded.errors == []


def test_the_tokens_of_a_recorded_sample_are_those_of_rest(of_recorded: Any, recorded: RecordedHome) -> None:
    import httpx

    url, job = recorded.url, recorded.job
    item = httpx.get(f"{url}api/v1/jobs/{job}/samples", params={"limit": 1}).json()["samples"][0]
    path = f"{item['step']}/{item['group']}/{item['sample']}"
    whole = httpx.get(f"{url}api/v1/jobs/{job}/samples/{path}").json()
    page = of_recorded.open(f"jobs/{job}/samples?at=0")
    page.locator(".side-by-side li a").first.click()
    page.locator("main .token-text .t").first.wait_for()
    shown = page.locator("main .token-text .t").count()
    assert shown >= len(whole["token_ids"])


def test_the_length_of_answers_filters_and_the_link_says_so(of_recorded: Any, recorded: RecordedHome) -> None:
    import httpx

    url, job = recorded.url, recorded.job
    page = of_recorded.open(f"jobs/{job}/samples")
    page.get_by_label("Tokens").fill(">3")
    page.keyboard.press("Enter")
    page.wait_for_function("() => decodeURIComponent(location.hash).includes('tokens=>3')")
    of_recorded.settle()
    page.wait_for_function(
        """() => {
          const shown = [...document.querySelectorAll('.sample-list .length')];
          return shown.length > 0 && shown.every(one => /^4 tok/.test(one.innerText));
        }"""
    )
    everything = httpx.get(f"{url}api/v1/jobs/{job}/samples").json()["total"]
    total = httpx.get(f"{url}api/v1/jobs/{job}/samples", params={"tokens": ">3"}).json()["total"]
    assert 0 < total < everything
    page.wait_for_function(
        "total => document.querySelector('main [role=status]').innerText.replace(/\\D/g, '') === String(total)",
        arg=total,
    )
    assert of_recorded.errors == []


def test_the_slider_goes_back_to_an_event(of_recorded: Any, recorded: RecordedHome) -> None:
    page = of_recorded.open(f"jobs/{recorded.job}/replay?seq=40")
    page.get_by_text("Event 40 of").first.wait_for()
    assert of_recorded.errors == []


@pytest.fixture
def standing() -> Iterator[tuple[StandingJob, str, RestServer]]:
    with StandingJob() as job:
        server = RestServer(create_app(job.master, token="secret"), token="secret")
        yield job, f"{server.start()}/", server
        server.stop()


def test_behind_a_token_the_page_asks_once_and_then_follows(
    browser: Any, standing: tuple[StandingJob, str, RestServer]
) -> None:
    job, url, _ = standing
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(30_000)
    page = context.new_page()
    page.goto(f"{url}#/jobs/small/now")
    field = page.locator("input[type=password]")
    field.wait_for()
    field.fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("The token is wrong").first.wait_for()
    field.fill("secret")
    page.keyboard.press("Enter")
    page.locator("main .sentence").first.wait_for()
    assert [cookie["httpOnly"] for cookie in context.cookies()] == [True]
    job.do(job.world.say, "trainer-0", {"step": 7, "steps": 9})
    job.do(job.world.kill, "rollout-1")
    page.goto(f"{url}#/jobs/small/incidents")
    page.get_by_text("rollout-1").first.wait_for()
    context.close()


def test_a_pause_from_the_page_is_in_the_journal_with_who_asked(
    browser: Any, standing: tuple[StandingJob, str, RestServer]
) -> None:
    job, url, _ = standing
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(30_000)
    page = context.new_page()
    page.request.post(
        f"{url}api/v1/session", data={"token": "secret"}, headers={"Sec-Fetch-Site": "same-origin"}
    )
    page.goto(f"{url}#/jobs/small/now")
    page.get_by_role("button", name="Pause").first.click()
    page.get_by_role("dialog").get_by_role("button", name="Pause").click()
    until = time.monotonic() + 30
    while not any(event["kind"] == "PauseRequested" for event in job.master.events()):
        assert time.monotonic() < until, "no pause came"
        page.wait_for_timeout(100)
    (asked,) = (event for event in job.master.events() if event["kind"] == "PauseRequested")
    assert asked["actor"] == "rest"
    context.close()
