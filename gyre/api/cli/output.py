"""Output of the command line: JSON and compact tables to stdout, messages to stderr.

rich is imported when a table is printed and not before.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import click

from gyre.api.terminal.formats import ago, local_time
from gyre.api.terminal.plain_text import plain, plain_json
from gyre.api.terminal.text_tables import Column, table, whole_lines

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 240
"""Width of a table that goes to a pipe or a file: wide enough that nothing is folded."""


LAST_LINE = "last_line"
"""In an error's details: what is printed on stdout after its sentence."""


def write_json(data: Any) -> None:
    """One JSON document on stdout."""
    click.echo(plain_json(json.dumps(finite(data), indent=2, ensure_ascii=False)))


def write_json_line(data: Any) -> None:
    """One JSON object on a line of its own, at once."""
    click.echo(plain_json(json.dumps(finite(data), ensure_ascii=False, separators=(",", ":"))))
    sys.stdout.flush()


def finite(data: Any) -> Any:
    """NaN and infinities as null, which is all that JSON has for them."""
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    return [finite(value) for value in data] if isinstance(data, list | tuple) else data


def remark(text: str) -> None:
    """Print a message to stderr."""
    click.echo(plain(text), err=True)


def say(text: str) -> None:
    """Print text of others to stdout."""
    click.echo(plain(text))


def console(width: int | None = None) -> Console:
    """rich on stdout: as wide as the terminal, or `width`, or `PIPE_WIDTH` where nobody looks."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # rich would end the process with code 1; a reader that left is no failure

    if width is None and not stdout_is_terminal():
        width = PIPE_WIDTH
    return Quiet(file=sys.stdout, width=width, highlight=False, markup=False, soft_wrap=False)


def write_table(columns: Sequence[Column], rows: Iterable[Sequence[Any]]) -> None:
    """A compact table: fitted to a terminal, and with everything in it where nobody looks."""
    if stdout_is_terminal():
        out = console()
        out.print(table(columns, list(rows), out.width))
        return
    click.echo("".join(f"{line}\n" for line in whole_lines(columns, list(rows))), nl=False)


def moment(at: float | None, now: float) -> str:
    """A time as its reader wants it: `3 min ago` on a terminal, ISO with its offset elsewhere; empty for None."""
    return ago(at, now) if stdout_is_terminal() else local_time(at)


def stdout_is_terminal() -> bool:
    return sys.stdout.isatty()
