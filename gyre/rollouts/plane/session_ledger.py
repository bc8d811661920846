"""The sessions of a job: which there are, what turns they have, and how they ended. Pure.

A member of a requested group is a session, and another one where infrastructure failed: an attempt. Its turns are
groups of one sample among the open groups, each after its parent's, so engines, leases and tokens are theirs; here is
what ties them together. A turn's row says what it adds and whose it is, and is written once.

Invariants:
- *written before answered*: a turn, an end and a snapshot are told of when the ledger has them;
- *the fold is the state*: the rows of sessions, over the groups' rows, give the same sessions with the same turns;
- *one at a time*: a session is run by one worker, who has its newest claim; what comes with an older one is refused;
- *infrastructure is no reward*: a member that infrastructure ended is drawn again, and is in no group that is
  delivered; how often is bounded, and then the group goes on without it where it has members enough, and has else
  failed for good.

This module must not know about HTTP, messages or tools, and reads no clock.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import msgpack
import numpy as np
from numpy.typing import NDArray

from gyre.request_body import RequestRefused, refused
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.reported import SessionsStatus
from gyre.rollouts.plane.requests import InFlightRequest, requested_groups, sampling_of
from gyre.rollouts.plane.session_breaker import Breaker
from gyre.rollouts.plane.session_counts import SessionCounts
from gyre.rollouts.plane.session_lengths import SessionLengths
from gyre.rollouts.plane.session_tree import (
    ROOT,
    LedgerSession,
    LedgerTurn,
    SessionOutcome,
    asked_prompt,
    group_of,
)
from gyre.rollouts.plane.session_workers import Workers
from gyre.rollouts.plane.settings import SessionSettings
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import Request
from gyre.rollouts.sample_checks import MOST_TOKENS
from gyre.rollouts.samples import Group, GroupRequest
from gyre.rollouts.scheduling.fleet import Prefix
from gyre.rollouts.token_log.records import request_in, request_out

TURN = "turn"
"""The purpose of a turn's request."""

SNAPSHOT_BYTES = 1 << 20
"""Largest snapshot of an environment: it is written with each change of its session."""

REASON_CHARS = 2000
"""Kept of why a session ended."""

MOST_LOSSES = 3
"""Workers that a session may lose in a row without another turn: with one more it is taken for what kills them, before
a vertex that it kills has no restart left without a step (`failover.vertex`), which would end the job. One that was
taken away with others' workers has its attempt drawn again, which begins to count anew."""

PREFIX_KEPT_S = 30.0
"""How long an instance is preferred for having what a turn begins with. Of tools' calls 86 % are over within a second,
and 95 % within ten; after that engines that are full have read other prompts into that memory."""

UNUSED = "session"
"""Why tokens are discarded that were drawn for an attempt of which nothing is trained."""

OVERSAMPLED = "oversampled"
"""Why those are discarded of a group that was complete without them (`config.agent.oversample`)."""

_GROUP, _SESSION, _FAILED = "group/", "session/", "failed/"
_OF = "turn"
"""Key of a turn's `meta`: the session's id, the turn's number, its key and its note."""


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
    outcome: SessionOutcome
    reward: float | None
    reason: str = ""
    extras: Mapping[str, float] = {}
    claim: int | None = None


@dataclass(eq=False, slots=True)
class SessionGroup:
    """A requested group whose members are sessions. `number` is below 0, where no request has one, and the lower the
    later it was asked for: the ledger has it, so that the oldest go first with the next manager too."""

    number: int
    asked: GroupRequest
    members: list[LedgerSession] = field(default_factory=list)
    """The newest attempt at each; none where the group has failed."""
    failed: str = ""
    """Why it cannot be generated."""

    @property
    def purpose(self) -> str:
        return self.asked.purpose

    @property
    def group(self) -> Group:
        return self.asked.group

    @property
    def name(self) -> str:
        return f"{self.purpose}/{self.group.id}"

    @property
    def is_complete(self) -> bool:
        return not self.failed and len(self._over()) >= self.asked.n

    def _over(self) -> list[LedgerSession]:
        return [one for one in self.members if one.is_over and one.is_written]

    def drop_others(self) -> list[LedgerSession]:
        """It is complete: keep as many members as it was asked for, of those that are over the first by their index,
        whatever their lengths. Returns the others."""
        kept = self._over()[: self.asked.n]
        others = [one for one in self.members if one not in kept]
        self.members = kept
        return others

    def complete(self) -> Group:
        """The group with its rows; it is complete."""
        return group_of(self.group, self.members)


