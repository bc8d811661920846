"""Moments as people write them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from gyre.errors import ConfigError
from gyre.logs.moments import moment_of

NOW = 1_790_000_000.0


@pytest.mark.parametrize(
    ("text", "ago_s"),
    [("30s", 30), ("10m", 600), ("10 min", 600), ("1.5h", 5400), ("2d", 172_800), ("1789999999.5", 0.5)],
)
def test_so_long_ago(text: str, ago_s: float) -> None:
    assert moment_of(text, NOW, key="since") == NOW - ago_s


def test_an_iso_time_is_of_its_offset_or_of_this_machine() -> None:
    assert moment_of("2026-11-25T20:12:15Z", NOW, key="since") == 1795637535.0
    assert moment_of("2026-11-25T21:12:15+01:00", NOW, key="since") == 1795637535.0
    local = datetime(2026, 11, 25, 20, 12).astimezone(UTC).timestamp()
    assert moment_of("2026-11-25 20:12", NOW, key="since") == local


@pytest.mark.parametrize("text", ["yesterday", "10x", "", "-5m", "nan"])
def test_what_is_none_is_a_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--since: .* is no time"):
        moment_of(text, NOW, key="--since")
