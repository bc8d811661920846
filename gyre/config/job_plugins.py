"""Which losses, recipes, engines and other plug-ins of the user's own a job names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.config.plugins import (
    ADVANTAGE,
    AGENT,
    BACKEND,
    CODEC,
    ENGINE,
    ENVIRONMENT,
    LOSS,
    RECIPE,
    SINK,
    TASK,
    PluginKind,
)
from gyre.config.spec import AGENT_ROLE, JobSpec


def plugins_of(spec: JobSpec) -> list[tuple[PluginKind, str]]:
    """The plug-ins that are not built in, with their kinds; also of a `config` that was not checked yet."""
    loss, task = _section(spec.config, "loss"), _section(spec.config, "task")
    agent = _section(spec.config, "agent") if AGENT_ROLE in spec.roles else {}
    named = (
        (RECIPE, spec.recipe),
        (BACKEND, spec.backend),
        (LOSS, loss.get("loss_mode")),
        (ADVANTAGE, loss.get("adv_estimator")),
        (TASK, task.get("name")),
        (ENGINE, spec.rollouts.engine),
        *((ENGINE, role.pool.engine) for role in spec.roles.values() if role.pool is not None),
        (CODEC, spec.weights.codec),
        (AGENT, agent.get("function") or None),
        (ENVIRONMENT, agent.get("environment") or None),
        *((SINK, sink.kind) for sink in spec.observe.sinks),
    )
    return [(kind, name) for kind, name in named if isinstance(name, str) and name not in kind.built_in]


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = config.get(key)
    return found if isinstance(found, Mapping) else {}
