"""What the sessions of a step say of it: turns, how they ended, what agents and tools put there, and how long it took.

Pure. The names are in `gyre.workloads.trainer.learning.metric_names`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from gyre.rollouts.samples import Group, Sample
from gyre.rollouts.session_extras import ENGINE_S, OUTCOME, TOOL_S, TURNS, first_rows, number_of, row_turns

OUTCOMES = ("scored", "truncated", "policy_fault")
"""How a session ends that is trained; one that infrastructure ended is not."""

TURNS_NAMED = 4
"""The first turns have a number each, and those after them have one together: an agent asks its tools anew each time,
and what it says changes with how much it knows."""


def session_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Of the rollouts that are sessions; empty where none is."""
    sessions = [found for group in groups for found in first_rows(group)]
    if not sessions:
        return {}
    firsts = [first.extras for first, _ in sessions]
    ended = [extras[OUTCOME] for extras in firsts]
    turns = _known(number_of(extras, TURNS) for extras in firsts)
    tools = _known(number_of(extras, TOOL_S) for extras in firsts)
    engines = _known(number_of(extras, ENGINE_S) for extras in firsts)
    found = {f"rollouts_{name}_ratio": ended.count(name) / len(ended) for name in OUTCOMES}
    if turns:
        found |= {"turns_mean": _mean(turns), "turns_max": max(turns)}
    if tools:
        found |= {"tool_seconds_mean": _mean(tools), "tool_seconds_max": max(tools)}
    if engines:
        found["engine_seconds_mean"] = _mean(engines)
    return found | _tokens([rows for _, rows in sessions])


def _tokens(sessions: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Of the turns of each session, each once in however many rows it is: what was put there, and what was drawn."""
    added = 0
    drawn: dict[str, list[int]] = {}
    for rows in sessions:
        turns = {turn.number: turn for row in rows for turn in row_turns(row)}
        for place, number in enumerate(sorted(turns)):
            turn = turns[number]
            added += turn.drawn - turn.start
            drawn.setdefault(turn_metric(place), []).append(turn.end - turn.drawn)
    return {"tokens_not_drawn": added} | {name: _mean(lengths) for name, lengths in drawn.items()}


def turn_metric(place: int) -> str:
    """The metric of a session's turn at this place, from 0."""
    return f"turn_{place + 1}_tokens_mean" if place < TURNS_NAMED else "later_turns_tokens_mean"


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
