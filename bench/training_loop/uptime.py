"""When instances were up, what they could have made in that time, and what they made: by the manager's log.

An instance is up from the event that it serves a version until its engine died, it left or it drains. Its capacity is
what it made in a busy second: the median over the seconds in which it had at least a quarter of `running` samples.
Instances on one GPU share it: capacities of seconds with others up and without are told apart by how many were up.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]

_DOWN = ("EngineDied", "InstanceLeft", "InstanceDraining")


def intervals(rows: Sequence[Row], first: float, last: float) -> dict[str, list[tuple[float, float]]]:
    """By instance, in order, within `first` and `last`."""
    since: dict[str, float] = {}
    found: dict[str, list[tuple[float, float]]] = {}
    for row in sorted(rows, key=lambda row: row["at"]):
        name, at = row.get("instance"), row["at"]
        if name is None or at > last:
            continue
        if row["kind"] == "WeightsLoaded":
            since.setdefault(name, at)
        elif row["kind"] in _DOWN and name in since:
            began = since.pop(name)
            if at > first:
                found.setdefault(name, []).append((max(began, first), at))
    for name, began in since.items():
        found.setdefault(name, []).append((max(began, first), last))
    return found


def ideal_of(rows: Sequence[Row], first: float, last: float, running: int) -> Row:
    """`{"up_s", "capacity_tokens_s", "made_tokens", "ideal_tokens", "made_over_ideal"}`; the capacity by how many were
    up at once. The ideal is above what a trainer wants that is slower than they are."""
    up = intervals(rows, first, last)
    states = [row for row in rows if row["kind"] == "state" and first <= row["at"] <= last]
    if len(states) < 2:
        return {"up_s": {name: _length(spans) for name, spans in up.items()}}

    def count_at(at: float) -> int:
        return sum(any(began <= at < ended for began, ended in spans) for spans in up.values())

    rates: dict[int, list[float]] = {}
    lengths: dict[int, float] = {}
    for before, after in _seconds(states):
        length = after["at"] - before["at"]
        count = count_at(before["at"])
        lengths[count] = lengths.get(count, 0.0) + length
        busy = [held for _, held, _ in before["instances"].values() if held >= running // 4]
        if len(busy) >= count > 0 and count == count_at(after["at"]):
            rates.setdefault(count, []).append((after["generated"] - before["generated"]) / length)
    capacity = {count: statistics.median(values) for count, values in rates.items()}
    made = states[-1]["generated"] - states[0]["generated"]
    known = all(count in capacity for count in lengths if count)  # else there is nothing to compare with
    ideal = sum(capacity[count] * length for count, length in lengths.items() if count) if known else 0.0
    return {
        "up_s": {name: _length(spans) for name, spans in up.items()},
        "seconds_with_so_many_up": {str(count): round(length, 1) for count, length in lengths.items()},
        "capacity_tokens_s": {str(count): round(value, 1) for count, value in capacity.items()},
        "busy_seconds": {str(count): len(values) for count, values in rates.items()},
        "made_tokens": made,
        "ideal_tokens": round(ideal) or None,
        "made_over_ideal": round(made / ideal, 4) if ideal else None,
    }


def _seconds(states: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Pairs of states a second apart."""
    pairs, before = [], states[0]
    for row in states[1:]:
        if row["at"] - before["at"] >= 1.0:
            pairs.append((before, row))
            before = row
    return pairs


def _length(spans: Sequence[tuple[float, float]]) -> float:
    return round(sum(ended - began for began, ended in spans), 1)
