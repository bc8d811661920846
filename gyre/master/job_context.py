"""The job's state and its journal, together: the only way in which control state changes.

`submit(event)` decides, and queues event, changed snapshot rows and commands as one entry for one transaction.
Commands are carried out after their commit, in order. The state in memory may be ahead of the journal by the queued
entries; nothing outside sees the difference: views, commands and acknowledgements all wait for the commit.

Invariants:
- *decided once*: one loop thread submits, so events have one order;
- *nothing before its commit*: no command runs and no caller hears of an event that a crash could still lose;
- *encoded first*: the state advances only by what the journal can hold; any other event raises when it is submitted,
  and changes nothing;
- *a full disk loses nothing*: entries that could not be written are kept and written again, in order, while the
  data plane goes on; a journal owned by a newer epoch ends this master at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from gyre.clock import Clock
from gyre.errors import Fenced, GyreError
from gyre.failover import Decision, FailoverCoordinator, JobState, fold, row_of, state_from
from gyre.failover.commands import Command, command_body, command_from, command_kind
from gyre.failover.events import Event, body_of, kind_of
from gyre.master.owner import HearsCommits
from gyre.store import EncodedEntry, Entry, GroupCommitWriter, Journal, StoredCommand, encode_entry

RETRY_S = 1.0
"""Pause between attempts to write the journal after a failure; long, because people have to free a full disk."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A command with the id that makes it idempotent."""

    id: str
    command: Command


@dataclass(slots=True)
class _Queued:
    entry: EncodedEntry
    state: JobState
    issued: list[Issued]
    told: list[asyncio.Future[int]]
    """Done when the entry is written."""


def entry_of(
    decision: Decision,
    event: Event,
    *,
    seq: int,
    event_id: str,
    at: float,
    actor: str,
    cause: str | None = None,
    issued: Sequence[Issued] = (),
    done: Sequence[str] = (),
) -> Entry:
    """One event's part of a transaction: the event, the rows that its decision changed, and its commands."""
    upserts: dict[tuple[str, str], dict[str, Any]] = {}
    deletes = []
    for key in decision.changed:
        row = row_of(decision.state, key)
        if row is None:
            deletes.append(key)
        else:
            upserts[key] = row
    return Entry(
        seq=seq,
        event_id=event_id,
        cause=cause,
        kind=kind_of(event),
        at=at,
        actor=actor,
        body=body_of(event),
        upserts=upserts,
        deletes=deletes,
        commands=[
            StoredCommand(item.id, command_kind(item.command), command_body(item.command)) for item in issued
        ],
        done=done,
    )


class JobNow(Protocol):
    """What a part of the master asks of its `JobContext`."""

    @property
    def state(self) -> JobState:
        """The state as decided."""

    @property
    def epoch(self) -> int:
        """The master's own."""


