"""A real job with one instance and a spare: whoever is killed, samples go on within seconds, and nothing is lost."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from gyre.api.home import home
from gyre.config import SPARE_ROLLOUT
from tests.kill.conftest import Run
from tests.kill.test_kills import engine_of

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(180)]

STEPS = 24
SPARE = f"{SPARE_ROLLOUT}-0"
SERVES_WITHIN_S = 3.0
ENGINE = "the engine of rollout-0"
PATIENCE = 5.0
"""How many times as long a busy machine may take."""

Engines = dict[str, dict[str, Any]]


class Plane:
    """The rollout plane of a job as its manager says that it is."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def engines(self) -> Engines:
        try:
            where = json.loads((self._directory / "rollouts.json").read_text())
            headers = {"Authorization": f"Bearer {where['secret']}"}
            status = httpx.get(
                f"{where['url']}/v1/status", headers=headers, timeout=5.0, trust_env=False
            ).json()
        except (httpx.HTTPError, OSError, ValueError):  # it is being replaced, or not there yet
            return {}
        return {one["instance"]: one for one in status["instances"]}

    def until(self, holds: Callable[[Engines], bool], what: str, within_s: float = 60.0) -> Engines:
        end = time.monotonic() + within_s
        while time.monotonic() < end:
            if holds(found := self.engines()):
                return found
            time.sleep(0.01)
        raise AssertionError(f"{what} within {within_s} s did not come: {self.engines()}")

    def at_work(self) -> Engines:
        """The instance generates, and the spare waits with the version that is served."""

        def holds(found: Engines) -> bool:
            if not {"rollout-0", SPARE} <= found.keys():
                return False
            instance, spare = found["rollout-0"], found[SPARE]
            waits = spare["not_admitted"] == "spare" and not spare["samples"]
            return bool(instance["samples"]) and waits and spare["version"] == instance["version"]

        return self.until(holds, "an instance at work beside a spare")


def test_a_spare_takes_over_within_seconds_and_nothing_is_lost(
    start: Callable[..., Run], kill_home: Path
) -> None:
    # Generating takes longer than training, so that there is always something to take over.
    run = start(steps=STEPS, slack=4, rollout_total=1, actors=1, rollouts={"spares": 1, "max_running": 1})
    plane = Plane(home(kill_home).job_directory(run.handle.job_id))
    took = {}
    for victims in (("rollout-0",), (SPARE,), (ENGINE,), ("rollout-0", "master")):
        run.faults.reach_step(run.handle.status()["job"]["step"] + 1)
        before = plane.at_work()[SPARE]["tokens"]
        if ENGINE in victims:
            killed = []
            engine_of(run.faults.find("rollout-0")).kill()
        else:
            killed = run.faults.kill(*victims)
        died_at = time.monotonic()
        if SPARE not in victims:
            plane.until(
                lambda found, before=before: SPARE in found and found[SPARE]["tokens"] > before,
                "a token of the spare",
                SERVES_WITHIN_S * PATIENCE,
            )
            took[victims] = time.monotonic() - died_at
        for one in killed:
            run.faults.replaced(one)
    print({" and ".join(victims): round(seconds, 2) for victims, seconds in took.items()})
    plane.until(
        lambda found: (
            [found[name]["not_admitted"] for name in ("rollout-0", SPARE) if name in found] == ["", "spare"]
        ),
        "a successor that serves beside a spare that waits",
    )
    view = run.end(steps=STEPS)
    changed = [event["body"] for event in run.handle.events() if event["kind"] == "RolloutsChanged"]
    promoted = [body["details"] for body in changed if body["what"] == "SparePromoted"]
    assert {tuple(one["missing"]) for one in promoted} == {("rollout-0",)}
    assert len(promoted) >= 3
    assert [body for body in changed if body["what"] == "SpareRelieved"]
    assert {one["vertex"] for one in view["incidents"]} == {"rollout-0", SPARE, "master"}
