"""Text of others for a terminal: what a process printed, an error of a user's code, a name.

Invariant *a terminal gets no commands*: no byte of it moves the cursor, sets a title or turns the direction of writing.
Colours are left out, and what else a terminal would obey is shown as Python escapes it.
"""

from __future__ import annotations

import re

_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_OBEYED = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ufeff\ud800-\udfff]"
)


def plain(text: str) -> str:
    """The text with its lines and tabs, and nothing else that a terminal would obey."""
    if text.isascii() and text.isprintable():
        return text
    return _OBEYED.sub(_escaped, _COLOURS.sub("", text))


def plain_json(text: str) -> str:
    """JSON with what a terminal would obey as JSON escapes it."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escaped(found: re.Match[str]) -> str:
    number = ord(found[0])
    return f"\\x{number:02x}" if number < 0x100 else f"\\u{number:04x}"
