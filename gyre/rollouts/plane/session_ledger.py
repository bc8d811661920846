"""The sessions of a job: which there are, who runs each, what turns they have, and how they ended. Pure.

A member of a requested group is a session, and another one where infrastructure failed: an attempt. Its turns are
groups of one sample among the open groups, so engines, leases and tokens are theirs; here is what ties them together.

Invariants:
- *written before answered*: a turn, an end and a snapshot are told of when the ledger has them;
- *the fold is the state*: the rows of sessions, over the groups' rows, give the same sessions with the same turns;
- *one at a time*: a session is run by one worker, who has its newest claim; what comes with an older one is refused;
- *infrastructure is no reward*: a member that infrastructure ended is drawn again, and is in no group that is
  delivered.

This module must not know about HTTP, messages or tools, and reads no clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from gyre.request_body import RequestRefused, refused
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.requests import InFlightRequest, requested_groups, sampling_of
from gyre.rollouts.plane.session_tree import ROOT, Outcome, Session, Turn, asked_prompt, group_of
from gyre.rollouts.plane.settings import SessionSettings
from gyre.rollouts.protocol.codec import checked
from gyre.rollouts.protocol.frames import Request
from gyre.rollouts.samples import Group, GroupRequest, pack_groups
from gyre.rollouts.scheduling.fleet import Prefix
from gyre.rollouts.token_log.records import request_in, request_out

TURN = "turn"
"""The purpose of a turn's request."""

SNAPSHOT_BYTES = 1 << 20
"""Largest snapshot of an environment: it is written with each turn."""

REASON_CHARS = 2000
"""Kept of why a session ended."""

TAKEN_WITHIN_S = 10.0
"""A worker says within this time that it runs a session, or has not heard that it was given it."""

PREFIX_KEPT_S = 30.0
"""How long an instance is preferred for having what a turn begins with. Of tools' calls 86 % are over within a second,
and 95 % within ten; after that engines that are full have read other prompts into that memory."""

UNUSED = "session"
"""Why tokens are discarded that were drawn for an attempt of which nothing is trained."""

_GROUP, _SESSION = "group/", "session/"


class TurnAsked(NamedTuple):
    """The session's turn of this `key`: `prompt_ids` int32 `[p]` are its whole prompt, which begins with the path of
    `parent`. `sampling` has what the agent wants otherwise than the job. `claim` is None where nobody says it."""

    session: str
    key: str
    prompt_ids: NDArray[np.int32]
    sampling: Mapping[str, Any]
    at: float
    """In seconds since 1970."""
    parent: int = ROOT
    claim: int | None = None
    note: bytes = b""


class SessionEnded(NamedTuple):
    session: str
    outcome: Outcome
    reward: float | None
    reason: str = ""
    extras: Mapping[str, float] = {}
    claim: int | None = None


@dataclass(eq=False, slots=True)
class SessionGroup:
    """A requested group whose members are sessions. `number` is below 0, where no request has one."""

    number: int
    asked: GroupRequest
    members: list[Session] = field(default_factory=list)
    """The newest attempt at each."""
    is_told: bool = False
    """That it is complete."""

    @property
    def purpose(self) -> str:
        return self.asked.purpose

    @property
    def group(self) -> Group:
        return self.asked.group

    @property
    def is_complete(self) -> bool:
        return all(one.is_over and one.is_written for one in self.members)

    def complete(self) -> Group:
        """The group with its rows; it is complete."""
        return group_of(self.group, self.members)


