"""What the rollout manager has yet to write: opened and closed groups, deltas, leases, and how samples ended.

Invariants:
- *in order*: an end stands with the newest delta, and is folded after that one's tokens;
- *forgotten when closed*: a delta is forgotten with the last sample that it holds something of.

This module must not know what the changes bring about, or when they are written.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.protocol.columns import ReportColumns
from gyre.rollouts.samples import GroupRequest
from gyre.rollouts.token_log.records import (
    LeaseRecord,
    PendingDelta,
    delta_out,
    request_out,
)

GIVE_WAY_AFTER_S = 0.5e-3
"""How long encoding goes on at a time: the loop may be waiting for the interpreter, and would otherwise get it only
after 5 ms."""

DELTA_ROWS = 512
"""Reports one after another make one delta up to this many samples: a row in the ledger costs more than its content."""


@dataclass(slots=True)
class WriteBatch:
    """What is to be committed together. Groups are named by the numbers of their requests, instances by theirs."""

    counters: dict[str, Any]
    opened: dict[int, bytes]
    deltas: list[PendingDelta]
    closed: list[int]
    forgotten: list[int]
    """Deltas that nobody needs any more."""
    reports: dict[int, int]
    """The number of the last report in it, for each instance that reported."""
    ended: set[int]
    """Instances that reported a sample's end."""
    complete: list[int]
    """Groups that may be delivered once this is committed."""
    finished: list[int]
    """The keys of samples that have finished."""
    sessions: dict[str, bytes | None] = field(default_factory=dict)
    """Rows of sessions by name, None for those that are forgotten."""

    def encoded(self) -> list[tuple[int, bytes]]:
        """The deltas as they are stored. The thread that writes encodes them, not the loop."""
        encoded = []
        began = time.perf_counter()
        for delta in self.deltas:
            encoded.append((delta.seq, delta_out(delta)))
            if time.perf_counter() - began > GIVE_WAY_AFTER_S:
                time.sleep(1e-6)
                began = time.perf_counter()
        return encoded


class WriteBuffer:
    def __init__(self) -> None:
        self.retention = Retention()
        self.next_seq = 1
        self.complete: list[int] = []
        self.finished: list[int] = []
        self._opened: dict[int, bytes] = {}
        self._closed: list[int] = []
        self._forgotten: list[int] = []
        self._reports: dict[int, int] = {}
        self._sessions: dict[str, bytes | None] = {}
        self._ended: set[int] = set()
        self._deltas: list[PendingDelta] = []

    @property
    def is_dirty(self) -> bool:
        return bool(
            self._deltas
            or self._opened
            or self._closed
            or self._forgotten
            or self._reports
            or self._sessions
            or self.complete
        )

    def take(self, counters: dict[str, Any]) -> WriteBatch:
        batch = WriteBatch(
            counters=counters,
            opened=self._opened,
            deltas=self._deltas,
            closed=self._closed,
            forgotten=self._forgotten,
            reports=self._reports,
            ended=self._ended,
            complete=self.complete,
            finished=self.finished,
            sessions=self._sessions,
        )
        self._opened, self._closed, self._forgotten = {}, [], []
        self._reports, self._ended, self._sessions = {}, set(), {}
        self.complete, self.finished = [], []
        self._deltas = []
        return batch

    def open(self, number: int, request: GroupRequest) -> None:
        self._opened[number] = request_out(request)

    def close(self, number: int) -> None:
        self._opened.pop(number, None)
        self._closed.append(number)

    def keep_session(self, name: str, body: bytes | None) -> None:
        """The session, or group of sessions, of this name has changed; None where it is forgotten."""
        self._sessions[name] = body

    def close_sample(self, key: int, keys: NDArray[np.int64]) -> None:
        """The sample is closed; `keys` are those of all rows as they are now."""
        self._forgotten += self.retention.closed(key, keys)

    def forget(self, seq: int) -> None:
        """Nobody needs this delta."""
        self._forgotten.append(seq)

    def reported(self, instance: int, seq: int, *, ended: bool) -> None:
        """All that the instance's report brought is here."""
        self._reports[instance] = seq
        if ended:
            self._ended.add(instance)

    def tokens(self, report: ReportColumns, keys: NDArray[np.int64]) -> int:
        """Note what a report brought, `keys` naming its rows' samples. Returns the number of its delta."""
        delta = self._with_room(report.rows, keys)
        delta.reports.append(report)
        delta.keys.append(keys)
        return delta.seq

    def leases(
        self, rows: NDArray[np.uint32], keys: NDArray[np.int64], granted: Sequence[LeaseRecord]
    ) -> None:
        """Note leases that were granted. `rows` and `keys` are those of their samples, all open."""
        for at in range(0, len(granted), DELTA_ROWS):
            part = slice(at, at + DELTA_ROWS)
            self._with_room(rows[part], keys[part]).leases += granted[part]

    def _with_room(self, rows: NDArray[np.uint32], keys: NDArray[np.int64]) -> PendingDelta:
        """The newest delta, if something of these samples fits in, else a new one."""
        delta = self._deltas[-1] if self._deltas else None
        if (
            delta is not None
            and not delta.sealed
            and delta.rows + len(rows) <= DELTA_ROWS
            and delta.seq in self.retention
        ):
            self.retention.extend(delta.seq, rows, keys)
        else:
            delta = self._new(rows.copy(), keys)
        delta.rows += len(rows)
        return delta

    def end(self, row: int, key: int, last: int, kind: str, *more: Any, seal: bool = False) -> int:
        """Note how a sample ended, with the newest delta: what stands there is folded after its tokens, in order.
        `last` is the last delta that holds something of the sample. `seal` where it may get more tokens. Returns the
        delta's number."""
        delta = self._deltas[-1] if self._deltas else None
        if delta is not None and delta.seq in self.retention:
            if delta.seq != last:
                self.retention.join(delta.seq, row, key)
        else:  # nobody needs the last one any more
            delta = self._new(np.array([row], np.uint32), np.array([key]))
        delta.ends.append([key, kind, *more])
        delta.sealed |= seal
        return delta.seq

    def _new(self, rows: NDArray[np.uint32], keys: NDArray[np.int64]) -> PendingDelta:
        delta = PendingDelta(self.next_seq)
        self.next_seq += 1
        self._deltas.append(delta)
        self.retention.add(delta.seq, rows, keys)
        return delta


