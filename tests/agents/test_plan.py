"""What a plan says of the agent that a job names, before any process starts."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.api.checks.examine import check_plugins
from gyre.api.demo import demo_job
from gyre.config import parse_job
from gyre.config.job_plugins import plugins_of
from gyre.config.plugins import AGENT, ENVIRONMENT, TASK
from gyre.errors import ConfigError
from gyre.graph import compile_job

GIVEN = "tests.agents.given_agents"


def job_with(**agent: Any) -> Any:
    roles = {"actor": {}, "rollout": {}, "agent": {}}
    config = {"agent": agent, "task": {"name": "arithmetic"}}
    return compile_job(parse_job({"recipe": "grpo", "config": config, "roles": roles})).spec


@pytest.mark.parametrize(
    ("agent", "sentence"),
    [
        ({"function": f"{GIVEN}:score"}, r"config\.agent\.function: module .* has no 'score'"),
        ({"function": f"{GIVEN}:no_session"}, r"config\.agent\.function: .*cannot be called as"),
        ({"function": f"{GIVEN}:scores", "options": {"deep": 1}}, r"config\.agent\.function: .*deep"),
        ({"environment": f"{GIVEN}:Stepless"}, r"config\.agent\.environment: .* has no step\(\)"),
        ({"environment": f"{GIVEN}:HalfRemembering"}, r"has one of snapshot\(\) and restore\(\)"),
        (
            {"environment": "gyre.agents.calculator:Calculator", "recovery": "snapshot"},
            r"config\.agent\.recovery: 'snapshot' given, but .* has no snapshot\(\)",
        ),
        (
            {"environment": "gyre.agents.calculator:Calculator", "options": {"x": 1}},
            r"config\.agent\.environment: .*x",
        ),
        ({"environment": "no_such_module:Shop"}, r"config\.agent\.environment: .*does not import"),
    ],
)
def test_what_is_no_agent_is_told_at_submit(agent: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        check_plugins(job_with(**agent))


@pytest.mark.parametrize(
    ("agent", "kind"),
    [
        ({"function": f"{GIVEN}:scores"}, AGENT),
        ({"function": f"{GIVEN}:asks_an_sdk"}, AGENT),
        ({"function": "gyre.agents.adapters.miles:agent", "options": {"function": "a:b", "own": 1}}, AGENT),
        ({"environment": "gyre.agents.adapters.skyrl_gym:SkyRlGym", "options": {"env": "x"}}, ENVIRONMENT),
    ],
)
def test_what_is_one_passes(agent: dict[str, Any], kind: Any) -> None:
    spec = job_with(**agent)
    assert [found for found, _ in plugins_of(spec)] == [kind]
    check_plugins(spec)


def test_the_demo_with_an_agent_can_run() -> None:
    compiled = demo_job(agent=True).plan()
    assert {"agent", "reward", "rollout_manager"} <= compiled.spec.roles.keys()
    assert {kind for kind, _ in plugins_of(compiled.spec)} == {TASK, ENVIRONMENT}
    check_plugins(compiled.spec)


def test_a_name_that_is_no_path_is_told_in_a_whole_sentence() -> None:
    with pytest.raises(ConfigError, match=r"'guess' is neither .* nor an import path \"module:Name\"\.$"):
        job_with(environment="guess")
