"""Which runs a table shows, in which order, and what groups of them come to.

Pure. This module must not know who shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from gyre.api.runs.columns import column_named, held_out_of
from gyre.api.runs.filters import parse_filter
from gyre.errors import ConfigError, nearest

Item = Mapping[str, Any]

GROUPS = ("experiment", "tag", "seed", "recipe", "model", "phase", "name")
"""By what runs can be grouped. `experiment`: runs that differ in their seed alone, so a group's mean and spread are
those over seeds. A run with several tags is in the group of each."""

SUMMARISED = ("step", "reward", "held_out", "tokens_per_s", "cost", "took")
"""Columns of which a group has the mean and the spread."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Of so many members that have the value: their mean, and their standard deviation, None of one alone."""

    count: int
    mean: float
    std: float | None


@dataclass(frozen=True, slots=True)
class Group:
    """`key`: what its members have in common; "" for those that have none of it. `names` and `jobs`: of its members,
    in the order of the table. `values`: by the name of the column. `held_out`: of which set and unit that value is."""

    key: str
    jobs: tuple[str, ...]
    names: tuple[str, ...]
    values: dict[str, Spread]
    held_out: tuple[str, str] | None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def select_runs(items: Sequence[Item], *, filter: str = "", sort: str = "", now: float) -> list[Item]:
    """The items that the filter lets through, in this order. Raises ConfigError for a filter or an order that is
    none."""
    holds = parse_filter(filter)
    return ordered([item for item in items if holds(item, now)], sort, now=now)


def ordered(items: Sequence[Item], sort: str, *, now: float) -> list[Item]:
    """The items by these columns, as `-reward` or `model,-reward`: "-" is from the greatest down. Those without the
    value are last in either direction. Without an order they stay as they are."""
    found = list(items)
    for name in reversed([name.strip() for name in sort.split(",") if name.strip()]):
        column, down = column_named(name.lstrip("+-")), name.startswith("-")
        values = [column.value(item, now) for item in found]
        there = [at for at, value in enumerate(values) if value not in (None, "", ())]
        absent = [at for at, value in enumerate(values) if value in (None, "", ())]
        there.sort(key=lambda at: _sortable(values[at]), reverse=down)
        found = [found[at] for at in [*there, *absent]]
    return found


def _sortable(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(one.casefold() for one in value)
    return value.casefold() if isinstance(value, str) else value


def grouped(items: Sequence[Item], by: str, *, now: float) -> list[Group]:
    """The groups by one of `GROUPS`, in the order of their first members. Raises ConfigError for another word."""
    if by not in GROUPS:
        raise ConfigError(
            f"Runs are not grouped by {by!r}.", hint=nearest(by, GROUPS) or f"One of: {', '.join(GROUPS)}."
        )
    column = column_named(by)
    members: dict[str, list[Item]] = {}
    for item in items:
        value = column.value(item, now)
        keys = (value or ("",)) if isinstance(value, tuple) else ("" if value is None else str(value),)
        for key in keys:
            members.setdefault(key, []).append(item)
    return [_group(key, of_it, now) for key, of_it in members.items()]


def _group(key: str, items: Sequence[Item], now: float) -> Group:
    kinds = Counter((one["set"], one["unit"]) for item in items if (one := held_out_of(item)) is not None)
    kind = kinds.most_common(1)[0][0] if kinds else None
    values = {}
    for name in SUMMARISED:
        column = column_named(name)
        told = items
        if name == "held_out":  # of one set and in one unit: means over several say nothing
            told = [
                item for item in items if (one := held_out_of(item)) and (one["set"], one["unit"]) == kind
            ]
        found = [float(value) for item in told if isinstance(value := column.value(item, now), int | float)]
        if found:
            values[name] = Spread(len(found), fmean(found), stdev(found) if len(found) > 1 else None)
    return Group(
        key, tuple(item["job_id"] for item in items), tuple(item["name"] for item in items), values, kind
    )