class Retention:
    """Which deltas are still needed: those that hold something of a sample whose group is open. A sample is its `row`
    and its `key`: it is closed when its row has another key.

    A delta holds tokens of hundreds of samples. Counting them down would cost a step for each sample of each delta.
    Instead each delta is watched through one of its open samples, and only when that one is closed another is looked
    for: the newest, which most likely stays longest, so that a delta is looked at a few times in all.
    """

    def __init__(self) -> None:
        self._samples: dict[int, tuple[NDArray[np.uint32], NDArray[np.int64]]] = {}
        """Rows and keys of each delta's samples, by its number."""
        self._watched: dict[int, list[int]] = {}
        """The deltas that are watched through a sample, by its key."""

    def __contains__(self, seq: int) -> bool:
        return seq in self._samples

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, seq: int, rows: NDArray[np.uint32], keys: NDArray[np.int64]) -> None:
        """The delta `seq` holds something of these samples, all open. At least one."""
        self._samples[seq] = rows, keys
        self._watched.setdefault(int(keys.max()), []).append(seq)

    def extend(self, seq: int, rows: NDArray[np.uint32], keys: NDArray[np.int64]) -> None:
        """The delta holds something of these samples as well."""
        more_rows, more_keys = self._samples[seq]
        self._samples[seq] = np.concatenate((more_rows, rows)), np.concatenate((more_keys, keys))

    def join(self, seq: int, row: int, key: int) -> None:
        """The delta holds something of this sample as well."""
        if not (self._samples[seq][1] == key).any():
            self.extend(seq, np.array([row], np.uint32), np.array([key]))

    def closed(self, key: int, key_of: NDArray[np.int64]) -> list[int]:
        """The sample is closed; `key_of` are the keys by row as they are now. Returns the deltas that nobody needs."""
        gone = []
        for seq in self._watched.pop(key, ()):
            rows, keys = self._samples[seq]
            left = keys[key_of[rows] == keys]
            if left.size:
                self._watched.setdefault(int(left.max()), []).append(seq)
            else:
                del self._samples[seq]
                gone.append(seq)
        return gone
