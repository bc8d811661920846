"""Whether a folder's tokenizer is what transformers makes of the whole folder, which has more than `tokenizer.json`.

`tokenizer_config.json` and `added_tokens.json` may add tokens, or have a begin token put before a text; a class of
transformers' own may change how a text is cut. A model was trained with all of that, and so must prompts be. Here both
cut the same texts, and a tokenizer that cuts one of them otherwise is refused. Where transformers is not installed, or
makes no tokenizer of the folder, nobody can tell.

This module must not know what is tokenized.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gyre.data.tokenizer import TextTokenizer
from gyre.errors import ConfigError

_TEXTS = (
    "Hello, world!",
    " leading and  double blanks, trailing ",
    "\n\nlines\r\n\tand tabs\n",
    "1234567890 3.14159 1,000,000",
    "What's “this”? It's - an e-mail: a_b@c.example",
    "ÀÉÎõü ﬁ ﬀ Å A\u030a İı ß ẞ",
    "日本語。한국어 العربية हिन्दी ไทย",
    "🙂👩\u200d👩\u200d👧 🇩🇪 \u200b\ufeff",
    "def f(x):\n    return {x: [x ** 2]}  # code",
    r"\frac{1}{2} $x^2$ <b>bold</b> [INST] <<SYS>>",
    "UPPER lower MiXeD",
    "x",
    "",
)
"""Of what tokenizers differ in: blanks, lines, digits, case, signs, scripts, and characters of several parts."""


def refuse_another_than_transformers(folder: Path, tokenizer: TextTokenizer) -> None:
    """Raises ConfigError where transformers cuts a text into other tokens than the tokenizer of this folder, and where
    that is code which the folder brings along."""
    try:
        from transformers import AutoTokenizer
    except ImportError:
        return
    theirs = _theirs(AutoTokenizer, folder)
    if theirs is None:
        return
    for text in _texts(tokenizer):
        for special in (True, False):
            (own,) = tokenizer.encode([text], special=special)
            wanted = list(theirs(text, add_special_tokens=special)["input_ids"])
            if own != wanted:
                raise ConfigError(
                    f"{folder}: {text!a:.60} is {_shown(own)} by tokenizer.json, and {_shown(wanted)} as transformers "
                    "reads the whole folder" + ("." if special else ", without what it adds to a text."),
                    hint="Have transformers write the folder anew: AutoTokenizer.from_pretrained(FOLDER)"
                    ".save_pretrained(FOLDER).",
                )


def _theirs(auto: Any, folder: Path) -> Any:
    """Transformers' tokenizer of the folder; None where it makes none, as of one that lacks `config.json`. Raises
    ConfigError for a folder that has code of its own for it."""
    try:
        own_code = "AutoTokenizer" in json.loads((folder / "tokenizer_config.json").read_text())["auto_map"]
    except (OSError, ValueError, LookupError, TypeError):  # as in most folders
        own_code = False
    if own_code:
        raise ConfigError(
            f"{folder} brings code of its own for its tokenizer, which is not run.",
            hint="Have transformers write a folder without it, of a tokenizer_class that is transformers' own.",
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what nobody asked here
            return auto.from_pretrained(os.path.abspath(folder), local_files_only=True)
    except Exception:  # of whichever class of transformers' the folder names
        return None


def _texts(tokenizer: TextTokenizer) -> Iterator[str]:
    """Those above, and each special token within a text, with and without blanks around it."""
    yield from _TEXTS
    for token in dict.fromkeys(tokenizer.special.values()):
        yield f"a{token}b"
        yield f"a {token} b"


def _shown(tokens: list[int]) -> str:
    return f"{tokens[:12]}{'…' if len(tokens) > 12 else ''}"
