"""A real job with agents on a real Ray cluster. Whatever dies while sessions run, the job ends with the very weights of
an undisturbed run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gyre.api import RLJobBuilder
from gyre.api.demo import AGENT_CONFIG
from gyre.api.home import home
from gyre.rollouts.plane.stored_account import stored_account
from gyre.store import open_store
from gyre.testing.processes import ProcessFaults
from tests.kill.conftest import Run
from tests.kill.gate import Gate
from tests.kill.jobs import agent_job

pytestmark = [pytest.mark.ray, pytest.mark.kill, pytest.mark.slow, pytest.mark.timeout(480)]

STEPS = 12

DEATHS = (
    (1, "agent-0"),
    (3, "rollout_manager-0"),
    (4, "rollout-0"),
    (6, "agent-1"),
    (7, "trainer-0"),
    (9, "master"),
)
"""After which step who is killed."""


@pytest.fixture(scope="module")
def calm_digest(kill_home: Path) -> str:
    """Of the final weights of a run that nobody disturbs."""
    handle = agent_job(STEPS).build().submit("calm-agents", home_path=kill_home)
    run = Run(handle, ProcessFaults(handle), Gate(home(kill_home).job_directory(handle.job_id)))
    view = run.end(steps=STEPS)
    assert view["incidents"] == []
    handle.close()
    return str(view["job"]["result"]["digest"])


def test_whatever_is_killed_the_weights_come_out_the_same(
    start: Callable[..., Run], calm_digest: str
) -> None:
    run = start(job=agent_job(STEPS, gated=True))
    for step, name in DEATHS:
        run.faults.reach_step(step)
        (victim,) = run.faults.kill(name)
        assert run.faults.replaced(victim).pid != victim.pid
    view = run.end(steps=STEPS)
    assert view["job"]["result"]["digest"] == calm_digest
    told = [event["body"] for event in run.handle.events() if event["kind"] == "RolloutsChanged"]
    assert not [body for body in told if body["what"] == "SessionFault"]


def test_agents_and_the_manager_at_once(start: Callable[..., Run], calm_digest: str) -> None:
    run = start(job=agent_job(STEPS, gated=True))
    run.faults.reach_step(3)
    for victim in run.faults.kill("agent-0", "agent-1", "rollout_manager-0"):
        run.faults.replaced(victim)
    assert run.end(steps=STEPS)["job"]["result"]["digest"] == calm_digest


def recovering_job(recovery: str, folder: Path) -> RLJobBuilder:
    environment = {
        "environment": "tests.kill.workloads:HeldCalculator",
        "options": {"folder": str(folder)},
        "recovery": recovery,
    }
    return agent_job(STEPS, gated=True, agent={**AGENT_CONFIG["agent"], **environment})


def kill_agents_amid_sessions(run: Run, step: int, folder: Path) -> None:
    """Both agents die after this step, when a tool has answered at least one of their sessions, and is to answer
    again."""
    held, waits = folder / "held", folder / "waits"
    run.faults.reach_step(step)
    held.touch()
    run.gate.open_to(STEPS)  # there are sessions to come
    run.faults.until(lambda _: waits.exists() or None, "session was under way", timeout_s=60.0)
    victims = run.faults.kill("agent-0", "agent-1")
    run.gate.open_to(step + 4)
    held.unlink()
    for victim in victims:
        run.faults.replaced(victim)


def test_environments_go_on_from_their_snapshots(
    start: Callable[..., Run], calm_digest: str, tmp_path: Path
) -> None:
    run = start(job=recovering_job("snapshot", tmp_path))
    kill_agents_amid_sessions(run, 2, tmp_path)
    run.faults.reach_step(5)
    run.faults.kill("agent-0", "rollout_manager-0")
    assert run.end(steps=STEPS)["job"]["result"]["digest"] == calm_digest


def test_sessions_that_begin_anew_are_in_the_account(start: Callable[..., Run], tmp_path: Path) -> None:
    run = start(job=recovering_job("restart", tmp_path))
    kill_agents_amid_sessions(run, 2, tmp_path)
    run.end(steps=STEPS)  # no prompt is lost, and none trained twice
    with open_store(run.handle.store_url) as store:
        account = stored_account(store.rollouts(run.handle.job_id).load())
    assert account is not None
    assert account["missing"] == 0
    assert account["discarded"]["session"] > 0
    discarded = sum(account["discarded"].values())
    assert account["generated"] == account["delivered"] + account["in_flight"] + discarded
