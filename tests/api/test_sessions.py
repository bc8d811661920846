"""The cookie of the page: made from the token, good for a while, and never more than the token."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from gyre.api.rest import create_app
from gyre.api.rest.sessions import SessionCookies
from tests.api.conftest import Connect
from tests.doubles.standing_job import StandingJob

JOB = "/api/v1/jobs/small"
SAME = {"sec-fetch-site": "same-origin"}


def header(cookies: SessionCookies, value: str) -> bytes:
    return f"other=1; {cookies.name}={value}".encode()


def test_a_cookie_is_good_until_its_end() -> None:
    cookies = SessionCookies(b"secret", lasts_s=100.0)
    shown = header(cookies, cookies.make(1000.0))
    assert cookies.is_valid(shown, 1099.0)
    assert not cookies.is_valid(shown, 1100.0)
    assert b"secret" not in shown


def test_it_is_good_after_a_restart_and_not_under_another_token() -> None:
    made = SessionCookies(b"secret")
    value = made.make(1000.0)
    assert SessionCookies(b"secret").is_valid(header(made, value), 1001.0)
    other = SessionCookies(b"other")
    assert other.name != made.name
    assert not other.is_valid(f"{other.name}={value}".encode(), 1001.0)


@pytest.mark.parametrize("value", ["", ".", "9999999999.", "x.y", "9999999999." + "0" * 64, "-1.aa", "٣.a"])
def test_no_other_value_is_good(value: str) -> None:
    cookies = SessionCookies(b"secret")
    assert not cookies.is_valid(header(cookies, value), 1.0)


def test_a_later_end_needs_another_mac() -> None:
    cookies = SessionCookies(b"secret", lasts_s=1.0)
    _, _, mac = cookies.make(1000.0).partition(".")
    assert not cookies.is_valid(header(cookies, f"9999999999.{mac}"), 1000.0)


@pytest.fixture
def guarded(job: StandingJob, connect: Connect) -> Iterator[httpx.Client]:
    with connect(create_app(job.master, token="secret"), "http://job.example") as client:
        yield client


def test_the_token_once_and_then_the_cookie(guarded: httpx.Client) -> None:
    assert guarded.get(JOB).status_code == 401
    answer = guarded.post("/api/v1/session", json={"token": "secret"}, headers=SAME)
    assert answer.status_code == 200
    set_cookie = answer.headers["set-cookie"].lower()
    assert "httponly" in set_cookie
    assert "samesite=strict" in set_cookie
    assert guarded.get(JOB).status_code == 200
    assert guarded.post(f"{JOB}:pause", headers=SAME).status_code == 202
    assert guarded.delete("/api/v1/session", headers=SAME).status_code == 200
    assert guarded.get(JOB).status_code == 401


def test_a_wrong_token_gets_no_cookie(guarded: httpx.Client) -> None:
    answer = guarded.post("/api/v1/session", json={"token": "guess"}, headers=SAME)
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"sec-fetch-site": "cross-site"},
        {"origin": "https://evil.example"},
        {"origin": "null"},
    ],
)
def test_a_change_by_cookie_says_where_it_comes_from(guarded: httpx.Client, headers: dict[str, str]) -> None:
    guarded.post("/api/v1/session", json={"token": "secret"}, headers=SAME)
    answer = guarded.post(f"{JOB}:pause", headers=headers)
    assert answer.status_code == 403
    assert guarded.post(f"{JOB}:pause", headers={"origin": "http://job.example"}).status_code == 202


def test_another_site_cannot_open_a_session(guarded: httpx.Client) -> None:
    answer = guarded.post(
        "/api/v1/session", json={"token": "secret"}, headers={"sec-fetch-site": "cross-site"}
    )
    assert answer.status_code == 403


def test_without_a_token_there_is_nothing_to_show(http: httpx.Client) -> None:
    assert http.post("/api/v1/session", json={"token": "any"}).json()["needs_token"] is False
