"""What parts of a trainer report to the journal."""

from __future__ import annotations

from typing import Any


class Reported:
    """The events in order, each its body with its `kind`."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def report(self, kind: str, **body: Any) -> None:
        self.events.append({"kind": kind, **body})
