"""The front of a job with agents: the trainer's WebSocket, and the HTTP routes of those who run sessions.

    POST /v1/sessions/claim, /beat       hand out sessions; say which are run
    GET /v1/sessions/{id}                how far one is
    POST /v1/sessions/{id}/end           its outcome and reward
    PUT /v1/sessions/{id}/snapshot       the environment's state
    /s/{id}/v1/chat/completions, …       a turn, in each of `gyre.chat.dialects`; or without /s/{id}, with X-Session-ID

Invariants:
- *written before answered*: see `gyre.rollouts.plane.session_ledger`;
- *the same bytes again*: a request that is sent again, over deaths of either side, gets the same answer: all of it is
  made of what the ledger has;
- *every wait has an end*: a client waits for a turn for as long as an SDK does, and asks again;
- *heard is sent*: a request counts as answered when its answer was written to a client that was there;
- *a key runs its own*: who comes with a key touches only the sessions that workers of this key have claimed;
- *bounded*: of a session so many requests are there at once, and of all so many bytes are read.

This module must not know how a message becomes tokens, or how they are generated.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from gyre.chat.dialects import COUNT_TOKENS, DIALECTS, Dialect
from gyre.chat.messages import Message
from gyre.chat.requests import ChatRequest, FinishedTurn
from gyre.chat.retries import Repeats
from gyre.config import GENERATE_SCOPE
from gyre.errors import Unauthorized
from gyre.ports.bounds import PortBounds
from gyre.request_body import RequestRefused, error_body, refused
from gyre.rollouts.manager.callers import Callers
from gyre.rollouts.manager.sessions.chat_http import (
    SESSION_PATH,
    is_there,
    number_of,
    retries_of,
    streamed,
    whole,
)
from gyre.rollouts.manager.sessions.conversations import Conversations, unknown_answer
from gyre.rollouts.manager.shell import PlaneShell
from gyre.rollouts.manager.trainer_front import TrainerFront
from gyre.rollouts.plane.peers import Caller
from gyre.rollouts.plane.session_ledger import SessionEnded, TurnAsked, lost
from gyre.rollouts.plane.session_trainer import (
    CLAIMS,
    SessionsClaimed,
    SessionTrainer,
    SnapshotKept,
    WorkerBeat,
)
from gyre.rollouts.plane.session_tree import ROOT, LedgerSession, LedgerTurn, SessionOutcome
from gyre.rollouts.plane.settings import ManagerSettings, SessionSettings

BODY_BYTES = 32 << 20
"""Largest body of a turn: a history of a million tokens as text, with what tools answered."""

ANSWER_WITHIN_S = 540.0
"""For a turn, or a write: below the read timeout of the clients' SDKs, which is 600 s; they ask again after it."""

CLAIM_WITHIN_S = 30.0
"""Longest wait for a session that a worker may ask for."""

MOST_CLAIMED = 1024
"""Sessions handed out at once."""

MOST_AT_ONCE = 64
"""Requests of one session that wait at once, those that ask for the same turn included. An agent that runs its calls in
parallel has a few."""

MOST_READ_BYTES = 1 << 30
"""Of bodies that are here at once."""

MOST_EXTRAS, EXTRA_CHARS = 64, 100
"""Numbers beside a reward, each a column of the step's metrics, and their names."""

READ_APART_BYTES = 64 << 10
"""A body of this size is read on a thread of its own: the loop has other work."""

MOST_NUMBER = 1e30
"""What a reward is below: sums and squares of it stay finite as float64."""

_encode = msgspec.json.Encoder().encode

Handler = Callable[[web.Request, Caller], Awaitable[web.StreamResponse]]


