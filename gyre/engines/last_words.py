"""What an engine said last: the part of its output that says why it ended, made fit to be shown to anybody.

Invariants:
- *bounded*: at most `CHARS` characters in `LINES` lines, whatever the engine printed;
- *clean*: no control characters of a terminal, and none of the given secrets.

This module must not know which engine it is, or where its words are shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

LINES = 24
CHARS = 4000
LINE_CHARS = 400

AFTER_TRACEBACK = 4
"""Lines after the exception that are kept: mostly others who noticed that the engine ends."""

SECRET_LEAST = 8
"""Characters of the shortest secret: a shorter text would be found in words that are none."""

_TRACEBACK = "Traceback (most recent call last)"
_CHAINED = ("direct cause of the following exception", "another exception occurred")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|\x1b.")
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class LastWords(NamedTuple):
    """`sentence` is one line, the exception if there is one; `text` has the lines around it. Both "" if there are
    none."""

    sentence: str
    text: str


def last_words(output: str, secrets: Iterable[str] = ()) -> LastWords:
    """The last words in the end of an engine's output: its last traceback with what came after it, else its last
    lines."""
    lines = [line for line in clean(output, secrets).split("\n") if line.strip()]
    start = _last_traceback(lines)
    if start is None:
        kept = lines[-LINES:]
        sentence = kept[-1] if kept else ""
    else:
        raised = _exception_after(lines, start)
        kept = lines[start : raised + 1 + AFTER_TRACEBACK]
        if len(kept) > LINES:
            # The frames next to the exception say most.
            kept = [kept[0], "  …", *kept[-(LINES - 2) :]]
        sentence = lines[raised]
    return LastWords(_cut(sentence.strip()), _bounded([_cut(line) for line in kept]))


def clean(output: str, secrets: Iterable[str] = ()) -> str:
    """The output without secrets, and without what only moves a terminal's cursor or changes its colours."""
    for secret in secrets:
        if len(secret) >= SECRET_LEAST:
            output = output.replace(secret, "***")
    lines = _ESCAPES.sub("", output).replace("\r\n", "\n").split("\n")
    # A progress bar writes over its line; its last state is what a person saw.
    return "\n".join(_CONTROLS.sub(" ", line.rstrip("\r").rpartition("\r")[2]).rstrip() for line in lines)


def _last_traceback(lines: list[str]) -> int | None:
    """The line where the last traceback begins, or the first of those that led to it."""
    found = [at for at, line in enumerate(lines) if _TRACEBACK in line]
    if not found:
        return None
    start = found.pop()
    while found and any(word in lines[start - 1] for word in _CHAINED):
        start = found.pop()
    return start


def _exception_after(lines: list[str], start: int) -> int:
    """The line that names the exception of the last traceback: the first after its header that is not indented."""
    header = max(at for at in range(start, len(lines)) if _TRACEBACK in lines[at])
    return next(
        (at for at in range(header + 1, len(lines)) if not lines[at].startswith((" ", "\t"))), len(lines) - 1
    )


def _cut(line: str) -> str:
    return line if len(line) <= LINE_CHARS else f"{line[: LINE_CHARS - 1]}…"


def _bounded(lines: list[str]) -> str:
    """The last of the lines that have `CHARS` characters together."""
    while sum(len(line) + 1 for line in lines) > CHARS:
        del lines[0]
    return "\n".join(lines)
