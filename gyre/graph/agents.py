"""The role `agent`: the processes in which the sessions of a recipe's job run, and what it needs of the job.

A job with it has sessions of several turns where others have samples. The graph is the same: the rollout plane delivers
groups, whose rewards are there already.

This module must not import what runs in the role: `gyre.agents` is named by text.
"""

from __future__ import annotations

from gyre.config import AGENT_ROLE, JobSpec, Resources, RoleSpec
from gyre.errors import ConfigError, GraphError
from gyre.graph.recipes import RECIPES, ROLLOUT_INSTANCE, SESSION_REWARD, Recipe


def with_agents(spec: JobSpec, recipe: Recipe) -> None:
    """Complete a job that has agents, in place: the role `reward`, whose class keeps the rewards that sessions ended
    with, need not be written down, and an agent takes no device unless it says so. Raises GraphError where the recipe
    knows no agents."""
    if AGENT_ROLE not in spec.roles:
        return
    if AGENT_ROLE not in recipe.optional:
        if recipe.name not in RECIPES:
            return  # a recipe of the user's own may have a role of this name
        raise GraphError(
            f"roles.{AGENT_ROLE}: is given, but recipe {recipe.name!r} has no sessions of several turns.",
            hint="Take grpo, dr_grpo, dapo or rloo, or leave the role out.",
        )
    agent = spec.roles[AGENT_ROLE]
    if "accelerator" not in agent.resources.model_fields_set:
        agent.resources = agent.resources.model_copy(update={"accelerator": 0.0})
    if "reward" not in spec.roles:
        spec.roles["reward"] = RoleSpec(resources=Resources(accelerator=0.0))
    if spec.roles["reward"].entrypoint is None:
        spec.roles["reward"].entrypoint = SESSION_REWARD.model_copy()


def check_agents(spec: JobSpec, recipe: Recipe) -> None:
    """Check that the role and its section `config.agent` are there together, and that the rollouts are those of the
    rollout plane. Classes must be resolved. Raises ConfigError and GraphError."""
    if AGENT_ROLE in spec.roles and AGENT_ROLE not in recipe.optional:
        return
    told = spec.config.get(AGENT_ROLE) is not None
    if AGENT_ROLE not in spec.roles:
        if told:
            raise GraphError(
                f"config.{AGENT_ROLE}: is given, but the job has no role {AGENT_ROLE}, whose processes would run it.",
                hint=f"Add the role {AGENT_ROLE}, or leave the section out.",
            )
        return
    if not told:
        raise ConfigError(
            f"config.{AGENT_ROLE}: is missing, and the role {AGENT_ROLE} runs what it names.",
            hint="Give config.agent.function or config.agent.environment, as module:name.",
        )
    entrypoint = spec.roles["rollout"].entrypoint
    if entrypoint != ROLLOUT_INSTANCE:
        raise GraphError(
            f"roles.rollout.entrypoint: {entrypoint} given, but the turns of agents come from instances of the "
            "rollout plane.",
            hint="Leave the class out; rollouts.engine says what generates.",
        )
