"""The example whose agent is a loop on the package `openai`, as a user runs it: the model learns, though the manager
that has its turns and a process that runs the loop are killed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gyre.api.definition.jobfile import load_job_file
from gyre.testing.processes import ProcessFaults
from tests.e2e.conftest import Shared

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.clients, pytest.mark.timeout(600)]

ENDS_WITHIN_S = 400.0
EXAMPLE = Path(__file__).parents[2] / "examples" / "openai_agent.py"


def test_a_loop_of_openais_package_is_trained_though_its_processes_are_killed(shared: Shared) -> None:
    handle = load_job_file(EXAMPLE).submit("openai-agent", home_path=shared.home)
    try:
        faults = ProcessFaults(handle)
        for step, name in ((1, "rollout_manager-0"), (3, "agent-0")):
            faults.reach_step(step, timeout_s=ENDS_WITHIN_S)
            (victim,) = faults.kill(name)
            assert faults.replaced(victim, timeout_s=ENDS_WITHIN_S).pid != victim.pid
        view: Any = handle.wait(ENDS_WITHIN_S)
        events = list(handle.events())
    finally:
        handle.close()
    result = view["job"]["result"]
    assert (result["prompts_lost"], result["trained_twice"]) == (0, 0)
    assert result["prompts"] == 8 * 32
    killed = {one["body"]["vertex"] for one in events if one["kind"] == "VertexLost"}
    assert {"rollout_manager-0", "agent-0"} <= killed
    accuracies = [one["body"]["accuracy"] for one in events if one["kind"] == "Evaluated"]
    assert accuracies[0] < 0.4
    assert accuracies[-1] > 0.8, accuracies
