"""Texts that end an answer: with which drawn token one is there, and before which token it begins.

What counts is what the tokens are written as together; special ones are no text.

Invariant *however they come*: an answer ends with the first token with which one of its texts is there, however many
tokens came at once.

This module must not know who draws, or of models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from gyre.chat.token_text import REPLACEMENT


class Words(Protocol):
    """What tokens are written as: see `gyre.chat.renderer`."""

    def pieces(self, ids: Sequence[int]) -> list[str]: ...

    def text(self, ids: Sequence[int]) -> str: ...


class Stop(NamedTuple):
    text: str
    before: int
    """Tokens that are written before it, without anything of it."""


def first_end(ids: Sequence[int], start: int, texts: Sequence[str], words: Words) -> int | None:
    """How many of `ids` the answer has: up to the first from `start` on with which one of the texts is there; none was
    before. None where it goes on. Costs as much as what is new, and some tokens before it."""
    since = since_when(ids, start, texts, words)
    pieces = words.pieces(ids[since:])
    joined = "".join(pieces)
    if REPLACEMENT in joined:  # a character of several tokens is in none of the pieces
        ends = range(start + 1, len(ids) + 1)
        return next((end for end in ends if _in(texts, words.text(ids[since:end]))), None)
    if not (found := _in(texts, joined)):
        return None
    end, size = min(joined.index(one) + len(one) for one in found), 0
    for at, piece in enumerate(pieces, since + 1):
        size += len(piece)
        if size >= end:
            return at
    return None


def stop_of(ids: Sequence[int], texts: Sequence[str], words: Words) -> Stop | None:
    """The text with which the last token ends the answer: of several the one that begins first. None where it was not
    ended by a text."""
    if not ids or not texts:
        return None
    since = since_when(ids, len(ids) - 1, texts, words)
    text, without = words.text(ids[since:]), words.text(ids[since:-1])
    if not (found := [one for one in _in(texts, text) if one not in without]):
        return None
    stop = min(found, key=lambda one: (text.index(one), -len(one)))
    before = len(ids) - 1
    while before > since and len(words.text(ids[since:before])) > text.index(stop):
        before -= 1
    return Stop(stop, before)


def _in(texts: Sequence[str], text: str) -> list[str]:
    return [one for one in texts if one in text]


def since_when(ids: Sequence[int], start: int, texts: Sequence[str], words: Words) -> int:
    """The first token that a text may begin with which no token before `start` ends; 0 also where it would be one
    before all of these. A token that is a part of a character is written together with those before it."""
    left = max(len(one.encode()) for one in texts)
    at = start
    while at:
        piece = words.pieces([ids[at - 1]])[0]
        if left <= 0 and REPLACEMENT not in piece:
            break
        at -= 1
        left -= len(piece)
    return at
