"""The grammar by which runs are filtered, on the page, by REST and on the command line.

    filter     = term { ["," | "and"] term }          all of them hold
    term       = column comparison value | word
    comparison = "=" | "!=" | "~" | "!~" | ">" | ">=" | "<" | "<="
    value      = characters without space and comma, or "anything in quotes"

`~` is "contains", without regard to case; so is `=` without regard to case. A word alone is looked for in name, id,
phase, reason, model, recipe, tags and notes. Numbers may end with `%`, `k` or `M`; spans with `s`, `m`, `h` or `d`; a
moment is a date, as `2026-11-27` or `2026-11-27T18:30`, of this machine's clock. A run that has no value in a column
satisfies only `!=` and `!~` there, and `=""`. Of tags, one has to satisfy `=` and `~`, and none may be what `!=` and
`!~` name.

Pure. This module must not know where the runs are from.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any

from gyre.api.runs.columns import RunColumn, Value, column_named
from gyre.errors import ConfigError

MOST_CHARS = 1000
"""Of a filter: one that is longer is not typed."""

Filter = Callable[[Mapping[str, Any], float], bool]
"""Whether an item satisfies it, by the item and the time."""

_WORDS_IN = ("name", "id", "phase", "reason", "model", "recipe", "tags", "notes")

_TOKEN = re.compile(
    r"""\s*(?:,|\band\b(?=\s))?\s*
    (?:(?P<column>[A-Za-z_][\w.:/+-]*)\s*(?P<sign>!=|!~|>=|<=|==|=|~|>|<)\s*)?
    (?:"(?P<quoted>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s,"=~<>!][^\s,"]*))?""",
    re.VERBOSE,
)
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*([%kMsmhd]?|min)")
_SCALE = {"": 1.0, "%": 0.01, "k": 1e3, "M": 1e6}
_SPAN = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_ORDER: dict[str, Callable[[Any, Any], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}


def parse_filter(text: str) -> Filter:
    """The filter that `text` is; "" lets everything through. Raises ConfigError, which says where it is no filter."""
    if len(text) > MOST_CHARS:
        raise ConfigError(f"The filter has {len(text):,} characters, and may have {MOST_CHARS:,}.")
    terms: list[Filter] = []
    at = 0
    while text[at:].strip(" \t\r\n,"):
        found = _TOKEN.match(text, at)
        assert found is not None  # it matches nothing, too
        quoted, bare = found["quoted"], found["bare"]
        if quoted is None and bare is None:
            raise _no_filter(text, found)
        value = re.sub(r"\\(.)", r"\1", quoted) if quoted is not None else bare
        terms.append(
            _comparison(column_named(found["column"].lower()), found["sign"], value)
            if found["column"]
            else _word(value)
        )
        at = found.end()
    return lambda item, now: all(term(item, now) for term in terms)


def _no_filter(text: str, found: re.Match[str]) -> ConfigError:
    if found["column"]:
        wanted = f"{found['column']}{found['sign']}"
        return ConfigError(
            f"{wanted} has no value in the filter.", hint=f'As in {wanted}0.5 or {wanted}"two words".'
        )
    rest = text[found.end() :].strip()
    return ConfigError(
        f"{rest[:40]!r} is no filter.",
        hint='As in reward>0.5, model~qwen, tag=ablation or notes~"two words"; commas and spaces mean "and".',
    )


def _word(word: str) -> Filter:
    columns = [column_named(name) for name in _WORDS_IN]
    wanted = word.casefold()

    def holds(item: Mapping[str, Any], now: float) -> bool:
        return any(wanted in text.casefold() for one in columns for text in _texts(one.value(item, now)))

    return holds


def _comparison(column: RunColumn, sign: str, value: str) -> Filter:
    sign = "=" if sign == "==" else sign
    if sign.startswith("!"):
        same = _comparison(column, sign[1:], value)
        return lambda item, now: not same(item, now)
    if sign == "=" and value == "":
        return lambda item, now: column.value(item, now) in (None, "", ())
    if sign == "~" or (sign == "=" and column.kind in ("text", "texts")):
        return _of_text(column, sign, value)
    if column.kind in ("text", "texts"):
        raise ConfigError(
            f"{column.name} is text, which is not {sign} anything.", hint=f"{column.name}~{value}"
        )
    if column.kind == "time":
        return _of_time(column, sign, value)
    wanted = _number_of(column, value)
    holds = _ORDER.get(sign, _is_same)
    return lambda item, now: (
        isinstance(found := column.value(item, now), int | float) and holds(found, wanted)
    )


def _of_text(column: RunColumn, sign: str, value: str) -> Filter:
    wanted = value.casefold()

    def holds(item: Mapping[str, Any], now: float) -> bool:
        texts = [text.casefold() for text in _texts(column.value(item, now))]
        return any(wanted in text if sign == "~" else wanted == text for text in texts)

    return holds


def _of_time(column: RunColumn, sign: str, value: str) -> Filter:
    """A date without a clock is the whole day: `=` is within it, `>` after it."""
    try:
        first = datetime.fromisoformat(value)
    except ValueError:
        raise ConfigError(
            f"{column.name}{sign}{value}: that is no date.", hint="As in 2026-11-27 or 2026-11-27T18:30."
        ) from None
    length = timedelta(days=1) if len(value) <= len("2026-11-27") else timedelta(minutes=1)
    try:
        begin, end = first.timestamp(), (first + length).timestamp()
    except (OverflowError, OSError, ValueError):
        raise ConfigError(f"{column.name}{sign}{value}: no clock shows that date.") from None
    tests: dict[str, Callable[[float], bool]] = {
        "=": lambda at: begin <= at < end,
        ">": lambda at: at >= end,
        ">=": lambda at: at >= begin,
        "<": lambda at: at < begin,
        "<=": lambda at: at < end,
    }
    holds = tests[sign]
    return lambda item, now: isinstance(at := column.value(item, now), int | float) and holds(at)


def _number_of(column: RunColumn, value: str) -> float:
    units = _SPAN if column.kind == "seconds" else _SCALE
    found = _NUMBER.fullmatch(value)
    if found is None or found[2] not in units:
        example = "10m" if column.kind == "seconds" else "0.5"
        raise ConfigError(
            f"{column.name} is a number, and {value!r} is none.", hint=f"As in {column.name}>{example}."
        )
    return float(found[1]) * units[found[2]]


def _is_same(found: float, wanted: float) -> bool:
    """What a table shows in four digits is looked for in as many; whole numbers are themselves."""
    if isinstance(found, int):
        return found == wanted
    return abs(found - wanted) <= 5e-4 * abs(wanted)


def _texts(value: Value) -> tuple[str, ...]:
    if isinstance(value, tuple):
        return value
    if value is None or value == "":
        return ()
    return (f"{value:.6g}" if isinstance(value, float) else str(value),)
