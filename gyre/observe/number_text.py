"""Numbers in as few digits as matter, for people: the same in a step's line, at a run's end and in a list of runs.

Pure: it imports nothing. This module must not know what is counted.
"""

from __future__ import annotations

from collections.abc import Callable


def short(value: float) -> str:
    """Two or three digits that matter: `0.41`, `3.9`, `0.0021`, `128`, `1.2e-07`."""
    size = abs(value)
    if size >= 9.95:
        return f"{value:.0f}" if size < 1e6 else f"{value:.2e}"
    if size >= 0.995:
        return f"{value:.2f}".rstrip("0").rstrip(".")
    if value == 0:
        return "0"
    return f"{value:.2g}"


ROUNDING = 1e-12
"""A standard deviation below this part of its mean is what adding up in floating point leaves of equal values."""


def plus_minus(mean: float, deviation: float | None, form: Callable[[float], str] = short) -> str:
    """`0.41 ±0.49`; without a deviation the mean alone, and `±0` for one that is rounding."""
    if deviation is None:
        return form(mean)
    return f"{form(mean)} ±{form(0.0 if deviation <= ROUNDING * abs(mean) else deviation)}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def thousands(value: float) -> str:
    """`820`, `5.2k`, `1.4M`."""
    if abs(value) >= 999_500:
        return f"{value / 1e6:.1f}M"
    return f"{value / 1e3:.1f}k" if abs(value) >= 999.5 else f"{value:.0f}"
