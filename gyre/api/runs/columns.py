"""The columns of the table of runs: what each is called, its value of an item of `JobReader.jobs`, and how it is
written. `gyre ls`, its groups, CSV, filters and the page (`ui/src/facts.ts`) have them from here.

This module must not know who shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gyre.api.terminal.formats import duration, price
from gyre.errors import ConfigError, nearest
from gyre.observe.number_text import percent, short
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
    """A column; `read` gives its value of an item and the time, which is the item's of this name where it is None. None
    and "" stand for what a run does not have.

    `title` is above it on the page, `head` in `gyre ls` (the title in capitals where it is ""), where it may be
    `dispensable` on a narrow terminal. `text` is its cell in `gyre ls` where the value alone is not enough. `mean`
    writes the mean of a group's members; None: groups have none."""

    name: str
    kind: Kind
    meaning: str
    read: Callable[[Item, float], Value] | None = None
    title: str = ""
    head: str = ""
    dispensable: int = 0
    text: Callable[[Item], str] | None = None
    mean: Callable[[float], str] | None = None

    def value(self, item: Item, now: float) -> Value:
        found: Value = item.get(self.name) if self.read is None else self.read(item, now)
        return found


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
    `version`, and the newest: `last`, `last_version`."""
    rows = item.get("held_out") or ()
    return next((row for row in rows if name is None or row["set"] == name), None)


def _reason(item: Item) -> str:
    place = item.get("queue_place")
    return f"{item['reason']}, number {place} in the queue" if place else str(item["reason"])


def _steps(item: Item) -> str:
    """`25/40`: steps made of those asked for; `25` where nobody asked for a number."""
    return f"{item['step']}/{item['steps']}" if item.get("steps") else str(item["step"])


def _best_held_out(item: Item) -> str:
    """`math500 61 % (v80)`: the best evaluation of the first set; a mean reward as a number."""
    best = held_out_of(item)
    if best is None:
        return ""
    value = percent(best["value"]) if best["unit"] == "accuracy" else f"reward {short(best['value'])}"
    by = f" by {best['right_by']}" if best.get("right_by") else ""  # an older summary has none
    return f"{best['set']} {value}{by} (v{best['version']})"


def _last_held_out(item: Item) -> str:
    """`57 % (v80)`: the newest evaluation of that set; "" where it is the best one."""
    found = held_out_of(item)
    if found is None or found.get("last") is None or found["last_version"] == found["version"]:
        return ""
    value = percent(found["last"]) if found["unit"] == "accuracy" else short(found["last"])
    return f"{value} (v{found['last_version']})"


COLUMNS: tuple[RunColumn, ...] = (
    RunColumn("name", "text", "the job's name", title="Job", head="NAME", dispensable=5),
    RunColumn("id", "text", "its id", _key("job_id"), title="ID"),
    RunColumn("phase", "text", "`running`, `succeeded`, `failed`, `stopped`, …", title="Phase"),
    RunColumn(
        "reason",
        "text",
        "why it is in that phase: how it ended",
        title="Why",
        head="REASON",
        dispensable=3,
        text=_reason,
    ),
    RunColumn("message", "text", "the same in a sentence"),
    RunColumn("recipe", "text", "its recipe; none for a trainer of your own", title="Recipe"),
    RunColumn(
        "model", "text", "the last part of its model's folder, or the small decoder's shape", title="Model"
    ),
    RunColumn("seed", "number", "`config.seed`", title="Seed"),
    RunColumn(
        "experiment",
        "text",
        "a short text that is the same for runs which differ in their seed alone",
        _key("config"),
    ),
    RunColumn("step", "number", "steps made", title="Steps", head="STEP", text=_steps, mean=short),
    RunColumn("steps", "number", "steps asked for; unknown of a trainer of your own"),
    RunColumn(
        "version", "number", "the newest published policy version", _version, title="Version", dispensable=12
    ),
    RunColumn("reward", "number", "mean reward of the last step", title="Reward", dispensable=4, mean=short),
    RunColumn(
        "held_out",
        "number",
        "the best evaluation of its first held-out set: accuracy from 0 to 1, or else mean reward",
        _best("value"),
        title="Best held-out",
        head="BEST HELD OUT",
        dispensable=7,
        text=_best_held_out,
        mean=short,
    ),
    RunColumn(
        "held_out_last",
        "number",
        "the newest evaluation of that set",
        _best("last"),
        title="Last",
        dispensable=9,
        text=_last_held_out,
        mean=short,
    ),
    RunColumn("held_out_set", "text", "which set that is of", _best("set")),
    RunColumn("held_out_unit", "text", "`accuracy` or `reward`", _best("unit")),
    RunColumn("held_out_version", "number", "the policy version that earned it", _best("version")),
    RunColumn(
        "tokens_per_s",
        "number",
        "tokens a second, the median over the run",
        title="Tokens/s",
        head="TOK/S",
        dispensable=10,
        mean=short,
    ),
    RunColumn(
        "cost", "number", "what it cost, where that is known", title="Cost", dispensable=11, mean=price
    ),
    RunColumn("tags", "texts", "its tags; `tag` is the same", _tags, title="Tags", dispensable=8),
    RunColumn("notes", "text", "its note", title="Note"),
    RunColumn(
        "started",
        "time",
        "when it was submitted",
        _key("submitted_at"),
        title="Began",
        head="SUBMITTED",
        dispensable=1,
    ),
    RunColumn("ended", "time", "when it ended", _key("ended_at")),
    RunColumn(
        "took",
        "seconds",
        "of its last run, until its end or so far",
        ran_for,
        title="Took",
        head="FOR",
        dispensable=6,
        mean=duration,
    ),
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
