"""Where in the user's files each key of a job stands, so that a mistake names file and line, whoever finds it.

A mistake begins with its key (`roles.actor.total: …`). The key's line is that of the deepest part of it that the user
wrote: of `config.optim.lr`, which is missing, the line of `config.optim`.

Invariant *named once*: an error that names its file already is left as it is.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from gyre.config import JobSpec
from gyre.config.yaml_text import YamlText
from gyre.errors import ConfigError

Place = tuple[str, int]
"""A file and a line in it."""

_KEYS = [[key] for key in JobSpec.model_fields]
_KEY = re.compile(r"([a-z_]\w*(?:\.[\w<>*-]+)*)(?=[: ])")

LOCATED, PLACE = "located", "place"
"""Keys of an error's details: its message names file and line; the file and line, as a pair, that it is about."""


@dataclass(frozen=True, slots=True)
class YamlPart:
    """A YAML file that holds what stands below `above` in the job; () for all of it."""

    shown: str
    text: YamlText
    above: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class JobSource:
    """`file` as the user named it; `parts` of a YAML job; `lines` of a Python job, by key; `overrides` as `a.b=c`."""

    file: str
    parts: tuple[YamlPart, ...] = ()
    lines: Mapping[str, Place] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()

    def place_of(self, key: Sequence[str]) -> str:
        """`job.yaml, line 3`, or `--set a.b=c`; "" for a key of which no part was written."""
        for override in reversed(self.overrides if key else ()):
            given = override.partition("=")[0].split(".")
            if list(key[: len(given)]) == given or given[: len(key)] == list(key):
                return f"--set {override}"
        best: tuple[int, str] = (0, "")
        for part in self.parts:
            if tuple(key[: len(part.above)]) == part.above:
                depth, line = part.text.line_of(key[len(part.above) :])
                if line and depth + len(part.above) > best[0]:
                    best = depth + len(part.above), f"{part.shown}, line {line}"
        if best[1] or (place := self._line(key)) is None:
            return best[1]
        shown = self.file if Path(place[0]) == Path(self.file).resolve() else place[0]
        return f"{shown}, line {place[1]}"

    def line_of(self, error: ConfigError) -> Place | None:
        """Where a Python file gave the key that the error begins with."""
        return self._line(_key_of(error.message))

    def _line(self, key: Sequence[str]) -> Place | None:
        found = (self.lines.get(".".join(key[:depth])) for depth in range(len(key), 0, -1))
        return next((place for place in found if place is not None), None)

    def located(self, error: ConfigError, *, always: bool = False) -> ConfigError:
        """The error with file and line before each of its mistakes. One that is about no key of the job is left as it
        is, or with `always` gets the file."""
        if error.details.get(LOCATED) or error.message.startswith((self.file, "--set")):
            return error
        mistakes = error.details.get("mistakes")
        sentences = [error.message] if not mistakes or len(mistakes) == 1 else list(map(str, mistakes))
        keys = error.details.get("keys") or map(_key_of, sentences)
        shown, before = [], ""
        for sentence, key in zip(sentences, keys, strict=False):
            if not always and key[:1] not in _KEYS:
                return error
            place = self.place_of(key) or self.file
            shown.append(sentence if place == before else f"{place}: {sentence}")
            before = place
        text = "; ".join(shown)
        details = {**error.details, LOCATED: True}
        return type(error)(text if text[-1] in ".?" else f"{text}.", hint=error.hint, details=details)

    @contextmanager
    def named(self, *, always: bool = False) -> Iterator[None]:
        """Errors of configuration in this block come out with their file and line."""
        try:
            yield
        except ConfigError as error:
            found = self.located(error, always=always)
            if found is error:
                raise
            raise found from error


def _key_of(sentence: str) -> list[str]:
    """The key that the sentence begins with; [] for none."""
    found = _KEY.match(sentence)
    if found is None or sentence[found.end() :][:1] != ":":
        return []
    return found[1].split(".")


def users_line(rooms: Iterable[str] = ("gyre.",)) -> Place | None:
    """The file and line of the innermost caller that is not of these packages."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(tuple(rooms)):
        back = frame.f_back
        if back is None:
            return None
        frame = back
    return frame.f_code.co_filename, frame.f_lineno
