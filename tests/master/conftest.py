"""A job under the real master, over a fake cluster, in virtual time. After every test the fold is the snapshot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.master.lives import Job


@pytest.fixture
def make_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    made: list[Job] = []

    def make(**knobs: Any) -> Job:
        job = Job(tmp_path / f"job{len(made)}", **knobs)
        made.append(job)
        return job

    yield make
    for job in made:
        job.check()
    for job in made:
        job.store.close()


@pytest.fixture
def job(make_job: Callable[..., Job]) -> Job:
    return make_job()
