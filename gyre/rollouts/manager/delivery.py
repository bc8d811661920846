"""Whole groups on their way from the rollout manager to the trainer.

Invariants:
- *delivered until taken*: a group that is whole stays here until the trainer says that it is in its ledger, and goes
  to each trainer that attaches;
- *asked again, answered again*: a trainer lays aside what it did not ask for; it gets it once more when it does;
- *a window*: no more is on its way than the trainer reads; what is whole beyond it waits here, as it does in the
  manager's ledger.

This module must not know who generated a group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from gyre.rollouts.core.requests import GroupRequest
from gyre.rollouts.manager.sessions import Connection
from gyre.rollouts.protocol.frames import Done
from gyre.rollouts.samples import Group, pack_groups

GROUPS_PER_FRAME = 64
PORTION_BYTES = 4 << 20
"""Of one frame: far below the frame limit, however long the groups are."""

WINDOW_BYTES = 32 << 20
"""On their way to the trainer."""


class Delivery:
    """`open_tickets` are the book's, by number: one that was closed is not delivered."""

    def __init__(self, open_tickets: dict[int, GroupRequest]) -> None:
        self._tickets = open_tickets
        self._trainer: Connection | None = None
        self._ready: dict[str, dict[int, GroupRequest]] = defaultdict(dict)
        """Whole groups in the ledger that the trainer has not taken, by purpose and group."""
        self._outbox: dict[int, GroupRequest] = {}
        """Of these, what goes to the trainer that is attached, and which of them it was sent."""
        self._sent: set[int] = set()

    def attached(self, trainer: Connection | None) -> None:
        """Another trainer, which was sent nothing yet; or none."""
        self._trainer = trainer
        if trainer is not None:
            self._outbox, self._sent = {}, set()

    def whole(self, tickets: Iterable[GroupRequest]) -> None:
        """The ledger has these."""
        open_ones = [ticket for ticket in tickets if ticket.number in self._tickets]
        for ticket in open_ones:
            self._ready[ticket.purpose][ticket.group.id] = ticket
        self._deliver(open_ones)

    def holds(self, purpose: str) -> bool:
        """Whether anything of it is whole and not taken."""
        return purpose in self._ready

    def again(self, purpose: str, ids: Iterable[int]) -> None:
        """The trainer asks for these groups: those that are whole go out now, also if they were sent before. So does
        the rest of the purpose that was not: an earlier trainer may have had it, and this one says so."""
        ready = self._ready.get(purpose, {})
        self._sent.difference_update(ready[group_id].number for group_id in ids if group_id in ready)
        self._deliver(list(ready.values()))

    def taken(self, purpose: str, ids: Iterable[int]) -> None:
        ready = self._ready.get(purpose, {})
        for group_id in ids:
            if (ticket := ready.pop(group_id, None)) is not None:
                self._sent.discard(ticket.number)
        if not ready:
            self._ready.pop(purpose, None)

    def _deliver(self, tickets: list[GroupRequest]) -> None:
        self._outbox.update({ticket.number: ticket for ticket in tickets if ticket.number not in self._sent})
        self.pump()

    def pump(self) -> None:
        """Send whole groups as fast as the trainer reads them, a portion of one purpose at a time."""
        while (trainer := self._trainer) is not None and trainer.waiting_bytes < WINDOW_BYTES:
            groups: list[Group] = []
            purpose, size = None, 0
            for number, ticket in list(self._outbox.items()):
                if number in self._tickets and purpose in (None, ticket.purpose):
                    purpose = ticket.purpose
                    groups.append(ticket.complete())
                    size += 8 * groups[-1].token_count
                    self._sent.add(number)
                elif number in self._tickets:
                    continue
                del self._outbox[number]
                if size >= PORTION_BYTES or len(groups) == GROUPS_PER_FRAME:
                    break
            if purpose is None:
                return
            trainer.send(Done(purpose=purpose, groups=pack_groups(groups)))
