"""Giving samples to instances: who is admitted is computed, the placement decides, and the assignments go out.

Invariants:
- *admitted means verified*: admission is computed from the present state before samples are given out, whatever came
  since the last time;
- *continued means durable*: a sample goes on elsewhere after the commit that holds its tokens;
- *a recall has an end*: a sample that was recalled and not handed back in time is taken back;
- *in order*: what is sent to an instance behind a frame that waits for a commit waits too.

This module must not know about sockets or the trainer.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from gyre.rollouts.core.admission import DeviceUse, NotAdmitted
from gyre.rollouts.core.groups import Given, OpenGroups, Recalled
from gyre.rollouts.core.requests import InFlightSample
from gyre.rollouts.manager.sessions import AgentSession, AgentSessions
from gyre.rollouts.protocol.frames import Assign, Assignment, Cancel, Frame

WORK_PORTION_BYTES = 4 << 20
"""Largest batch of continued samples in one frame; well below the frame limit, however long they are."""

ASSIGN_PER_TURN = 2048
"""Samples given out before the loop looks at its sockets again: about 20 ms."""


MISSING_TOLD = 16
"""Most names of missing instances in the event of a spare that begins to serve."""


class Dispatch:
    """`devices(session)` says how an instance may use its devices, `handover()` whether samples are kept away from an
    instance that loads. `commit_now()` and `commit_soon()` ask for a commit; `on_event` is told of samples that move.
    """

    def __init__(
        self,
        groups: OpenGroups,
        sessions: AgentSessions,
        *,
        devices: Callable[[AgentSession], DeviceUse],
        handover: Callable[[], bool],
        commit_now: Callable[[], None],
        commit_soon: Callable[[], None],
        on_event: Callable[[str, dict[str, Any]], None],
        now: Callable[[], float],
    ) -> None:
        self.hold_until = 0.0
        """Nothing is given out before: samples may still be held by instances that have not dialled yet."""
        self.committed_seq = 0
        """The number of the newest delta in the ledger."""
        self._groups = groups
        self._sessions = sessions
        self._devices = devices
        self._handover = handover
        self._commit_now = commit_now
        self._commit_soon = commit_soon
        self._on_event = on_event
        self._now = now
        self._scheduled = False
        self._recalled: dict[tuple[int, int], float] = {}
        """When each (row, lease) was recalled, in that order."""
        self._is_stale = True
        """Something other than a report came since admission was computed."""
        self._rebalanced_at = 0.0
        self._moved: Counter[str] = Counter()
        """How many samples each instance was asked for that move, since this was told last."""
        self._serving_spares: frozenset[str] = frozenset()
        """The spares that serve, as was told last."""

    def soon(self) -> None:
        """Dispatch once for everything that this turn of the loop brings, with admission computed anew."""
        self._is_stale = True
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self.at_once)

    def at_once(self) -> None:
        """Assign the queued samples to admitted instances."""
        self._scheduled = False
        self.compute_admission()
        if self._now() < self.hold_until:
            return
        given = self._groups.assign(ASSIGN_PER_TURN)
        self.send_work(given)
        if given:
            self._commit_soon()  # the leases
        if sum(len(work) for _, work in given.values()) == ASSIGN_PER_TURN:
            self.soon()
        else:  # nothing waits here for the slots that are free
            self._move(self._groups.deal(self._now()))

    def compute_admission(self) -> bool:
        """Compute who may be given samples now; whether anybody may who might not before. A report changes nothing of
        it, and there are thousands of reports."""
        if not self._is_stale:
            return False
        self._is_stale = False
        more = self._sessions.admit(self._devices, handover=self._handover())
        if self._now() >= self.hold_until:  # before, instances that have not dialled yet are not dead
            self._tell_spares()
        return more

    def wants(self, wanted: Mapping[str, int]) -> None:
        """So many instances of these roles there are to be."""
        if wanted.items() - self._sessions.wanted.items():
            self._sessions.wanted.update(wanted)
            self.soon()

    def _tell_spares(self) -> None:
        """Tell which spares have begun to serve, or are relieved, since this was told last."""
        now = self._sessions.substitution
        for name in sorted(now.serving - self._serving_spares):
            version = self._groups.instances[name].version
            told = {"instance": name, "missing": list(now.missing[:MISSING_TOLD]), "version": version}
            self._on_event("SparePromoted", told)
        for name in sorted(self._serving_spares - now.serving):
            session = self._sessions.get(name)
            if session is not None and session.not_admitted is NotAdmitted.SPARE:  # else it is gone itself
                held = len(self._groups.instances[name].held)
                self._on_event("SpareRelieved", {"instance": name, "samples": held})
        self._serving_spares = now.serving

    def send_work(self, given: Given) -> None:
        for name, (prompts, work) in given.items():
            session = self._sessions.get(name)
            if session is None or session.connection is None:
                continue
            known = {prompt.request_id: prompt for prompt in prompts}
            for portion in _portions(work):
                needed = 0
                for one in portion:
                    state = self._groups.sample(one.key)
                    if one.prior and state is not None:
                        needed = max(needed, self._groups.last_delta(state))
                request_ids = dict.fromkeys(one.request_id for one in portion)
                self.tell(
                    session, Assign(prompts=[known[number] for number in request_ids], work=portion), needed
                )

    def tell(self, session: AgentSession, frame: Frame, needed: int = 0) -> None:
        """Send it when the delta `needed` is committed, and after what waits for that already."""
        if session.deferred or needed > self.committed_seq:
            session.deferred.append((needed, frame))
            self._commit_now()
        elif session.connection is not None:
            session.connection.send(frame)

    def committed(self, session: AgentSession) -> None:
        """Send what waited for the deltas that are in the ledger now."""
        while session.deferred and session.deferred[0][0] <= self.committed_seq:
            _, frame = session.deferred.popleft()
            if session.connection is not None:
                session.connection.send(frame)

    def recall(self, states: Iterable[InFlightSample]) -> None:
        """What runs there goes on elsewhere, from its last token."""
        self._tell_recalled(self._groups.recall(states))

    def _tell_recalled(self, recalled: Recalled) -> None:
        for name, rows in recalled.items():
            if (session := self._sessions.get(name)) is not None:
                self.tell(session, Cancel(rows=rows))
                self._recalled.update(dict.fromkeys(rows, self._now()))

    def _take_back(self, since: float) -> None:
        """What was recalled before `since`, and was not handed back, goes on elsewhere, whatever its holder says."""
        taken: Counter[str] = Counter()
        while self._recalled:
            (row, lease), recalled_at = next(iter(self._recalled.items()))
            if recalled_at > since:
                break
            del self._recalled[row, lease]
            if (name := self._groups.take_back(row, lease)) is not None:
                taken[name] += 1
        for name, count in taken.items():
            self._on_event("RecallIgnored", {"instance": name, "count": count})
        if taken:
            self.soon()

    def cancel_superseded(self) -> None:
        """Stop what went on elsewhere."""
        cancelled, self._groups.cancelled = self._groups.cancelled, []
        for name, row, lease in cancelled:
            session = self._sessions.get(name)
            if session is not None:
                self.tell(session, Cancel(rows=[(row, lease)]))

    def look(self, now: float, *, rebalance_every_s: float, recall_timeout_s: float) -> None:
        """Periodic catch-up of admission, dispatch and rebalancing."""
        self._is_stale = True
        self._take_back(now - recall_timeout_s)
        if self.compute_admission():
            self.soon()
        if self.hold_until and now >= self.hold_until:
            self.hold_until = 0.0
            self.soon()
        if self._groups.can_deal:
            self.soon()
        if now - self._rebalanced_at > rebalance_every_s:
            self._rebalance(now)
            self.soon()

    def _rebalance(self, now: float) -> None:
        self._rebalanced_at = now
        self._move(self._groups.rebalance(now))
        for name, count in self._moved.items():
            self._on_event("SamplesMoved", {"instance": name, "count": count})
        self._moved.clear()

    def _move(self, recalled: Recalled) -> None:
        self._tell_recalled(recalled)
        for name, rows in recalled.items():
            self._moved[name] += len(rows)


def _portions(work: list[Assignment]) -> Iterator[list[Assignment]]:
    """Fresh samples first, for they wait for nothing; then those that go on, by size."""
    if fresh := [one for one in work if not one.prior]:
        yield fresh
    portion: list[Assignment] = []
    size = 0
    for one in work:
        if one.prior:
            portion.append(one)
            size += len(one.prior)
            if size >= WORK_PORTION_BYTES:
                yield portion
                portion, size = [], 0
    if portion:
        yield portion
