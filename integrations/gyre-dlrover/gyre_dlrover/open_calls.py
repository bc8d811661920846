"""Calls that the trainer has handed to workers, until they tell the results.

A worker takes a call at once and tells its result later, so that a method that waits for long holds up nothing.

Invariants:
- *at least once*: a call whose worker dies is handed to the worker that takes its place;
- *once each*: no incarnation of a worker is handed a call twice.

This module must not import Ray or torch.
"""

from __future__ import annotations

import itertools
import threading
from collections import defaultdict
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from gyre.errors import GyreError

Place = tuple[str, int]
"""A role, by Gyre's name, and a rank."""

CallNumber = tuple[int, int]
"""The trainer's incarnation, and the number among its calls."""


@dataclass(slots=True, eq=False)
class OpenCall:
    """`future` has the result as the worker told it: pickled."""

    place: Place
    number: CallNumber
    method: str
    arguments: Any
    handed_to: int = 0
    """The incarnation that it was handed to last."""
    future: Future[bytes] = field(default_factory=Future)


class OpenCalls:
    """Thread-safe."""

    def __init__(self, term: int) -> None:
        self._lock = threading.Lock()
        self._numbers = ((term, number) for number in itertools.count(1))
        self._open: dict[Place, dict[CallNumber, OpenCall]] = defaultdict(dict)

    def add(self, place: Place, method: str, arguments: Any) -> OpenCall:
        with self._lock:
            call = OpenCall(place, next(self._numbers), method, arguments)
            self._open[place][call.number] = call
        return call

    def to_hand(self, place: Place, incarnation: int) -> list[OpenCall]:
        """Those that this incarnation has not been handed, which it has from now on."""
        with self._lock:
            found = [call for call in self._open[place].values() if call.handed_to < incarnation]
            for call in found:
                call.handed_to = incarnation
        return found

    def break_off(self) -> None:
        """End them all, for nobody hears of results any more."""
        with self._lock:
            left = [call for calls in self._open.values() for call in calls.values()]
            self._open.clear()
        for call in left:
            call.future.set_exception(GyreError(f"{call.method} was broken off: the trainer ends."))

    def end(self, place: Place, number: CallNumber) -> OpenCall | None:
        """The call, which is open no more; None for one of an earlier trainer, or one that has ended."""
        with self._lock:
            return self._open[place].pop(number, None)
