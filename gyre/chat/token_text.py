"""How tokens become text: what of a text stays whatever comes, what each token is written as, and where it stands.

Invariant *what was said stays*: the settled text of some tokens begins the settled text of these and more, and the
whole text of all of them. So a stream that sends what is new of it sends every character once.

Which text is settled depends on the tokenizer's decoder. One of bytes (GPT-2's, Qwen's) writes a character that is not
whole as `\ufffd`. One that falls back to bytes (Llama 2's, Gemma's) writes a whole run of bytes as `\ufffd` if one of
them fits nowhere, so that no run is settled before another token ends it.

This module must not know who reads a text, or of models.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

REPLACEMENT = "\ufffd"
"""What a decoder writes for bytes that are no character."""

_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_OF_ONE_TOKEN = frozenset({"Metaspace", "WordPiece", "BPEDecoder", "CTC", "Strip"})
"""Steps of a decoder that look at a token and those before it, or cut what is at the text's ends."""


class TokenText:
    """By a tokenizer of the `tokenizers` library."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        steps = list(_steps(json.loads(decoder.__getstate__()))) if decoder is not None else []
        kinds = {step["type"] for step in steps}
        self._is_of_bytes = "ByteLevel" in kinds
        self._falls_back = "ByteFallback" in kinds
        self._unsettled = _unsettled(steps)
        self._written: dict[int, str] = {}

    def text(self, token_ids: Sequence[int], *, special: bool) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not special)
        return text

    def settled(self, token_ids: Sequence[int], *, special: bool) -> str:
        """What of their text stays, whatever tokens follow. "" for a decoder that is not known: its text is there at
        the end."""
        if self._unsettled is None:
            return ""
        count = len(token_ids)
        if self._falls_back:
            while count and self._is_open(token_ids[count - 1], special):
                count -= 1
        text = self.text(token_ids[:count], special=special)
        if self._is_of_bytes:
            text = text.rstrip(REPLACEMENT)
        return text[: len(text) - self._unsettled] if self._unsettled else text

    def written(self, token_ids: Sequence[int]) -> list[str]:
        """What each token adds to a text, and of a special token its name. A part of a character is `\ufffd`."""
        missing = [one for one in dict.fromkeys(token_ids) if one not in self._written]
        if missing:
            before, alone = self._before
            both = self._tokenizer.decode_batch(
                [[*before, one] for one in missing], skip_special_tokens=False
            )
            self._written |= {one: text.removeprefix(alone) for one, text in zip(missing, both, strict=True)}
        return [self._written[one] for one in token_ids]

    def pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The same, but that a special token adds nothing."""
        names = self.written(token_ids)
        return ["" if one in self._special else name for one, name in zip(token_ids, names, strict=True)]

    def behind(self, token_ids: Sequence[int]) -> str:
        """What they add to a text together, without special ones."""
        before, alone = self._before
        return self.text([*before, *token_ids], special=False).removeprefix(alone)

    def offsets(self, token_ids: Sequence[int], *, special: bool) -> list[int]:
        """Where in the text each token begins, in characters: by what each token adds by itself, so that it is near
        where a decoder writes a token otherwise beside others (GPT-1's). Tokens that are parts of characters begin
        where the first of them does."""
        names = self.written(token_ids)
        found: list[int] = []
        at = 0
        while (first := len(found)) < len(names):
            end = first + 1
            is_part = self._is_part(token_ids[first], names[first])
            while is_part and end < len(names) and self._is_part(token_ids[end], names[end]):
                end += 1
            if is_part or not at:  # a text begins without a blank
                before, alone = self._before if at else ([], "")
                run = [*before, *token_ids[first:end]]
                size = len(self.text(run, special=special)) - len(alone)
            else:
                size = 0 if not special and token_ids[first] in self._special else len(names[first])
            found += [at] * (end - first)
            at += size
        most = len(self.text(token_ids, special=special))
        return [min(one, most) for one in found]

    @cached_property
    def _before(self) -> tuple[list[int], str]:
        """Tokens to decode another one behind, for some decoders strip a first blank; and their text."""
        before = self._tokenizer.encode("a", add_special_tokens=False).ids
        return before, self._tokenizer.decode(before, skip_special_tokens=False)

    @cached_property
    def _names(self) -> Mapping[int, str]:
        return {at: name for name, at in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(at for at, token in added.items() if token.special)

    @cached_property
    def _bytes(self) -> frozenset[int]:
        return frozenset(at for at, name in self._names.items() if _BYTE.fullmatch(name))

    def _is_part(self, token_id: int, name: str) -> bool:
        """Whether a token is written together with those beside it."""
        return REPLACEMENT in name or (self._falls_back and token_id in self._bytes)

    def _is_open(self, token_id: int, special: bool) -> bool:
        """Whether a run of bytes goes on over the token: it is one, or nothing is written for it."""
        if not special and token_id in self._special:
            return True
        return token_id in self._bytes or token_id not in self._names


def _steps(decoder: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if decoder["type"] == "Sequence":
        for one in decoder["decoders"]:
            yield from _steps(one)
    else:
        yield decoder


def _unsettled(steps: Sequence[Mapping[str, Any]]) -> int | None:
    """How many characters at the end of a text a later token may change, besides what is not whole. None where nobody
    knows."""
    joined, most = False, 0
    for step in steps:
        kind = step["type"]
        if kind in ("ByteLevel", "Fuse"):
            joined = True
        elif kind == "ByteFallback":
            if joined:
                return None
        elif kind == "Replace":
            if joined:  # it finds what lies across tokens
                pattern = step["pattern"].get("String")
                if pattern is None:
                    return None
                most += max(0, len(pattern) - 1)
        elif kind not in _OF_ONE_TOKEN:
            return None
    return most
