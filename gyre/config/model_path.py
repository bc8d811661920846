"""Where a job's `config`, as it was written, names the model's folder.

This module must not import pydantic's sections: raw specs of stored jobs are read by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_KEYS = ("model_path", "megatron.model_path")
"""The second is the older name of the first."""


def model_folder(config: Mapping[str, Any]) -> tuple[str, str]:
    """The key and the path of the model's folder; both "" if the job names none."""
    for key in _KEYS:
        found: Any = config
        for part in key.split("."):
            found = found.get(part) if isinstance(found, Mapping) else None
        if isinstance(found, str) and found:
            return f"config.{key}", found
    return "", ""
