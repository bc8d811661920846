"""The tokenizer of a model's folder as the package `renderers` wants one, by which no text of a client's becomes a
control token.

A renderer joins what clients said with its frame, and encodes both at once. So a literal of a token that was added to
the vocabulary (`<|im_end|>`, `<tool_call>`) is broken before the renderer sees it: a mark, which is in no text of the
conversation, stands after its first character. Text is encoded apart on both sides of a mark, and the mark is gone.

Invariant *foreign text is text*: what is encoded has as many added tokens as the frame has literals.

This module must not know of renderers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre.chat.token_text import TokenText
from gyre.errors import ConfigError
from gyre.extras import needed
from gyre.request_body import refused

_MARKS = tuple(map(chr, range(0xFDD0, 0xFDF0)))
"""Unicode's non-characters, which no text should have."""


class FrameTokenizer:
    """By `tokenizer.json` of a folder. Raises ConfigError where it cannot be read."""

    def __init__(self, folder: Path) -> None:
        package = needed("tokenizers", "config.chat")
        try:
            self._tokenizer = package.Tokenizer.from_file(str(folder / "tokenizer.json"))
            config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        except Exception as error:  # the package raises Exception itself for a file that it cannot read
            raise ConfigError(
                f"{folder}: the tokenizer cannot be read: {error!s:.200}.",
                hint="Give the folder of a Hugging Face model with tokenizer.json and tokenizer_config.json.",
            ) from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._text = TokenText(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = frozenset(added)
        literals = sorted(
            (one.content for one in added.values() if len(one.content) > 1), key=len, reverse=True
        )
        self._literal = re.compile("|".join(map(re.escape, literals)) or "(?!)")
        self._mark = _MARKS[0]
        self.name_or_path = str(folder)
        self.unk_token_id = self._id_of(config.get("unk_token"))
        self.eos_token_id = self._id_of(config.get("eos_token"))

    # -- as renderers wants it ----------------------------------------------------------------------

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        """Ids of the frame and the text in it, without the tokens that a tokenizer adds at its ends. Raises ChatRefused
        where a text is taken for a control token all the same."""
        ids: list[int] = []
        pieces = text.replace(_escaped(self._mark), self._mark).split(self._mark)
        encoded = self._tokenizer.encode_batch_fast(pieces, add_special_tokens=False)
        for piece, found in zip(pieces, (one.ids for one in encoded), strict=True):
            if sum(one in self._added for one in found) > sum(1 for _ in self._literal.finditer(piece)):
                raise refused(
                    422,
                    "control_token",
                    "A text of the conversation is taken for a control token by the model's tokenizer.",
                    "Remove it from the text.",
                )
            ids += found
        return ids

    def decode(self, token_ids: Any, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(one) for one in token_ids]
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if isinstance(tokens, str):
            found = self._tokenizer.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(one) for one in tokens]

    def written(self, ids: Sequence[int]) -> list[str]:
        """What each token adds to a text, and of a special one its name. A part of a character is `\ufffd`."""
        return self._text.written(ids)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The same, but that a special token is no text."""
        return self._text.pieces(ids)

    def text(self, ids: Sequence[int]) -> str:
        """What they are written as together, behind other tokens, without special ones."""
        return self._text.behind(ids)

    # -- foreign text -------------------------------------------------------------------------------

    @property
    def added_ids(self) -> frozenset[int]:
        """The tokens that were added to the vocabulary, special ones and others."""
        return self._added

    def begin(self, texts: Iterable[str]) -> None:
        """Chooses a mark that none of the conversation's texts has. Where they have all of them, none is left in
        them."""
        told = list(texts)
        free = (one for one in _MARKS if not any(one in text or _escaped(one) in text for text in told))
        self._mark = next(free, _MARKS[0])

    def broken(self, value: Any) -> Any:
        """The text, or all texts in lists and mappings, with every literal broken by the mark."""
        if isinstance(value, str):
            return self._broken(value)
        if isinstance(value, Mapping):
            return {self.broken(key): self.broken(one) for key, one in value.items()}
        if isinstance(value, list | tuple):
            return [self.broken(one) for one in value]
        return value

    def _broken(self, text: str) -> str:
        text = text.replace(self._mark, "").replace(_escaped(self._mark), "")
        while self._literal.search(text):  # a literal may begin within another one
            text = self._literal.sub(lambda found: f"{found[0][0]}{self._mark}{found[0][1:]}", text)
        return text

    def _id_of(self, told: Any) -> int | None:
        literal = told.get("content") if isinstance(told, dict) else told
        found = self._tokenizer.token_to_id(literal) if isinstance(literal, str) else None
        return None if found is None else int(found)


def texts_of(value: Any) -> Iterator[str]:
    """All texts in a value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from texts_of(key)
            yield from texts_of(one)
    elif isinstance(value, Sequence):
        for one in value:
            yield from texts_of(one)


def _escaped(mark: str) -> str:
    """The mark as JSON in ASCII has it, which some frames write."""
    return f"\\u{ord(mark):04x}"
