"""Who runs which session: those that wait for a worker, those that each worker has, and who is silent or too slow.

Invariants:
- *somebody or waits*: a session that has not ended is with one worker, or waits;
- *begun goes first*: a session that lost its worker is handed out before those that have not begun, and of either kind
  those that were asked for first, whichever manager it is.

What a call costs depends on the sessions that it touches, and not on how many there are.

This module reads no clock: `now` is an argument, monotonic, in seconds. It must not know about turns, or what becomes
of a session that is released.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import islice
from operator import itemgetter

from gyre.rollouts.plane.session_tree import LedgerSession

TAKEN_WITHIN_S = 10.0
"""A worker says within this time that it runs a session, and every 5 s from then on. One that does not has dropped it,
or has not heard that it was given it."""

ENDED_WITHIN_S = 60.0
"""After a session's time is over, until it is taken from its agent: for the last turn, and for the grader."""

_PLACE = itemgetter(0)


class Workers:
    """A worker that said nothing for `silence_s` has lost its sessions; one may run a session for `seconds`."""

    def __init__(self, *, silence_s: float, seconds: float) -> None:
        self._silence_s = silence_s
        self._seconds = seconds
        self._waiting: dict[tuple[int, bool], list[tuple[tuple[int, int], LedgerSession]]] = {}
        """By the oldest version that may answer them, and whether they have not begun; each with its place, in their
        order."""
        self._queue_of: dict[str, tuple[tuple[int, bool], tuple[int, int]]] = {}
        """The queue of each, and its place there."""
        self._running: dict[str, dict[str, LedgerSession]] = {}
        """By worker and id."""
        self._heard: dict[str, float] = {}
        """When each worker was heard last."""
        self._ends: list[tuple[float, str, int, str]] = []
        """A heap: when a session, in this claim, is taken from this worker."""

    @property
    def waiting(self) -> int:
        """Sessions that nobody runs."""
        return len(self._queue_of)

    @property
    def running(self) -> int:
        return sum(map(len, self._running.values()))

    def __len__(self) -> int:
        """Workers that were heard lately."""
        return len(self._heard)

    # -- sessions come and go -----------------------------------------------------------------------

    def wait(
        self, session: LedgerSession, version: int, place: tuple[int, int], *, first: bool = False
    ) -> None:
        """Nobody runs it: it is handed out, `first` before those that have not begun, and of either kind in the order
        of their places, which no two have in common. `version` is the oldest that may answer its turns."""
        self.forget(session)
        session.worker = ""
        queue = version, not first
        self._queue_of[session.id] = queue, place
        insort(self._waiting.setdefault(queue, []), (place, session), key=_PLACE)

    def forget(self, session: LedgerSession) -> None:
        """It is not handed out any more, and nobody is to run it."""
        found = self._queue_of.pop(session.id, None)
        if found is not None:
            queue, place = found
            waiting = self._waiting[queue]
            del waiting[bisect_left(waiting, place, key=_PLACE)]
            if not waiting:
                del self._waiting[queue]
        theirs = self._running.get(session.worker)
        if theirs is not None and theirs.pop(session.id, None) is not None and not theirs:
            del self._running[session.worker]

    def back(self, sessions: Sequence[LedgerSession], now: float) -> None:
        """What an earlier manager handed out: each worker has as long to dial as one that is silent, and each session
        all of its time, as nobody knows how much of it was the manager's."""
        for session in sessions:
            self._heard[session.worker] = session.seen_at = now
            self._give(session, now + self._seconds)

    def _give(self, session: LedgerSession, over_at: float) -> None:
        self._running.setdefault(session.worker, {})[session.id] = session
        heapq.heappush(self._ends, (over_at + ENDED_WITHIN_S, session.id, session.claim, session.worker))

    # -- workers ------------------------------------------------------------------------------------

    def hear(self, worker: str, now: float) -> None:
        self._heard[worker] = now

    def take(
        self, worker: str, most: int, *, newest: int | None = None, now: float, at: float
    ) -> list[LedgerSession]:
        """The worker runs at most so many of those that wait, the first ones; with `newest` none of those that only
        newer versions may answer. `at` is in seconds since 1970."""
        self.hear(worker, now)
        queues = [
            [(is_fresh, place, session) for place, session in islice(waiting, most)]
            for (version, is_fresh), waiting in self._waiting.items()
            if newest is None or version <= newest
        ]
        taken = [session for *_, session in islice(heapq.merge(*queues, key=_in_order), most)]
        for session in taken:
            self.forget(session)
            session.worker = worker
            session.claim = max(session.claim + 1, int(1000 * at))
            session.given_at = session.seen_at = now
            session.began_at = at if session.began_at is None else session.began_at
            self._give(session, now + session.began_at + self._seconds - at)
        return taken

    def beat(
        self, worker: str, ids: Sequence[str], back: Sequence[tuple[str, int | None]], now: float
    ) -> list[LedgerSession]:
        """The worker lives, and runs these. Returns what it was given and does not run: what it gives `back`, by name
        and claim, at once."""
        self.hear(worker, now)
        theirs = self._running.get(worker, {})
        for name in ids:
            if (session := theirs.get(name)) is not None:
                session.seen_at = now
        return [
            one
            for one in theirs.values()
            if now - one.seen_at > TAKEN_WITHIN_S or (one.id, one.claim) in back
        ]

    def lost(self, worker: str, ids: Sequence[str]) -> list[str]:
        """Those of them that the worker has no longer."""
        theirs = self._running.get(worker, {})
        return [name for name in ids if name not in theirs]

    def silent(self, now: float) -> list[tuple[str, list[LedgerSession]]]:
        """Forget the workers that were silent for too long. Returns those that had sessions, with these."""
        over = [worker for worker, heard in self._heard.items() if now - heard > self._silence_s]
        for worker in over:
            del self._heard[worker]
        return [(worker, list(self._running[worker].values())) for worker in over if worker in self._running]

    def overdue(self, now: float) -> list[LedgerSession]:
        """Sessions that should have ended by now."""
        found = []
        while self._ends and self._ends[0][0] <= now:
            _, name, claim, worker = heapq.heappop(self._ends)
            session = self._running.get(worker, {}).get(name)
            if session is not None and session.claim == claim:
                found.append(session)
        return found


def _in_order(waiting: tuple[bool, tuple[int, int], LedgerSession]) -> tuple[bool, tuple[int, int]]:
    return waiting[:2]
