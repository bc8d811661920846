"""Agents and environments that were written for others, as Gyre's. Each module is named in `config.agent`, and imports
what it adapts when it is used:

    function: gyre.agents.adapters.miles:agent             options: {function: my.agents:run}
    function: gyre.agents.adapters.verl:agent              options: {loop: my.loops:ToolLoop, tokenizer: models/x}
    function: gyre.agents.adapters.verifiers:agent         options: {taskset: my-taskset, harness: null}
    environment: gyre.agents.adapters.skyrl_gym:SkyRlGym   options: {env: gsm8k}
    environment: gyre.agents.adapters.reasoning_gym:ReasoningGym   options: {dataset: chain_sum}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gyre.config.plugins import PluginKind
from gyre.errors import ConfigError


def named(option: str, path: str) -> Any:
    """What the import path `module:name` of an adapter's option stands for. Raises ConfigError."""
    return PluginKind("import", f"config.agent.options.{option}", "gyre.agents", ()).load(path)


def prompt_of(task: Mapping[str, Any], key: str) -> Any:
    """The prompt that a row of the data has in the column `key`: a text, or messages. Raises ConfigError where there is
    none."""
    found = task.get(key)
    if isinstance(found, str) or (isinstance(found, Sequence) and found):
        return found
    raise ConfigError(
        f"config.agent.options.prompt: the data has no column {key!r} with a prompt.",
        hint=f"It has {', '.join(sorted(map(str, task))) or 'none'}.",
    )


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    """A prompt as messages in OpenAI's form; a text is one of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(one) for one in prompt]
