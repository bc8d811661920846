"""A real job begins with another one's weights, whoever of it is killed at its beginning."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gyre.api.handle import JobHandle
from gyre.api.home import home
from gyre.store import open_store
from tests.kill.conftest import Run

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]

STEPS = 4


GANG: dict[str, Any] = {"actor": ("gyre.workloads.megatron", "MegatronActor"), "stall_timeout_s": 60.0}


@pytest.fixture
def source(kill_home: Path, undisturbed_digest: str, tmp_path: Path) -> tuple[str, str, Path]:
    """The undisturbed job, the name of its newest checkpoint, and a copy of that."""
    with open_store(home(kill_home).database_url()) as store:
        job = store.job("undisturbed").job_id
    (newest,) = sorted(home(kill_home).job_directory(job).glob("checkpoints/step_*"))[-1:]
    shutil.copytree(newest, tmp_path / "source")
    return job, newest.name, tmp_path / "source"


def test_killed_at_its_beginning_it_begins_with_the_same_weights_again_also_those_of_another_back_end(
    start: Callable[..., Run], source: tuple[str, str, Path], undisturbed_digest: str
) -> None:
    """Optimizer, data position and ledger begin anew: all prompts of its steps are drawn, none is that job's. A gang of
    Megatron's begins with plain torch's weights, and the other way round."""
    before, checkpoint, copy = source
    calm = start(steps=STEPS, from_=copy)
    digest = calm.end(steps=STEPS)["job"]["result"]["digest"]
    run = start(steps=STEPS, from_="undisturbed")
    shutil.rmtree(copy)
    victims = [run.faults.kill(name)[0] for name in ("actor-0", "trainer-0", "master", "actor-1")]
    assert len({victim.pid for victim in victims}) == 4
    view = run.end(steps=STEPS)
    assert view["job"]["result"]["digest"] == digest != undisturbed_digest
    first = next(event for event in run.handle.events() if event["kind"] == "JobSubmitted")
    assert first["body"]["weights_from"] == f"job {before}, {checkpoint}"
    with closing(JobHandle(before, run.handle.store_url)) as undisturbed:
        theirs = published(undisturbed)
    assert first_version(calm) == first_version(run)
    assert first_version(run)["checksum"] == theirs[-1]["checksum"] != theirs[0]["checksum"]

    megatron = start(steps=2, from_="undisturbed", **GANG)
    megatron.end(steps=2)
    assert first_version(megatron) == first_version(calm)
    last = last_version(megatron)
    assert last["checksum"] != first_version(megatron)["checksum"], "it was trained"
    back = start(steps=1, from_=megatron.handle.job_id)
    back.end(steps=1)
    assert first_version(back)["checksum"] == last["checksum"]


def first_version(run: Run) -> dict[str, Any]:
    return published(run.handle)[0]


def last_version(run: Run) -> dict[str, Any]:
    return published(run.handle)[-1]


def published(handle: JobHandle) -> list[dict[str, Any]]:
    """Versions and checksums, in order."""
    bodies = [event["body"] for event in handle.events() if event["kind"] == "WeightsPublished"]
    return [{key: body[key] for key in ("version", "checksum", "size_bytes")} for body in bodies]