class SessionLedger:
    def __init__(self, groups: OpenGroups, settings: SessionSettings) -> None:
        self._groups = groups
        self._settings = settings
        self.sessions: dict[str, Session] = {}
        self.by_number: dict[int, SessionGroup] = {}
        """The groups, by their numbers."""
        self._by_name: dict[tuple[str, int], SessionGroup] = {}
        self._waiting: dict[str, None] = {}
        """Sessions that nobody runs, in the order in which they are handed out."""
        self._heard: dict[str, float] = {}
        """When each worker was heard last."""
        self._turns: dict[int, tuple[Session, Turn]] = {}
        """By the number of the turn's request."""
        self._changed: set[str] = set()
        """Sessions whose rows go into the next batch."""
        self._writing: set[str] = set()
        """Of those in the batch that is written."""
        self._next_number = -1
        self.given: list[Session] = []
        """What was handed out last."""

    # -- groups -------------------------------------------------------------------------------------

    def open(self, frame: Request) -> list[SessionGroup]:
        """Open the groups of the frame that are not known yet. Raises FrameError if nobody could generate them."""
        opened = []
        for group in requested_groups(frame):
            if (frame.purpose, group.id) in self._by_name:
                continue
            prompt = asked_prompt(group)
            sampling = sampling_of(frame, prompt)
            asked = GroupRequest(
                frame.purpose, prompt, frame.n, sampling, frame.seed, frame.min_version, frame.pinned
            )
            one = self._add(asked)
            self._groups.keep_session(_group_name(one), request_out(asked))
            one.members = [self._begin(one, index, 0) for index in range(asked.n)]
            opened.append(one)
        return opened

    def close(self, purpose: str, ids: Iterable[int]) -> list[tuple[str, int, int]]:
        """Forget these groups, which the trainer has. Returns (instance, row, lease) of the turns that still run."""
        running = []
        for group_id in ids:
            one = self._by_name.pop((purpose, group_id), None)
            if one is None:
                continue
            del self.by_number[one.number]
            self._groups.pins.pop(one.number, None)
            self._groups.keep_session(_group_name(one), None)
            for session in one.members:
                running += self._forget(session, unused="" if one.is_complete else UNUSED)
        return running

    def _add(self, asked: GroupRequest) -> SessionGroup:
        one = SessionGroup(self._next_number, asked)
        self._next_number -= 1
        self.by_number[one.number] = self._by_name[asked.purpose, asked.group.id] = one
        if asked.pinned:
            self._groups.pins[one.number] = asked.min_version
        return one

    def _begin(self, one: SessionGroup, index: int, attempt: int) -> Session:
        name = f"{one.purpose.replace('/', '.')}-{one.group.id}-{index}-{attempt}"
        session = Session(name, one.purpose, one.group.id, index, attempt)
        self.sessions[name] = session
        self._waiting[name] = None
        self._keep(session)
        return session

    def _forget(self, session: Session, *, unused: str = "") -> list[tuple[str, int, int]]:
        running = self._close_turns(session.turns, unused=unused)
        session.turns = []
        self.sessions.pop(session.id, None)
        self._waiting.pop(session.id, None)
        self._changed.discard(session.id)
        self._groups.keep_session(_SESSION + session.id, None)
        return running

    def _close_turns(self, turns: Sequence[Turn], *, unused: str = "") -> list[tuple[str, int, int]]:
        for turn in turns:
            self._turns.pop(turn.request.number, None)
        return self._groups.close(TURN, [turn.request.group.id for turn in turns], unused=unused)

    # -- who runs a session -------------------------------------------------------------------------

    def claim(self, worker: str, most: int, *, now: float, at: float) -> list[Session]:
        """Hand out at most so many sessions, those of the oldest groups first. `now` is monotonic, `at` in seconds
        since 1970. One whose turns no policy may answer before a pinned group is over is kept back: workers full of
        such sessions would have no room for those that all of them wait for."""
        self._heard[worker] = now
        pin = self._oldest_pin()
        free = (name for name in self._waiting if pin is None or self._asks_at_most(name, pin))
        self.given = [self.sessions[name] for name in islice(free, most)]
        for session in self.given:
            session.given_at = now
            del self._waiting[session.id]
            session.worker = worker
            session.claim += 1
            session.began_at = at if session.began_at is None else session.began_at
            self._keep(session)
        return self.given

    def _oldest_pin(self) -> int | None:
        """The oldest version that a group wants and no other, which no newer one takes the place of."""
        pinned = [one for one in self._by_name.values() if one.asked.pinned and not one.is_complete]
        return min((one.asked.min_version for one in pinned), default=None)

    def _asks_at_most(self, name: str, version: int) -> bool:
        return self.group_with(self.sessions[name]).asked.min_version <= version

    @property
    def waiting(self) -> int:
        """Sessions that nobody runs."""
        return len(self._waiting)

    def beat(self, worker: str, ids: Sequence[str], *, now: float) -> list[str]:
        """The worker lives, and runs these. Returns those of them that it has no longer; what it does not run of those
        that it has is handed out again."""
        self._heard[worker] = now
        runs = set(ids)
        for session in self._of(worker):
            if session.id not in runs and now - session.given_at > TAKEN_WITHIN_S:
                self._release(session)
        return self.lost(worker, ids)

    def lost(self, worker: str, ids: Sequence[str]) -> list[str]:
        """Those of them that the worker has no longer."""
        return [name for name in ids if not self._runs(worker, name)]

    def _runs(self, worker: str, name: str) -> bool:
        session = self.sessions.get(name)
        return session is not None and session.worker == worker and session.outcome is None

    def _of(self, worker: str) -> list[Session]:
        return [one for one in self.sessions.values() if one.worker == worker and one.outcome is None]

    def silent(self, now: float) -> list[str]:
        """Release the sessions of workers that were silent for too long. Returns the workers that had any."""
        over = [
            worker for worker, heard in self._heard.items() if now - heard > self._settings.worker_silence_s
        ]
        lost = []
        for worker in over:
            del self._heard[worker]
            if sessions := self._of(worker):
                lost.append(worker)
            for session in sessions:
                self._release(session)
        return lost

    def _release(self, session: Session) -> None:
        """Nobody runs it any longer: somebody else gets it, before those that have not begun."""
        session.worker = ""
        if self._settings.recovery == "restart" and session.turns:
            self._again(session)
        else:
            self._waiting = {session.id: None, **self._waiting}
            self._keep(session)

    # -- turns --------------------------------------------------------------------------------------

    def ask(self, event: TurnAsked, *, now: float) -> tuple[Turn, bool]:
        """The turn of this key, and whether it is new. `now` is monotonic. Raises RequestRefused."""
        session = self.open_session(event.session, event.claim)
        known = session.turn_of(event.key)
        if known is not None:
            return known, False
        self._check_budget(session, event)
        one = self._by_name[session.purpose, session.group_id]
        room = self._settings.max_tokens - len(event.prompt_ids)
        sampling = {**one.asked.sampling, **event.sampling}
        sampling["max_new_tokens"] = min(int(sampling["max_new_tokens"]), room)
        frame = checked(
            Request,
            purpose=TURN,
            groups=pack_groups([Group(_turn_id(session, event.key), event.prompt_ids, {})]),
            n=1,
            sampling=sampling,
            seed=one.asked.seed,
            min_version=one.asked.min_version,
            pinned=one.asked.pinned,
        )
        opened = self._groups.open(frame)
        if not opened:  # two turns with the same 63 bits of SHA-256
            raise refused(422, "other_request", "This turn cannot be taken.", "Change the request.")
        number = session.turns[-1].number + 1 if session.turns else 0
        turn = self._add_turn(session, Turn(number, event.parent, event.key, opened[0], event.note))
        self._groups.prefer(turn.request, (-one.number, -number), self._prefix_of(session, turn, now))
        self._keep(session)
        return turn, True

    def _prefix_of(self, session: Session, turn: Turn, now: float) -> Prefix | None:
        """Who has the path before the turn; None where nobody is known to."""
        if turn.parent == ROOT:
            return None
        before = session.turn(turn.parent)
        runs, parts = before.sample.runs, before.sample.instances
        if not parts or len(runs) != 1:  # what other weights than the last began is of no use to the last
            return None
        if before.told_at is not None and now - before.told_at > PREFIX_KEPT_S:
            return None
        return Prefix(parts[-1].name, runs[0][0], len(before.prompt_ids) + before.sample.length)

    def _check_budget(self, session: Session, event: TurnAsked) -> None:
        limits = self._settings
        if len(session.turns) >= limits.max_turns:
            raise _spent(f"The session has had its {limits.max_turns} turns (config.agent.max_turns).")
        if len(event.prompt_ids) >= limits.max_tokens:
            raise _spent(
                f"The turn's prompt has {len(event.prompt_ids)} tokens, and a session takes {limits.max_tokens} "
                "(config.agent.max_tokens)."
            )
        if session.began_at is not None and event.at - session.began_at > limits.seconds:
            raise _spent(f"The session has had its {limits.seconds:g} s (config.agent.seconds).")

    def _add_turn(self, session: Session, turn: Turn) -> Turn:
        session.turns.append(turn)
        self._turns[turn.request.number] = session, turn
        return turn

    def open_session(self, name: str, claim: int | None = None) -> Session:
        """The session, which has not ended. Raises RequestRefused."""
        session = self.find(name)
        if claim is not None and claim != session.claim:
            raise refused(410, "lost", f"The session {name!r} was handed to another worker.", "Let go of it.")
        if session.outcome is not None:
            raise refused(410, "ended", f"The session {name!r} has ended: {session.outcome}.")
        return session

    def find(self, name: str) -> Session:
        """Raises RequestRefused."""
        session = self.sessions.get(name)
        if session is None:
            raise refused(
                404, "not_found", f"There is no session {name[:200]!r}: it was never there, or is over."
            )
        return session

    # -- ends ---------------------------------------------------------------------------------------

    def end(self, event: SessionEnded) -> Session:
        """The session has ended; the same again changes nothing. Raises RequestRefused."""
        session = self.find(event.session)
        told = (event.outcome, event.reward, dict(event.extras))
        if session.outcome is not None:
            if told != (session.outcome, session.reward, session.extras):
                raise refused(
                    422, "ended", f"The session {session.id!r} has ended otherwise: {session.outcome}."
                )
            return session
        self.open_session(event.session, event.claim)
        session.outcome, session.reward, session.extras = told
        session.reason = event.reason[:REASON_CHARS]
        session.worker = ""
        self._waiting.pop(session.id, None)
        unfinished = [turn for turn in session.turns if not turn.sample.finish]
        self._groups.cancelled += self._close_turns(unfinished)
        gone = {turn.number for turn in unfinished}
        session.turns = [turn for turn in session.turns if turn.number not in gone]
        if session.outcome is not Outcome.INFRA_FAULT and not any(one.sample.length for one in session.turns):
            # nothing was drawn, so there is nothing to train on
            session.outcome, session.reward = Outcome.INFRA_FAULT, None
            session.reason = session.reason or "It ended without a turn."
        self._keep(session)
        return session

    def keep_snapshot(self, name: str, claim: int | None, body: bytes) -> Session:
        """Raises RequestRefused."""
        session = self.open_session(name, claim)
        if len(body) > SNAPSHOT_BYTES:
            raise refused(
                422, "snapshot", f"A snapshot of {len(body)} bytes; no more than {SNAPSHOT_BYTES} are kept."
            )
        session.snapshot = body
        self._keep(session)
        return session

    def draw_again(self, session: Session) -> str:
        """Infrastructure ended the session: begin another attempt. Returns why there is none, "" where there is."""
        if session.attempt >= self._settings.redraws:
            return (
                f"Session {session.id} and {session.attempt} attempts before it ended by a fault of infrastructure: "
                f"{session.reason}"
            )
        self._again(session)
        return ""

    def _again(self, session: Session) -> None:
        one = self._by_name[session.purpose, session.group_id]
        self._groups.cancelled += self._forget(session, unused=UNUSED)
        one.members[session.index] = self._begin(one, session.index, session.attempt + 1)

    # -- the ledger ---------------------------------------------------------------------------------

    def _keep(self, session: Session) -> None:
        """The session's row goes into the next batch."""
        self._changed.add(session.id)
        session.is_written = False
        self._groups.keep_session(_SESSION + session.id, _row_out(session))

    def collect(self) -> None:
        """The batch goes to the ledger next."""
        self._writing, self._changed = self._changed, set()

    def committed(
        self, complete: Sequence[InFlightRequest], *, now: float
    ) -> tuple[list[Turn], list[Session]]:
        """The batch is in the ledger, and with it the ends of these turns. Returns the turns that may be told now, and
        the sessions of which all is written."""
        turns = [found[1] for request in complete if (found := self._turns.get(request.number)) is not None]
        for turn in turns:
            turn.is_written, turn.told_at = True, now
        written, self._writing = self._writing - self._changed, set()
        sessions = [session for name in written if (session := self.sessions.get(name)) is not None]
        for session in sessions:
            session.is_written = True
        return turns, sessions

    def restore(self, rows: Mapping[str, bytes]) -> None:
        """Restore the committed state, over the groups, which are restored. Who ran a session has time to say that it
        still does."""
        for name, body in sorted(rows.items()):
            if name.startswith(_GROUP):
                one = self._add(request_in(body))
                one.members = [_no_session(one, index) for index in range(one.asked.n)]
        for name, body in rows.items():
            if name.startswith(_SESSION):
                self._restore(_row_in(body))

    def _restore(self, row: dict[str, Any]) -> None:
        turns = row.pop("turns")
        outcome = row.pop("outcome")
        session = Session(**row, outcome=Outcome(outcome) if outcome else None, is_written=True)
        one = self._by_name.get((session.purpose, session.group_id))
        if one is None:
            return
        for number, parent, key, request_number, note in turns:
            request = self._groups.requests.get(request_number)
            if request is not None:
                turn = self._add_turn(session, Turn(number, parent, key, request, note))
                turn.is_written = bool(turn.sample.finish)
                self._groups.prefer(request, (-one.number, -number), None)
        self.sessions[session.id] = session
        one.members[session.index] = session
        if session.outcome is None and not session.worker:
            self._waiting[session.id] = None

    def resumed(self, now: float) -> None:
        """After `restore`: each worker that had a session is given as long to dial as one that is silent."""
        for session in self.sessions.values():
            if session.worker:
                self._heard[session.worker] = now

    def session_of(self, request: InFlightRequest) -> Session | None:
        """The session that the request is a turn of."""
        found = self._turns.get(request.number)
        return found[0] if found is not None else None

    def group_with(self, session: Session) -> SessionGroup:
        return self._by_name[session.purpose, session.group_id]

    def status(self) -> dict[str, Any]:
        """How many sessions wait for an agent, run, or have ended, and what their turns wait for."""
        running = [one for one in self.sessions.values() if one.worker]
        at_engine = sum(any(not turn.sample.finish for turn in one.turns) for one in running)
        return {
            "waiting": self.waiting,
            "running": len(running),
            "at_engine": at_engine,
            "with_agent": len(running) - at_engine,
            "ended": sum(one.outcome is not None for one in self.sessions.values()),
            "turns": sum(len(one.turns) for one in self.sessions.values()),
            "workers": len(self._heard),
        }

    def complete_groups(self) -> list[SessionGroup]:
        """Those that are complete."""
        return [one for one in self.by_number.values() if one.is_complete]


