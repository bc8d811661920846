"""The jobs of a store over REST, without any master: what `gyre ui` serves."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from gyre.api.home import Home
from gyre.api.reader import JobReader
from gyre.api.rest.app import create_store_app
from gyre.api.stored_jobs import StoredJobs
from tests.api.conftest import Connect, Seed


@pytest.fixture
def served(home: Home, seed: Seed, connect: Connect) -> Iterator[httpx.Client]:
    url = seed("actor_lost")
    with JobReader(url, at=home) as reader, connect(create_store_app(StoredJobs(reader), token=None)) as http:
        yield http


def test_the_list_has_every_job_of_the_store(served: httpx.Client) -> None:
    jobs = served.get("/api/v1/jobs").json()["jobs"]
    assert [job["job_id"] for job in jobs] == ["golden-1"]


@pytest.mark.parametrize(
    "view", ["", "/graph", "/spec", "/vertices", "/engines", "/incidents", "/metrics", "/now"]
)
def test_every_view_is_there_when_the_cluster_is_gone(served: httpx.Client, view: str) -> None:
    answer = served.get(f"/api/v1/jobs/golden-1{view}")
    assert answer.status_code == 200, answer.text


def test_the_account_counts_no_prompt_as_lost(served: httpx.Client) -> None:
    account = served.get("/api/v1/jobs/golden-1/account").json()
    assert account["prompts"]["lost"] == account["prompts"]["twice"] == 0


def test_the_history_is_paged(served: httpx.Client) -> None:
    page = served.get("/api/v1/jobs/golden-1/events", params={"limit": 3}).json()
    assert [event["seq"] for event in page["events"]] == [1, 2, 3]
    assert page["more"]


def test_no_master_means_no_metrics_and_no_such_job_is_a_problem(served: httpx.Client) -> None:
    assert served.get("/metrics").status_code == 404
    assert served.get("/api/v1/jobs/grpp").json()["code"] == "not_found"
