"""Environments of `skyrl-gym` (0.4): text in, text out, made by their registered names.

    extras of the environment = the row of the data: `reward_spec`, `extra_info`, …

This module must not import skyrl_gym before an environment is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.agents.adapters import messages_of, prompt_of
from gyre.agents.environments import Messages


class SkyRlGym:
    """The environment registered as `env`. `env_config` is its configuration, `prompt` the column of the data with the
    prompt."""

    def __init__(self, env: str, env_config: Mapping[str, Any] | None = None, prompt: str = "prompt") -> None:
        self._name, self._config, self._prompt = env, dict(env_config or {}), prompt
        self._env: Any = None

    def reset(self, task: Mapping[str, Any], seed: int) -> Messages:
        import skyrl_gym
        from omegaconf import OmegaConf

        extras = {"max_turns": 1, **task}
        self._env = skyrl_gym.make(self._name, env_config=OmegaConf.create(self._config), extras=extras)
        first, _ = self._env.init(messages_of(prompt_of(task, self._prompt)))
        return list(first)

    def step(self, message: Mapping[str, Any]) -> tuple[Messages, float, bool]:
        told = self._env.step(message.get("content") or "")
        return list(told["observations"]), float(told["reward"]), bool(told["done"])

    @property
    def extras(self) -> Mapping[str, float]:
        """The environment's own metrics that are numbers."""
        found = self._env.get_metrics() if self._env is not None else {}
        return {name: float(value) for name, value in found.items() if isinstance(value, int | float | bool)}

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
