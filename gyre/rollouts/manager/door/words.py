"""What the door knows of the model that it serves: its end tokens, how long a text it takes, and its tokenizer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.rollouts.plane.settings import Tokenizer


@dataclass(frozen=True, slots=True)
class ModelWords:
    """`stops` end a sample unless the request says `ignore_eos`; `positions` are the most tokens of prompt and answer,
    None where that is not known."""

    stops: tuple[int, ...] = ()
    positions: int | None = None
    tokenizer: Tokenizer | None = None


def words_of(folder: Path, tokenizer: Tokenizer | None = None) -> ModelWords:
    """What `config.json` and `generation_config.json` of a model's folder say; what cannot be read says nothing."""
    config, generation = _json(folder / "config.json"), _json(folder / "generation_config.json")
    found: list[Any] = []
    for told in (generation.get("eos_token_id"), config.get("eos_token_id")):
        found += told if isinstance(told, list) else [told]
    stops = tuple(dict.fromkeys(one for one in found if type(one) is int and one >= 0))
    positions = config.get("max_position_embeddings")
    return ModelWords(stops, positions if type(positions) is int and positions > 0 else None, tokenizer)


def _json(path: Path) -> dict[str, Any]:
    try:
        told = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return told if isinstance(told, dict) else {}
