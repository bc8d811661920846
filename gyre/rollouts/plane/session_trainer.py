"""The trainer of a job with agents, as a requester: the members of its groups are sessions, and their turns are
requests of their own.

Invariants:
- those of `gyre.rollouts.plane.trainer` and `gyre.rollouts.plane.session_ledger`;
- *a group waits for its last session*: it is delivered when all of its members have ended, and that is in the ledger;
- *every session has somebody or waits*: a worker that is silent has lost its sessions, which are handed out again.

This module must not know about HTTP, messages or tools.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from gyre.rollouts.plane import placement
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.instructions import Commit, CommitWithin, Wake
from gyre.rollouts.plane.keys import WRITTEN_WITHIN_S
from gyre.rollouts.plane.requesters import Handler
from gyre.rollouts.plane.requests import InFlightRequest, InFlightSample
from gyre.rollouts.plane.session_ledger import TURN, SessionEnded, SessionLedger, TurnAsked
from gyre.rollouts.plane.session_tree import Outcome, Session
from gyre.rollouts.plane.settings import ManagerSettings, SessionSettings
from gyre.rollouts.plane.trainer import TrainerRequester
from gyre.rollouts.protocol.frames import GroupsStored, Request, SampleCounts
from gyre.rollouts.token_log.write_buffer import WriteBatch

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane

CLAIMS = "claims"
"""What those wait for who would run a session."""


class SessionsClaimed(NamedTuple):
    """The worker runs at most so many more sessions. `at` is in seconds since 1970."""

    worker: str
    most: int
    at: float


class WorkerBeat(NamedTuple):
    """The worker lives, and runs these sessions."""

    worker: str
    sessions: Sequence[str]


class SnapshotKept(NamedTuple):
    session: str
    claim: int | None
    body: bytes


class SessionTrainer(TrainerRequester):
    def __init__(self, groups: OpenGroups, settings: ManagerSettings) -> None:
        super().__init__(groups, settings)
        self.sessions = SessionLedger(groups, settings.sessions or SessionSettings())
        self.delivery.requests = ChainMap(self.sessions.by_number, groups.requests)  # type: ignore[arg-type]

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

    def _open(self, plane: Plane, frame: Request) -> bool:
        opened = self.sessions.open(frame)
        if opened:
            plane.instructions.append(Wake([CLAIMS]))
        return bool(opened)

    def _close(self, plane: Plane, frame: GroupsStored) -> None:
        plane.groups.cancelled += self.sessions.close(frame.purpose, frame.ids)

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
        self.sessions.beat(event.worker, event.sessions, now=plane.now)
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
        placement.cancel_superseded(plane)
        plane.commit(Commit.NOW)

    def _snapshot(self, plane: Plane, event: SnapshotKept) -> None:
        """Raises RequestRefused."""
        self.sessions.keep_snapshot(event.session, event.claim, event.body)
        plane.commit(Commit.NOW)

    def _released(self, plane: Plane) -> None:
        """Sessions may have been released: somebody else gets them."""
        placement.cancel_superseded(plane)
        plane.instructions.append(Wake([CLAIMS]))
        plane.commit(Commit.SOON)

    # -- what comes of it ---------------------------------------------------------------------------

    def restore(self, plane: Plane, sessions: Mapping[str, bytes]) -> None:
        self.sessions.restore(sessions)
        self.sessions.resumed(plane.now)
        self.delivery.complete(self.sessions.complete_groups())

    def collect(self, plane: Plane, batch: WriteBatch, finished: Sequence[InFlightSample]) -> None:
        """Samples are not told of ahead of their groups: a turn is no sample of the trainer's."""
        self.sessions.collect()

    def committed(self, plane: Plane, batch: WriteBatch, complete: Sequence[InFlightRequest]) -> None:
        turns, written = self.sessions.committed(complete, now=plane.now)
        if names := [turn.name for turn in turns] + [session.id for session in written]:
            plane.instructions.append(Wake(names))
        for session in written:
            if session.outcome is not None:
                self._session_ended(plane, session)
        self._deliver(plane)

    def _session_ended(self, plane: Plane, session: Session) -> None:
        one = self.sessions.group_with(session)
        if session.outcome is not Outcome.INFRA_FAULT:
            if one.is_complete:
                self.delivery.complete([one])
                plane.instructions.append(Wake([CLAIMS]))  # others may have waited for its policy
            return
        told: dict[str, Any] = {"session": session.id, "attempt": session.attempt, "reason": session.reason}
        plane.report_event("SessionFault", told)
        if why := self.sessions.draw_again(session):
            self._fail(plane, one, why)
        else:
            self._released(plane)

    def given_up(self, plane: Plane, samples: Sequence[InFlightSample]) -> None:
        """A turn that no instance can generate ends its session."""
        for state in samples:
            if state.request.purpose == TURN:
                self._turn_failed(plane, state.request, "; ".join(state.evidence))

    def unservable(self, plane: Plane, request: InFlightRequest, why: str) -> None:
        self._turn_failed(plane, request, why)

    def _turn_failed(self, plane: Plane, request: InFlightRequest, why: str) -> None:
        session = self.sessions.session_of(request)
        if session is not None and session.outcome is None:
            self.sessions.end(
                SessionEnded(session.id, Outcome.INFRA_FAULT, None, f"A turn cannot be generated: {why}")
            )
            plane.instructions.append(Wake([session.id, *(turn.name for turn in session.turns)]))
            plane.commit(Commit.NOW)

    def look(self, plane: Plane) -> None:
        for worker in self.sessions.silent(plane.now):
            plane.report_event("AgentLost", {"worker": worker})
            self._released(plane)
