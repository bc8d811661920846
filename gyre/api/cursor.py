"""The cursor of a log page: file → offset, as one opaque word that fits a query string."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Mapping

from gyre.errors import ConfigError


def write_cursor(offsets: Mapping[str, int]) -> str:
    return base64.urlsafe_b64encode(json.dumps(dict(offsets), sort_keys=True).encode()).decode()


def read_cursor(cursor: str) -> dict[str, int]:
    """The inverse of `write_cursor`; an empty text is the beginning. Raises ConfigError for anything else."""
    if not cursor:
        return {}
    try:
        offsets = json.loads(base64.urlsafe_b64decode(cursor.encode()))
        if isinstance(offsets, dict) and all(
            type(value) is int and 0 <= value < 2**63 for value in offsets.values()
        ):
            return offsets
    except (binascii.Error, ValueError, RecursionError):
        pass
    raise ConfigError(
        "cursor: is not one that this interface gave.", hint="Leave it out to begin at the start."
    )
