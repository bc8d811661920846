"""What a line of a log looks like: `2026-11-25T20:12:15.123Z I text`, the time in UTC and the level by one letter.

D, I, W and E are debug, information, warning and error. A line without such a beginning was written by something that
knows nothing of Gyre (a library in C, a process that the user's code started): it has the time of the line before it.

This module must not know files.
"""

from __future__ import annotations

import calendar
import re
import time

LEVELS = "DIWE"
"""From the least to the worst."""

STAMP_BYTES = 24
PREFIX_BYTES = STAMP_BYTES + 3

ENGINE = b"[engine] "
"""Stands before what the engine of a vertex printed."""

_PREFIX = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z [DIWE] ")
_WORDS = re.compile(rb"\b(?:(DEBUG)|(INFO)|(WARN|WARNING)|(ERROR|CRITICAL|FATAL))\b")
_MAY_NAME = re.compile(rb"[DIWECFT](?:EBUG|NFO|ARN|RROR|RITICAL|ATAL|raceback)")
_WORDS_WITHIN = 120
"""Bytes of a line's beginning in which its level is looked for: the text of a log record comes behind it."""
_TRACEBACK = b"Traceback (most recent call last)"


BETWEEN = {level: f" {level} ".encode() for level in LEVELS}
"""What stands between the time and the text."""


class Stamps:
    """Times as text. That of a second is made once, and the last one is kept."""

    def __init__(self) -> None:
        self._second = self._millis = -1
        self._second_text = self._text = b""

    def of(self, at: float) -> bytes:
        millis = int(at * 1000)
        if millis == self._millis:
            return self._text
        second = millis // 1000
        if second != self._second:
            self._second_text = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(second)).encode()
            self._second = second
        self._millis, self._text = millis, b"%b.%03dZ" % (self._second_text, millis % 1000)
        return self._text


def time_of(stamp: bytes) -> float:
    """The seconds since 1970 of a stamp; 0 of one that names no time."""
    try:
        seconds = calendar.timegm(time.strptime(stamp[:19].decode(), "%Y-%m-%dT%H:%M:%S"))
        return seconds + int(stamp[20:23]) / 1000
    except ValueError:
        return 0.0


def is_stamped(line: bytes) -> bool:
    return line[STAMP_BYTES - 1 : STAMP_BYTES + 1] == b"Z " and _PREFIX.match(line) is not None


def level_in(text: bytes, otherwise: str) -> str:
    """The level that a line names itself, in capitals near its beginning: `INFO:     started`, `[rank0] WARNING: …`."""
    if _MAY_NAME.search(text, 0, _WORDS_WITHIN) is None:  # of nearly every line, and three times as fast
        return otherwise
    found = _WORDS.search(text, 0, _WORDS_WITHIN)
    if found is not None:
        return LEVELS[(found.lastindex or 1) - 1]
    return "E" if _TRACEBACK in text[:_WORDS_WITHIN] else otherwise


class Levels:
    """The levels of the lines of one writer, which are guessed: a line's own word, else `otherwise`. A traceback is an
    error from its first line to that of the exception."""

    def __init__(self, otherwise: str) -> None:
        self._otherwise = otherwise
        self._in_traceback = False

    def of(self, line: bytes) -> str:
        if self._in_traceback:
            # The lines of its frames are indented; the exception is the first that is not.
            self._in_traceback = line[:1] in (b" ", b"\t", b"")
            return "E"
        level = level_in(line, self._otherwise)
        if level == "E" and _TRACEBACK in line:
            self._in_traceback = True
        return level


def level_of_record(levelno: int) -> str:
    """The letter of one of `logging`'s levels."""
    if levelno >= 40:
        return "E"
    return "W" if levelno >= 30 else "I" if levelno >= 20 else "D"