def _spent(message: str) -> RequestRefused:
    return refused(422, "budget", message, "End the session; what is there is trained.")


def _no_session(one: SessionGroup, index: int) -> Session:
    """In the place of a member until its row is read."""
    return Session("", one.purpose, one.group.id, index, 0)


def _group_name(one: SessionGroup) -> str:
    return f"{_GROUP}{one.purpose}/{one.group.id}"


def _turn_id(session: Session, key: str) -> int:
    """63 bits of what names the turn: its seed depends on nothing else."""
    told = f"{session.id}\0{key}".encode()
    return int.from_bytes(hashlib.sha256(told).digest()[:8], "little") >> 1


def _row_out(session: Session) -> bytes:
    turns = [[turn.number, turn.parent, turn.key, turn.request.number, turn.note] for turn in session.turns]
    row = {
        "id": session.id,
        "purpose": session.purpose,
        "group_id": session.group_id,
        "index": session.index,
        "attempt": session.attempt,
        "claim": session.claim,
        "worker": session.worker,
        "snapshot": session.snapshot,
        "began_at": session.began_at,
        "outcome": session.outcome.value if session.outcome else "",
        "reward": session.reward,
        "reason": session.reason,
        "extras": session.extras,
        "turns": turns,
    }
    return bytes(msgpack.packb(row))


def _row_in(body: bytes) -> dict[str, Any]:
    row: dict[str, Any] = msgpack.unpackb(body)
    return row
