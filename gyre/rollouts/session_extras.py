"""What the rows of a session say of it beside their tokens, as extras of samples: `session.NAME`.

Each row has its `path`, and its session's `outcome` and `reason`. The numbers of the whole session are on its first
row alone, so that a sum over rows is one over rollouts.

This module must not know how a session is run, or what becomes of the numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from gyre.rollouts.samples import Group, Sample

SESSION = "session."
"""Before each name."""

ASKED = f"{SESSION}prompt_ids"
"""In the `meta` of a group that is delivered: the prompt that it was asked for with, int32 `[p]`."""

PATH = f"{SESSION}path"
"""The turns of a row, as lists of the fields of `RowTurn`."""
OUTCOME, REASON = f"{SESSION}outcome", f"{SESSION}reason"
TURNS = f"{SESSION}turns"
"""Turns of the session, in whatever row."""
TOOL_S, ENGINE_S = f"{SESSION}tool_s", f"{SESSION}engine_s"
"""Seconds in which its agent was waited for between turns, and in which any of its turns was at an engine or waited for
one. Neither is there of a session that was run under two managers: the time between them is nobody's."""


class RowTurn(NamedTuple):
    """A turn in a row: tokens `start` to `drawn` were added, by the prompt or by what the agent put there, and `drawn`
    to `end` are what the policy drew. In tokens after the group's prompt; the latter of each two is exclusive."""

    number: int
    start: int
    drawn: int
    end: int
    waited_s: float | None
    """Seconds from the answer before it, of whatever turn, to its request; None of a first one, of one that was asked
    for while another was generated, and where that is not known."""


def row_turns(sample: Sample) -> list[RowTurn]:
    """The turns of the row, in the order of the conversation; none where it is no row of a session, or somebody changed
    what was there."""
    path = sample.extras.get(PATH)
    if not isinstance(path, list | tuple):
        return []
    try:
        return [RowTurn(*turn) for turn in path]
    except TypeError:
        return []


def first_rows(group: Group) -> list[tuple[Sample, list[Sample]]]:
    """Of each rollout that is a session its first row and all of its rows."""
    found = []
    for places in group.rollouts:
        rows = [group.samples[at] for at in places]
        if OUTCOME in rows[0].extras:
            found.append((rows[0], rows))
    return found


def number_of(extras: dict[str, Any], key: str) -> float | None:
    value = extras.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def spent(asked: Sequence[tuple[float | None, float | None]]) -> tuple[float, float] | None:
    """Seconds between turns and seconds of turns, of when each was asked for and told, in the order of asking; None
    where any of it is not known. What was at the engine at the same time counts once."""
    between = within = 0.0
    until: float | None = None
    for start, end in asked:
        if start is None or end is None:
            return None
        if until is None:
            until = start
        between += max(start - until, 0.0)
        within += max(end - max(start, until), 0.0)
        until = max(until, end)
    return between, within
