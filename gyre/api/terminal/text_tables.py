"""Tables for people: columns are fitted to a width before rich draws them, so no word is folded and no row is lost.

If the width is too small, empty columns go first, then the most dispensable ones; the remaining columns shrink down to
their `least` width, and their cells are cut with an ellipsis or wrapped between words. A table without a width, for a
pipe or a file, keeps everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gyre.api.terminal.plain_text import plain

if TYPE_CHECKING:
    from rich.table import Table

GAP = 2
"""Spaces between two columns."""

COLOURS = {
    "running": "green",
    "succeeded": "green",
    "recovered": "green",
    "answering": "green",
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
"""Colours of cells that are exactly these words."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column and how it may shrink. Without `least` it is whole or left out."""

    name: str
    least: int | None = None
    """The width down to which its cells are cut."""
    wraps: bool = False
    """Its cells are wrapped between words instead of cut."""
    dispensable: int = 0
    """0 is never left out; of the others the greatest goes first."""
    cell: Callable[[Mapping[str, Any], float], Any] | str = ""
    """Its cell of an item and the time, for `rows_of`: what the item has under this key, or what the function gives."""


def rows_of(
    columns: Sequence[Column], items: Sequence[Mapping[str, Any]], now: float = 0.0
) -> list[list[Any]]:
    """A row for each item; `now` in seconds since 1970, where a column has spans of time."""
    return [
        [item.get(one.cell) if isinstance(one.cell, str) else one.cell(item, now) for one in columns]
        for item in items
    ]


def fit(columns: Sequence[Column], natural: Sequence[int], width: int) -> dict[int, int]:
    """The width of every column that stays, by its index, given the natural widths.

    A natural width of 0 marks an empty column, which is left out if it is dispensable. The sum with the gaps is at
    most `width` if there is one character for each column that is not dispensable.
    """
    widths = {
        index: wanted for index, wanted in enumerate(natural) if wanted or not columns[index].dispensable
    }

    def least(index: int) -> int:
        floor = columns[index].least
        return widths[index] if floor is None else min(widths[index], floor)

    def gaps() -> int:
        return GAP * (len(widths) - 1)

    for index in sorted(widths, key=lambda index: -columns[index].dispensable):
        if not columns[index].dispensable or sum(map(least, widths)) + gaps() <= width:
            break
        del widths[index]
    while (excess := sum(widths.values()) + gaps() - width) > 0:
        flexible = [index for index in widths if widths[index] > least(index)]
        narrow = flexible or [index for index in widths if widths[index] > 1]
        if not narrow:
            break
        widest = max(narrow, key=lambda index: widths[index])
        room = widths[widest] - (least(widest) if flexible else 1)
        widths[widest] -= min(excess, room)
    return widths


def whole_lines(columns: Sequence[Column], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The table for a pipe or a file, with everything in it: without rich, which draws ten times as slowly."""
    from rich.cells import cell_len

    cells = [[("" if cell is None else plain(str(cell))).split("\n") for cell in row] for row in rows]
    if any(column.name for column in columns):
        cells.insert(0, [[column.name] for column in columns])
    widths = [
        max((cell_len(line) for row in cells for line in row[index]), default=0) + GAP
        for index in range(len(columns))
    ]
    lines = []
    for row in cells:
        for at in range(max(map(len, row), default=0)):
            parts = [cell[at] if at < len(cell) else "" for cell in row]
            line = "".join(
                part + " " * (width - cell_len(part)) for part, width in zip(parts, widths, strict=True)
            )
            lines.append(line.rstrip())
    return lines


def table(columns: Sequence[Column], rows: Sequence[Sequence[Any]], width: int) -> Table:
    """The table as rich draws it on a terminal. A row without wrapping columns is one line."""
    from rich.cells import cell_len
    from rich.table import Table
    from rich.text import Text

    cells = [["" if cell is None else plain(str(cell)) for cell in row] for row in rows]
    longest = [
        max((cell_len(line) for row in cells for line in row[index].split("\n")), default=0)
        for index in range(len(columns))
    ]
    natural = [
        0 if column.dispensable and not wanted else max(cell_len(column.name), wanted)
        for column, wanted in zip(columns, longest, strict=True)
    ]
    widths = fit(columns, natural, width)
    drawn = Table(
        box=None,
        header_style="dim",
        pad_edge=False,
        padding=(0, GAP, 0, 0),
        show_header=any(column.name for column in columns),
    )
    for index, column_width in widths.items():
        column = columns[index]
        drawn.add_column(
            column.name,
            width=column_width,
            no_wrap=not column.wraps,
            overflow="fold" if column.wraps else "ellipsis",
        )
    for row in cells:
        drawn.add_row(*(Text(row[index], style=COLOURS.get(row[index], "")) for index in widths))
    return drawn
