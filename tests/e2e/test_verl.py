"""verl's own trainer over a Gyre fleet, in an environment of its own (`make test-long PART=verl`), on CPUs: its processes are
killed while samples are in flight, one joins, and verl resumes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gyre.rollouts.trainer.sample_ledger import account_of
from gyre.store import open_store
from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import ENDS_WITHIN_S, Shared
from tests.e2e.fleets import Fleet, fleet_on
from tests.e2e.verl_job import PYTHON, ROOT, Followed, make_place, over_fleet, stop

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.verl,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not PYTHON.exists(), reason="make test-long PART=verl makes verl's environment"),
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("verl"))


@pytest.fixture(scope="module")
def fleet(shared: Shared, place: Path) -> Iterator[Fleet]:
    with fleet_on(shared, place / "model", "for-verl", place) as fleet:
        yield fleet


def verl(fleet: Fleet, place: Path, steps: int, **options: Any) -> subprocess.Popen[str]:
    return over_fleet(place, f"{fleet.shared.home}/v", steps, url=fleet.url, key=fleet.key, **options)


async def test_verl_trains_while_the_fleet_is_killed_and_goes_on_where_it_was(
    fleet: Fleet, place: Path, shared: Shared
) -> None:
    faults = ProcessFaults(fleet.handle)
    async with aiohttp.ClientSession() as fleet.session:
        await fleet.healthy()
    process = verl(fleet, place, 6)
    joined = None
    try:
        followed = Followed(process)
        followed.until(r"step:1 ")
        (victim,) = faults.kill("rollout-0")
        followed.until(r"step:2 ")
        assert faults.replaced(victim, timeout_s=ENDS_WITHIN_S).pid != victim.pid
        joined = join(fleet, shared)
        followed.until(r"step:3 ")
        (victim,) = faults.kill("rollout_manager-0")
        followed.until(r"step:4 ")
        assert faults.replaced(victim, timeout_s=ENDS_WITHIN_S).pid != victim.pid
        followed.ends()
    finally:
        stop(process)
        if joined is not None:
            stop(joined)
    steps = followed.steps()
    assert sorted(steps) == [1, 2, 3, 4, 5, 6]
    assert steps[1]["training/rollout_probs_diff_max"] < 1e-5, "its log-probs are of other weights"
    for numbers in steps.values():
        assert numbers["training/off_policy/trajectory_staleness/max"] <= 2
    again = verl(fleet, place, 8)
    try:
        later = Followed(again)
        later.ends()
    finally:
        stop(again)
    assert sorted(later.steps()) == [7, 8]
    with open_store(fleet.handle.store_url) as store:
        account = account_of(store.ledger(fleet.handle.job_id))
    assert (account.lost, account.trained_twice) == ((), ())


async def test_an_instance_gets_the_version_of_a_trainer_that_is_gone(
    fleet: Fleet, place: Path, shared: Shared
) -> None:
    """verl serves its versions itself, and ends: no folder is shared, and whoever joins then has them from others."""
    async with aiohttp.ClientSession() as fleet.session:
        await fleet.healthy()
        before = await policies(fleet)
        process = verl(fleet, place, 3, on_plane=True, checkpoints="other")
        joined = None
        try:
            followed = Followed(process)
            await asyncio.to_thread(followed.ends)
            assert sorted(followed.steps()) == [1, 2, 3]
            for numbers in followed.steps().values():
                assert numbers["training/off_policy/trajectory_staleness/max"] <= 2
            newest = (before["newest"] or 0) + 4
            joined = join(fleet, shared)
            until = time.monotonic() + ENDS_WITHIN_S
            while (
                set((told := await policies(fleet))["instances"].values()) != {newest}
                or len(told["instances"]) < 3
            ):
                assert time.monotonic() < until, (newest, told)
                await asyncio.sleep(0.2)
        finally:
            stop(process)
            if joined is not None:
                stop(joined)


async def policies(fleet: Fleet) -> dict[str, Any]:
    assert fleet.session is not None
    async with fleet.session.get(
        f"{fleet.url}/v1/policies", headers={"Authorization": f"Bearer {fleet.key}"}
    ) as reply:
        assert reply.status == 200, await reply.text()
        told: dict[str, Any] = await reply.json()
        return told


def join(fleet: Fleet, shared: Shared) -> subprocess.Popen[str]:
    """An instance from elsewhere."""
    made = shared.gyre("token", "create", "for-verl", "--name", f"spot-{time.monotonic_ns()}")
    assert made.code == 0, made.err
    command = [sys.executable, "-m", "gyre.api", "join", fleet.url, "--token", made.out.strip()]
    return subprocess.Popen(
        [*command, "--engine", "embedded"],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GYRE_HOME": str(shared.home)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
