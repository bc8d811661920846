"""A real job begins with another one's weights, whoever of it is killed at its beginning."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gyre.api.home import home
from gyre.store import open_store
from tests.kill.conftest import Run

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(300)]

STEPS = 4


def test_killed_at_its_beginning_it_begins_with_the_same_weights_again(
    start: Callable[..., Run], kill_home: Path, undisturbed_digest: str, tmp_path: Path
) -> None:
    """Optimizer, data position and ledger begin anew: all prompts of its steps are drawn, none is that job's."""
    with open_store(home(kill_home).database_url()) as store:
        before = store.job("undisturbed").job_id
    source = tmp_path / "source"
    (newest,) = sorted(home(kill_home).job_directory(before).glob("checkpoints/step_*"))[-1:]
    shutil.copytree(newest, source)
    calm = start(steps=STEPS, from_=source)
    digest = calm.end(steps=STEPS)["job"]["result"]["digest"]
    run = start(steps=STEPS, from_="undisturbed")
    shutil.rmtree(source)
    victims = [run.faults.kill(name)[0] for name in ("actor-0", "trainer-0", "master", "actor-1")]
    assert len({victim.pid for victim in victims}) == 4
    view = run.end(steps=STEPS)
    assert view["job"]["result"]["digest"] == digest != undisturbed_digest
    assert start(steps=STEPS).end(steps=STEPS)["job"]["result"]["digest"] != digest, "it begins otherwise"
    first = next(event for event in run.handle.events() if event["kind"] == "JobSubmitted")
    assert first["body"]["weights_from"] == f"job {before}, {newest.name}"
    assert first_version(calm) == first_version(run)


def test_a_gang_of_megatron_s_begins_with_plain_torch_s_weights_and_the_other_way_round(
    start: Callable[..., Run], undisturbed_digest: str
) -> None:
    plain = start(steps=1, from_="undisturbed")
    plain.end(steps=1)
    gang = {"actor": ("gyre.workloads.megatron", "MegatronActor"), "stall_timeout_s": 60.0}
    megatron = start(steps=2, from_="undisturbed", **gang)
    megatron.end(steps=2)
    assert first_version(megatron) == first_version(plain)
    last = last_version(megatron)
    assert last["checksum"] != first_version(megatron)["checksum"], "it was trained"
    back = start(steps=1, from_=megatron.handle.job_id)
    back.end(steps=1)
    assert first_version(back)["checksum"] == last["checksum"]


def first_version(run: Run) -> dict[str, Any]:
    return published(run)[0]


def last_version(run: Run) -> dict[str, Any]:
    return published(run)[-1]


def published(run: Run) -> list[dict[str, Any]]:
    """Versions and checksums, in order."""
    bodies = [event["body"] for event in run.handle.events() if event["kind"] == "WeightsPublished"]
    return [{key: body[key] for key in ("version", "checksum", "size_bytes")} for body in bodies]
