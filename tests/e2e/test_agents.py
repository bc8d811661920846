"""A model learns to use a calculator over two or three turns, and agents that are killed change nothing of it."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.api.demo import AGENT_CONFIG, demo_job
from gyre.api.home import home
from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import Shared
from tests.kill.jobs import agent_job

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ENDS_WITHIN_S = 280.0
STEPS = 8
BRANCHED_STEPS = 4
SAME = ("reward_mean", "loss", "entropy", "grad_norm")


def test_kills_of_agents_change_no_number_and_the_model_learns(shared: Shared) -> None:
    undisturbed, accuracies = run(shared, ())
    killed, again = run(
        shared, ((1, ("agent-0",)), (3, ("agent-0", "agent-1")), (5, ("agent-1", "rollout_manager-0")))
    )
    assert accuracies[0] < 0.4
    assert accuracies[-1] > 0.8, accuracies
    assert [[step[name] for name in SAME] for step in killed] == [
        [step[name] for name in SAME] for step in undisturbed
    ]
    assert again == accuracies


def test_sessions_that_branch_are_trained_once_whoever_dies(shared: Shared) -> None:
    """A row that shares drawn tokens with another is a row as trainers want it."""
    agent = {"function": "tests.e2e.workloads:branching", "concurrency": 32, "max_turns": 4, "max_tokens": 60}
    job = agent_job(BRANCHED_STEPS, agent=agent, reward=("tests.e2e.workloads", "CountedRows"))
    handle = shared.submit(job)
    faults = ProcessFaults(handle)
    faults.reach_step(1, timeout_s=200.0)
    faults.kill("agent-0", "rollout_manager-0")
    result: Any = handle.wait(ENDS_WITHIN_S)["job"]["result"]
    assert (result["prompts_lost"], result["trained_twice"]) == (0, 0)
    steps = [event["body"]["metrics"] for event in handle.events() if event["kind"] == "StepCompleted"]
    handle.close()
    assert [step["step"] for step in steps] == list(range(1, BRANCHED_STEPS + 1))
    told = (home(shared.home).job_directory(handle.job_id) / "branches").read_text().splitlines()
    with_branches = {int(line.split()[0]) for line in told if int(line.split()[1])}
    assert with_branches >= {step["step"] for step in steps}
    assert all(step["grad_norm"] > 0.0 and step["old_kl"] < 1e-9 for step in steps), (
        "it is not what was drawn"
    )


def run(
    shared: Shared, kills: tuple[tuple[int, tuple[str, ...]], ...]
) -> tuple[list[dict[str, float]], list[float]]:
    """The metrics of the steps and the accuracies of the evaluations of the demo's job, while these vertices are
    killed after these steps."""
    job = demo_job(steps=STEPS, agent=True)
    assert job.spec.config["agent"] == AGENT_CONFIG["agent"]
    handle = job.submit(f"agents-{len(kills)}", home_path=shared.home)
    faults = ProcessFaults(handle)
    for step, names in kills:
        faults.reach_step(step, timeout_s=200.0)
        faults.kill(*names)
    result: Any = handle.wait(ENDS_WITHIN_S)["job"]["result"]
    assert (result["prompts_lost"], result["trained_twice"]) == (0, 0)
    events = list(handle.events())
    handle.close()
    return (
        [event["body"]["metrics"] for event in events if event["kind"] == "StepCompleted"],
        [event["body"]["accuracy"] for event in events if event["kind"] == "Evaluated"],
    )
