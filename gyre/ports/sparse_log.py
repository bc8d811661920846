"""A filter of log records: one line a second at most for one cause, with the number of those that were left out."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable

EVERY_S = 1.0
CAUSES_KNOWN = 256
"""Causes kept at one time; the one that was silent for the longest is forgotten first."""


class SparseLog(logging.Filter):
    """Two records have one cause if their logger, their text before its values are filled in and the type of their
    exception are the same."""

    def __init__(self, every_s: float = EVERY_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._every_s = every_s
        self._clock = clock
        self._causes: OrderedDict[tuple[str, str, str], tuple[float, int]] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[0].__name__ if record.exc_info and record.exc_info[0] else ""
        cause = (record.name, str(record.msg)[:80], error)
        now = self._clock()
        since, left_out = self._causes.pop(cause, (float("-inf"), 0))
        if now - since < self._every_s:
            self._causes[cause] = (since, left_out + 1)
            return False
        self._causes[cause] = (now, 0)
        while len(self._causes) > CAUSES_KNOWN:
            self._causes.popitem(last=False)
        if left_out:
            record.msg, record.args = f"{record.getMessage()} (… and {left_out:,} more)", None
        return True


_FILTER = SparseLog()


def make_sparse(*names: str) -> None:
    """Have these loggers write one line a second at most for one cause. Harmless where it was done before."""
    for name in names:
        logging.getLogger(name).addFilter(_FILTER)
