"""Events that peers bring about, folded so that no peer fills the journal.

In a window, the first few events of a kind and source are told as they come; the others are counted, and told as one
event at its end: the last one's fields, and `count`. The same bound holds for all sources of a kind together, however
many names a machine takes; the job's own instances are not counted there.

Invariants:
- *bounded*: in a window at most `EACH` + 1 events of a kind and source, and `ALL_SOURCES` + 1 of a kind from peers that
  joined;
- *nothing is lost in silence*: what was not told is in a count.

This module reads no clock: `now` is an argument. It must not know what an event means.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gyre.rollouts.plane.links import AgentLinks

WINDOW_S = 10.0
EACH = 8
"""More than an honest instance has of one kind in a window: what it cannot do, it tries again after growing pauses."""

ALL_SOURCES = 128

SOURCES_TOLD = 16

SOURCE_FIELDS = ("instance", "peer", "worker")
"""The field that names an event's source; an event without one is the manager's own, and is never folded."""

NOT_FOLDED = frozenset(("SamplesMoved", "ScaleAdvised"))

Told = tuple[str, dict[str, Any]]


@dataclass(slots=True)
class _Window:
    until: float
    told: int = 0
    count: int = 0
    last: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, None] = field(default_factory=dict)


class PeerEvents:
    """Of the instances of `links`."""

    def __init__(self, links: AgentLinks) -> None:
        self._links = links
        self._windows: dict[tuple[str, str], _Window] = {}
        """By kind and source, "" for all sources together; in the order of their ends."""

    def add(self, kind: str, fields: dict[str, Any], now: float) -> Told | None:
        """The event, if it is to be told now. `due` has to be asked before."""
        source = next((str(fields[name]) for name in SOURCE_FIELDS if name in fields), "")
        if not source or kind in NOT_FOLDED:
            return kind, fields
        everybody = self._window(kind, "", now) if not self._links.is_ours(source) else None
        if everybody is not None and everybody.told >= ALL_SOURCES:
            _count(everybody, source, fields)
            return None
        own = self._window(kind, source, now)
        if own.told >= EACH:
            _count(own, source, fields)
            return None
        own.told += 1
        if everybody is not None:
            everybody.told += 1
        return kind, fields

    def due(self, now: float) -> Iterator[Told]:
        """What was counted in the windows that have ended."""
        while self._windows:
            (kind, source), window = next(iter(self._windows.items()))
            if window.until > now:
                return
            del self._windows[kind, source]
            if window.count:
                several = {"sources": list(window.sources)} if not source else {}
                yield kind, {**window.last, "count": window.count, **several}

    def _window(self, kind: str, source: str, now: float) -> _Window:
        window = self._windows.get((kind, source))
        if window is None:
            window = self._windows[kind, source] = _Window(now + WINDOW_S)
        return window


def _count(window: _Window, source: str, fields: dict[str, Any]) -> None:
    window.count += 1
    window.last = fields
    if len(window.sources) < SOURCES_TOLD:
        window.sources[source] = None
