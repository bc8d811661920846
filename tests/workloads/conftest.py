"""Fixtures of the in-process runs: an empty store, made once and copied, and what an undisturbed run comes to."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gyre.store import StepRow, open_store
from gyre.testing.in_process import InProcessJob
from gyre.workloads.trainer import loop, retries
from tests.rank_pool import RankPool
from tests.waits import GENEROUS_S
from tests.workloads.toy_policy import toy_spec

MakeJob = Callable[..., InProcessJob]


@dataclass(frozen=True)
class Run:
    """What a run came to: its result, and every step's digest."""

    result: dict[str, Any]
    digests: dict[int, str | None]


def steps_of(job: InProcessJob) -> list[StepRow]:
    with job.ledger() as ledger:
        return ledger.load().steps


def digests_of(job: InProcessJob) -> dict[int, str | None]:
    return {row.step: row.digest for row in steps_of(job)}


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Three processes that may be a gang's."""
    made = RankPool(3, preload="tests.workloads.torch_workloads")
    yield made
    made.close()


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "gyre.db"
    open_store(f"sqlite:///{path}").close()
    return path


@pytest.fixture
def make_job(empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeJob]:
    """Jobs that are closed at the end, each in a folder and a store of its own."""
    monkeypatch.setattr(loop, "IDLE_POLL_S", 0.02)
    monkeypatch.setattr(retries, "RETRY_FIRST_S", 0.1)
    made: list[InProcessJob] = []

    def make(spec: dict[str, Any] | None = None, **changes: Any) -> InProcessJob:
        folder = tmp_path / f"job{len(made)}"
        folder.mkdir()
        shutil.copy(empty_store, folder / "gyre.db")
        given = spec or toy_spec(**changes)
        given = {**given, "failover": {"backoff_s": 0.0, **given.get("failover", {})}}
        made.append(InProcessJob(given, folder))
        return made[-1]

    yield make
    for job in made:
        job.close()


@pytest.fixture(scope="session")
def undisturbed(empty_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("undisturbed")
    shutil.copy(empty_store, folder / "gyre.db")
    with InProcessJob(toy_spec(), folder) as job:
        result = job.result(timeout_s=GENEROUS_S)
        return Run(result, digests_of(job))
