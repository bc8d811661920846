"""Whether the agents of a job run as many sessions as its engines take."""

from __future__ import annotations

from collections.abc import Iterator

from gyre.api.checks.amounts import begun_per_step
from gyre.api.checks.findings import JobWarning, Note
from gyre.config import AGENT_ROLE, JobSpec
from gyre.config.sections import WorkloadSettings
from gyre.graph.rollout_roles import is_instance, rollouts_of


def check(spec: JobSpec, *, here: bool) -> Iterator[str]:
    """Yields a warning where agents are fewer than engines take, and a note where that is not known; raises nothing."""
    settings = WorkloadSettings.read(spec.config)
    agent = settings.agent
    if agent is None or AGENT_ROLE not in spec.roles:
        return
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
