"""What needs a server that does as it is told: it goes away, wants a token, makes a step; and a very large job."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ui.conftest import Mock

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_step_shows_without_asking(reader: Any, job: str, mock: Mock) -> None:
    page = reader.open(f"jobs/{job}/now")
    before = page.locator(".step-line").inner_text()
    mock.behave(advance=job)
    page.wait_for_function("before => document.querySelector('.step-line').innerText !== before", arg=before)


def test_a_server_that_is_away_is_said_and_the_data_stays(reader: Any, job: str, mock: Mock) -> None:
    page = reader.open(f"jobs/{job}/now")
    sentence = page.locator(".sentence").inner_text()
    mock.behave(away=True)
    page.locator(".away").wait_for()
    assert "since" in page.locator(".away").inner_text()
    assert page.locator(".sentence").inner_text() == sentence
    mock.behave(away=False)
    page.locator(".away").wait_for(state="detached")
    mock.behave(advance=job)
    before = page.locator(".step-line").inner_text()
    page.wait_for_function("before => document.querySelector('.step-line').innerText !== before", arg=before)


def test_a_token_is_asked_for_and_opens_the_page(reader: Any, job: str, mock: Mock) -> None:
    mock.behave(token="sesame")
    page = reader.page
    page.goto(f"{reader.base_url}#/jobs/{job}/account")
    page.locator("#token").fill("wrong")
    page.get_by_role("button", name="Open").click()
    page.get_by_role("alert").wait_for()
    page.locator("#token").fill("sesame")
    page.get_by_role("button", name="Open").click()
    page.locator("main .total").first.wait_for()
    assert page.evaluate("document.cookie") == ""


def test_a_command_asks_first(reader: Any, job: str, mock: Mock) -> None:
    page = reader.open(f"jobs/{job}/now")
    page.get_by_role("button", name="Pause …").click()
    page.locator("dialog[open]").wait_for()
    assert mock.behave()["commands"] == []
    page.locator("dialog button.primary").click()
    page.get_by_text("Accepted: event").wait_for()
    assert mock.behave()["commands"] == [{"verb": "pause"}]
    page.locator("dialog").get_by_role("button", name="Close").click()
    page.get_by_role("button", name="Resume …").click()
    page.locator("dialog button.primary").click()
    page.get_by_text("Accepted: event").wait_for()


def test_scale_sends_role_and_count(reader: Any, job: str, mock: Mock) -> None:
    page = reader.open(f"jobs/{job}/now")
    page.get_by_role("button", name="Scale …").click()
    page.get_by_label("Instances").fill("6")
    page.locator("dialog button.primary").click()
    page.get_by_text("Accepted: event").wait_for()
    assert mock.behave()["commands"] == [{"verb": "scale", "role": "rollout", "count": 6}]


def test_an_ended_job_has_no_stream(reader: Any, mock: Mock) -> None:
    asked: list[str] = []
    reader.page.on("request", lambda request: asked.append(request.url))
    reader.open("jobs/grpo-gsm8k/now")
    reader.open("jobs/grpo-gsm8k/curves")
    assert not [url for url in asked if "events/stream" in url]


def test_a_move_of_the_slider_draws_that_moment_by_two_questions_at_most(
    reader: Any, job: str, mock: Mock
) -> None:
    page = reader.open(f"jobs/{job}/replay?seq=300")
    page.locator("section[aria-label='The event']").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.locator("#moment").fill("310")
    page.get_by_text("Event 310 of").first.wait_for()
    assert len(asked) <= 2  # the moment, and the event beside it


def test_of_ten_thousand_vertices_few_rows_are_drawn(reader: Any, mock: Mock) -> None:
    page = reader.open("jobs/large/fleet")
    page.locator(".fleet-line strong").first.wait_for()
    assert page.locator(".line").count() < 200
    page.locator("[aria-label=Vertices]").focus()
    page.keyboard.press("End")
    page.get_by_text("rollout-7498", exact=True).first.wait_for()


def test_sessions_are_told_where_they_are(reader: Any, job: str, mock: Mock) -> None:
    page = reader.open(f"jobs/{job}/fleet")
    section = page.get_by_role("region", name="Sessions")
    section.get_by_text(
        "12 sessions run on 2 workers: 5 at an engine, 7 with an agent or its tools."
    ).wait_for()
    section.locator("summary").click()
    section.get_by_text("the grader has no GPU").wait_for()


def test_a_row_of_a_session_is_a_conversation(reader: Any, job: str, mock: Mock) -> None:
    page = reader.open(f"jobs/{job}/tokens?step=300&group=30000&sample=7")
    section = page.get_by_role("region", name="Conversation")
    section.get_by_text("ended as truncated: it had its 2 turns").wait_for()
    parts = section.locator("li button").all_inner_texts()
    assert [part.split(":")[0].split(" by")[0] for part in parts] == [
        "Turn 1, drawn",
        "Turn 2, put there",
        "Turn 2, drawn",
    ]
    section.locator("li button").nth(1).click()
    page.locator(".t.chosen.masked").wait_for()
    page.locator(".joint", has_text="put there, turn 2").wait_for()
    page.goto(page.url.replace("sample=7", "sample=0"))
    page.locator("main h1", has_text="Sample 0").wait_for()
    assert page.get_by_role("region", name="Conversation").count() == 0


def test_false_alarms_are_counted_beside_their_vertex(reader: Any, job: str, mock: Mock) -> None:
    page = reader.open(f"jobs/{job}/fleet")
    page.locator("main .vertex-line strong").first.wait_for()
    lines = page.locator("main .vertex-line", has_text="false alarm").all_inner_texts()
    assert [("actor-1" in line, "2 false alarms" in line) for line in lines] == [(True, True)]


def test_a_view_that_was_never_open_opens_while_the_server_is_away(reader: Any, job: str, mock: Mock) -> None:
    page = reader.open(f"jobs/{job}/now")
    page.wait_for_function(
        "() => performance.getEntriesByName(new URL('assets/AccountView.js', document.baseURI)).length"
    )
    mock.behave(away=True)
    page.locator(".away").wait_for()
    page.locator(".views a", has_text="Account").click()
    page.locator("main h1", has_text="Account").wait_for()


def test_jobs_are_compared_from_their_list(reader: Any, mock: Mock) -> None:
    page = reader.open("jobs")
    page.get_by_label("Compare grpo-math").check()
    page.get_by_label("Compare ppo-code").check()
    page.get_by_role("button", name="Compare 2").click()
    page.locator("main .chart canvas").first.wait_for()
    page.get_by_text("config.algorithm").wait_for()
    assert page.get_by_role("region", name="Outcomes").locator("tbody tr").count() == 2
    assert reader.errors == []