class SessionFront(TrainerFront):
    requester = SessionTrainer
    bounds = PortBounds(body_bytes=BODY_BYTES, unproven=8192, unproven_per_address=4096)

    def __init__(self, shell: PlaneShell, callers: Callers, *, weights_key: str) -> None:
        super().__init__(shell, callers, weights_key=weights_key)
        trainer = next(one for one in shell.plane.requesters if isinstance(one, SessionTrainer))
        self.ledger = trainer.sessions
        self._settings = settings = shell.plane.settings.sessions or SessionSettings()
        self._conversations = Conversations(settings.renderer)
        self._repeats: dict[str, tuple[LedgerSession, int, Repeats]] = {}
        """By session, with the claim that they are of. A group that is asked for again has other sessions of the same
        names."""
        self._asking: Counter[str] = Counter()
        """Requests of each session that are here."""
        self._read_bytes = 0
        """Of the bodies that are here."""
        self.branches: Counter[str] = Counter()
        """Turns that began a branch, by why, since this manager began."""
        self._waiting: dict[str, set[asyncio.Event]] = {}
        self._is_closed = False

    @classmethod
    def urgent_commit_s(cls, settings: ManagerSettings) -> float:
        """An agent waits for each commit, as a client of a door: those that end while one is written share the next."""
        return (settings.sessions or SessionSettings()).urgent_commit_s

    def routes(self) -> list[web.RouteDef]:
        turns = []
        for dialect in DIALECTS:
            handler = partial(self._turn, dialect)
            for path in (dialect.path, f"{SESSION_PATH}{dialect.path}"):
                turns.append(web.post(path, self._route(handler, dialect)))
        return [
            *super().routes(),
            web.post("/v1/sessions/claim", self._route(self._claim)),
            web.post("/v1/sessions/beat", self._route(self._beat)),
            web.get("/v1/sessions/{session}", self._route(self._look_at)),
            web.post("/v1/sessions/{session}/end", self._route(self._end)),
            web.put("/v1/sessions/{session}/snapshot", self._route(self._snapshot)),
            *(
                web.post(path, self._route(self._count, COUNT_TOKENS))
                for path in (COUNT_TOKENS.path, f"{SESSION_PATH}{COUNT_TOKENS.path}")
            ),
            web.get("/v1/models", self._route(self._models)),
            web.get("/s/{session}/v1/models", self._route(self._models)),
            *turns,
        ]

    def status(self) -> dict[str, Any]:
        return {"sessions": {**self.ledger.status(), "branches": dict(self.branches)}}

    def wake(self, names: Sequence[str]) -> None:
        for name in names:
            for event in self._waiting.get(name, ()):
                event.set()

    def close(self) -> None:
        self._is_closed = True
        self.wake(list(self._waiting))

    # -- who runs sessions --------------------------------------------------------------------------

    async def _claim(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        told = await _object(request)
        worker, most = _worker(told, caller), _whole(told, "most", 1, MOST_CLAIMED)
        until = self.shell.now() + min(_seconds(told, "wait_s"), CLAIM_WITHIN_S)
        given: list[LedgerSession] = []
        with self._waits(CLAIMS) as woken:
            while is_there(request):
                woken.clear()
                self.shell.handle(SessionsClaimed(worker, most, self.callers.clock()))
                given = list(self.ledger.given)
                left_s = until - self.shell.now()
                if given or left_s <= 0 or self._is_closed:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await woken.wait()
        claims = [(session, session.claim) for session in given]
        for session in given:
            await self._written(session)
        # meanwhile its group may have failed, or its worker was lost
        theirs = [one for one, claim in claims if one.worker == worker and one.claim == claim]
        return _json({"sessions": [self._handed_out(one) for one in theirs if one.outcome is None]})

    def _handed_out(self, session: LedgerSession) -> dict[str, Any]:
        asked = self.ledger.group_with(session).asked
        began = session.began_at or self.callers.clock()
        return {
            "id": session.id,
            "purpose": session.purpose,
            "group": session.group_id,
            "index": session.index,
            "attempt": session.attempt,
            "path": f"/s/{session.id}.{session.claim}",
            "task": {
                key: value for key, value in asked.group.meta.items() if not isinstance(value, np.ndarray)
            },
            "prompt_ids": asked.group.prompt_ids.tolist(),
            "sampling": asked.sampling,
            "turns": len(session.turns),
            "snapshot": session.snapshot or None,
            "seconds_left": max(0.0, began + self._settings.seconds - self.callers.clock()),
            "max_turns": self._settings.max_turns,
            "max_tokens": self._settings.max_tokens,
        }

    async def _beat(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        told = await _object(request)
        ids, back = _names(told, "sessions"), [_named(one) for one in _names(told, "back")]
        worker = _worker(told, caller)
        self.shell.handle(WorkerBeat(worker, ids, back))
        return _json({"lost": self.ledger.workers.lost(worker, ids)})

    async def _end(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        told = await _object(request)
        name, claim = _named(request.match_info["session"])
        session = self._own(caller, name, claim)
        outcome = _outcome(told)
        reward = None if outcome is SessionOutcome.INFRA_FAULT else _number(told.get("reward"), "reward")
        reason = _sentence(told.get("reason"), "reason")
        self.shell.handle(SessionEnded(name, outcome, reward, reason, _extras(told), claim))
        await self._written(session)
        return _json({"id": name, "outcome": session.outcome})  # without a drawn token another than was said

    async def _snapshot(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        name, claim = _named(request.match_info["session"])
        self._own(caller, name, claim)
        with self._room_for(request):
            self.shell.handle(SnapshotKept(name, claim, await request.read()))
            await self._written(self.ledger.find(name))
        return _json({"id": name})

    def _own(self, caller: Caller, name: str, claim: int | None = None) -> LedgerSession:
        """The session, which the caller may touch. Raises RequestRefused."""
        session = self.ledger.find(name)
        if not caller.is_ours and not session.worker.startswith(_worker_of(caller, "")):
            if claim is not None and (claim != session.claim or not session.worker):
                raise lost(name)
            raise refused(403, "not_yours", f"The session {name[:200]!r} is not run with this key.")
        return session

    async def _look_at(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        session = self._own(caller, _named(request.match_info["session"])[0])
        return _json(
            {
                "id": session.id,
                "worker": session.worker or None,
                "outcome": session.outcome,
                "turns": [
                    {"parent": one.parent, "prompt": one.prompt_length, "drawn": one.sample.length}
                    for one in session.turns
                ],
            }
        )

    async def _models(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        model = {
            "id": self._settings.model,
            "object": "model",
            "created": 0,
            "owned_by": "gyre",
            "max_model_len": self._settings.max_tokens,
        }
        return _json({"object": "list", "data": [model]})

    # -- turns --------------------------------------------------------------------------------------

    async def _turn(self, dialect: Dialect, request: web.Request, caller: Caller) -> web.StreamResponse:
        name, claim = _named(request.match_info.get("session") or request.headers.get("X-Session-ID") or "")
        self._own(caller, name, claim)
        session = self.ledger.open_session(name, claim)
        with self._place_of(session), self._room_for(request):
            body = await request.read()
            asked = (
                await asyncio.to_thread(dialect.read, body)
                if len(body) > READ_APART_BYTES
                else dialect.read(body)
            )
            session = self.ledger.open_session(name, claim)  # it may be somebody else's since
            repeats = self._repeats_of(session)
            key = repeats.key(dialect.path, body, retries_of(request), number_of(request))
            turn = session.turn_of(key) or await self._begin(session, claim, key, asked)
            await self._until_told(session, turn)
            if why := self.callers.why_not(caller):
                raise Unauthorized(why)
            reply = self._reply(session, turn, asked)
            if asked.stream:
                response = await streamed(request, dialect.events(asked, reply))
            else:
                response = await whole(request, _json(dialect.answer(asked, reply)))
            if is_there(request):
                repeats.left(key)
            return response

    async def _count(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        """How many tokens a prompt would have: nothing is drawn."""
        name, claim = _named(request.match_info.get("session") or request.headers.get("X-Session-ID") or "")
        self._own(caller, name, claim)
        session = self.ledger.open_session(name, claim)
        with self._place_of(session), self._room_for(request):
            asked = await asyncio.to_thread(COUNT_TOKENS.read, await request.read())
            prompt = (await self._conversations.prompt_of(session, asked))[1]
        nothing = FinishedTurn(session.id, 0, "", Message("assistant"), "stop", len(prompt))
        return _json(COUNT_TOKENS.answer(asked, nothing))

    async def _begin(
        self, session: LedgerSession, claim: int | None, key: str, asked: ChatRequest
    ) -> LedgerTurn:
        if asked.prompt_ids is not None:
            prompt = asked.prompt_ids
            parent, note = session.parent_of(prompt), b""
            why = "retokenised" if parent == ROOT and session.turns else ""
        else:
            parent, prompt, note, why = await self._conversations.prompt_of(
                session, asked, _turn_before(session, asked)
            )
        sampling = {**asked.sampling, **self._conversations.stops(asked.sampling)}
        before = len(session.turns)
        self.shell.handle(
            TurnAsked(session.id, key, prompt, sampling, self.callers.clock(), parent, claim, note)
        )
        turn = session.turn_of(key)
        assert turn is not None, "the machine took the turn"
        if why and len(session.turns) > before:
            self.branches[why] += 1
        return turn

    async def _until_told(self, session: LedgerSession, turn: LedgerTurn) -> None:
        """Wait until the turn's end is in the ledger. Raises RequestRefused where it will not be."""
        with self._waits(turn.name, session.id) as woken:
            until = self.shell.now() + ANSWER_WITHIN_S
            while not turn.is_written:
                if session.outcome is not None or self.ledger.sessions.get(session.id) is not session:
                    raise refused(
                        410, "ended", f"The session {session.id!r} ended while its turn was generated."
                    )
                if self._is_closed:
                    raise refused(
                        503, "unfinished", "The manager is being replaced; the turn goes on.", "Ask again."
                    )
                try:
                    async with asyncio.timeout(until - self.shell.now()):
                        await woken.wait()
                except TimeoutError:
                    raise refused(
                        504,
                        "unfinished",
                        f"The turn is not whole after {ANSWER_WITHIN_S:g} s; it goes on.",
                        "Ask again.",
                    ) from None
                woken.clear()

    def _reply(self, session: LedgerSession, turn: LedgerTurn, asked: ChatRequest) -> FinishedTurn:
        ids, logprobs = turn.sample.tokens()
        return FinishedTurn(
            id=_answer_id(session, turn),
            created=int(session.began_at or 0),
            model=asked.model or self._settings.model,
            message=self._conversations.message_of(session, turn)
            if asked.prompt_ids is None
            else Message("assistant"),
            finish=turn.sample.finish,
            prompt_length=turn.prompt_length,
            prompt_ids=turn.prompt_ids.tolist() if asked.wants_prompt else (),
            token_ids=ids.tolist(),
            logprobs=logprobs.tolist(),
            token_texts=self._conversations.texts(ids.tolist()) if asked.logprobs else (),
            versions=turn.sample.runs,
            stopped_by=stop.text if (stop := self._conversations.stop_of(turn)) is not None else "",
        )

    def _repeats_of(self, session: LedgerSession) -> Repeats:
        of, claim, found = self._repeats.get(session.id, (None, -1, None))
        if found is None or of is not session or claim != session.claim:
            if len(self._repeats) > 2 * len(self.ledger.sessions) + 64:
                self._repeats = {
                    name: one for name, one in self._repeats.items() if name in self.ledger.sessions
                }
            # after a new claim the agent is at its beginning; of one that an earlier manager gave, in the middle
            known = [turn.key for turn in session.turns] if not session.given_at else []
            found = Repeats(known)
            self._repeats[session.id] = session, session.claim, found
        return found

    # -- bounds -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _place_of(self, session: LedgerSession) -> Iterator[None]:
        """While a request of the session is here. Raises RequestRefused where too many are."""
        if self._asking[session.id] >= MOST_AT_ONCE:
            raise refused(
                429,
                "too_many_open",
                f"{MOST_AT_ONCE} requests of the session {session.id!r} are not answered yet.",
                "Wait for some of them.",
            )
        self._asking[session.id] += 1
        try:
            yield
        finally:
            self._asking[session.id] -= 1
            if not self._asking[session.id]:
                del self._asking[session.id]

    @contextlib.contextmanager
    def _room_for(self, request: web.Request) -> Iterator[None]:
        """While the request's body is here. Raises RequestRefused where there is no room."""
        told = request.content_length
        size = BODY_BYTES if told is None else min(told, BODY_BYTES)
        if self._read_bytes + size > MOST_READ_BYTES:
            raise refused(429, "busy", "The manager reads too much at once.", "Ask again.")
        self._read_bytes += size
        try:
            yield
        finally:
            self._read_bytes -= size

    # -- waiting ------------------------------------------------------------------------------------

    async def _written(self, session: LedgerSession) -> None:
        """Wait until the ledger has what was done to the session."""
        with self._waits(session.id) as woken:
            until = self.shell.now() + ANSWER_WITHIN_S
            while not session.is_written and self.ledger.sessions.get(session.id) is session:
                if self._is_closed:
                    raise refused(503, "unfinished", "The manager is being replaced.", "Ask again.")
                try:
                    async with asyncio.timeout(until - self.shell.now()):
                        await woken.wait()
                except TimeoutError:
                    raise refused(
                        504, "unfinished", f"It is not written after {ANSWER_WITHIN_S:g} s.", "Ask again."
                    ) from None
                woken.clear()

    @contextlib.contextmanager
    def _waits(self, *names: str) -> Iterator[asyncio.Event]:
        event = asyncio.Event()
        for name in names:
            self._waiting.setdefault(name, set()).add(event)
        try:
            yield event
        finally:
            for name in names:
                waiting = self._waiting[name]
                waiting.discard(event)
                if not waiting:
                    del self._waiting[name]

    def _route(
        self, handler: Handler, dialect: Dialect | None = None
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            caller = await self.callers.admitted(request)
            caller.check(GENERATE_SCOPE, "run sessions")
            try:
                return await handler(request, caller)
            except RequestRefused as error:
                return _refusal(error, dialect)

        return handle


def _answer_id(session: LedgerSession, turn: LedgerTurn) -> str:
    return f"{session.id}-{turn.number}"


def _turn_before(session: LedgerSession, asked: ChatRequest) -> LedgerTurn | None:
    """The turn whose answer has the id that the request goes on from; None where it names none. Raises
    RequestRefused."""
    if not asked.after:
        return None
    for turn in session.turns:
        if _answer_id(session, turn) == asked.after:
            return turn
    raise unknown_answer(asked.after)


def _named(text: str) -> tuple[str, int | None]:
    """A session's id, and the claim that is written behind it."""
    name, dot, claim = text.rpartition(".")
    if dot and claim.isascii() and claim.isdecimal() and len(claim) < 16:
        return name, int(claim)
    if not text:
        raise refused(404, "not_found", "No session is named: by the path /s/ID, or the header X-Session-ID.")
    return text, None


async def _object(request: web.Request) -> dict[str, Any]:
    try:
        told = msgspec.json.decode(await request.read())
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise refused(400, "invalid", f"The body is no JSON: {str(error)[:200]}.") from None
    if not isinstance(told, dict):
        raise refused(422, "invalid", "The body is no object.")
    return told


def _names(told: dict[str, Any], key: str) -> list[str]:
    names = told.get(key, [] if key == "back" else None)
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise refused(422, "invalid", f"{key}: expected a list of ids.")
    return names


def _worker(told: dict[str, Any], caller: Caller) -> str:
    """The worker's name: those of a key are apart from the job's own, and from other keys'."""
    value = told.get("worker")
    if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
        raise refused(422, "invalid", f"worker: {value!r:.40}, expected a name of at most 200 characters.")
    return _worker_of(caller, value)


def _worker_of(caller: Caller, name: str) -> str:
    return name if caller.is_ours else f"{caller.token}/{name}"


def _number(value: Any, key: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < MOST_NUMBER:
        raise refused(422, "invalid", f"{key}: {value!r:.40}, expected a number below {MOST_NUMBER:g}.")
    return float(value)


def _seconds(told: dict[str, Any], key: str) -> float:
    return max(0.0, _number(told.get(key, 0.0), key))


def _sentence(value: Any, key: str) -> str:
    if not isinstance(value, str | None):
        raise refused(422, "invalid", f"{key}: {value!r:.40}, expected text.")
    return value or ""


def _extras(told: dict[str, Any]) -> dict[str, float]:
    extras = told.get("extras") or {}
    if not isinstance(extras, dict) or len(extras) > MOST_EXTRAS:
        raise refused(422, "invalid", f"extras: expected at most {MOST_EXTRAS} numbers by name.")
    for name in extras:
        if not 0 < len(name) <= EXTRA_CHARS:
            raise refused(
                422, "invalid", f"extras: {name!r:.40}, expected a name of at most {EXTRA_CHARS} characters."
            )
    return {name: _number(value, f"extras.{name[:40]}") for name, value in extras.items()}


def _whole(told: dict[str, Any], key: str, least: int, most: int) -> int:
    value = told.get(key, least)
    if type(value) is not int or not least <= value <= most:
        raise refused(422, "invalid", f"{key}: {value!r:.40}, expected a number from {least} to {most}.")
    return value


def _outcome(told: dict[str, Any]) -> SessionOutcome:
    try:
        return SessionOutcome(str(told.get("outcome")))
    except ValueError:
        known = ", ".join(SessionOutcome)
        raise refused(
            422, "invalid", f"outcome: {told.get('outcome')!r:.40}, expected one of {known}."
        ) from None


def _refusal(error: RequestRefused, dialect: Dialect | None) -> web.Response:
    details = error.details
    status, code, param = int(details["status"]), str(details["reason"]), details.get("param")
    body = (
        dialect.refusal(status, code, str(error), param)
        if dialect
        else error_body(status, code, str(error), param)
    )
    headers = {"Retry-After": "1"} if status in (429, 503, 504) else {"x-should-retry": "false"}
    return web.Response(status=status, body=_encode(body), content_type="application/json", headers=headers)


def _json(told: Any) -> web.Response:
    return web.Response(body=_encode(told), content_type="application/json")
