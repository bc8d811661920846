"""The sessions of a job with agents in words: the page, the terminal and REST say the same.

Pure. It takes what the rollout manager reported as it is, and says nothing of what is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

ENDS = {
    "scored": "scored",
    "truncated": "cut off at a limit",
    "policy_fault": "for a fault of the policy",
    "infra_fault": "for a fault of infrastructure",
}


def sessions_sentence(told: Mapping[str, Any]) -> str:
    """Where the sessions are, and what came of them since the rollout manager started."""
    return " ".join(_parts(told))


def sessions_fact(told: Mapping[str, Any]) -> str:
    """Where they are, as short as it goes, and while sessions are held back the newest fault."""
    places = (("at_engine", "at an engine"), ("with_agent", "with an agent"), ("waiting", "waiting"))
    fact = f"sessions {', '.join(f'{_count(told, key):,} {where}' for key, where in places)}"
    fault = _newest_fault(told) if _number(told, "pause_s") else None
    return fact if fault is None else f"{fact}, held back: {fault.get('reason') or 'faults'!s:.120}"


def _parts(told: Mapping[str, Any]) -> Iterator[str]:
    waiting, running, workers = (_count(told, key) for key in ("waiting", "running", "workers"))
    if running:
        yield (
            f"{_many(running, 'session runs', 'sessions run')} on {_many(workers, 'worker', 'workers')}: "
            f"{_count(told, 'at_engine')} at an engine, {_count(told, 'with_agent')} with an agent or its tools."
        )
    if waiting and not workers:
        yield f"{_many(waiting, 'session waits', 'sessions wait')} for an agent, and none is connected."
    elif waiting:
        yield f"{_many(waiting, 'session waits', 'sessions wait')} for an agent."
    if not running and not waiting:
        yield "No session runs or waits."
    if pause := _number(told, "pause_s"):
        yield (
            "Infrastructure ended several in a row, so sessions are handed out one at a time, after pauses of "
            f"{pause:g} s."
        )
    if failed := _count(told, "failed_groups"):
        yield f"{_many(failed, 'group', 'groups')} cannot be generated."
    yield from _since_start(told)


def _since_start(told: Mapping[str, Any]) -> Iterator[str]:
    since = told.get("since_start")
    if not isinstance(since, Mapping):
        return
    outcomes = since.get("outcomes")
    ends = {key: _count(outcomes, key) for key in ENDS} if isinstance(outcomes, Mapping) else {}
    if any(ends.values()):
        words = ", ".join(f"{count:,} {ENDS[key]}" for key, count in ends.items() if count)
        turns = _many(_count(since, "turns"), "turn was", "turns were")
        total = _many(sum(ends.values()), "session", "sessions")
        again = _count(since, "drawn_again")
        drawn = f"; {again:,} {'was' if again == 1 else 'were'} drawn again" if again else ""
        yield f"Since the manager started {total} ended, {words}{drawn}; {turns} answered."
    branches = told.get("branches")
    if isinstance(branches, Mapping) and (why := {key: _count(branches, key) for key in branches}):
        yield f"Branches: {', '.join(f'{count:,} by {key}' for key, count in sorted(why.items()))}."
    if newest := _newest_fault(told):
        yield f"The newest fault, of {newest.get('session', '')}: {newest.get('reason') or 'no reason was given'}"


def _newest_fault(told: Mapping[str, Any]) -> Mapping[str, Any] | None:
    since = told.get("since_start")
    faults = since.get("faults") if isinstance(since, Mapping) else None
    return faults[0] if isinstance(faults, list) and faults and isinstance(faults[0], Mapping) else None


def _number(told: Mapping[str, Any], key: str) -> float:
    value = told.get(key)
    return value if isinstance(value, int | float) else 0


def _count(told: Mapping[str, Any], key: str) -> int:
    return int(_number(told, key))


def _many(count: int, one: str, more: str) -> str:
    return f"{count:,} {one if count == 1 else more}"
