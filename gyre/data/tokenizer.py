"""The tokenizer of a model folder in Hugging Face's layout, by the `tokenizers` library.

This module must not know of data sets.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import xxhash

from gyre.chat.token_text import TokenText
from gyre.data.readers import download_hint
from gyre.data.templates import ChatTemplate
from gyre.errors import ConfigError
from gyre.extras import needed

FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
"""The files that are read from a model's folder; all but the first are optional."""

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_OF_LAST_CALL = ("padding", "truncation")
"""Parts of `tokenizer.json` that transformers writes of the last call before a model is saved, and ignores when it
reads the file."""


class TextTokenizer:
    """A model folder's tokenizer. Raises ConfigError if the folder has no `tokenizer.json`, or no end token."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokenizer.json"
        if not folder.exists():
            raise ConfigError(f"{folder} does not exist.", hint=download_hint(folder, "model"))
        if folder.is_file():
            raise ConfigError(f"{folder} is a file.", hint=f"Give its folder, {folder.parent}.")
        if not file.exists():
            raise ConfigError(
                f"{folder} has no tokenizer.json.",
                hint="Give the folder of a Hugging Face model with a fast tokenizer.",
            )
        with _in_usual_form(folder):
            self._tokenizer = _tokenizer(file)
            self._text = TokenText(self._tokenizer)
            config = _json(folder / "tokenizer_config.json")
            self.special = _special_tokens(config, _json(folder / "special_tokens_map.json"))
            """The texts of the special tokens by the names that chat templates use: `bos_token`, `eos_token`, …"""
            self.vocab_size = max(
                int(self._tokenizer.get_vocab_size()), int(_json(folder / "config.json").get("vocab_size", 0))
            )
            self.stop_token_ids = self._stops(
                _json(folder / "generation_config.json"), _json(folder / "config.json")
            )
            self.template = self._template(folder, config)

    @property
    def eos_id(self) -> int:
        return self.stop_token_ids[0]

    def encode(self, texts: Sequence[str], *, special: bool) -> list[list[int]]:
        """The tokens of each text; with `special`, also those that the tokenizer adds (a begin token, say)."""
        found = self._tokenizer.encode_batch(list(texts), add_special_tokens=special)
        return [list(one.ids) for one in found]

    def decode(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """The text, without special tokens, or with them."""
        return self._text.text([int(token) for token in token_ids], special=special)

    def piece(self, token_id: int) -> str:
        """The same as `written`, of one token."""
        return self._text.written([token_id])[0]

    def settled(self, token_ids: Sequence[int], *, special: bool = False) -> str:
        """What of their text stays, whatever tokens follow."""
        return self._text.settled(token_ids, special=special)

    def written(self, token_ids: Sequence[int]) -> list[str]:
        """What each token adds to a text, and of a special token its name. A part of a character is `\ufffd`."""
        return self._text.written(token_ids)

    def offsets(self, token_ids: Sequence[int], *, special: bool = False) -> list[int]:
        """Where in their text each token begins, in characters."""
        return self._text.offsets(token_ids, special=special)

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
        strange = [one for one in stops if not 0 <= one < self.vocab_size]
        if strange:
            raise ConfigError(
                f"the end token {strange[0]} is not in the vocabulary, which has {self.vocab_size} tokens.",
                hint="See eos_token_id in generation_config.json and config.json.",
            )
        return stops

    def _template(self, folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
        source = config.get("chat_template")
        file = folder / "chat_template.jinja"
        if file.exists():
            try:
                source = file.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"{file} cannot be read: {error}.") from error
        if isinstance(source, list):  # several, by name
            source = {one["name"]: one["template"] for one in source}
        if isinstance(source, Mapping):
            if "default" not in source:
                raise ConfigError(
                    f"{folder} has the chat templates {', '.join(sorted(source))}, and none of them is the default.",
                    hint="Put the one to use into chat_template.jinja.",
                )
            source = source["default"]
        return ChatTemplate(source, self.special) if source else None


def copy_tokenizer(folder: Path, to: Path) -> None:
    """Copy the files of a folder's tokenizer, without the padding and truncation that its last user had."""
    for name in FILES:
        if not (folder / name).exists():
            continue
        shutil.copyfile(folder / name, to / name)
    found = _json(folder / "tokenizer.json")
    if any(found.get(key) is not None for key in _OF_LAST_CALL):
        text = json.dumps(found | dict.fromkeys(_OF_LAST_CALL), ensure_ascii=False, indent=2)
        (to / "tokenizer.json").write_text(text, encoding="utf-8")


