"""How many tokens the model of a job reads at most, prompt and answer together, by the job's `config`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.config.model_path import model_folder
from gyre.config.sections import ModelSettings, read_section
from gyre.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Positions:
    """A number of tokens, and the key or file that says it."""

    count: int
    where: str


def positions_of(config: Mapping[str, Any]) -> Positions | None:
    """The model's positions. None where they are not known: of a class of the user's own, of a folder that is not here,
    and of scaled positions, where engines have a limit of their own."""
    _, path = model_folder(config)
    if path:
        file = Path(path) / "config.json"
        told = model_config(file)
        scaled = told.get("rope_scaling") or told.get("rope_parameters") or {}
        if "factor" in scaled:
            return None
        count = told.get("max_position_embeddings")
        return Positions(count, f"max_position_embeddings of {file}") if isinstance(count, int) else None
    if not isinstance(config.get("model"), Mapping):
        return None
    try:
        model = read_section(ModelSettings, config, "model")
    except ConfigError:  # a model of the user's own, whose section has other keys
        return None
    return Positions(model.max_positions, "config.model.max_positions")


def model_config(file: Path) -> dict[str, Any]:
    """The content of a model's `config.json`; nothing if it is missing or damaged, as whoever loads it says."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
