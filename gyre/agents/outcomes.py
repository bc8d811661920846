"""How a session ends, and the exceptions that say so.

Invariant *a failure is never a reward*: what is the infrastructure's fault has no reward, is left out of its group's
mean, and is replaced; only what the policy did earns or costs one.

This module must not know how a session is run, or who is told of its end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gyre.errors import GyreError
from gyre.rollouts.sample_checks import real_number, shown
from gyre.users_code import said_where

SCORED, TRUNCATED, POLICY_FAULT, INFRA_FAULT = "scored", "truncated", "policy_fault", "infra_fault"

KINDS = (SCORED, TRUNCATED, POLICY_FAULT, INFRA_FAULT)

MOST_REASON = 500
"""Characters of a reason: it is a sentence for people, kept with each session."""

MOST_EXTRAS = 64
"""Numbers beside a reward: each is one of every sample and of every step."""


class PolicyFault(Exception):
    """What the policy did cannot be gone on from: a call that does not parse, a forbidden action. The session scores 0.
    Raise it, or a class of your own below it, with a short name of the fault."""


class InfraFault(Exception):
    """A tool, a sandbox or a grader failed, and not the policy. The session has no reward, and is replaced."""


class BudgetSpent(Exception):
    """The session's turns, tokens or time are spent, so it gets no further turn. Let it pass: the session is cut off
    with the reward that it has."""


class SessionLost(GyreError):
    """The session is another process's now, or has ended. Nothing that this one does counts any more."""

    code = "session_lost"
    exit_code = 1


class SessionRefused(GyreError):
    """The rollout manager refuses a request for good; `details` has `status` and `code`."""

    code = "session_refused"
    exit_code = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a session: one of `KINDS`, its reward (of `infra_fault` none, 0.0 here), why, and further numbers by
    name. Raises ValueError for what is none."""

    kind: str
    reward: float = 0.0
    reason: str = ""
    extras: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a session cannot end as {self.kind!r}; expected one of {', '.join(KINDS)}")
        if not math.isfinite(self.reward):
            raise ValueError(f"a session ended with the reward {self.reward}, expected a finite number")
        if len(self.extras) > MOST_EXTRAS:
            raise ValueError(
                f"a session ended with {len(self.extras)} further numbers, at most {MOST_EXTRAS} are kept"
            )
        for name, value in self.extras.items():
            if not isinstance(name, str) or not name or not math.isfinite(value):
                raise ValueError(
                    f"a session ended with {name!r:.40}: {value!r:.40}, expected a name and a finite number"
                )


def outcome_of(returned: Any) -> Outcome:
    """What an agent's function returned: a number is a score; a mapping has `reward` and further numbers; an Outcome
    says it all. Raises ValueError for anything else."""
    if isinstance(returned, Outcome):
        return returned
    if isinstance(returned, Mapping):
        if "reward" not in returned:
            raise ValueError(
                f"the agent returned a mapping without 'reward', it has {', '.join(map(str, returned))}"
            )
        more = {str(name): _number(value, str(name)) for name, value in returned.items() if name != "reward"}
        return Outcome(SCORED, _number(returned["reward"], "reward"), extras=more)
    return Outcome(SCORED, _number(returned, "reward"))


def _number(value: Any, name: str) -> float:
    number = real_number(value)
    if number is not None:
        return number
    raise ValueError(
        f"the agent returned {shown(value)} as {name}, expected a finite number of float32, a mapping with 'reward', "
        "or an Outcome"
    )


def outcome_of_error(error: BaseException, reward: float = 0.0) -> Outcome:
    """How a session ends whose code raised `error`: cut off where its budget is spent, with the `reward` that it has;
    0 for a fault of the policy; without one for anything else. An SDK's own errors are recognised by what they carry.
    Raises SessionLost where it is another process's now."""
    for cause in _chain(error):
        if isinstance(cause, BudgetSpent) or _refusal(cause) == (422, "budget"):
            return Outcome(TRUNCATED, reward, reason=_short(str(cause)))
        if isinstance(cause, SessionLost) or _refusal(cause)[0] == 410:
            raise SessionLost("the session is another process's now, or has ended.") from error
        if isinstance(cause, PolicyFault):
            return Outcome(POLICY_FAULT, 0.0, reason=_short(str(cause) or type(cause).__name__))
    return Outcome(INFRA_FAULT, reason=_short(said_where(error)))


def _chain(error: BaseException) -> list[BaseException]:
    """The error, and those that led to it."""
    found: list[BaseException] = []
    at: BaseException | None = error
    while at is not None and at not in found:
        found.append(at)
        at = at.__cause__ or at.__context__
    return found


def _refusal(error: BaseException) -> tuple[Any, Any]:
    """Status and code of an answer that an SDK's exception tells of, as openai's and anthropic's have them."""
    status = getattr(error, "status_code", None)
    body = getattr(error, "body", None)
    inner = body.get("error", body) if isinstance(body, Mapping) else None
    code = getattr(error, "code", None) or (inner.get("code") if isinstance(inner, Mapping) else None)
    return status, code


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= MOST_REASON else f"{words[: MOST_REASON - 1]}…"
