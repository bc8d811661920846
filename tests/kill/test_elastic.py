"""A real job scales its rollouts by itself: more while the trainer waits for them, fewer while they stand idle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gyre.api.home import home
from gyre.rollouts.trainer.sample_ledger import account_of
from gyre.store import open_store
from tests.kill.conftest import Run

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]


def test_a_backlog_brings_an_instance_and_idleness_drains_it_and_nothing_is_lost(
    start: Callable[..., Run], kill_home: Path
) -> None:
    run = start(
        steps=20_000,  # until the test has seen enough, and stops it
        rollouts={"max_running": 1},  # so that they are what the trainer waits for
        rollout_total=1,
        # However busy the machine is: that is no matter of this test.
        elastic={"min": 1, "max": 2, "up_cooldown_s": 1.2, "down_cooldown_s": 2.0, "cores_full": 2.0},
        reward="SwitchedReward",
        actors=1,
    )
    slow = home(kill_home).job_directory(run.handle.job_id) / "slow"

    def rollouts(view: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {vertex["id"]: vertex for vertex in view["vertices"] if vertex["role"] == "rollout"}

    def both_serve(view: dict[str, Any]) -> bool | None:
        found = rollouts(view)
        return True if len(found) == 2 and found["rollout-1"]["version"] is not None else None

    run.faults.until(both_serve, "a second instance", timeout_s=300.0)
    slow.touch()
    # What is said of it then: once work comes again, it may be started again.
    gone = run.faults.until(
        lambda view: one if (one := rollouts(view)["rollout-1"])["phase"] == "stopped" else None,
        "the second instance gone",
        timeout_s=300.0,
    )
    slow.unlink()
    step = run.handle.status()["job"]["step"]
    run.faults.reach_step(step + 2)  # the one that is left does it all
    run.handle.stop("seen enough")
    view = run.handle.wait(60.0)
    assert view["job"]["phase"] == "stopped"
    assert view["incidents"] == []

    events = list(run.handle.events())
    advices = [event["body"] for event in events if event["kind"] == "ScaleAdvised"]
    followed = [(advice["seen"], advice["count"]) for advice in advices]
    assert followed[:2] == [(1, 2), (2, 1)]
    assert "waited" in advices[0]["reason"]
    assert advices[0]["possible"] == 2
    assert "idle" in advices[1]["reason"]
    assert gone["message"] == advices[1]["reason"]
    left = [
        event["body"]["details"]
        for event in events
        if event["kind"] == "RolloutsChanged" and event["body"]["what"] == "InstanceLeft"
    ]
    assert ("rollout-1", "drained") in {(one["instance"], one["reason"]) for one in left}
    with open_store(run.handle.store_url) as store:
        account = account_of(store.ledger(run.handle.job_id))
        assert account.trained >= 16 * (step + 2), "the steps that were waited for are not in the ledger"
        assert account.lost == ()
        assert account.trained_twice == ()
        counters = store.rollouts(run.handle.job_id).load().counters
    assert counters["generated"] >= counters["delivered"] > 0
    assert set(counters["discarded"]) <= {"withdrawn"}
