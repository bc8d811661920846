"""Data sets of prompts with answers: read, tokenised once, and drawn by number.

`gyre data prepare` turns JSONL, Parquet or a Hugging Face data set into a folder of tokens, answers and hashes;
`PreparedData` gives a job its rows as prompts by index. Exports are resolved on first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_EXPORTS = {
    "ChatTemplate": "templates",
    "PreparedData": "prepared",
    "TextTokenizer": "tokenizer",
    "prepare": "prepare",
    "read_rows": "sources",
}

__all__ = ["ChatTemplate", "PreparedData", "TextTokenizer", "prepare", "read_rows"]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
