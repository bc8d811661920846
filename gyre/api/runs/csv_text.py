"""The table of runs and the curves of several as CSV (RFC 4180), for a spreadsheet or pandas.

A cell of text that a spreadsheet would take for a formula begins with an apostrophe. Pure.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from gyre.api.runs.columns import COLUMNS, column_named

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_of_runs(items: Iterable[Mapping[str, Any]], columns: Sequence[str] = (), *, now: float) -> str:
    """A line for each run, below one with the names of these columns, or of all. Raises ConfigError for a column that
    is none."""
    chosen = [column_named(name) for name in columns] or list(COLUMNS)
    rows = [[_cell(column.value(item, now)) for column in chosen] for item in items]
    return _text([column.name for column in chosen], rows)


def csv_of_curves(steps: Mapping[str, Sequence[Mapping[str, Any]]], names: Sequence[str] = ()) -> str:
    """A line for each step of each job (by its name), with these metrics, or with all that any of the steps has."""
    known = dict.fromkeys(
        key for rows in steps.values() for row in rows for key, value in row.items() if _is_number(value)
    )
    known.pop("step", None)
    wanted = list(names) or list(known)
    rows = [
        [_cell(job), row["step"], *(row[name] if _is_number(row.get(name)) else "" for name in wanted)]
        for job, of_it in steps.items()
        for row in of_it
    ]
    return _text(["job", "step", *wanted], rows)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    text = "; ".join(value) if isinstance(value, tuple) else value
    return f"'{text}" if isinstance(text, str) and text.startswith(_FORMULA) else text


def _text(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(head)
    writer.writerows(rows)
    return out.getvalue()
