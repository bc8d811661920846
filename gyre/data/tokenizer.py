"""The tokenizer of a model folder in Hugging Face's layout, by the `tokenizers` library.

This module must not know of data sets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gyre.data.extras import needed
from gyre.data.templates import ChatTemplate
from gyre.errors import ConfigError

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
"""The files that are read from a model's folder; all but the first are optional."""

_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token")


class TextTokenizer:
    """A model folder's tokenizer. Raises ConfigError if the folder has no `tokenizer.json`, or no end token."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not file.exists():
            raise ConfigError(
                f"{folder} has no tokenizer.json.",
                hint="Give the folder of a Hugging Face model with a fast tokenizer.",
            )
        self._tokenizer = needed("tokenizers", "a tokenizer").Tokenizer.from_file(str(file))
        config = _json(folder / "tokenizer_config.json")
        self.special = {name: _text(config[name]) for name in _SPECIAL if config.get(name)}
        self.stop_token_ids = self._stops(
            _json(folder / "generation_config.json"), _json(folder / "config.json")
        )
        self.vocab_size = max(
            int(self._tokenizer.get_vocab_size()), int(_json(folder / "config.json").get("vocab_size", 0))
        )
        self.template = self._template(folder, config)

    @property
    def eos_id(self) -> int:
        return self.stop_token_ids[0]

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """The tokens of each text; with `special`, also those that the tokenizer adds (a begin token, say)."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=special)
        return [list(one.ids) for one in found]

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text, without special tokens."""
        text: str = self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=True)
        return text

    def _stops(self, generation: Mapping[str, Any], model: Mapping[str, Any]) -> tuple[int, ...]:
        """The end tokens: the tokenizer's first, then those that the model was trained with."""
        found = []
        if "eos_token" in self.special:
            found.append(self._tokenizer.token_to_id(self.special["eos_token"]))
        for told in (generation.get("eos_token_id"), model.get("eos_token_id")):
            found += told if isinstance(told, list) else [told]
        stops = tuple(dict.fromkeys(int(one) for one in found if one is not None))
        if not stops:
            raise ConfigError(
                "the tokenizer has no end token.",
                hint="Put eos_token into tokenizer_config.json, or eos_token_id into generation_config.json.",
            )
        return stops

    def _template(self, folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
        source = config.get("chat_template")
        if (folder / "chat_template.jinja").exists():
            source = (folder / "chat_template.jinja").read_text()
        if isinstance(source, list):  # several, by name
            source = next((one["template"] for one in source if one["name"] == "default"), None)
        return ChatTemplate(source, self.special) if source else None


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return found


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)
