"""The section `config.agent`: what runs in the role `agent`, and how far a session may go."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from gyre.config.plugins import AGENT, ENVIRONMENT
from gyre.config.sections.section import Section

PositiveInt = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0)]

Recovery = Literal["replayable", "snapshot", "restart"]


def _named(check: Any) -> Any:
    """A check of names that lets "" be, which names nothing."""
    return AfterValidator(lambda name: check(name) if name else name)


class AgentRoleSettings(Section):
    """What the vertices of the role `agent` run, and the limits of each session."""

    function: Annotated[str, _named(AGENT.check)] = ""
    """`module:function` of an agent: it gets a session, and returns its reward."""
    environment: Annotated[str, _named(ENVIRONMENT.check)] = ""
    """`module:Class` of an environment instead: Gyre asks for its turns, and gives it each answer."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the function, or of the class."""
    concurrency: PositiveInt = 16
    """Sessions that one vertex runs at once."""
    max_turns: PositiveInt = 16
    """Turns of a session, after which it is cut off."""
    max_tokens: PositiveInt = 4096
    """Tokens of a session, those of prompts and tools included, after which it is cut off: a row that is trained has no
    more. Where the job does not give it, a smaller context has a smaller one."""
    seconds: Seconds = 600.0
    """Time of a session, after which it is cut off."""
    tool_timeout_s: Seconds = 60.0
    """Time of one call of an environment, or of one that is made with `session.tool`. One that takes longer is the
    environment's fault, and not the policy's."""
    recovery: Recovery = "replayable"
    """How a session goes on whose process died: `replayable` runs the agent again from its beginning, and answers what
    it asked before from the ledger; `snapshot` goes on from what the environment's `snapshot()` returned; `restart`
    discards its turns."""
    redraws: Annotated[int, Field(ge=0)] = 3
    """Further attempts at a session that a fault of the infrastructure ended; then its group is given up."""
    breaker: PositiveInt = 8
    """Sessions in a row that fail for the infrastructure's fault, after which a vertex pauses, and the rollout manager
    hands out one at a time, after ever longer pauses."""

    oversample: Annotated[float, Field(ge=1.0, le=4.0)] = 1.0
    """Sessions that a group for training begins with, by those that it is asked for: once so many have ended, the
    others are cancelled. A step waits for fewer stragglers, and is trained on sessions that are shorter than what the
    policy draws: `sessions.oversampled` of the rollout manager's status has the lengths of both."""

    @model_validator(mode="after")
    def _one_of_the_two(self) -> AgentRoleSettings:
        if bool(self.function) == bool(self.environment):
            given = "both are" if self.function else "neither is"
            raise ValueError(f"either function or environment says what the agents run, and {given} given")
        if self.recovery == "snapshot" and not self.environment:
            raise ValueError(
                "recovery is 'snapshot', which an environment with snapshot() and restore() has, and a function has "
                "none; take 'replayable' or 'restart'"
            )
        return self
