"""The cursor of a log page: file → offset, as one opaque word that fits a query string."""

from __future__ import annotations

import base64
import binascii
import json
import zlib
from collections.abc import Mapping

from gyre.errors import ConfigError

MOST_BYTES = 4 << 20
"""Of a cursor unpacked: tens of thousands of files."""


def write_cursor(offsets: Mapping[str, int]) -> str:
    packed = zlib.compress(json.dumps(dict(offsets), sort_keys=True).encode())
    return base64.urlsafe_b64encode(packed).decode()


def read_cursor(cursor: str) -> dict[str, int]:
    """The inverse of `write_cursor`; an empty text is the beginning. Raises ConfigError for anything else."""
    if not cursor:
        return {}
    try:
        unpacking = zlib.decompressobj()
        offsets = json.loads(unpacking.decompress(base64.urlsafe_b64decode(cursor.encode()), MOST_BYTES))
        if isinstance(offsets, dict) and all(
            type(value) is int and 0 <= value < 2**63 for value in offsets.values()
        ):
            return offsets
    except (binascii.Error, zlib.error, ValueError, RecursionError):
        pass
    raise ConfigError(
        "cursor: is not one that this interface gave.", hint="Leave it out to begin at the start."
    )
