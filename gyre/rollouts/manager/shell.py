"""The shell of the plane's machine: it has the ledger, the clock and the loop, gives events to the machine, and carries
its instructions out.

Invariants:
- *in order*: the instructions of an event are carried out, in order, before the next event is given;
- *reporting never fails the manager*: an event that cannot be reported is left out.

This module must not know about HTTP, or what is decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

from gyre.clock import Clock
from gyre.errors import StoreError
from gyre.rollouts.core_usage import CoreUsage
from gyre.rollouts.manager.connections import Connection
from gyre.rollouts.manager.front import Front
from gyre.rollouts.plane import delivery
from gyre.rollouts.plane.events import Committed, DispatchDue, LedgerFree, Restored, RoomFor, Ticked
from gyre.rollouts.plane.instructions import (
    Answer,
    Close,
    Commit,
    CommitWithin,
    Deliver,
    DispatchSoon,
    Instruction,
    Refuse,
    ReportEvent,
    Send,
    WakeWaiters,
    Write,
)
from gyre.rollouts.plane.machine import handle
from gyre.rollouts.plane.requesters import Requester
from gyre.rollouts.plane.settings import ManagerSettings
from gyre.rollouts.plane.state import Plane
from gyre.rollouts.token_log.group_commit import GroupCommit
from gyre.rollouts.token_log.write_buffer import WriteBatch
from gyre.store import RolloutRows, RolloutStore

TICK_S = 0.1

CHECKPOINT_EVERY_S = 0.5
"""At two hundred commits a second the store's log has a thousand pages by then, SQLite's own measure."""


class HearsOfPlane:
    """Who has a rollout manager. Overrides what it wants to hear."""

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """What people should know: instances that join and go, quarantined samples."""

    def fail(self, error: BaseException) -> None:
        """This manager's work has ended by a failure. It is to be started again: the ledger has everything."""


class PlaneShell:
    """Its `owner` hears of events. The `fronts` serve those that wait for requests."""

    def __init__(
        self,
        store: RolloutStore,
        settings: ManagerSettings,
        requesters: Sequence[type[Requester]],
        *,
        term: int,
        weights_key: str,
        urgent_commit_s: float,
        owner: HearsOfPlane,
        clock: Clock,
    ) -> None:
        self.now = clock.monotonic
        self.plane = Plane(
            settings,
            requesters,
            epoch=term,
            now=clock.monotonic(),
            weights_key=weights_key,
            node=socket.gethostname(),
        )
        self.fronts: list[Front] = []
        self.store = store
        self.commits = GroupCommit(
            self.collect,
            self.write,
            self.committed,
            interval_s=settings.commit_interval_s,
            urgent_s=urgent_commit_s,
        )
        self._term = term
        self._owner = owner
        self._cores = CoreUsage() if settings.pools and settings.on_cores else None

    # -- events and instructions --------------------------------------------------------------------

    def handle(self, event: object) -> list[Instruction]:
        """Give the event to the machine, and carry out what it says, which is returned. Raises GyreError where the
        event is refused."""
        instructions = handle(self.plane, event, self.now())
        for one in instructions:
            self._carry_out[type(one)](self, one)
        return instructions

    def _send(self, one: Send) -> None:
        peer = cast(Connection, one.peer)
        if not one.if_read or peer.waiting_bytes < delivery.WINDOW_BYTES:
            peer.send(one.frame)

    def _close(self, one: Close) -> None:
        cast(Connection, one.peer).close()

    def _deliver(self, one: Deliver) -> None:
        self.read(cast(Connection, one.peer))

    def read(self, peer: Connection) -> None:
        """The peer has read something: it gets as much of what is ready for it as it reads."""
        while peer.waiting_bytes < delivery.WINDOW_BYTES and self.handle(RoomFor(peer)):
            pass

    def _report(self, one: ReportEvent) -> None:
        try:
            self._owner.event(one.kind, one.fields)
        except Exception as error:  # the listener may fail in any way on what a peer sent
            print(f"the event {one.kind} could not be told: {error!r}"[:1000], file=sys.stderr, flush=True)

    def _commit(self, one: Commit) -> None:
        if one is Commit.SOON:
            self.commits.soon()
        elif one is Commit.NOW:
            self.commits.now()
        else:
            self.commits.at_once()

    def _commit_within(self, one: CommitWithin) -> None:
        self.commits.within(one.seconds)

    def _dispatch_soon(self, one: DispatchSoon) -> None:
        asyncio.get_running_loop().call_soon(self.handle, DispatchDue())

    def _answer(self, one: Answer) -> None:
        for front in self.fronts:
            front.answer(one.requests)

    def _wake(self, one: WakeWaiters) -> None:
        for front in self.fronts:
            front.wake(one.names)

    def _refuse(self, one: Refuse) -> None:
        raise one.error

    def _written(self, one: Write) -> None:
        """`collect` takes it."""

    _carry_out: dict[type, Callable[[PlaneShell, Any], None]] = {  # noqa: RUF012 - a table, which nobody changes
        Send: _send,
        Close: _close,
        Deliver: _deliver,
        ReportEvent: _report,
        Commit: _commit,
        CommitWithin: _commit_within,
        DispatchSoon: _dispatch_soon,
        Answer: _answer,
        WakeWaiters: _wake,
        Refuse: _refuse,
        Write: _written,
    }

    # -- the ledger ---------------------------------------------------------------------------------

    def take_over(self) -> RolloutRows:
        """Take the ledger over; runs on the ledger's thread. Raises Fenced if a newer manager exists."""
        self.store.take_over(term=self._term)
        return self.store.load()

    def restore(self, rows: RolloutRows) -> None:
        self.handle(Restored(rows))
        for front in self.fronts:
            front.restored()

    def collect(self) -> WriteBatch | None:
        """The next batch; None where there is nothing to write."""
        done = self.handle(LedgerFree())
        batch = next((one.batch for one in done if isinstance(one, Write)), None)
        if batch is not None:
            for front in self.fronts:
                front.collected()
        return batch

    def write(self, batch: WriteBatch) -> None:
        """Write a batch; runs on the ledger's thread."""
        self.store.write(
            self._term,
            counters=batch.counters,
            opened=batch.opened,
            deltas=batch.encoded(),
            closed=batch.closed,
            forgotten=batch.forgotten,
            sessions=batch.sessions,
        )

    def committed(self, batch: WriteBatch) -> None:
        self.handle(Committed(batch))
        for front in self.fronts:
            front.committed()

    async def checkpoint_loop(self) -> None:
        """Every so often: what was committed goes from the store's log into its file, beside the commits."""
        seen = self.commits.count
        while True:
            await asyncio.sleep(CHECKPOINT_EVERY_S)
            if seen != self.commits.count:
                seen = self.commits.count
                # Where it fails, the next one does it, or a commit when the log is long.
                with contextlib.suppress(StoreError):
                    await asyncio.to_thread(self.store.checkpoint)

    # -- time ---------------------------------------------------------------------------------------

    async def tick_loop(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self.tick()

    def tick(self) -> None:
        self.handle(Ticked(self._cores.look() if self._cores is not None else None))
