"""A job's numbers over time: what they are, how they are kept, and how they are read.

write_moment(store.series("j1"), numbers_of(state, telemetry), at=now)      # the master, each tick
read_series(store.series("j1"), prefix="instance", since=a, until=b, points=300)

Exports are resolved on first use: what is kept is read with numpy, and `gyre ls` reads none of it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre.observe.series.numbers import Numbers, numbers_of
    from gyre.observe.series.reading import Series, read_series, spent_by_role
    from gyre.observe.series.recording import Recorder
    from gyre.observe.series.thinning import tick_for

__all__ = ["Numbers", "Recorder", "Series", "numbers_of", "read_series", "spent_by_role", "tick_for"]

_EXPORTS = {
    "Numbers": "numbers",
    "Recorder": "recording",
    "Series": "reading",
    "numbers_of": "numbers",
    "read_series": "reading",
    "spent_by_role": "reading",
    "tick_for": "thinning",
}


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
