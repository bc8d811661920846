"""How the command line writes: JSON as data, compact tables for people, remarks to stderr.

rich is imported when a table is printed and not before.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 240
"""Columns where nobody looks: a table in a pipe is not folded to a terminal that is not there."""

COLOURS = {
    "running": "green",
    "succeeded": "green",
    "recovered": "green",
    "ok": "green",
    "starting": "yellow",
    "recovering": "yellow",
    "paused": "yellow",
    "stopping": "yellow",
    "open": "yellow",
    "warn": "yellow",
    "away": "yellow",
    "failed": "red",
    "fail": "red",
    "gave up": "red",
}


def write_json(data: Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(finite(data), indent=2, ensure_ascii=False))


def write_json_line(data: Any) -> None:
    """One JSON object on a line of its own, at once."""
    click.echo(json.dumps(finite(data), ensure_ascii=False, separators=(",", ":")))
    sys.stdout.flush()


def finite(data: Any) -> Any:
    """NaN and infinities as null, which is all that JSON has for them."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    return [finite(value) for value in data] if isinstance(data, list | tuple) else data


def remark(text: str) -> None:
    """Something said about the data: to stderr."""
    click.echo(text, err=True)


def console() -> Console:
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the process with code 1; a reader that left is no failure

    width = None if sys.stdout.isatty() else PIPE_WIDTH
    return Quiet(file=sys.stdout, width=width, highlight=False, markup=False, soft_wrap=False)


def write_table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """A compact table. Words that `COLOURS` knows are coloured on a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        texts = ["" if cell is None else str(cell) for cell in row]
        table.add_row(*(Text(text, style=COLOURS.get(text, "")) for text in texts))
    console().print(table)


def local_time(at: float | None) -> str:
    """Seconds since 1970 as local ISO time with its offset; empty for None."""
    return "" if not at else datetime.fromtimestamp(at).astimezone().isoformat(timespec="seconds")


def duration(seconds: float | None) -> str:
    """`0.8 s`, `12 s`, `3 min 5 s`, `2 h 14 min`, `3 d 4 h`; empty for None."""
    if seconds is None:
        return ""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    units = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))
    for index, (name, size) in enumerate(units):
        if whole >= size:
            first, rest = divmod(whole, size)
            if index == len(units) - 1:
                return f"{first} {name}"
            smaller, small = units[index + 1]
            second = rest // small
            return f"{first} {name} {second} {smaller}" if second else f"{first} {name}"
    return "0 s"


def number(value: Any) -> str:
    """A number as people read it: four significant digits, and nothing for what is not there."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
