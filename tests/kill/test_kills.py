"""Real kills on a real Ray cluster. Whatever dies, the job ends with the very weights of an undisturbed run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import psutil
import pytest

from gyre.testing.processes import Victim
from tests.kill.conftest import Run

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.timeout(240)]

Start = Callable[..., Run]


DEATHS = (
    (2, "rollout-0", "vertex"),
    (4, "actor-0", "region"),
    (6, "trainer-0", "vertex"),
    (8, "rollout_manager-0", "vertex"),
    (11, "reward-0", "vertex"),
    (13, "actor-1", "region"),
    (16, "trainer-0", "vertex"),
)
"""After which step, between two checkpoints, who is killed, and what is started anew for it. The trainer twice: what it
restored from is restored from again."""


def test_a_killed_vertex_is_replaced_and_the_weights_come_out_the_same(
    start: Start, undisturbed_digest: str
) -> None:
    """One of each kind, and each rank of the gang, each when the last is back."""
    run = start()
    for step, name, _ in DEATHS:
        run.faults.reach_step(step)
        (victim,) = run.faults.kill(name)
        assert run.faults.replaced(victim).pid != victim.pid
    view = run.end()
    assert view["job"]["result"]["digest"] == undisturbed_digest
    assert [(one["vertex"], one["scope"]) for one in view["incidents"]] == [death[1:] for death in DEATHS]
    for incident in view["incidents"]:
        assert incident["cause"] == "process_died"
        assert incident["evidence"]["error"]
        assert incident["recovery_s"] is not None


def engine_of(agent: Victim) -> psutil.Process:
    """The process that serves under it; its guard has the same words in its command, and others."""
    for child in psutil.Process(agent.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # a child that came and went
            words = child.cmdline()
            if "gyre.rollouts.engines.embedded" in words and not any("guard.py" in word for word in words):
                return child
    raise AssertionError(f"{agent} has no engine")


def test_a_killed_engine_and_a_killed_master_take_no_vertex_along(
    start: Start, undisturbed_digest: str
) -> None:
    """The engine is started again under the same agent; the master takes over again, and the data plane goes on."""
    run = start()
    run.faults.reach_step(3)

    def serves(view: dict[str, Any]) -> bool | None:  # on a busy machine it may still be starting
        return next(
            (True for v in view["vertices"] if v["id"] == "rollout-1" and v["version"] is not None), None
        )

    run.faults.until(serves, "rollout-1 serving", timeout_s=30.0)
    agent = run.faults.find("rollout-1")
    engine_of(agent).kill()
    run.faults.reach_step(8)
    (victim,) = run.faults.kill("master")
    successor = run.faults.replaced(victim)
    view = run.end()
    assert successor.incarnation == victim.incarnation + 1
    assert view["job"]["result"]["digest"] == undisturbed_digest
    assert [vertex["incarnation"] for vertex in view["vertices"]] == [1] * len(view["vertices"])
    told = [event["body"] for event in run.handle.events() if event["kind"] == "RolloutsChanged"]
    (death,) = (body["details"] for body in told if body["what"] == "EngineDied")
    assert death["instance"] == "rollout-1"
    assert death["error"]


def test_a_rollout_class_of_the_users_is_called_again_elsewhere(start: Start) -> None:
    run = start(steps=10, own_rollouts=True)
    run.faults.reach_step(4)
    (victim,) = run.faults.kill("rollout-0")
    run.faults.replaced(victim)
    run.end(steps=10)


def test_many_killed_at_once(start: Start, undisturbed_digest: str) -> None:
    """First those two that know the job, then every process that it has."""
    run = start(rollout_total=1)
    for step, names in (
        (6, ("trainer-0", "master")),
        (
            12,
            (
                "rollout-0",
                "rollout_manager-0",
                "reward-0",
                "actor-0",
                "actor-1",
                "trainer-0",
                "master",
            ),
        ),
    ):
        run.faults.reach_step(step)
        for victim in run.faults.kill(*names):
            run.faults.replaced(victim)
    view = run.end()
    assert view["job"]["result"]["digest"] == undisturbed_digest


def test_a_stopped_process_is_found_and_replaced(start: Start, undisturbed_digest: str) -> None:
    """A vertex by the master, and the master by its vertices, which end it."""
    names = ("actor-1", "trainer-0", "rollout-0", "master")
    run = start(rollout_total=1)
    for turn, name in enumerate(names):
        run.faults.reach_step(3 + 4 * turn)
        run.faults.replaced(run.faults.stop(name))
    view = run.end()
    assert view["job"]["result"]["digest"] == undisturbed_digest
    for name in names:
        (incident,) = run.incidents_of(view, name)
        assert incident["cause"] == "silent"
        assert "stopped" in incident["evidence"]["stack"]  # the kernel's word for its state
        if name != "master":
            assert 3.0 <= incident["detected_after_s"] < 15.0  # and not by the 20 s of a stall
            assert "host.py" in incident["evidence"]["stack"] or "Thread" in incident["evidence"]["stack"]


def test_a_job_behind_its_weights_survives_kills_too(start: Start) -> None:
    """With staleness permitted the weights may differ from run to run; the account may not."""
    run = start(steps=12, max_staleness=2, rollout_total=1)
    run.faults.reach_step(4)
    for victim in run.faults.kill("rollout-0", "actor-0"):
        run.faults.replaced(victim)
    run.faults.kill("trainer-0")
    view: dict[str, Any] = run.end(steps=12)
    lags = [
        event["body"]["metrics"]["staleness_max"]
        for event in run.handle.events()
        if event["kind"] == "StepCompleted"
    ]
    assert max(lags) <= 2
    assert view["job"]["step"] == 12
