"""Data sets of prompts with answers: read, tokenised once, and drawn by number.

`gyre data prepare` turns JSONL, Parquet or a Hugging Face data set into a folder of tokens, answers and hashes;
`PreparedData` gives a job its rows as prompts by index. Exports are resolved on first use.
"""

from __future__ import annotations

from gyre.lazy_exports import lazy

_EXPORTS = {
    "ChatTemplate": "templates",
    "PreparedData": "prepared",
    "TextTokenizer": "tokenizer",
    "prepare": "prepare",
    "read_rows": "sources",
}

__all__ = ["ChatTemplate", "PreparedData", "TextTokenizer", "prepare", "read_rows"]

__getattr__ = lazy(__name__, _EXPORTS)
