"""What users call a job by, beside its name: tags to find and group it by, and a note.

One check for all who take them: job files, `gyre tag` and `gyre note`, REST and the page. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from gyre.errors import ConfigError

TAG_CHARS = 64
MOST_TAGS = 32
"""Of one job: more are a table of their own, and no list shows them."""
NOTE_CHARS = 4000
"""Two pages of text. A list carries the notes of all of its jobs."""

_TAG = re.compile(r"[\w](?:[\w.:/+@ -]*[\w.+])?")
"""A tag stands in a filter as it is (`tag=ablation`), so it has none of the signs of one."""


def checked_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """The tags, each once, in their order. Raises ConfigError for a tag that is none, and for too many."""
    found = tuple(dict.fromkeys(tags))
    for tag in found:
        if len(tag) > TAG_CHARS or not _TAG.fullmatch(tag):
            raise ConfigError(
                f"{_shown(tag)} cannot be a tag.",
                hint=f"A tag has at most {TAG_CHARS} letters, digits, spaces and . : / + @ _ -, and begins and ends "
                "with a letter or a digit.",
            )
    if len(found) > MOST_TAGS:
        raise ConfigError(
            f"{len(found)} tags: a job has at most {MOST_TAGS}.", hint="Keep the rest in its note."
        )
    return found


def checked_note(text: str) -> str:
    """The note without white space at its ends. Raises ConfigError for one that is too long or no text."""
    note = text.strip()
    if len(note) > NOTE_CHARS:
        raise ConfigError(
            f"The note has {len(note):,} characters, and may have {NOTE_CHARS:,}.",
            hint="Write the address of a longer text.",
        )
    if "\x00" in note or any("\ud800" <= one <= "\udfff" for one in note):
        raise ConfigError(
            "The note holds a NUL or half a character, which no database keeps.", hint="Write plain text."
        )
    return note


def _shown(tag: str) -> str:
    text = ascii(tag)
    return text if len(text) <= TAG_CHARS + 16 else f"{text[: TAG_CHARS + 16]}…"
