"""What the rollout manager's book has to write: opened and closed groups, deltas, and how samples ended.

Invariants:
- *in order*: an end stands with the newest delta, and is folded after that one's tokens;
- *forgotten when closed*: a delta is forgotten with the last sample that it holds something of.

This module must not know what the book decides, or when something is written.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.core.report_batch import ReportBatch
from gyre.rollouts.core.requests import GroupRequest
from gyre.rollouts.protocol.frames import Progress
from gyre.rollouts.token_log.records import NewDelta, delta_out, request_out
from gyre.rollouts.token_log.retention import Retention

GIVE_WAY_AFTER_S = 0.5e-3
"""Of encoding: the loop may be waiting for the interpreter, and would otherwise get it only after 5 ms."""

DELTA_ROWS = 512
"""Reports one after another make one delta up to so many samples: rows in the ledger cost more than what is in them."""


@dataclass(slots=True)
class WriteBatch:
    """What is to be committed together. `sessions` maps an instance number to the last progress number in it;
    `ended` are those of them that told of a sample's end."""

    counters: dict[str, Any]
    opened: dict[int, bytes]
    deltas: list[NewDelta]
    closed: list[int]
    forgotten: list[int]
    sessions: dict[int, int]
    ended: set[int]
    complete: list[GroupRequest]
    """Groups that may be delivered once this is committed."""

    def encoded(self) -> list[tuple[int, bytes]]:
        """The deltas as they are stored; done by whoever writes, not by the loop."""
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
        self.live = Retention()
        self.next_seq = 1
        self.opened: dict[int, bytes] = {}
        self.closed: list[int] = []
        self.forgotten: list[int] = []
        self.sessions: dict[int, int] = {}
        """Of each instance that reported, by number: its last report."""
        self.ended: set[int] = set()
        self.complete: list[GroupRequest] = []
        self._deltas: list[NewDelta] = []

    @property
    def is_dirty(self) -> bool:
        return bool(
            self._deltas or self.opened or self.closed or self.forgotten or self.sessions or self.complete
        )

    def take(self, counters: dict[str, Any]) -> WriteBatch:
        batch = WriteBatch(
            counters=counters,
            opened=self.opened,
            deltas=self._deltas,
            closed=self.closed,
            forgotten=self.forgotten,
            sessions=self.sessions,
            ended=self.ended,
            complete=self.complete,
        )
        self.clear()
        return batch

    def clear(self) -> None:
        self.opened, self.closed, self.forgotten = {}, [], []
        self.sessions, self.ended, self.complete = {}, set(), []
        self._deltas = []

    def open(self, request: GroupRequest) -> None:
        self.opened[request.number] = request_out(request)

    def close(self, request: GroupRequest) -> None:
        self.opened.pop(request.number, None)
        self.closed.append(request.number)

    def closed_sample(self, key: int, keys: NDArray[np.int64]) -> None:
        """The sample is closed; `keys` are those of all rows as they are now."""
        self.forgotten += self.live.closed(key, keys)

    def tokens(self, frame: Progress | ReportBatch, keys: NDArray[np.int64]) -> int:
        """What reports brought, `keys` naming their rows' samples. Gives the number of the delta that holds it."""
        rows = frame.rows
        delta = self._deltas[-1] if self._deltas else None
        if (
            delta is not None
            and not delta.sealed
            and delta.rows + len(rows) <= DELTA_ROWS
            and delta.seq in self.live
        ):
            self.live.extend(delta.seq, rows, keys)
        else:
            delta = self._new(rows.copy(), keys)
        delta.frames.append(frame)
        delta.keys.append(keys)
        delta.rows += len(rows)
        return delta.seq

    def end(self, row: int, key: int, last: int, kind: str, *more: Any, seal: bool = False) -> int:
        """How a sample ended, with the newest delta of the batch: what stands there is folded after its tokens, in
        order. `last` is the last delta that holds something of the sample. `seal` where it may get more tokens. Gives
        the delta's number."""
        delta = self._deltas[-1] if self._deltas else None
        if delta is not None and delta.seq in self.live:
            if delta.seq != last:
                self.live.join(delta.seq, row, key)
        else:  # nobody needs the last one any more
            delta = self._new(np.array([row], np.uint32), np.array([key]))
        delta.ends.append([key, kind, *more])
        delta.sealed |= seal
        return delta.seq

    def _new(self, rows: NDArray[np.uint32], keys: NDArray[np.int64]) -> NewDelta:
        delta = NewDelta(self.next_seq)
        self.next_seq += 1
        self._deltas.append(delta)
        self.live.add(delta.seq, rows, keys)
        return delta
