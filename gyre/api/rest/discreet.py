"""A job's port without what may be secret: what the REST interface says of it, and the page shows.

This module must not know which values are secret: `gyre.redaction` knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.logs.reading import LogQuery
from gyre.master.master_api import MasterApi, View
from gyre.redaction import KNOWN


class Discreet:
    """A `MasterApi`, whose texts have `***` for each secret. Numbers over time and samples are as they are: a series
    has no texts, and a sample is the job's data."""

    def __init__(self, port: MasterApi) -> None:
        self._port = port

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)

    def view(self) -> View:
        return _shown(self._port.view())

    def spec(self) -> dict[str, Any]:
        return _shown(self._port.spec())

    def graph(self, *, placement: bool = True) -> dict[str, Any]:
        return _shown(self._port.graph(placement=placement))

    def events(self, *, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        return [_shown(event) for event in self._port.events(after=after, limit=limit)]

    def nodes(self) -> list[dict[str, Any]]:
        return [_shown(node) for node in self._port.nodes()]

    def logs(
        self, query: LogQuery, *, after: Mapping[str, int], tail: int | None, limit_bytes: int
    ) -> dict[str, Any]:
        return _shown(self._port.logs(query, after=after, tail=tail, limit_bytes=limit_bytes))

    def at(self, *, seq: int | None = None, time: float | None = None) -> dict[str, Any]:
        return _shown(self._port.at(seq=seq, time=time))

    def timeline(self, *, since: float | None = None, until: float | None = None) -> dict[str, Any]:
        return _shown(self._port.timeline(since=since, until=until))


def _shown(data: dict[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = KNOWN.data(data)
    return shown
