"""The columns of the table of runs: what each is called, and its value of an item of `JobReader.jobs`.

This module must not know who shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gyre.errors import ConfigError, nearest
from gyre.observe.run_lines import ran_for

Item = Mapping[str, Any]
Value = str | float | int | tuple[str, ...] | None
Kind = Literal["text", "texts", "number", "seconds", "time"]
"""`texts`: several, of which a comparison wants one. `seconds`: a span. `time`: a moment, in seconds since 1970."""

OF_A_SET = "held_out."
"""What the name of a column begins with that is of one held-out set: `held_out.math500`, and
`held_out.math500.reward.format` of a number that the reward function returned beside the reward."""


COMPONENT = "reward."
"""What the name of such a number begins with."""


@dataclass(frozen=True, slots=True)
class RunColumn:
    """A column; `value` is told an item and the time. None and "" stand for what a run does not have."""

    name: str
    kind: Kind
    meaning: str
    value: Callable[[Item, float], Value]


def _key(name: str) -> Callable[[Item, float], Value]:
    def value(item: Item, now: float) -> Value:
        found: Value = item.get(name)
        return found

    return value


def _version(item: Item, now: float) -> Value:
    version = item.get("version", -1)
    return version if isinstance(version, int) and version >= 0 else None


def _tags(item: Item, now: float) -> Value:
    return tuple(item.get("tags") or ())


def _best(key: str) -> Callable[[Item, float], Value]:
    def value(item: Item, now: float) -> Value:
        found: Value = (held_out_of(item) or {}).get(key)
        return found

    return value


def held_out_of(item: Item, name: str | None = None) -> Mapping[str, Any] | None:
    """The best evaluation of the set of this name, or else of the job's first set: `set`, `unit`, `value`,
    `version`."""
    rows = item.get("held_out") or ()
    return next((row for row in rows if name is None or row["set"] == name), None)


COLUMNS: tuple[RunColumn, ...] = (
    RunColumn("name", "text", "the job's name", _key("name")),
    RunColumn("id", "text", "its id", _key("job_id")),
    RunColumn("phase", "text", "`running`, `succeeded`, `failed`, `stopped`, …", _key("phase")),
    RunColumn("reason", "text", "why it is in that phase: how it ended", _key("reason")),
    RunColumn("message", "text", "the same in a sentence", _key("message")),
    RunColumn("recipe", "text", "its recipe; none for a trainer of your own", _key("recipe")),
    RunColumn(
        "model", "text", "the last part of its model's folder, or the small decoder's shape", _key("model")
    ),
    RunColumn("seed", "number", "`config.seed`", _key("seed")),
    RunColumn(
        "experiment",
        "text",
        "a short text that is the same for runs which differ in their seed alone",
        _key("config"),
    ),
    RunColumn("step", "number", "steps made", _key("step")),
    RunColumn("steps", "number", "steps asked for; unknown of a trainer of your own", _key("steps")),
    RunColumn("version", "number", "the newest published policy version", _version),
    RunColumn("reward", "number", "mean reward of the last step", _key("reward")),
    RunColumn(
        "held_out",
        "number",
        "the best evaluation of its first held-out set: accuracy from 0 to 1, or else mean reward",
        _best("value"),
    ),
    RunColumn("held_out_set", "text", "which set that is of", _best("set")),
    RunColumn("held_out_unit", "text", "`accuracy` or `reward`", _best("unit")),
    RunColumn("held_out_version", "number", "the policy version that earned it", _best("version")),
    RunColumn("tokens_per_s", "number", "tokens a second, the median over the run", _key("tokens_per_s")),
    RunColumn("cost", "number", "what it cost, where that is known", _key("cost")),
    RunColumn("tags", "texts", "its tags; `tag` is the same", _tags),
    RunColumn("notes", "text", "its note", _key("notes")),
    RunColumn("started", "time", "when it was submitted", _key("submitted_at")),
    RunColumn("ended", "time", "when it ended", _key("ended_at")),
    RunColumn("took", "seconds", "of its last run, until its end or so far", ran_for),
)

_BY_NAME = {column.name: column for column in COLUMNS}
_SAME = {
    "tag": "tags",
    "note": "notes",
    "job": "name",
    "job_id": "id",
    "submitted": "started",
    "config": "experiment",
}
"""Other words for a column."""


def _of_set(name: str) -> RunColumn:
    wanted = name[len(OF_A_SET) :]
    of, _, component = wanted.partition(f".{COMPONENT}")

    def value(item: Item, now: float) -> Value:
        best = held_out_of(item, wanted)
        if best is not None or not component:
            return (best or {}).get("value")
        found: Value = ((held_out_of(item, of) or {}).get("components") or {}).get(COMPONENT + component)
        return found

    what = f"the mean of {COMPONENT}{component} in the best evaluation of {of}" if component else ""
    return RunColumn(name, "number", what or f"the best evaluation of {wanted}", value)


def column_named(name: str) -> RunColumn:
    """The column of this name, `held_out.SET` among them. Raises ConfigError, which names the nearest."""
    known = _BY_NAME.get(_SAME.get(name, name))
    if known is not None:
        return known
    if name.startswith(OF_A_SET) and len(name) > len(OF_A_SET):
        return _of_set(name)
    raise ConfigError(
        f"There is no column {name!r} in the table of runs.",
        hint=nearest(name, _BY_NAME) or f"The columns: {', '.join(_BY_NAME)}.",
    )
