"""A standing job, and an app over its master, for every test of the surfaces."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from gyre.api.home import Home
from gyre.api.rest import create_app
from gyre.store import Entry, open_store
from tests.doubles.standing_job import StandingJob

with warnings.catch_warnings():
    # Starlette's test client has begun to ask for a fork of httpx; it works with either.
    warnings.simplefilter("ignore")
    from fastapi.testclient import TestClient

Connect = Callable[..., AbstractContextManager[httpx.Client]]


@pytest.fixture
def job() -> Iterator[StandingJob]:
    with StandingJob() as job:
        yield job


@pytest.fixture(scope="module")
def shared_job() -> Iterator[StandingJob]:
    """For tests that change nothing: a job costs 40 ms of CPU time."""
    with StandingJob() as job:
        yield job


@pytest.fixture
def shared_http(shared_job: StandingJob, connect: Connect) -> Iterator[httpx.Client]:
    with connect(create_app(shared_job.master, token=None)) as client:
        yield client
    assert shared_job.view()["seq"] == 8


@pytest.fixture
def golden() -> Iterator[StandingJob]:
    """A live job of the id that the seeded store knows."""
    with StandingJob(job_id="golden-1") as job:
        yield job


@pytest.fixture
def connect() -> Connect:
    """Makes a client of an app in this process, without a socket."""

    def to(app: FastAPI, base_url: str = "http://127.0.0.1") -> AbstractContextManager[httpx.Client]:
        return TestClient(app, base_url=base_url, raise_server_exceptions=False)

    return to


@pytest.fixture
def http(job: StandingJob, connect: Connect) -> Iterator[httpx.Client]:
    with connect(create_app(job.master, token=None)) as client:
        yield client


GOLDEN = Path(__file__).parents[1] / "failover" / "golden"
Seed = Callable[..., str]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Home:
    """A GYRE_HOME of this test's own, and no other address from the environment."""
    for name in ("GYRE_URL", "GYRE_TOKEN", "GYRE_STORE", "GYRE_CA", "GYRE_FINGERPRINT", "RAY_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GYRE_HOME", str(tmp_path))
    return Home(tmp_path)


@pytest.fixture
def seed(home: Home) -> Seed:
    """Writes a golden history into the home's store as a job; returns the store's url.

    `url` is its master's; `live` leaves the job open in the directory.
    """

    def write(
        name: str, *, url: str = "", live: bool = False, job_id: str = "golden-1", at: float = 1.0
    ) -> str:
        data = json.loads((GOLDEN / f"{name}.json").read_text())
        with open_store(home.database_url()) as store:
            store.create_job(job_id=job_id, name=data["spec"]["name"], spec=data["spec"], now=at)
            journal = store.journal(job_id)
            epoch = journal.take_over(now=at, pid=1)
            entries = [
                Entry(
                    seq=event["seq"],
                    event_id=event["id"],
                    cause=event["cause"],
                    kind=event["kind"],
                    at=event["at"],
                    actor=event["actor"],
                    body=event["body"],
                )
                for event in data["events"]
            ]
            rows = {(row["kind"], row["key"]): row["body"] for row in data["snapshot"]}
            entries[-1] = replace(entries[-1], upserts=rows)
            journal.append(epoch, entries)
            phase = rows["job", "job"]["phase"]
            store.update_job(job_id, phase=phase, url=url or None, ended_at=None if live else 2.0)
        return home.database_url()

    return write
