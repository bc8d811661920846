"""What the parts of a trainer may ask of what stands behind it, `gyre.workloads.runtime`.

This module must not know the parts, nor the runtime.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class HearsEvents(Protocol):
    def report(self, kind: str, **body: Any) -> None:
        """An event for the journal; `kind` is the name of a class in `gyre.failover.events`. From any thread."""


class SeesWaits(Protocol):
    def waiting(self) -> AbstractContextManager[None]:
        """While inside, the trainer stands still through no fault of its own."""


class SeesScripts(SeesWaits, Protocol):
    def wait_while_paused(self) -> None:
        """Return when the job is not paused, or stops."""


class Nobody:
    """For whoever waits where nobody looks."""

    def waiting(self) -> AbstractContextManager[None]:
        return nullcontext()


NOBODY = Nobody()
