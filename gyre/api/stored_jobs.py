"""The jobs of a store, each as a master would show it: what `gyre ui` serves.

Invariant: *the journal is enough*: every read works when the job's cluster is long gone (`gyre.api.reader`).

This module must not know HTTP.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from gyre.api.reader import JobReader
from gyre.config import parse_job
from gyre.errors import NotFound
from gyre.graph import CompiledJob, as_dict, compile_job
from gyre.logs.reading import LogQuery
from gyre.master.master_api import MasterApi, View, spec_of
from gyre.observe.samples.query import SampleReader
from gyre.rollouts.plane.stored_account import stored_account

POLL_S = 0.25
"""Between two looks for new events, of a job that somebody watches."""


class StoredJobs:
    """The jobs of `reader`, which has a store."""

    def __init__(self, reader: JobReader) -> None:
        self._reader = reader
        self._lock = threading.Lock()
        self._ports: dict[str, StoredJob] = {}

    def items(self) -> list[dict[str, Any]]:
        return self._reader.jobs()

    def count(self) -> int:
        return self._reader.store.listing.count()

    def port(self, job: str) -> MasterApi:
        found = self._reader.find(job)
        with self._lock:
            return self._ports.setdefault(found.job_id, StoredJob(self._reader, found.job_id))


class StoredJob:
    """A `MasterApi` of one job, over its store and, while that answers, its master."""

    def __init__(self, reader: JobReader, job_id: str) -> None:
        self._reader = reader
        self.job_id = job_id
        self._lock = threading.Lock()
        self._compiled: CompiledJob | None = None
        self._graphs: dict[bool, dict[str, Any]] = {}
        """With the placement of each vertex, and without."""

    def view(self) -> View:
        return self._reader.view(self.job_id)

    def tokens(self) -> list[dict[str, Any]]:
        return self._reader.tokens(self.job_id)

    def spec(self) -> dict[str, Any]:
        return spec_of(parse_job(self._reader.spec(self.job_id)))

    def graph(self, *, placement: bool = True) -> dict[str, Any]:
        with self._lock:
            if self._compiled is None:
                self._compiled = compile_job(parse_job(self._reader.spec(self.job_id)))
            if placement not in self._graphs:
                self._graphs[placement] = as_dict(self._compiled, placement=placement)
            return self._graphs[placement]

    def events(self, *, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        return self._reader.events(self.job_id, after=after, limit=limit)

    def wait_for_events(self, *, after: int, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while self._last_seq() <= after:
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(POLL_S, left_s))
        return True

    def nodes(self) -> list[dict[str, Any]]:
        return self._reader.nodes(self.job_id)

    def command(self, verb: str, body: Mapping[str, Any], *, by: str, timeout_s: float = 10.0) -> int:
        return self._reader.command(self.job_id, verb, body, deadline_s=timeout_s)

    def logs(
        self, query: LogQuery, *, after: Mapping[str, int], tail: int | None, limit_bytes: int
    ) -> dict[str, Any]:
        return self._reader.logs(self.job_id, query, after=after, tail=tail, limit_bytes=limit_bytes)

    def steps(self, *, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        return self._reader.store.ledger(self.job_id).metrics(after=after, limit=limit)

    def listed(self) -> dict[str, Any]:
        return self._reader.listed(self.job_id)

    def label(
        self, *, add: Sequence[str] = (), remove: Sequence[str] = (), notes: str | None = None
    ) -> dict[str, Any]:
        return self._reader.label(self.job_id, add=add, remove=remove, notes=notes)

    def audit(self) -> dict[str, Any]:
        return asdict(self._reader.store.ledger(self.job_id).audit())

    def plane_account(self) -> dict[str, Any] | None:
        return stored_account(self._reader.store.rollouts(self.job_id).load())

    def series(
        self,
        *,
        prefix: str = "",
        since: float | None = None,
        until: float | None = None,
        points: int = 300,
        names: Sequence[str] = (),
    ) -> dict[str, Any]:
        return self._reader.series(
            self.job_id, prefix=prefix, since=since, until=until, points=points, names=names
        )

    def at(self, *, seq: int | None = None, time: float | None = None) -> dict[str, Any]:
        return self._reader.at(self.job_id, seq=seq, time=time)

    def timeline(self, *, since: float | None = None, until: float | None = None) -> dict[str, Any]:
        return self._reader.timeline(self.job_id, since=since, until=until)

    def decisions(self, *, around: int) -> dict[str, int | None]:
        return self._reader.decisions(self.job_id, around=around)

    def samples(self) -> SampleReader:
        return self._reader.samples(self.job_id)

    def metrics(self) -> bytes:
        raise NotFound(
            "Only a master has metrics.", hint="Ask the address that `gyre ls --json` gives a job."
        )

    def _last_seq(self) -> int:
        return self._reader.store.journal(self.job_id).last_seq()
