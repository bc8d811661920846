"""What tokens say, by whatever brings the job's prompts: a task, a prepared data set, a class of the user's own.

Invariants:
- *no text is no error*: where nobody can decode, or decoding fails, there is none, and the tokens are kept;
- *always UTF-8*: what is no text (a lone half of a surrogate pair) is escaped.

This module must not know which tokenizer it has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.samples import Group, Sample


class Texts:
    """`data` may have any of `prompt_text(group)`, `answer_of(sample)`, `tokenizer.piece(token)` and
    `tokenizer.decode(tokens)`. Used by one thread at a time."""

    def __init__(self, data: Any = None) -> None:
        self._prompt = _method(data, "prompt_text")
        self._answer = _method(data, "answer_of")
        tokenizer = getattr(data, "tokenizer", None)
        decode = _method(tokenizer, "decode")
        self._piece = _method(tokenizer, "piece") or (
            (lambda token: decode([token])) if decode is not None else None
        )
        self._pieces: dict[int, str] = {}
        self.problem = ""
        """What kept the last text that could not be had."""

    def prompt(self, group: Group) -> str | None:
        return self._text(self._prompt, group)

    def answer(self, sample: Sample) -> str | None:
        return self._text(self._answer, sample)

    def pieces(self, token_ids: NDArray[np.int32]) -> tuple[list[str], NDArray[np.int64]] | None:
        """The different pieces of these tokens, and for each token the place of its own among them."""
        if self._piece is None:
            return None
        different, places = np.unique(token_ids, return_inverse=True)
        found: list[str] = []
        for token in different.tolist():
            if token not in self._pieces:
                piece = self._text(self._piece, token)
                if piece is None:  # a token that the tokenizer does not know
                    piece = ""
                self._pieces[token] = piece
            found.append(self._pieces[token])
        return found, places.reshape(-1)

    def _text(self, of: Callable[[Any], Any] | None, what: Any) -> str | None:
        if of is None:
            return None
        try:
            return as_text(of(what))
        except Exception as error:  # the user's own code, over tokens that need not make sense
            self.problem = f"{type(error).__name__}: {error}"
            return None


def as_text(value: Any) -> str:
    """The value as text that UTF-8 can hold."""
    if type(value) is str and value.isascii():  # nearly all: names, reasons, pieces
        return value
    return str(value).encode("utf-8", "backslashreplace").decode("utf-8")


def _method(of: Any, name: str) -> Callable[[Any], Any] | None:
    found = getattr(of, name, None)
    return found if callable(found) else None
