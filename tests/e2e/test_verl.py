"""verl's own trainer over a Gyre fleet, in an environment of its own (`make test-long PART=verl`), on CPUs: its
processes are killed while samples are in flight, one joins, and verl resumes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import ENDS_WITHIN_S, Shared
from tests.e2e.fleets import Fleet, fleet_on
from tests.e2e.verl_job import (
    GROUPS,
    PYTHON,
    ROOT,
    SAMPLES,
    Followed,
    Records,
    Trained,
    make_place,
    over_fleet,
    stop,
)

BATCH = GROUPS * SAMPLES

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
def records(place: Path) -> Records:
    """Of all runs over the fleet."""
    return Records(place / "records")


@pytest.fixture(scope="module")
def fleet(shared: Shared, place: Path) -> Iterator[Fleet]:
    with fleet_on(shared, place / "model", "for-verl", place) as fleet:
        yield fleet


def verl(fleet: Fleet, place: Path, steps: int, **options: Any) -> subprocess.Popen[str]:
    return over_fleet(place, f"{fleet.shared.home}/v", steps, url=fleet.url, key=fleet.key, **options)


async def test_verl_trains_while_the_fleet_is_killed_and_goes_on_where_it_was(
    fleet: Fleet, place: Path, shared: Shared, records: Records
) -> None:
    faults = ProcessFaults(fleet.handle)
    async with aiohttp.ClientSession() as fleet.session:
        await fleet.healthy()
    process = verl(fleet, place, 6, records=records)
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
    again = verl(fleet, place, 8, records=records)
    try:
        later = Followed(again)
        later.ends()
    finally:
        stop(again)
    assert sorted(later.steps()) == [7, 8]
    each_prompt_was_trained_once(records.trained("checkpoints"), steps=8)
    await everything_is_accounted_for(fleet, place, records, steps={"checkpoints": 8}, starts=2)


async def test_an_instance_gets_the_version_of_a_trainer_that_is_gone(
    fleet: Fleet, place: Path, shared: Shared, records: Records
) -> None:
    """verl serves its versions itself, and ends: no folder is shared, and whoever joins then has them from others."""
    async with aiohttp.ClientSession() as fleet.session:
        await fleet.healthy()
        before = await policies(fleet)
        process = verl(fleet, place, 3, on_plane=True, checkpoints="other", records=records)
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
    each_prompt_was_trained_once(records.trained("other"), steps=3)
    others = len(records.trained("checkpoints")) // BATCH  # 0 where this test runs alone
    await everything_is_accounted_for(
        fleet, place, records, steps={"other": 3} | ({"checkpoints": others} if others else {}), starts=3
    )


def each_prompt_was_trained_once(rows: Sequence[Trained], *, steps: int) -> None:
    """By verl's own record of its steps: each has all of its groups, whole, and no prompt comes twice."""
    assert [one.step for one in rows] == [step for step in range(1, steps + 1) for _ in range(BATCH)]
    groups: dict[str, list[Trained]] = {}
    for one in rows:
        groups.setdefault(one.uid, []).append(one)
    assert len(groups) == steps * GROUPS, "a group was trained twice"
    for group in groups.values():
        assert sorted(one.sample for one in group) == list(range(SAMPLES))
        assert len({(one.step, one.prompt) for one in group}) == 1
    assert len({group[0].prompt for group in groups.values()}) == len(groups), "a prompt was trained twice"


async def everything_is_accounted_for(
    fleet: Fleet, place: Path, records: Records, *, steps: dict[str, int], starts: int
) -> None:
    """All of verl's runs so far, each up to one of its `steps`, in so many `starts`: every request is answered once,
    every row that verl trained is one of the answers, and every token that was generated is in an answer, or kept for
    one. A start leaves a batch ahead of training, which the run that goes on asks for again where it was not whole."""
    trained = [one for run in steps for one in records.trained(run)]
    asked, answered = records.asked(), records.answered()
    told = dict(answered)
    assert len(trained) == sum(steps.values()) * BATCH
    assert len(asked) == len(set(asked)), "verl asked for one sample twice"
    assert len(answered) == len(told), "a request was answered twice"
    assert set(told) <= set(asked)
    assert len(steps) * BATCH <= len(asked) - len(trained) <= starts * BATCH
    tokenizer = Tokenizer.from_file(str(place / "model" / "tokenizer.json"))
    texts = Counter(tokenizer.decode(ids, skip_special_tokens=True) for ids in told.values())
    assert not Counter(one.text for one in trained) - texts, "verl trained what was not answered, or twice"
    async with aiohttp.ClientSession() as fleet.session:
        account = await fleet.settled()
        kept = {one: tokens for one in asked if (tokens := await fleet.kept(one)) is not None}
    assert set(asked) <= set(told) | set(kept), "a request is neither answered nor there"
    assert all(kept[one] == len(told[one]) for one in kept if one in told)
    assert account["missing"] == 0
    assert set(account["discarded"]) <= {"superseded"}
    assert account["delivered"] == sum(len(ids) for one, ids in told.items() if one not in kept) > 0
    assert account["in_flight"] == sum(kept.values())
    discarded = sum(account["discarded"].values())
    assert account["generated"] == account["delivered"] + account["in_flight"] + discarded


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
