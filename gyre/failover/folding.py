"""Folding a history into the state that it leads to, and comparing that state with a stored snapshot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from gyre.failover.coordinator import FailoverCoordinator
from gyre.failover.events import event_from
from gyre.failover.state import JobState, RowKey, rows_of


class Recorded(Protocol):
    """An event as the journal keeps it."""

    @property
    def seq(self) -> int: ...
    @property
    def kind(self) -> str: ...
    @property
    def at(self) -> float: ...
    @property
    def body(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True)
class Difference:
    """A snapshot row that differs from the fold's. None means that there is no such row."""

    key: RowKey
    folded: dict[str, Any] | None
    stored: dict[str, Any] | None


def fold(
    coordinator: FailoverCoordinator, history: Iterable[Recorded], state: JobState | None = None
) -> JobState:
    """Decide every event of the history again, each at its own time; commands are not carried out."""
    state = JobState() if state is None else state
    for record in history:
        state = coordinator.decide(state, event_from(record.kind, record.body), record.at).state
    return state


def differences(state: JobState, stored: Mapping[RowKey, Mapping[str, Any]]) -> list[Difference]:
    """Returns where fold and snapshot differ, by key."""
    folded = rows_of(state)
    out = []
    for key in sorted(folded.keys() | stored.keys()):
        mine, theirs = folded.get(key), stored.get(key)
        if mine != (None if theirs is None else dict(theirs)):
            out.append(Difference(key, mine, None if theirs is None else dict(theirs)))
    return out
