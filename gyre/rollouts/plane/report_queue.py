"""Reports on their way into the open groups: those that nothing waits for are collected and taken in together.

Invariants:
- *in order*: of one instance at most one report waits, and it is taken before anything else of that instance is;
- *each for itself*: a report that cannot be is refused alone; those that waited with it are taken in;
- *before anybody asks*: whatever reads how far samples got, or gives them to somebody else, takes in first what waits.

This module must not know about sockets or when a report is acknowledged.
"""

from __future__ import annotations

from collections.abc import Sequence

from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.protocol.columns import ColumnFault, join_columns
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.progress import Report

MOST_REPORTS = 64
MOST_ROWS = 512
"""What waits is taken in when it is so much: about a millisecond of work, for which a freed slot would have to wait."""


class ReportQueue:
    def __init__(self, groups: OpenGroups) -> None:
        self.refused: list[tuple[str, FrameError]] = []
        """Instances whose reports cannot be true, which the caller has not yet cut and cleared."""
        self._groups = groups
        self._waiting: dict[str, Report] = {}
        self._rows = 0

    def has(self, name: str) -> bool:
        return name in self._waiting

    def add(self, name: str, report: Report) -> None:
        """Collect a report that has samples and ends none, of an instance of which no report waits."""
        self._waiting[name] = report
        self._rows += len(report.columns[0]) >> 2
        if len(self._waiting) >= MOST_REPORTS or self._rows >= MOST_ROWS:
            self.take_in()

    def take_in(self) -> None:
        """Take in all that waits."""
        if self._waiting:
            waiting, self._waiting, self._rows = self._waiting, {}, 0
            self._take(list(waiting), list(waiting.values()))

    def take_in_of(self, name: str) -> None:
        """Take in what waits of this instance."""
        if (report := self._waiting.pop(name, None)) is not None:
            self._rows -= len(report.columns[0]) >> 2
            self._take([name], [report])

    def _take(self, names: Sequence[str], reports: Sequence[Report]) -> None:
        """Take all in one pass; where one does not fit, take each half by itself."""
        if len(names) > 1:
            joined = join_columns([report.columns for report in reports])
            if isinstance(joined, ColumnFault) or not self._groups.progress_of_many(names, reports, joined):
                half = len(names) // 2
                self._take(names[:half], reports[:half])
                self._take(names[half:], reports[half:])
            return
        try:
            self._groups.progress(names[0], reports[0].unfold())
        except FrameError as error:
            self.refused.append((names[0], error))