class SessionLedger:
    """`vocabulary` is what token ids are below."""

    def __init__(
        self, groups: OpenGroups, settings: SessionSettings, *, vocabulary: int = MOST_TOKENS
    ) -> None:
        self._groups = groups
        self._settings = settings
        self._vocabulary = vocabulary
        self.sessions: dict[str, LedgerSession] = {}
        self.by_number: dict[int, SessionGroup] = {}
        """The groups, by their numbers."""
        self._by_name: dict[tuple[str, int], SessionGroup] = {}
        self.workers = Workers(silence_s=settings.worker_silence_s, seconds=settings.seconds)
        self.breaker = Breaker(settings.breaker)
        self.counts = SessionCounts()
        self.lengths = SessionLengths()
        self._turns: dict[int, tuple[LedgerSession, LedgerTurn]] = {}
        """By the number of the turn's request."""
        self._open: dict[int, LedgerSession] = {}
        """The sessions of turns whose ends are not in the ledger, by the same."""
        self._changed: set[str] = set()
        """Sessions whose rows go into the next batch."""
        self._writing: set[str] = set()
        """Of those in the batch that is written."""
        self._next_number = -1
        self.given: list[LedgerSession] = []
        """What was handed out last."""
        self.news: list[str] = []
        """Sessions that are over, or somebody else's, since this was taken last: who waits for them looks again."""

    # -- groups -------------------------------------------------------------------------------------

    def open(self, frame: Request) -> list[SessionGroup]:
        """Open the groups of the frame that are not known yet. Raises FrameError if nobody could generate them."""
        new = [group for group in requested_groups(frame) if (frame.purpose, group.id) not in self._by_name]
        if new:
            self._groups.check_pin(frame.min_version, pinned=frame.pinned)
        opened = []
        for group in new:
            prompt = asked_prompt(group)
            sampling = sampling_of(frame, prompt)
            asked = GroupRequest(
                frame.purpose, prompt, frame.n, sampling, frame.seed, frame.min_version, frame.pinned
            )
            one = self._add(asked)
            self._groups.keep_session(_GROUP + one.name, _group_out(one))
            one.members = [self._begin(one, index, 0) for index in range(self._members_of(asked))]
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
            self._groups.keep_session(_GROUP + one.name, None)
            if one.failed:
                self._groups.keep_session(_FAILED + one.name, None)
            unused = "" if one.is_complete else UNUSED
            for session in one.members:
                running += self._forget(session, unused=unused)
        return running

    def fail(self, one: SessionGroup, why: str) -> None:
        """The group cannot be generated: its sessions are over, and nothing of them is trained."""
        one.failed = why[:REASON_CHARS]
        self._groups.pins.pop(one.number, None)
        self._groups.keep_session(_FAILED + one.name, one.failed.encode())
        members, one.members = one.members, []
        for session in members:
            self._groups.cancelled += self._forget(session, unused=UNUSED)

    def failed(self, purpose: str, ids: Iterable[int]) -> list[SessionGroup]:
        """Those of these groups that cannot be generated."""
        found = (self._by_name.get((purpose, group_id)) for group_id in ids)
        return [one for one in found if one is not None and one.failed]

    def pinned_to(self, version: int) -> list[SessionGroup]:
        """Those that no policy but this one may generate, and that are not complete."""
        return [
            one
            for number, pin in self._groups.pins.items()
            if pin == version and (one := self.by_number.get(number)) is not None
        ]

    def completed(self, one: SessionGroup, *, now: float) -> bool:
        """The group is complete: nothing more is drawn for it. Whether it had sessions that it is complete without."""
        self._groups.pins.pop(one.number, None)
        if len(one.members) == one.asked.n:
            return False
        others = one.drop_others()
        self.lengths.completed(one.members, others, now)
        for session in others:
            self._groups.cancelled += self._forget(session, unused=OVERSAMPLED)
        return bool(others)

    def _members_of(self, asked: GroupRequest) -> int:
        """How many sessions the group begins with. An evaluation has no more than are asked for: its mean is of all."""
        return asked.n if asked.pinned else math.ceil(asked.n * self._settings.oversample)

    def _add(self, asked: GroupRequest, number: int | None = None) -> SessionGroup:
        """Under this number, which it had before, or else the next one."""
        one = SessionGroup(self._next_number if number is None else number, asked)
        self._next_number = min(self._next_number, one.number) - 1
        self.by_number[one.number] = self._by_name[asked.purpose, asked.group.id] = one
        if asked.pinned:
            self._groups.pins[one.number] = asked.min_version
        return one

    def _begin(self, one: SessionGroup, index: int, attempt: int) -> LedgerSession:
        name = f"{one.purpose.replace('/', '.')}-{one.group.id}-{index}-{attempt}"
        session = LedgerSession(name, one.purpose, one.group.id, index, attempt)
        self.sessions[name] = session
        self._wait(session)
        self._keep(session)
        return session

    def _wait(self, session: LedgerSession, *, first: bool = False) -> None:
        """Nobody runs it: it is handed out, the oldest groups first."""
        one = self.group_with(session)
        self.workers.wait(session, one.asked.min_version, (-one.number, session.index), first=first)

    def _forget(self, session: LedgerSession, *, unused: str) -> list[tuple[str, int, int]]:
        running = self._close_turns(session, session.turns, unused=unused)
        self.sessions.pop(session.id, None)
        self.workers.forget(session)
        self._changed.discard(session.id)
        self.news.append(session.id)
        self._groups.keep_session(_SESSION + session.id, None)
        return running

    def _close_turns(
        self, session: LedgerSession, turns: Sequence[LedgerTurn], *, unused: str = ""
    ) -> list[tuple[str, int, int]]:
        for turn in turns:
            self._turns.pop(turn.request.number, None)
            self._open.pop(turn.request.number, None)
        # children first: they go on from what is closed after them
        running = self._groups.close(TURN, [turn.request.group.id for turn in reversed(turns)], unused=unused)
        session.forget(turns)
        return running

    # -- who runs a session -------------------------------------------------------------------------

    def claim(self, worker: str, most: int, *, now: float, at: float) -> list[LedgerSession]:
        """Hand out at most so many sessions, those of the oldest groups first. `now` is monotonic, `at` in seconds
        since 1970. One whose turns no policy may answer before a pinned group is over is kept back: workers full of
        such sessions would have no room for those that all of them wait for."""
        newest = min(self._groups.pins.values(), default=None)
        self.given = self.workers.take(worker, self.breaker.allowed(most, now), newest=newest, now=now, at=at)
        if self.given:
            self.breaker.took(now)
        for session in self.given:
            self._keep(session)
        return self.given

    def beat(
        self, worker: str, ids: Sequence[str], back: Sequence[tuple[str, int | None]] = (), *, now: float
    ) -> bool:
        """The worker lives, and runs these; what it gives `back`, by name and claim, is handed out again, and so is
        what it has not run for a while of those that it has. Returns whether anything is."""
        dropped = self.workers.beat(worker, ids, back, now)
        for session in dropped:
            self._release(session)
        return bool(dropped)

    def silent(self, now: float) -> list[str]:
        """Release the sessions of workers that were silent for too long. Returns the workers that had any."""
        gone = self.workers.silent(now)
        for _, sessions in gone:
            for session in sessions:
                self._release(session)
        return [worker for worker, _ in gone]

    def _release(self, session: LedgerSession) -> None:
        """Its worker has lost it: somebody else gets it, before those that have not begun."""
        session.losses = session.losses + 1 if len(session.turns) <= session.turns_at_loss else 1
        session.turns_at_loss = max(len(session.turns), session.turns_at_loss)
        if session.losses > MOST_LOSSES:
            said = f"{session.losses} workers were lost in a row while they ran it, the last one was {session.worker}."
            self.end(SessionEnded(session.id, SessionOutcome.INFRA_FAULT, None, said))
        elif self._settings.recovery == "restart" and session.turns:
            self._again(session, session.faults, session.losses, session.turns_at_loss)
        else:
            self.news.append(session.id)
            self._wait(session, first=True)
            self._keep(session)

    # -- turns --------------------------------------------------------------------------------------

    def ask(self, event: TurnAsked, *, now: float) -> tuple[LedgerTurn, bool]:
        """The turn of this key, and whether it is new. `now` is monotonic. Raises RequestRefused."""
        session = self.open_session(event.session, event.claim)
        known = session.turn_of(event.key)
        if known is not None:
            return known, False
        self._check_budget(session, event)
        number = len(session.turns)
        request = self._request(session, event, number)
        turn = self._add_turn(
            session, LedgerTurn(number, event.parent, event.key, request, len(event.prompt_ids), event.note)
        )
        turn.asked_at = now
        self._groups.prefer(request, self._order_of(session, number), self._prefix_of(turn, session, now))
        return turn, True

    def _order_of(self, session: LedgerSession, number: int) -> tuple[int, int]:
        """Older groups first, and of a group the session that is farthest."""
        return -self.group_with(session).number, -number

    def _prefix_of(self, turn: LedgerTurn, session: LedgerSession, now: float) -> Prefix | None:
        """Who has the path before the turn; None where nobody is known to."""
        if turn.parent == ROOT:
            return None
        before = session.turns[turn.parent]
        runs, parts = before.sample.runs, before.sample.instances
        if not parts or len(runs) != 1:  # what other weights than the last began is of no use to the last
            return None
        if before.told_at is not None and now - before.told_at > PREFIX_KEPT_S:
            return None
        return Prefix(parts[-1].name, runs[0][0], before.length)

    def _request(self, session: LedgerSession, event: TurnAsked, number: int) -> InFlightRequest:
        one = self._by_name[session.purpose, session.group_id]
        prompt = event.prompt_ids
        if not len(prompt) or int(prompt.min()) < 0 or int(prompt.max()) >= self._vocabulary:
            raise refused(422, "invalid", f"A prompt is of token ids from 0 to {self._vocabulary - 1}.")
        added, after = self._added(session, event)
        meta = {_OF: [session.id, number, event.key, event.note]}
        group = Group(_turn_id(session, event.key), added, meta)
        asked = GroupRequest(
            TURN,
            group,
            1,
            self._sampling(one, event),
            one.asked.seed,
            one.asked.min_version,
            one.asked.pinned,
            after,
        )
        try:
            request = self._groups.open_after(asked, prompt)
        except FrameError as error:
            raise refused(410, "policy_gone", str(error.message), "The session cannot go on.") from None
        if request is None:  # two turns with the same 63 bits of SHA-256
            raise refused(422, "other_request", "This turn cannot be taken.", "Change the request.")
        return request

    def _added(self, session: LedgerSession, event: TurnAsked) -> tuple[NDArray[np.int32], int]:
        """What the turn adds to its parent, and the number of the parent's request, 0 for none."""
        if event.parent == ROOT:
            return event.prompt_ids, 0
        before = session.turns[event.parent] if 0 <= event.parent < len(session.turns) else None
        if before is None or not session.goes_on(before, event.prompt_ids):
            raise refused(422, "invalid", f"The prompt does not go on from turn {event.parent}.")
        return event.prompt_ids[before.length :], before.request.number

    def _sampling(self, one: SessionGroup, event: TurnAsked) -> dict[str, Any]:
        sampling = {**one.asked.sampling, **event.sampling}
        most, room = sampling["max_new_tokens"], self._settings.max_tokens - len(event.prompt_ids)
        if type(most) is not int or most < 1:
            raise refused(422, "invalid", f"The most new tokens: {most!r:.40}, expected a positive number.")
        return {**sampling, "max_new_tokens": min(most, room)}

    def _check_budget(self, session: LedgerSession, event: TurnAsked) -> None:
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

    def _add_turn(self, session: LedgerSession, turn: LedgerTurn) -> LedgerTurn:
        session.add(turn)
        self._turns[turn.request.number] = session, turn
        self._open[turn.request.number] = session
        return turn

    def open_session(self, name: str, claim: int | None = None) -> LedgerSession:
        """The session, which has not ended. Raises RequestRefused."""
        session = self.find(name)
        if claim is not None and claim != session.claim:
            raise lost(name)
        if session.outcome is not None:
            raise refused(410, "ended", f"The session {name!r} has ended: {session.outcome}.")
        return session

    def find(self, name: str) -> LedgerSession:
        """Raises RequestRefused."""
        session = self.sessions.get(name)
        if session is None:
            raise refused(
                404, "not_found", f"There is no session {name[:200]!r}: it was never there, or is over."
            )
        return session

    # -- ends ---------------------------------------------------------------------------------------

    def end(self, event: SessionEnded) -> LedgerSession:
        """The session has ended; the same again changes nothing. One without a drawn token has nothing to train on, and
        infrastructure ended it. Raises RequestRefused."""
        session = self.find(event.session)
        outcome, reward, reason = event.outcome, event.reward, event.reason
        if outcome is not SessionOutcome.INFRA_FAULT and not session.is_trainable:
            outcome, reward = SessionOutcome.INFRA_FAULT, None
            reason = reason or "It ended without a drawn token."
        told = (outcome, reward, dict(event.extras))
        if session.outcome is not None:
            if told != (session.outcome, session.reward, session.extras):
                raise refused(
                    422, "ended", f"The session {session.id!r} has ended otherwise: {session.outcome}."
                )
            return session
        self.open_session(event.session, event.claim)
        session.outcome, session.reward, session.extras = told
        session.reason, session.snapshot = reason[:REASON_CHARS], b""
        self.workers.forget(session)
        self.news.append(session.id)
        unfinished = [turn for turn in session.turns if not turn.sample.finish]
        self._groups.cancelled += self._close_turns(session, unfinished)
        self._keep(session)
        return session

    def keep_snapshot(self, name: str, claim: int | None, body: bytes) -> LedgerSession:
        """Raises RequestRefused."""
        session = self.open_session(name, claim)
        if len(body) > SNAPSHOT_BYTES:
            raise refused(
                422, "snapshot", f"A snapshot of {len(body)} bytes; no more than {SNAPSHOT_BYTES} are kept."
            )
        session.snapshot = body
        self._keep(session)
        return session

    def draw_again(self, session: LedgerSession) -> str:
        """Infrastructure ended the session: begin another attempt, or go on without it. Returns why its group cannot,
        "" where it can."""
        one = self.group_with(session)
        if session.faults < self._settings.redraws:
            self._again(session, session.faults + 1)
        elif len(one.members) > one.asked.n:
            one.members.remove(session)
            self._groups.cancelled += self._forget(session, unused=UNUSED)
        else:
            return (
                f"Session {session.id} and {session.faults} attempts before it ended by a fault of infrastructure: "
                f"{session.reason}"
            )
        return ""

    def _again(self, session: LedgerSession, faults: int, losses: int = 0, turns_at_loss: int = 0) -> None:
        one = self._by_name[session.purpose, session.group_id]
        self.counts.drawn_again += 1
        self._groups.cancelled += self._forget(session, unused=UNUSED)
        place = one.members.index(session)
        again = one.members[place] = self._begin(one, session.index, session.attempt + 1)
        again.faults, again.losses, again.turns_at_loss = faults, losses, turns_at_loss
        self._keep(again)

    # -- the ledger ---------------------------------------------------------------------------------

    def _keep(self, session: LedgerSession) -> None:
        """The session's row goes into the next batch."""
        self._changed.add(session.id)
        session.is_written = False
        self._groups.keep_session(_SESSION + session.id, _row_out(session))

    def collect(self) -> None:
        """The batch goes to the ledger next."""
        self._writing, self._changed = self._changed, set()

    def committed(
        self, complete: Sequence[InFlightRequest], *, now: float
    ) -> tuple[list[LedgerTurn], list[LedgerSession]]:
        """The batch is in the ledger, and with it the ends of these turns. Returns the turns that may be told now, and
        the sessions of which all is written."""
        turns = [found[1] for request in complete if (found := self._turns.get(request.number)) is not None]
        for turn in turns:
            if not turn.is_written:  # a new manager hears again of what an earlier one wrote
                turn.is_written, turn.told_at = True, now
                self.counts.turns += 1
            self._open.pop(turn.request.number, None)
        written, self._writing = self._writing - self._changed, set()
        sessions = [session for name in written if (session := self.sessions.get(name)) is not None]
        for session in sessions:
            session.is_written = True
            if session.outcome is not None:
                session.ended_at = now
                self.counts.ended(session.id, session.outcome, session.reason)
        return turns, sessions

    def restore(self, rows: Mapping[str, bytes], now: float) -> list[LedgerSession]:
        """Restore the committed state, over the groups, which are restored. Who ran a session has time to say that it
        still does. Returns the sessions that infrastructure ended."""
        stored = [_group_in(body) for name, body in rows.items() if name.startswith(_GROUP)]
        for number, asked in sorted(stored, key=_age):
            self._add(asked, number)
        failed = {name.removeprefix(_FAILED): body for name, body in rows.items() if name.startswith(_FAILED)}
        for one in self.by_number.values():
            if one.name in failed:
                one.failed, one.members = failed[one.name].decode(), []
                self._groups.pins.pop(one.number, None)
        for name, body in rows.items():
            if name.startswith(_SESSION):
                self._restore(msgpack.unpackb(body))
        for one in self.by_number.values():
            one.members.sort(key=attrgetter("index"))
        for request in self._groups.requests.values():
            if _OF in request.group.meta:
                self._restore_turn(request)
        for one in self.complete_groups():
            self.completed(one, now=now)
        there = self.sessions.values()
        for session in there:
            if session.outcome is None and not session.worker:
                self._wait(session, first=bool(session.claim))
        self.workers.back([one for one in there if one.outcome is None and one.worker], now)
        return [one for one in there if one.outcome is SessionOutcome.INFRA_FAULT]

    def _restore(self, row: dict[str, Any]) -> None:
        outcome = row.pop("outcome")
        session = LedgerSession(**row, outcome=SessionOutcome(outcome) if outcome else None, is_written=True)
        self.sessions[session.id] = session
        self._by_name[session.purpose, session.group_id].members.append(session)

    def _restore_turn(self, request: InFlightRequest) -> None:
        name, number, key, note = request.group.meta[_OF]
        session = self.sessions[name]
        parent, start = ROOT, 0
        if request.after:
            before = self._turns[request.after][1]
            parent, start = before.number, before.length
        turn = self._add_turn(
            session, LedgerTurn(number, parent, key, request, start + len(request.added), bytes(note))
        )
        if turn.sample.finish:
            turn.is_written = True
            del self._open[request.number]
        else:
            self._groups.prefer(request, self._order_of(session, number), None)

    # -- looking ------------------------------------------------------------------------------------

    def session_of(self, request: InFlightRequest) -> LedgerSession | None:
        """The session that the request is a turn of."""
        found = self._turns.get(request.number)
        return found[0] if found is not None else None

    def group_with(self, session: LedgerSession) -> SessionGroup:
        return self._by_name[session.purpose, session.group_id]

    def take_news(self) -> list[str]:
        news, self.news = self.news, []
        return news

    def status(self) -> dict[str, Any]:
        """A `SessionsStatus` but for its branches, which the front counts."""
        running, waiting = self.workers.running, self.workers.waiting
        at_engine = len({session.id for session in self._open.values() if session.worker})
        return vars(
            SessionsStatus(
                waiting=waiting,
                running=running,
                at_engine=at_engine,
                with_agent=running - at_engine,
                ended=len(self.sessions) - running - waiting,
                turns=len(self._turns),
                workers=len(self.workers),
                failed_groups=sum(bool(one.failed) for one in self.by_number.values()),
                pause_s=self.breaker.pause_s,
                since_start=self.counts.status(),
                oversampled=self.lengths.told(),
            )
        )

    def complete_groups(self) -> list[SessionGroup]:
        """Those that are complete."""
        return [one for one in self.by_number.values() if one.is_complete]