class JobContext:
    """The state of one job and its journal. Belongs to the control loop's thread, except for the attributes that say
    otherwise."""

    def __init__(
        self,
        journal: Journal,
        coordinator: FailoverCoordinator,
        *,
        clock: Clock,
        owner: HearsCommits,
    ) -> None:
        self.journal = journal
        self.coordinator = coordinator
        self.epoch = 0
        self.state = JobState()
        """The state as decided; may be ahead of the journal."""
        self.committed = JobState()
        """The state that the journal holds. Readable from any thread."""
        self.seq = 0
        """Sequence number of the last committed event. Readable from any thread."""
        self.error = ""
        """Why the journal cannot be written; empty when it can. Readable from any thread."""
        self.news = threading.Condition()
        """Notified at every commit, for readers on other threads."""
        self._clock = clock
        self._owner = owner
        self._next_seq = 1
        self._queued: deque[_Queued] = deque()
        self._finished: list[str] = []
        self._writer: GroupCommitWriter | None = None
        self._counter = 0
        self._retrying = False
        self._attempt = 0

    # -- taking over --------------------------------------------------------------------------------

    def open(self, *, pid: int) -> list[Issued]:
        """Raise the epoch, load the state, and return the commands that earlier masters left undone.

        By invariant the snapshot is the fold of the events; if there are events after the snapshot, they are folded
        too.
        """
        self.epoch = self.journal.take_over(now=self._clock.time(), pid=pid)
        rows = self.journal.snapshot()
        self.seq = self.journal.last_seq()
        state = state_from(rows) if rows else fold(self.coordinator, self.journal.events())
        self.state = self.committed = state
        self._next_seq = self.seq + 1
        self._writer = GroupCommitWriter(self.journal, self.epoch)
        return [Issued(row.id, command_from(row.kind, row.body)) for row in self.journal.pending_commands()]

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    # -- deciding -----------------------------------------------------------------------------------

    def submit(
        self, event: Event, *, cause: str | None = None, actor: str = "master", event_id: str | None = None
    ) -> asyncio.Future[int]:
        """Decide an event. The future is done, with the event's sequence number, when the event is in the journal; for
        a repeated event, when everything submitted before it is, which includes the original. Raises StoreError, and
        changes nothing, if the journal cannot hold the event or its consequences."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[int] = loop.create_future()
        if self.coordinator.is_repeated(self.state, event):
            if self._queued:
                self._queued[-1].told.append(done)
            else:
                done.set_result(self.seq)
            return done
        now = self._clock.time()
        decision = self.coordinator.decide(self.state, event, now)
        counter = self._counter + (event_id is None)
        event_id = event_id or f"e{self.epoch}.{counter}"
        issued = [Issued(f"{event_id}/{n}", command) for n, command in enumerate(decision.commands)]
        entry = encode_entry(
            entry_of(
                decision,
                event,
                seq=self._next_seq,
                event_id=event_id,
                cause=cause,
                at=now,
                actor=actor,
                issued=issued,
                done=self._finished,
            )
        )
        self._finished = []
        self._counter = counter
        self._next_seq += 1
        self.state = decision.state
        queued = _Queued(entry, decision.state, issued, [done])
        self._queued.append(queued)
        if not self._retrying:
            self._write(queued)
        return done

    @property
    def unwritten(self) -> int:
        """The number of the first event that is decided and not in the journal; 0 where all are."""
        return self._queued[0].entry.seq if self._queued else 0

    def finished(self, command_id: str) -> None:
        """Note that the command need not be run again. The note is written with the next event; until then a repetition
        is harmless."""
        self._finished.append(command_id)

    # -- committing ---------------------------------------------------------------------------------

    def _write(self, queued: _Queued) -> None:
        assert self._writer is not None
        loop = asyncio.get_running_loop()
        attempt = self._attempt
        try:
            future = self._writer.submit_encoded(queued.entry)
        except GyreError as error:
            self._failed(error, attempt)
            return

        def tell(written: Any) -> None:
            error = written.exception()
            if error is None:
                loop.call_soon_threadsafe(self._written, queued)
            else:
                loop.call_soon_threadsafe(self._failed, error, attempt)

        future.add_done_callback(tell)

    def _written(self, queued: _Queued) -> None:
        if not self._queued or self._queued[0] is not queued:
            return
        self._queued.popleft()
        with self.news:
            self.committed = queued.state
            self.seq = queued.entry.seq
            self.error = ""
            self.news.notify_all()
        for done in queued.told:
            if not done.done():
                done.set_result(queued.entry.seq)
        self._owner.committed()
        if queued.issued:
            self._owner.carry_out(queued.issued)

    def _failed(self, error: BaseException, attempt: int) -> None:
        if isinstance(error, Fenced):
            self._owner.fenced(error)
            return
        if attempt != self._attempt:
            return  # the late result of an attempt whose entries have all been sent again
        self.error = str(error)
        if not self._retrying:
            self._retrying = True
            asyncio.get_running_loop().call_later(RETRY_S, self._again)

    def _again(self) -> None:
        assert self._writer is not None
        self._writer.resume()
        self._retrying = False
        self._attempt += 1
        for queued in list(self._queued):
            if self._retrying:
                return
            self._write(queued)
