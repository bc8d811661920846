"""Which runs a table shows, in which order, and what groups of them come to.

Pure. This module must not know who shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import Any, TypeVar

from gyre.api.runs.columns import COLUMNS, Value, column_named, held_out_of
from gyre.api.runs.filters import parse_filter
from gyre.api.terminal.formats import price
from gyre.errors import ConfigError, nearest
from gyre.observe.number_text import percent, plus_minus, short

Item = Mapping[str, Any]
T = TypeVar("T")

GROUPS = ("experiment", "tag", "seed", "recipe", "model", "phase", "name")
"""By what runs can be grouped. `experiment`: runs that differ in their seed alone, so a group's mean and spread are
those over seeds. A run with several tags is in the group of each."""

SUMMARISED = tuple(column.name for column in COLUMNS if column.mean is not None)
"""Columns of which a group has the mean and the spread."""

_OF_A_SET = ("held_out", "held_out_last")


@dataclass(frozen=True, slots=True)
class Spread:
    """Of so many members that have the value: their mean, standard deviation (None of one alone) and sum."""

    count: int
    mean: float
    std: float | None
    sum: float


@dataclass(frozen=True, slots=True)
class GroupedRuns:
    """`key`: what its members have in common; "" for those that have none of it. `title`: what it is called, and
    `settings`: in which it differs from the other groups (`gyre.api.runs.naming`), "" where that is not known. `names`
    and `jobs`: of its members, in the order of the table; `failed`: how many of them. `values` and, for people,
    `words`: by the name of the column. `held_out`: of which set and unit that value is."""

    key: str
    title: str
    settings: str
    jobs: tuple[str, ...]
    names: tuple[str, ...]
    failed: int
    values: dict[str, Spread]
    words: dict[str, str]
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
    return _ordered(items, sort, lambda name, item: column_named(name).value(item, now))


def _ordered(rows: Sequence[T], sort: str, value_of: Callable[[str, T], Value]) -> list[T]:
    found = list(rows)
    for name in reversed([name.strip() for name in sort.split(",") if name.strip()]):
        down = name.startswith("-")
        values = [value_of(name.lstrip("+-"), row) for row in found]
        there = [at for at, value in enumerate(values) if value not in (None, "", ())]
        absent = [at for at, value in enumerate(values) if value in (None, "", ())]
        there.sort(key=lambda at: _sortable(values[at]), reverse=down)
        found = [found[at] for at in [*there, *absent]]
    return found


def _sortable(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(one.casefold() for one in value)
    return value.casefold() if isinstance(value, str) else value


def shared_names(items: Sequence[Item]) -> list[str]:
    """The names that several of these jobs have, which are distinguished by their ids."""
    times = Counter(item["name"] for item in items)
    return [name for name, count in times.items() if count > 1]


def cost_words(items: Sequence[Item]) -> str:
    """What these runs cost together, as `1.92 in all`; of how many, where not all have prices; "" where none has."""
    costs = [float(cost) for item in items if isinstance(cost := item.get("cost"), int | float)]
    if not costs:
        return ""
    some = f"; {len(costs):,} of {len(items):,} jobs have prices" if len(costs) < len(items) else ""
    return f"{price(sum(costs))} in all{some}"


def grouped(items: Sequence[Item], by: str, *, sort: str = "", now: float) -> list[GroupedRuns]:
    """The groups by one of `GROUPS`, in the order of their first members; with an order by the means of its columns,
    and of a column that has none by their first members. Raises ConfigError for another word."""
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
    found = [(_group(key, of_it, now), of_it[0]) for key, of_it in members.items()]
    named_set = len({group.held_out for group, _ in found} - {None}) > 1
    found = [(replace(group, words=_words(group, named_set)), first) for group, first in found]

    def value_of(name: str, one: tuple[GroupedRuns, Item]) -> Value:
        group, first = one
        known = column_named(name)
        if known.name in SUMMARISED:
            return group.values[known.name].mean if known.name in group.values else None
        return group.title if known.name == by else known.value(first, now)

    return [group for group, _ in _ordered(found, sort, value_of)]


def _group(key: str, items: Sequence[Item], now: float) -> GroupedRuns:
    kinds = Counter((one["set"], one["unit"]) for item in items if (one := held_out_of(item)) is not None)
    kind = kinds.most_common(1)[0][0] if kinds else None
    values = {}
    for name in SUMMARISED:
        column = column_named(name)
        told = items
        if name in _OF_A_SET:  # of one set and in one unit: means over several say nothing
            told = [
                item for item in items if (one := held_out_of(item)) and (one["set"], one["unit"]) == kind
            ]
        found = [float(value) for item in told if isinstance(value := column.value(item, now), int | float)]
        if found:
            values[name] = _spread(found)
    return GroupedRuns(
        key=key,
        title=key,
        settings="",
        jobs=tuple(item["job_id"] for item in items),
        names=tuple(item["name"] for item in items),
        failed=sum(item.get("phase") == "failed" for item in items),
        values=values,
        words={},
        held_out=kind,
    )


def _spread(values: Sequence[float]) -> Spread:
    return Spread(len(values), fmean(values), stdev(values) if len(values) > 1 else None, sum(values))


def _words(group: GroupedRuns, named_set: bool) -> dict[str, str]:
    """`0.71 ±0.02`: the mean of the members and their standard deviation; of how many, where not all have it. Of costs
    the sum, too. `named_set`: say of which held-out set an evaluation is, for the groups have several."""
    words = {}
    for name, found in group.values.items():
        form = _form_of(name, group.held_out)
        which = f"{group.held_out[0]} " if named_set and name in _OF_A_SET and group.held_out else ""
        whole = f", {form(found.sum)} in all" if name == "cost" and found.count > 1 else ""
        of = f" of {found.count}" if found.count < len(group.jobs) else ""
        words[name] = f"{which}{plus_minus(found.mean, found.std, form)}{whole}{of}"
    return words


def _form_of(name: str, kind: tuple[str, str] | None) -> Callable[[float], str]:
    accuracy = name in _OF_A_SET and kind is not None and kind[1] == "accuracy"
    return percent if accuracy else column_named(name).mean or short
