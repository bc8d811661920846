"""Tables for people: columns go or are cut before a word is folded, and a pipe gets everything."""

from __future__ import annotations

import io
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

import gyre
from gyre.api.cli.look import _message_of
from gyre.api.terminal.formats import ago, incident_message, sparkline
from gyre.api.terminal.text_tables import GAP, Column, fit, table, whole_lines

COLUMNS = (
    Column("NAME", least=6, dispensable=1),
    Column("ID"),
    Column("PHASE"),
    Column("REASON", dispensable=3),
    Column("FOR", dispensable=2),
    Column("MESSAGE", least=10),
)
ROWS = [
    (
        "a-long-name",
        "a-long-name-1a2b",
        "running",
        "",
        "3 min 5 s",
        "all is well with this one, and it goes on",
    ),
    ("b", "b-3c4d", "paused", "asked", "12 s", "日本語のメッセージ"),
]


def lines(width: int | None) -> list[str]:
    if width is None:
        return whole_lines(COLUMNS, ROWS)
    out = io.StringIO()
    Console(file=out, width=width).print(table(COLUMNS, ROWS, width))
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [44, 60, 80, 100, 200])
def test_a_row_is_a_line_within_the_width(width: int) -> None:
    drawn = lines(width)
    assert len(drawn) == 3
    assert max(map(cell_len, drawn)) <= width
    for line, word in zip(drawn, ("ID", "a-long-name-1a2b", "b-3c4d"), strict=True):
        assert word in line.split()
    assert all("running" in line or "paused" in line for line in drawn[1:])


def test_the_least_needed_column_goes_first_and_a_cut_ends_in_an_ellipsis() -> None:
    assert lines(200)[0].split() == ["NAME", "ID", "PHASE", "REASON", "FOR", "MESSAGE"]
    assert lines(62)[0].split() == ["NAME", "ID", "PHASE", "FOR", "MESSAGE"]
    assert lines(52)[0].split() == ["NAME", "ID", "PHASE", "MESSAGE"]
    assert lines(44)[0].split() == ["ID", "PHASE", "MESSAGE"]
    assert lines(62)[1].endswith("…")


def test_without_a_width_everything_stays() -> None:
    drawn = lines(None)
    assert drawn[0].split() == ["NAME", "ID", "PHASE", "REASON", "FOR", "MESSAGE"]
    assert drawn[1].endswith("and it goes on")
    assert whole_lines(COLUMNS, [("n", "i", "p", "", "", "m")])[0].split() == drawn[0].split()
    begins = [line.index(word) for line, word in zip(drawn, ("PHASE", "running", "paused"), strict=True)]
    assert len(set(begins)) == 1, "cells stand below their heading"


def test_a_cell_of_several_lines_keeps_them_below_each_other() -> None:
    columns = (Column("A"), Column("日本"), Column("C"))
    assert whole_lines(columns, [("1", "x\ny", "z"), (None, "日本語", 2)]) == [
        "A  日本    C",
        "1  x       z",
        "   y",
        "   日本語  2",
    ]


def test_an_empty_column_that_is_not_needed_is_left_out() -> None:
    drawn = table(COLUMNS, [("n", "i", "p", "", "1 s", "")], 200)
    assert [column.header for column in drawn.columns] == ["NAME", "ID", "PHASE", "FOR", "MESSAGE"]


def test_a_wrapped_column_breaks_between_words() -> None:
    out = io.StringIO()
    columns = (Column("A"), Column("B", least=10, wraps=True))
    Console(file=out, width=20).print(table(columns, [("one", "several words on several lines")], 20))
    assert [line.split() for line in out.getvalue().splitlines()[1:]] == [
        ["one", "several", "words"],
        ["on", "several"],
        ["lines"],
    ]


@given(
    st.lists(st.tuples(st.integers(0, 60), st.integers(0, 3), st.booleans()), min_size=1, max_size=10),
    st.integers(30, 200),
)
def test_what_stays_fits(shapes: list[tuple[int, int, bool]], width: int) -> None:
    columns = [Column("c", least=4 if cut else None, dispensable=rank) for _, rank, cut in shapes]
    widths = fit(columns, [natural for natural, _, _ in shapes], width)
    assert sum(widths.values()) + GAP * (len(widths) - 1) <= width
    assert {index for index, column in enumerate(columns) if not column.dispensable} <= widths.keys()


# -- words ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("passed_s", "words"),
    [
        (-5, "just now"),
        (0.4, "just now"),
        (12, "12 s ago"),
        (59.9, "59 s ago"),
        (200, "3 min ago"),
        (7500, "2 h ago"),
        (2 * 86400 + 5, "2 d ago"),
    ],
)
def test_how_long_ago(passed_s: float, words: str) -> None:
    assert ago(1_700_000_000.0, 1_700_000_000.0 + passed_s) == words


@pytest.mark.parametrize(
    ("vertex", "words"),
    [
        ({"message": "replaced"}, "replaced"),
        ({"message": "", "false_alarms": 1}, "1 false alarm"),
        ({"message": "replaced", "false_alarms": 2}, "replaced; 2 false alarms"),
        (
            {"message": "replaced", "silent": "busy", "silent_since": 60.0, "false_alarms": 2},
            "busy: reports nothing for 40 s; 2 false alarms",
        ),
    ],
)
def test_what_is_said_of_a_vertex(vertex: dict[str, Any], words: str) -> None:
    assert _message_of(vertex, 100.0) == words


def test_a_moment_that_never_was_has_no_words() -> None:
    assert ago(None, 5.0) == ""


def test_a_sparkline_has_the_shape_of_its_values() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 0, 7, 7], 2) == "▁█"
    assert sparkline([3.0, float("nan"), 3.0], 10) == "▅▅"
    assert sparkline([], 10) == ""
    assert len(sparkline(list(range(1001)), 40)) == 40


@pytest.mark.parametrize(
    ("evidence", "user_code", "cause", "message"),
    [
        ({"error": "no report for 9.0 s\n(limit 5 s)"}, False, "silent", "no report for 9.0 s (limit 5 s)"),
        ({"exit": "SIGKILL"}, False, "process_died", "SIGKILL"),
        (
            {"error": "It died.\n\tpid: 1\nWorker exit detail: out of memory."},
            False,
            "process_died",
            "out of memory.",
        ),
        (
            {
                "error": "ValueError: no",
                "traceback": 'T\n  File "/a/lib.py", line 9\n  File "/a/my.py", line 5\nV',
            },
            True,
            "user_code",
            "ValueError: no (my.py:5)",
        ),
        (
            {
                "error": "the reward function failed: ValueError (my.py, line 5)",
                "traceback": f'T\n  File "/a/my.py", line 5\nV\n  File "{gyre.__path__[0]}/api/reader.py", line 267',
            },
            True,
            "user_code",
            "the reward function failed: ValueError (my.py, line 5)",
        ),
        (
            {"error": "health() raised", "traceback": "Traceback\nOSError: gone"},
            False,
            "unhealthy",
            "health() raised: OSError: gone",
        ),
        ({"traceback": "Traceback\nKeyError: 'x'\n"}, False, "call_failed", "KeyError: 'x'"),
        ({}, False, "process_died", ""),
    ],
)
def test_why_an_incident_happened(
    evidence: dict[str, str], user_code: bool, cause: str, message: str
) -> None:
    assert incident_message({"evidence": evidence, "user_code": user_code, "cause": cause}) == message
