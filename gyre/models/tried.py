"""Which kinds of model that only transformers computes were tried, and what came of it: what `gyre models`, `gyre plan`
and each vertex answer by.

`tried.json` is written by `tools/models_table.py`, which tries every causal kind of one version of transformers. With
another version nothing in it is believed.

Invariants:
- *no rule*: a kind is taken because it was tried;
- *a reason in a sentence*: whoever does not take a kind says why.

This module must not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_name("tried.json")


@dataclass(frozen=True, slots=True)
class Tried:
    """What came of a kind with one who computes it: whether it `takes` it, the `reason` why not, and how it does it."""

    takes: bool
    reason: str
    how: str


@cache
def table() -> dict[str, Any]:
    """The versions of transformers and torch, and `kinds`, by `model_type`."""
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


@cache
def is_of_installed() -> bool:
    """Whether the table was made with the installed transformers."""
    try:
        return bool(version("transformers") == table()["transformers"])
    except PackageNotFoundError:
        return False


def knows(kind: str) -> bool:
    """Whether this `model_type` was tried, as the installed transformers computes it. One is not whose defaults are no
    model: only a folder's `config.json` can be tried."""
    return is_of_installed() and bool(table()["kinds"].get(kind, {}).get("made"))


def tried(kind: str, who: str) -> Tried:
    """What came of a kind with one who computes by transformers, such as `fsdp`. Raises KeyError for one that the table
    does not have."""
    row = table()["kinds"][kind][who]
    return Tried(row["takes"], row["reason"], row.get("way") or row.get("how", ""))


def problem_with(config: Mapping[str, Any], who: str) -> str:
    """Why `who` does not take the model of this `config.json`; "" where it does, or where the table does not know."""
    kind = str(config.get("model_type"))
    if not knows(kind):
        return ""
    found = tried(kind, who)
    if not found.takes:
        return f"model_type {kind!r} was tried with transformers {table()['transformers']}: {found.reason}"
    for key, value in table()["kinds"][kind].get("needs", {}).items():
        if config.get(key) != value:
            return f"model_type {kind!r} is a causal model where {key} is {str(value).lower()} alone"
    return ""


def taken(who: str) -> list[str]:
    """The kinds that one who computes by transformers takes, in the order of their names."""
    return [kind for kind in table()["kinds"] if tried(kind, who).takes]


def markdown_table(columns: Sequence[str]) -> str:
    """The table as the docs show it: the kinds that one of those who compute by transformers takes, and how."""
    lines = [f"| `model_type` | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for kind in table()["kinds"]:
        found = [tried(kind, who) for who in columns]
        if any(one.takes for one in found):
            lines.append(
                f"| `{kind}` | {' | '.join(_WORDS[one.how] if one.takes else 'no' for one in found)} |"
            )
    return "\n".join(lines)


_WORDS = {
    "segments": "packed",
    "positions": "packed by positions",
    "masks": "packed by masks",
    "alone": "one by one",
    "SlotRunner": "together",
    "RowRunner": "one by one",
}
"""Of a way, and of a runner, for people."""
