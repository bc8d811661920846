"""A real job whose trainer's device generates too, between its steps; and whatever is killed inside a window."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre.api.home import home
from tests.kill.conftest import Run

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]

STEPS = 24
WITH_LOCAL = {"rollouts": {"local": 1, "max_running": 1}, "rollout_total": 1, "actors": 1}
"""So that generating takes longer than training, however busy the machine is."""


def windows(run: Run) -> list[dict[str, Any]]:
    told = [event["body"] for event in run.handle.events() if event["kind"] == "RolloutsChanged"]
    return [body["details"] for body in told if body["what"] == "WindowClosed"]


def until_open(run: Run, directory: Path, within_s: float = 60.0) -> None:
    """A window in which the local instance is at work."""
    end = time.monotonic() + within_s
    while time.monotonic() < end:
        try:
            where = json.loads((directory / "rollouts.json").read_text())
            headers = {"Authorization": f"Bearer {where['secret']}"}
            status = httpx.get(f"{where['url']}/v1/status", headers=headers, timeout=5.0).json()
            local = [one for one in status["instances"] if one["instance"].startswith("local_rollout-")]
            if status["local_window"]["state"] == "open" and any(one["samples"] for one in local):
                return
        except (httpx.HTTPError, OSError, ValueError, KeyError):
            pass  # the manager is being replaced
        time.sleep(0.01)
    raise AssertionError(f"no window within {within_s} s")


def test_the_trainer_s_device_generates_and_whoever_dies_in_a_window_costs_nothing(
    start: Callable[..., Run], kill_home: Path
) -> None:
    # Each of the steps to the gate has a window that may be caught open.
    run = start(steps=STEPS, slack=10, **WITH_LOCAL)
    directory = home(kill_home).job_directory(run.handle.job_id)
    for turn, name in enumerate(("local_rollout-0", "rollout_manager-0", "trainer-0")):
        run.faults.reach_step(2 + 2 * turn)
        until_open(run, directory)
        (victim,) = run.faults.kill(name)
        run.faults.replaced(victim)
    view = run.end(steps=STEPS)
    closed = windows(run)
    assert len(closed) >= 10
    assert sum(one["tokens"] for one in closed) > 0
    assert all(one["reason"] for one in closed)
    assert {i["vertex"] for i in view["incidents"]} == {"local_rollout-0", "rollout_manager-0", "trainer-0"}
