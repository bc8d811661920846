"""How many tokens a job's policy has: token ids are below that.

This module must not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.config.model_path import model_folder
from gyre.models import architecture
from gyre.workloads.tasks.task import task_of


def vocabulary_of(config: Mapping[str, Any]) -> int | None:
    """The size of the vocabulary that the job's `config` gives; None where it gives none.

    A model's folder says it best, since a model may have more tokens than its tokenizer. A small decoder has those of
    the prepared data or of the task.
    """
    _, path = model_folder(config)
    found = architecture.vocabulary_of(Path(path).expanduser()) if path else None
    if found is not None:
        return found
    data = config.get("data")
    if isinstance(data, dict) and isinstance(data.get("path"), str):
        return _of_prepared(Path(data["path"]).expanduser())
    if config.get("task"):
        return int(task_of(config).tokenizer.vocab_size)
    return None


def _of_prepared(folder: Path) -> int | None:
    """As the manifest says; None where it cannot be read, which the reader of the data has a sentence for."""
    try:
        return int(json.loads((folder / "manifest.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
