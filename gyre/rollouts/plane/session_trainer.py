"""The trainer of a job with agents, as a requester: the members of its groups are sessions, and their turns are
requests of their own.

Invariants:
- those of `gyre.rollouts.plane.trainer` and `gyre.rollouts.plane.session_ledger`;
- *a group waits for its last session*: it is delivered when all of its members have ended, and that is in the ledger;
- *every session has somebody or waits*: a worker that is silent has lost its sessions, which are handed out again;
- *every session has an end*: one that its agent does not end in time is ended, as a fault of infrastructure;
- *a pin outlasts a tool*: while a group that only one policy may generate is not complete, no newer one is served,
  whether a turn is generated or not; where that policy is lost the group has failed.

This module must not know about HTTP, messages or tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from gyre.rollouts.plane import placement, updates
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.instructions import Commit, CommitWithin, WakeWaiters
from gyre.rollouts.plane.keys import WRITTEN_WITHIN_S
from gyre.rollouts.plane.peers import Peer
from gyre.rollouts.plane.requesters import Handler
from gyre.rollouts.plane.requests import InFlightRequest, InFlightSample
from gyre.rollouts.plane.session_ledger import SessionEnded, SessionGroup, SessionLedger, TurnAsked
from gyre.rollouts.plane.session_tree import LedgerSession, SessionOutcome
from gyre.rollouts.plane.settings import ManagerSettings, SessionSettings
from gyre.rollouts.plane.trainer import TrainerRequester
from gyre.rollouts.protocol.frames import GroupsStored, Request, SampleCounts
from gyre.rollouts.samples import unpack_groups
from gyre.rollouts.token_log.write_buffer import WriteBatch

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane

CLAIMS = "claims"
"""What those wait for who would run a session."""

NOT_ENDED = "Its agent did not end it in its time (config.agent.seconds), nor soon after it."


class SessionsClaimed(NamedTuple):
    """The worker runs at most so many more sessions. `at` is in seconds since 1970."""

    worker: str
    most: int
    at: float


class WorkerBeat(NamedTuple):
    """The worker lives, and runs these sessions. `back` are those that it gives back, with their claims."""

    worker: str
    sessions: Sequence[str]
    back: Sequence[tuple[str, int | None]] = ()


class SnapshotKept(NamedTuple):
    session: str
    claim: int | None
    body: bytes


class SessionTrainer(TrainerRequester):
    def __init__(self, groups: OpenGroups, settings: ManagerSettings) -> None:
        super().__init__(groups, settings)
        self.sessions = SessionLedger(
            groups, settings.sessions or SessionSettings(), vocabulary=settings.vocabulary
        )
        self.delivery.requests = self.sessions.by_number

    def handlers(self) -> Mapping[type, Handler]:
        return {
            **super().handlers(),
            SessionsClaimed: self._claimed,
            WorkerBeat: self._beat,
            TurnAsked: self._turn_asked,
            SessionEnded: self._ended,
            SnapshotKept: self._snapshot,
        }

    # -- what the trainer asks ----------------------------------------------------------------------

    def _requested(self, plane: Plane, peer: Peer, frame: Request) -> None:
        super()._requested(plane, peer, frame)
        self._tell_failures(plane, [group.id for group in unpack_groups(frame.groups)], frame.purpose)

    def _open(self, plane: Plane, frame: Request) -> bool:
        opened = self.sessions.open(frame)
        if opened:
            plane.instructions.append(WakeWaiters([CLAIMS]))
        return bool(opened)

    def _close(self, plane: Plane, frame: GroupsStored) -> None:
        plane.groups.cancelled += self.sessions.close(frame.purpose, frame.ids)
        self._wake(plane)

    def _underway(self, plane: Plane) -> SampleCounts:
        """Of the sessions: those without a turn under way are with their agents, or wait for one."""
        told = self.sessions.status()
        return msgspec.structs.replace(
            super()._underway(plane), with_agent=told["with_agent"], for_agent=told["waiting"]
        )

    # -- what workers ask ---------------------------------------------------------------------------

    def _claimed(self, plane: Plane, event: SessionsClaimed) -> None:
        if self.sessions.claim(event.worker, event.most, now=plane.now, at=event.at):
            plane.commit(Commit.NOW)

    def _beat(self, plane: Plane, event: WorkerBeat) -> None:
        if self.sessions.beat(event.worker, event.sessions, event.back, now=plane.now):
            self._released(plane)

    def _turn_asked(self, plane: Plane, event: TurnAsked) -> None:
        """Raises RequestRefused."""
        _, is_new = self.sessions.ask(event, now=plane.now)
        if is_new:
            plane.instructions.append(CommitWithin(WRITTEN_WITHIN_S))
            placement.dispatch_soon(plane)

    def _ended(self, plane: Plane, event: SessionEnded) -> None:
        """Raises RequestRefused."""
        self.sessions.end(event)
        self._over(plane)

    def _snapshot(self, plane: Plane, event: SnapshotKept) -> None:
        """Raises RequestRefused."""
        self.sessions.keep_snapshot(event.session, event.claim, event.body)
        plane.commit(Commit.NOW)

    def _over(self, plane: Plane) -> None:
        """Sessions may be over: what of them still runs is stopped, and who waits for them hears of it."""
        placement.cancel_superseded(plane)
        self._wake(plane)
        plane.commit(Commit.NOW)

    def _released(self, plane: Plane) -> None:
        """Sessions may have been released: somebody else gets them."""
        self._over(plane)
        plane.instructions.append(WakeWaiters([CLAIMS]))

    def _wake(self, plane: Plane) -> None:
        if news := self.sessions.take_news():
            plane.instructions.append(WakeWaiters(news))

    # -- what comes of it ---------------------------------------------------------------------------

    def restore(self, plane: Plane, sessions: Mapping[str, bytes]) -> None:
        ended = self.sessions.restore(sessions, plane.now)
        self.delivery.complete(self.sessions.complete_groups())
        for session in ended:
            if session.id in self.sessions.sessions:  # its group may have failed by the one before
                self._fault(plane, session)

    def collect(self, plane: Plane, batch: WriteBatch, finished: Sequence[InFlightSample]) -> None:
        """Samples are not told of ahead of their groups: a turn is no sample of the trainer's."""
        self.sessions.collect()

    def committed(self, plane: Plane, batch: WriteBatch, complete: Sequence[InFlightRequest]) -> None:
        turns, written = self.sessions.committed(complete, now=plane.now)
        if names := [turn.name for turn in turns] + [session.id for session in written]:
            plane.instructions.append(WakeWaiters(names))
        for session in written:
            if self.sessions.sessions.get(session.id) is not session:
                continue  # its group was complete without it
            if session.outcome is SessionOutcome.INFRA_FAULT:
                self._fault(plane, session)
            elif session.outcome is not None:
                self._counts(plane, session)
        self._deliver(plane)

    def _counts(self, plane: Plane, session: LedgerSession) -> None:
        """The session ended, and is a member of its group."""
        faults = self.sessions.breaker.in_a_row
        if self.sessions.breaker.fine():
            plane.report_event("SessionsResumed", {"faults": faults})
            plane.instructions.append(WakeWaiters([CLAIMS]))
        one = self.sessions.group_with(session)
        if one.is_complete:
            if self.sessions.completed(one, now=plane.now):
                self._over(plane)
            self.delivery.complete([one])
            self._unpinned(plane, one)

    def _fault(self, plane: Plane, session: LedgerSession) -> None:
        """Infrastructure ended the session, and the ledger has that."""
        one = self.sessions.group_with(session)
        told: dict[str, Any] = {
            "session": session.id,
            "attempt": session.attempt,
            "reason": session.reason,
            "worker": session.worker,
        }
        plane.report_event("SessionFault", told)
        if self.sessions.breaker.fault(plane.now):
            pause = {"faults": self.sessions.breaker.in_a_row, "pause_s": self.sessions.breaker.pause_s}
            plane.report_event("SessionsPaused", {**pause, "reason": session.reason})
        if why := self.sessions.draw_again(session):
            self._give_up(plane, one, why)
        else:
            self._released(plane)

    def _give_up(self, plane: Plane, one: SessionGroup, why: str) -> None:
        """The group cannot be generated: its sessions are over, and the trainer hears of it."""
        self.sessions.fail(one, why)
        self._over(plane)
        self._tell_failures(plane, [one.group.id], one.purpose)
        self._unpinned(plane, one)

    def _unpinned(self, plane: Plane, one: SessionGroup) -> None:
        """The group holds its policy no longer."""
        if one.asked.pinned:
            updates.promote(plane)
            plane.instructions.append(WakeWaiters([CLAIMS]))  # others may have waited for the next one

    def _tell_failures(self, plane: Plane, ids: Sequence[int], purpose: str) -> None:
        """Tell the trainer that is attached of those of the groups that have failed, once."""
        for one in self.sessions.failed(purpose, ids):
            if self.peer is not None and one.number not in self._failures_told:
                self._failures_told.add(one.number)
                self._fail(plane, one, one.failed)

    def given_up(self, plane: Plane, samples: Sequence[InFlightSample]) -> None:
        """A turn that no instance can generate ends its session."""
        for state in list(samples):
            self._turn_failed(plane, state.request, "; ".join(state.evidence))

    def unservable(self, plane: Plane, request: InFlightRequest, why: str) -> None:
        """Its group fails, in `policy_lost`."""

    def policy_lost(self, plane: Plane, version: int, why: str) -> None:
        for one in self.sessions.pinned_to(version):
            self._give_up(plane, one, why)

    def _turn_failed(self, plane: Plane, request: InFlightRequest, why: str) -> None:
        session = self.sessions.session_of(request)
        if session is not None and session.outcome is None:
            self.sessions.end(
                SessionEnded(
                    session.id, SessionOutcome.INFRA_FAULT, None, f"A turn cannot be generated: {why}"
                )
            )
            self._over(plane)

    def look(self, plane: Plane) -> None:
        for worker in self.sessions.silent(plane.now):
            plane.report_event("AgentLost", {"worker": worker})
            self._released(plane)
        if overdue := self.sessions.workers.overdue(plane.now):
            for session in overdue:
                self.sessions.end(SessionEnded(session.id, SessionOutcome.INFRA_FAULT, None, NOT_ENDED))
            self._over(plane)
        if self.sessions.breaker.is_over(plane.now):
            plane.instructions.append(WakeWaiters([CLAIMS]))
