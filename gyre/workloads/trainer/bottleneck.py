"""What a job's speed depends on, in one sentence, from the shares of recent time that
`gyre.workloads.trainer.wait_stats` gives.

    rollout; the actor waits 38 % of its time for samples
    rollout; the actor waits 68 % of its time for samples (delivering 52 %)
    agents and their tools; the actor waits 55 % of its time for them

What the wait was for is named where it is not generating, or scoring, for the most part. Of a job that has ended it is
said of the whole of its last trainer's time. The role that learns comes first in these shares. What it waits for is
what the job waits for; where it works nearly all the time, it is the bottleneck itself. Pure; it imports nothing of
weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.workloads.trainer.learning.step_line import percent

BUSY = 0.85
"""Share of its time from which the learner itself is what the job waits for."""
BALANCED = 0.15
"""Share of a wait below which it does not limit the job."""
OWN = 0.25
"""Share of its time from which something other than training is worth a sentence."""

_WAITS = "waits for "
_TRAINS = ("training", "stepping the optimizer", "computing log-probs", "computing values", "generating")
_LEARNS = ("publishing", "stepping the optimizer", "training", "writing a checkpoint", "getting ready")
"""What a role does that learns, and no other, the surest first: the seconds of a job's begin may have few of them."""
_PLAIN = ("generating", "scoring", "evaluating", "")
"""What a wait is for where nothing else is said of it."""
_OVERHEADS = {
    "publishing": "publishing weights",
    "writing a checkpoint": "writing checkpoints",
    "getting ready": "getting ready",
}
_THINGS = {
    "rollout": "samples",
    "reward": "scores",
    "reference": "the reference's log-probs",
    "critic": "values",
}


_OF_AGENTS = {
    "waiting for agents and their tools": "agents and their tools",
    "queued for a free agent": "agents that run the sessions",
}
"""What the plane waits for outside of it: no instance more would help."""

_ENDED = ("succeeded", "stopped", "failed")


def bottleneck_of(phase: object, progress: Mapping[str, Any]) -> str:
    """The sentence for a job in this phase with this report of its trainer; "" where there is nothing to say. Of one
    that has ended its seconds are looked at (`spent_s`), else its recent shares (`times`)."""
    phase = str(phase)
    if phase in _ENDED:
        return _in_the_past(_sentence_of(*_spent(progress))) if progress.get("step") else ""
    if phase not in ("starting", "running", "recovering"):
        return ""
    times = progress.get("times")
    if not isinstance(times, Mapping) or not times:
        return "starting up" if phase == "starting" or progress.get("steps") else ""
    role, shares = next(iter(times.items()))
    if not isinstance(shares, Mapping):
        return ""  # a user's own `fit()` may call anything `times`
    spent = {str(what): float(share) for what, share in shares.items() if isinstance(share, int | float)}
    if not progress.get("step"):
        doing = _largest(spent)
        return (
            f"starting up; the {role} is {doing}" if doing and not doing.startswith(_WAITS) else "starting up"
        )
    return _sentence_of(role, spent)


def _spent(progress: Mapping[str, Any]) -> tuple[str, dict[str, float]]:
    """The role that learns and the shares of all of its time; ("", {}) where unknown."""
    roles = progress.get("spent_s")
    known = {
        str(role): {str(what): float(s) for what, s in spent.items() if isinstance(s, int | float)}
        for role, spent in (roles.items() if isinstance(roles, Mapping) else ())
        if isinstance(spent, Mapping)
    }
    learners = [role for mark in _LEARNS for role, spent in known.items() if mark in spent]
    role = next(iter(learners), "")
    whole = sum(known.get(role, {}).values())
    return (role, {what: s / whole for what, s in known[role].items()}) if whole > 0 else ("", {})


_PAST = (
    ("it trains", "it trained"),
    ("it takes", "it took"),
    ("it is not there", "it was not there"),
    (" trains ", " trained "),
    (" waits ", " waited "),
)


def _in_the_past(sentence: str) -> str:
    what, mark, because = sentence.partition("; ")
    for now, then in _PAST:
        because = because.replace(now, then)
    return f"{what}{mark}{because}"


def _sentence_of(role: str, spent: Mapping[str, float]) -> str:
    if not spent:
        return ""
    works = sum(spent.get(what, 0.0) for what in _TRAINS)
    if works >= BUSY:
        return f"{role}; it trains {percent(works)} of its time"
    overheads = {what: share for what, share in spent.items() if what in _OVERHEADS}
    waits: dict[tuple[str, bool], dict[str, float]] = {}
    for what, share in spent.items():
        if what.startswith(_WAITS):
            other, _, doing = what.removeprefix(_WAITS).rstrip(")").partition(" (")
            waits.setdefault((other, doing == "evaluating"), {})[doing] = share
    (other, evaluates), parts = max(
        waits.items(), key=lambda item: sum(item[1].values()), default=(("", False), {})
    )
    waited = sum(parts.values())
    overhead = _largest(overheads)
    if overheads.get(overhead, 0.0) >= max(OWN, waited):
        return f"{_OVERHEADS[overhead]}; it takes {percent(overheads[overhead])} of the {role}'s time"
    if waited < BALANCED:
        return f"balanced; the {role} trains {percent(works)} of its time"
    if evaluates:
        return f"evaluations; the {role} waits {percent(waited)} of its time for them"
    if other == "itself":
        return f"{role}; it is not there {percent(waited)} of the time"
    mostly = _largest(parts)
    if mostly in _OF_AGENTS and parts[mostly] >= waited / 2:
        return f"{_OF_AGENTS[mostly]}; the {role} waits {percent(parts[mostly])} of its time for them"
    return f"{other}; the {role} waits {percent(waited)} of its time for {_THINGS.get(other, other)}{_mostly(parts)}"


def _mostly(parts: Mapping[str, float]) -> str:
    """` (delivering 52 %)`: the largest parts of a wait that are half of it together, at most two; "" where it is for
    what its name says."""
    doings = sorted(parts, key=lambda doing: -parts[doing])
    half = sum(parts.values()) / 2
    named = doings[: 1 if parts[doings[0]] >= half else 2]
    if named[0] in _PLAIN and len(named) == 1:
        return ""
    told = ", ".join(f"{doing or 'other'} {percent(parts[doing])}" for doing in named)
    return f" ({told})"


def _largest(shares: Mapping[str, float]) -> str:
    return max(shares, key=lambda what: shares[what], default="")
