"""The role `agent` in a recipe's job: what it brings, and the sentence for what does not go together."""

from __future__ import annotations

from typing import Any

import pytest

from gyre.config import parse_job
from gyre.errors import ConfigError
from gyre.graph import compile_job
from tests.graph.jobs import role

AGENT = {"function": "my.agents:solve"}


def agents_job(recipe: str = "grpo", config: dict[str, Any] | None = None, **roles: Any) -> Any:
    own = {"agent": AGENT} if config is None else config
    return parse_job(
        {
            "recipe": recipe,
            "config": own,
            "roles": {"actor": {}, "rollout": {}, "agent": {"total": 2}, **roles},
        }
    )


@pytest.mark.parametrize("recipe", ["grpo", "dr_grpo", "dapo", "rloo"])
def test_the_reward_of_sessions_is_added_by_itself(recipe: str) -> None:
    compiled = compile_job(agents_job(recipe))
    assert str(compiled.spec.roles["reward"].entrypoint) == "gyre.agents.reward:SessionReward"
    assert str(compiled.spec.roles["agent"].entrypoint) == "gyre.agents.vertex:AgentWorker"
    assert compiled.spec.roles["agent"].resources.accelerator == 0.0
    assert "rollout_manager" in compiled.spec.roles
    assert compile_job(compiled.spec).spec == compiled.spec


def test_a_reward_of_the_user_s_own_stays_and_one_without_a_class_keeps_the_sessions_rewards() -> None:
    own = compile_job(agents_job(reward=role())).spec.roles["reward"]
    assert str(own.entrypoint) == "my.module:Worker"
    plain = compile_job(agents_job(reward={"total": 3})).spec.roles["reward"]
    assert (str(plain.entrypoint), plain.total) == ("gyre.agents.reward:SessionReward", 3)


def test_an_agent_with_devices_of_its_own_keeps_them() -> None:
    job = agents_job(agent={"resources": {"accelerator": 1.0}})
    assert compile_job(job).spec.roles["agent"].resources.accelerator == 1.0


MISTAKES: dict[str, tuple[Any, list[str]]] = {
    "no section": (agents_job(config={}), ["config.agent: is missing", "config.agent.function"]),
    "no role": (
        parse_job(
            {
                "recipe": "grpo",
                "config": {"agent": AGENT},
                "roles": {key: {} for key in ("actor", "rollout", "reward")},
            }
        ),
        ["config.agent: is given, but the job has no role agent"],
    ),
    "rollouts of the user's own": (
        agents_job(rollout=role()),
        ["roles.rollout.entrypoint: my.module:Worker given", "instances of the rollout plane"],
    ),
    "a critic": (agents_job("ppo", critic={}), ["roles.agent: is given, but recipe 'ppo'", "grpo"]),
    "a fleet": (agents_job("fleet"), ["roles.agent: is given, but recipe 'fleet'"]),
    "both": (
        agents_job(config={"agent": {**AGENT, "environment": "my.envs:Shop"}}),
        ["config.agent: ", "both are given"],
    ),
    "neither": (agents_job(config={"agent": {}}), ["config.agent: ", "neither is given"]),
    "no import path": (
        agents_job(config={"agent": {"function": "solve"}}),
        ["config.agent.function: ", "import path"],
    ),
    "a function has no snapshot": (
        agents_job(config={"agent": {**AGENT, "recovery": "snapshot"}}),
        ["config.agent: ", "'snapshot'", "'replayable'"],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_a_sentence(name: str) -> None:
    spec, parts = MISTAKES[name]
    with pytest.raises(ConfigError) as caught:
        compile_job(spec)
    for part in parts:
        assert part in str(caught.value)
