"""Streamed micro-batches and asynchronous steps, with real processes that are killed: what is recorded is trained."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import sqlalchemy as sa

from gyre.store import open_store
from tests.kill.conftest import Run

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]

Start = Callable[..., Run]
STEPS = 16


def recorded(run: Run) -> dict[int, list[tuple[int, ...]]]:
    """By step, the groups of each micro-batch."""
    query = "SELECT step, shares FROM gyre_ledger_micro_batches WHERE job_id = :job ORDER BY step, position"
    with open_store(run.handle.store_url, read_only=True) as store, store._database.read() as connection:
        rows = connection.execute(sa.text(query), {"job": run.handle.job_id}).all()
    found: dict[int, list[tuple[int, ...]]] = {}
    for step, shares in rows:
        found.setdefault(step, []).append(tuple(sorted(g for share in json.loads(shares) for g in share)))
    return found


def test_trainer_gang_and_manager_are_killed_under_asynchronous_steps(start: Start) -> None:
    """Replays come to the checksums that the ledger has: the gang is killed between two checkpoints."""
    run = start(
        steps=STEPS,
        max_staleness=2,
        staleness="drop",
        run={"micro_batches": "streamed", "groups_per_micro_batch": 6, "groups_per_firing": 4},
    )
    before: dict[int, list[tuple[int, ...]]] = {}
    for turn, name in enumerate(("actor-1", "trainer-0", "rollout_manager-0")):
        run.faults.reach_step(3 + 5 * turn)
        before |= recorded(run)
        (victim,) = run.faults.kill(name)
        assert run.faults.replaced(victim).pid != victim.pid
    view = run.end(steps=STEPS)

    batches = recorded(run)
    assert list(batches) == list(range(1, STEPS + 1))
    for step, made in batches.items():
        assert len({group for batch in made for group in batch}) == 16
        assert all(1 <= len(batch) <= 6 for batch in made)
        assert made[: len(before.get(step, []))] == before.get(step, []), "recorded, and then something else"
    assert sorted(group for made in batches.values() for batch in made for group in batch) == list(
        range(16 * STEPS)
    )
    told = [event["body"] for event in run.handle.events()]
    assert not [body for body in told if "replaying step" in str(body.get("error", ""))]
    metrics: list[dict[str, Any]] = [body["metrics"] for body in told if "metrics" in body]
    assert all(0 <= one["staleness_max"] <= 2 for one in metrics)
    assert max(one["staleness_max"] for one in metrics) > 0, "nothing ever ran ahead"
    assert view["progress"]["tokens_discarded"] == view["job"]["result"]["tokens_discarded"]