def _tokenizer(file: Path) -> Any:
    tokenizers = needed("tokenizers", "a tokenizer")
    try:
        found = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise ConfigError(
            f"{file} cannot be read: {error}.",
            hint="The file may be incomplete; a clone without Git LFS has small text files in place of the data.",
        ) from error
    found.no_padding()
    found.no_truncation()
    return found


def _special_tokens(config: Mapping[str, Any], older: Mapping[str, Any]) -> dict[str, str]:
    """As transformers reads them: a folder without `added_tokens_decoder` is an older one, whose
    `special_tokens_map.json` counts; models add names of their own, such as `image_token`."""
    told = dict(config) if "added_tokens_decoder" in config else {**config, **older}
    found = {name: value for name, value in told.items() if name in _SPECIAL or name.endswith("_token")}
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        found |= told[key] if isinstance(told.get(key), Mapping) else {}
    return {
        name: _text(value)
        for name, value in found.items()
        if (isinstance(value, str) and value) or (isinstance(value, Mapping) and "content" in value)
    }


def tokenizer_identity(folder: Path | str) -> str:
    """A digest of what the numbers of this folder's tokenizer stand for: vocabulary, merges, added and special tokens,
    normaliser and pre-tokeniser. Two folders with the same digest cut a text into the same tokens. "" where there is no
    `tokenizer.json`, so that nothing can be compared. Raises ConfigError if the file cannot be read.

    What does not change a token is not in it: the file's form, padding and truncation, the chat template, and which of
    the special tokens ends an answer.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.exists():
        return ""
    with _in_usual_form(Path(folder)):
        found = _json(file)
        model = dict(found.get("model") or {})
        # Older files write a merge as one text, newer ones as a pair.
        model["merges"] = [
            merge.split(" ") if isinstance(merge, str) else merge for merge in model.get("merges") or ()
        ]
        content = {
            "vocab": model.pop("vocab", None),
            "model": _without_defaults(model),
            "added": {
                str(token["id"]): _without_defaults(token) for token in found.get("added_tokens") or ()
            },
            "normalizer": _without_defaults(found.get("normalizer")),
            "pre_tokenizer": _without_defaults(found.get("pre_tokenizer")),
        }
        text = json.dumps(content, sort_keys=True, separators=(",", ":"))
        return xxhash.xxh3_128_hexdigest(text.encode())


_IMMATERIAL = frozenset({"trim_offsets"})
"""Keys of a tokenizer's parts that change where a token stands in the text, and not which token it is."""


def _without_defaults(part: Any) -> Any:
    """A part of a tokenizer without what says nothing. Files of different ages write a default or leave it out."""
    if isinstance(part, Mapping):
        return {
            key: _without_defaults(value)
            for key, value in part.items()
            if key not in _IMMATERIAL
            and not (value is None or value is False or value == "")
            and not (key == "use_regex" and value is True)
        }
    if isinstance(part, list):
        return [_without_defaults(one) for one in part]
    return part


@contextmanager
def _in_usual_form(folder: Path) -> Iterator[None]:
    """Raises ConfigError where the files of a tokenizer are JSON, and have not what they should where it should be."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{folder}: the tokenizer's files are not as transformers writes them: {error!r:.200}.",
            hint="Get them anew.",
        ) from error


def _json(path: Path) -> dict[str, Any]:
    """The file's mapping; an absent file is an empty one. Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read: {error}.",
            hint="The file may be incomplete; a clone without Git LFS has small text files in place of the data.",
        ) from error
    if not isinstance(found, dict):
        raise ConfigError(f"{path} holds a {type(found).__name__}, not a mapping.")
    return found


def _text(token: Any) -> str:
    return str(token["content"] if isinstance(token, Mapping) else token)