def lost(name: str) -> RequestRefused:
    """For who ran the session before."""
    return refused(410, "lost", f"The session {name!r} was handed to another worker.", "Let go of it.")


def _spent(message: str) -> RequestRefused:
    return refused(422, "budget", message, "End the session; what is there is trained.")


def _turn_id(session: LedgerSession, key: str) -> int:
    """63 bits of what names the turn: its seed depends on nothing else."""
    told = f"{session.id}\0{key}".encode()
    return int.from_bytes(hashlib.sha256(told).digest()[:8], "little") >> 1


def _group_out(one: SessionGroup) -> bytes:
    return bytes(msgpack.packb([one.number, request_out(one.asked)]))


def _group_in(body: bytes) -> tuple[int | None, GroupRequest]:
    """The group's number, None in a row of before these were stored, and what was asked for."""
    row = msgpack.unpackb(body)
    return (row[0], request_in(row[1])) if len(row) == 2 else (None, request_in(body))


def _age(stored: tuple[int | None, GroupRequest]) -> tuple[int, str, int]:
    """The oldest first. Groups without a number are older than those with one, and not as many as had none when the
    first of these was given."""
    number, asked = stored
    return -(number or 0), asked.purpose, asked.group.id


def _row_out(session: LedgerSession) -> bytes:
    row = {
        "id": session.id,
        "purpose": session.purpose,
        "group_id": session.group_id,
        "index": session.index,
        "attempt": session.attempt,
        "claim": session.claim,
        "worker": session.worker,
        "faults": session.faults,
        "losses": session.losses,
        "turns_at_loss": session.turns_at_loss,
        "snapshot": session.snapshot,
        "began_at": session.began_at,
        "outcome": session.outcome.value if session.outcome else "",
        "reward": session.reward,
        "reason": session.reason,
        "extras": session.extras,
    }
    return bytes(msgpack.packb(row))
