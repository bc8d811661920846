"""Moments as people write them: `10m`, `2h`, `2026-11-25T20:12`. Pure."""

from __future__ import annotations

import re
from datetime import datetime

from gyre.errors import ConfigError

_UNITS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_AGO = re.compile(r"(\d+(?:\.\d+)?)\s*(s|min|m|h|d)")


def moment_of(text: str, now: float, *, key: str) -> float:
    """Seconds since 1970: so long before `now`, an ISO time (without an offset that of this machine), or the seconds
    themselves. Raises ConfigError, a sentence that begins with `key`."""
    word = text.strip()
    ago = _AGO.fullmatch(word)
    if ago is not None:
        return now - float(ago[1]) * _UNITS[ago[2]]
    try:
        return float(word) if re.fullmatch(r"\d+(\.\d+)?", word) else datetime.fromisoformat(word).timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{key}: {text!r} is no time.",
            hint="Say how long ago (30s, 10m, 2h, 1d) or when: 2026-11-25T20:12, with Z for UTC.",
        ) from None
