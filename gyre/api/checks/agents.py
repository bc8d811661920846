"""Whether the agents of a job can converse, and run as many sessions as its engines take."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from gyre.api.checks.amounts import begun_per_step
from gyre.api.checks.findings import JobWarning, Note, elsewhere
from gyre.config import AGENT_ROLE, JobSpec
from gyre.config.plugins import TASK
from gyre.config.sections import AgentRoleSettings, WorkloadSettings
from gyre.errors import ConfigError
from gyre.graph.rollout_roles import is_instance, rollouts_of


def check(spec: JobSpec, *, here: bool) -> Iterator[str]:
    """Yields warnings and notes. Raises ConfigError where conversations cannot be written in the model's tokens, and
    have to be."""
    settings = WorkloadSettings.read(spec.config)
    if settings.chat is not None:
        yield from _check_renderer(spec, settings, here=here)
    agent = settings.agent
    if agent is None or AGENT_ROLE not in spec.roles:
        return
    if settings.chat is None and _has_no_frame(spec, settings):
        yield _no_frame(agent)
    if agent.tool_timeout_s >= agent.seconds:
        yield JobWarning(
            f"config.agent.tool_timeout_s: {agent.tool_timeout_s:g} given, but a session is cut off after "
            f"{agent.seconds:g} s (config.agent.seconds): one whose tool hangs counts as truncated, and is trained. "
            "Give less."
        )
    yield from _check_counts(spec, settings, agent)


def _check_renderer(spec: JobSpec, settings: WorkloadSettings, *, here: bool) -> Iterator[str]:
    """Make the renderer of `config.chat`, as the rollout manager does. That a model's folder is not here has been
    said."""
    if settings.model_path and not Path(settings.model_path).is_dir():
        return
    from gyre.workloads.chat_format import renderer_of

    try:
        renderer_of(spec.config)
    except ConfigError as error:
        if here or not settings.model_path:
            raise
        yield elsewhere(error.message)


def _has_no_frame(spec: JobSpec, settings: WorkloadSettings) -> bool:
    """Whether it is known that the job's tokens have no place for a conversation: a task of the user's own may have."""
    if settings.data is not None:
        return True
    task = settings.task
    if task is None or task.name not in TASK.built_in or (task.file and not Path(task.file).is_file()):
        return False
    from gyre.workloads.chat_format import renderer_of

    return renderer_of(spec.config) is None


def _no_frame(agent: AgentRoleSettings) -> Note:
    """A function may ask with token ids. Raises ConfigError for an environment, which is asked in messages."""
    if agent.environment:
        raise ConfigError(
            "config.agent.environment: is asked in messages, and nothing says how they are written in the model's "
            "tokens.",
            hint="Name the renderer of the model in config.model_path as config.chat.renderer; see docs/agents.md.",
        )
    return Note(
        "nothing says how messages are written in the model's tokens (config.chat.renderer), so agents ask with token "
        "ids alone."
    )


def _check_counts(spec: JobSpec, settings: WorkloadSettings, agent: AgentRoleSettings) -> Iterator[str]:
    """Whether agents are fewer than engines take."""
    count = spec.roles[AGENT_ROLE].total
    at_once = count * agent.concurrency
    step = begun_per_step(spec, settings.sampling.n, agent.oversample)
    room = _room(spec)
    if at_once >= min(step, step if room is None else room):
        return
    have = (
        f"{count} {'agent runs' if count == 1 else 'agents run'} {at_once:,} sessions at once "
        f"(roles.{AGENT_ROLE}.total times config.{AGENT_ROLE}.concurrency), and a step begins {step:,}"
    )
    if room is None:
        yield Note(f"{have}: engines that generate more than {at_once:,} samples at once wait for agents.")
    else:
        yield JobWarning(
            f"{have}: the engines generate {room:,} samples at once, and wait for agents, the more so while tools "
            "work. Give more agents, or a greater concurrency."
        )


def _room(spec: JobSpec) -> int | None:
    """Samples that all engines together generate at once; None where any of them says so itself when it starts."""
    each = [
        (found.total, rollouts_of(spec, name).max_running)
        for name, found in spec.roles.items()
        if is_instance(spec, name)
    ]
    if any(most is None for _, most in each):
        return None
    return sum(total * (most or 0) for total, most in each)
