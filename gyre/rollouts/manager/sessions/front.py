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
- *every wait has an end*: a client waits for a turn for as long as an SDK does, and asks again.

This module must not know how a message becomes tokens, or how they are generated.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from aiohttp import web

from gyre.chat.dialects import DIALECTS, Dialect
from gyre.chat.messages import Message
from gyre.chat.requests import ChatRequest, Reply
from gyre.chat.retries import Repeats
from gyre.config import GENERATE_SCOPE
from gyre.ports.bounds import PortBounds
from gyre.request_body import RequestRefused, error_body, refused
from gyre.rollouts.manager.callers import Callers
from gyre.rollouts.manager.sessions.chat_http import SESSION_PATH, retries_of, streamed
from gyre.rollouts.manager.sessions.conversations import Conversations
from gyre.rollouts.manager.shell import PlaneShell
from gyre.rollouts.manager.trainer_front import TrainerFront
from gyre.rollouts.plane.peers import Caller
from gyre.rollouts.plane.session_ledger import SessionEnded, TurnAsked
from gyre.rollouts.plane.session_trainer import (
    CLAIMS,
    SessionsClaimed,
    SessionTrainer,
    SnapshotKept,
    WorkerBeat,
)
from gyre.rollouts.plane.session_tree import Outcome, Session, Turn
from gyre.rollouts.plane.settings import ManagerSettings, SessionSettings

BODY_BYTES = 32 << 20
"""Largest body of a turn: a history of a million tokens as text, with what tools answered."""

ANSWER_WITHIN_S = 540.0
"""For a turn, or a write: below the read timeout of the clients' SDKs, which is 600 s; they ask again after it."""

CLAIM_WITHIN_S = 30.0
"""Longest wait for a session that a worker may ask for."""

MOST_CLAIMED = 1024
"""Sessions handed out at once."""

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
        self._repeats: dict[tuple[str, int], Repeats] = {}
        """By session and claim."""
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
            web.get("/v1/models", self._route(self._models)),
            web.get("/s/{session}/v1/models", self._route(self._models)),
            *turns,
        ]

    def status(self) -> dict[str, Any]:
        return {"sessions": self.ledger.status()}

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
        worker, most = _text(told, "worker"), _whole(told, "most", 1, MOST_CLAIMED)
        until = self.shell.now() + min(float(told.get("wait_s", 0.0)), CLAIM_WITHIN_S)
        with self._waits(CLAIMS) as woken:
            while True:
                woken.clear()
                self.shell.handle(SessionsClaimed(worker, most, self.callers.clock()))
                given = list(self.ledger.given)
                left_s = until - self.shell.now()
                if given or left_s <= 0 or self._is_closed:
                    break
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(left_s):
                        await woken.wait()
        for session in given:
            await self._written(session)
        return _json({"sessions": [self._handed_out(session) for session in given]})

    def _handed_out(self, session: Session) -> dict[str, Any]:
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
        ids = told.get("sessions")
        if not isinstance(ids, list) or not all(isinstance(one, str) for one in ids):
            raise refused(422, "invalid", "sessions: expected a list of ids.")
        self.shell.handle(WorkerBeat(_text(told, "worker"), ids))
        return _json({"lost": self.ledger.lost(_text(told, "worker"), ids)})

    async def _end(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        told = await _object(request)
        name, claim = _named(request.match_info["session"])
        outcome, reward = _outcome(told), told.get("reward")
        if outcome is Outcome.INFRA_FAULT:
            reward = None
        elif not isinstance(reward, int | float) or isinstance(reward, bool) or not math.isfinite(reward):
            raise refused(422, "invalid", f"reward: {reward!r:.40}, expected a finite number.")
        extras = told.get("extras") or {}
        if not isinstance(extras, dict) or not all(type(one) in (int, float) for one in extras.values()):
            raise refused(422, "invalid", "extras: expected numbers by name.")
        reason = str(told.get("reason", ""))
        self.shell.handle(
            SessionEnded(name, outcome, None if reward is None else float(reward), reason, extras, claim)
        )
        session = self.ledger.sessions.get(name)
        if session is not None:
            await self._written(session)
        return _json({"id": name, "outcome": outcome})

    async def _snapshot(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        name, claim = _named(request.match_info["session"])
        self.shell.handle(SnapshotKept(name, claim, await request.read()))
        await self._written(self.ledger.find(name))
        return _json({"id": name})

    async def _look_at(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        session = self.ledger.find(_named(request.match_info["session"])[0])
        return _json(
            {
                "id": session.id,
                "worker": session.worker or None,
                "outcome": session.outcome,
                "turns": [
                    {"parent": one.parent, "prompt": len(one.prompt_ids), "drawn": one.sample.length}
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
        body = await request.read()
        session = self.ledger.open_session(name, claim)
        asked = await asyncio.to_thread(dialect.read, body) if len(body) > 1 << 16 else dialect.read(body)
        repeats = self._repeats_of(session)
        key = repeats.key(dialect.path, body, retries_of(request))
        turn = session.turn_of(key) or await self._begin(session, claim, key, asked)
        await self._until_told(session, turn)
        reply = self._reply(session, turn, asked)
        if asked.stream:
            response = await streamed(request, dialect.events(asked, reply))
        else:
            response = _json(dialect.answer(asked, reply))
        repeats.left(key)
        return response

    async def _begin(self, session: Session, claim: int | None, key: str, asked: ChatRequest) -> Turn:
        if asked.prompt_ids is not None:
            prompt = np.array(asked.prompt_ids, np.int32)
            parent, note = session.parent_of(prompt), b""
        else:
            parent, prompt, note = await self._conversations.prompt_of(session, asked)
        sampling = {**asked.sampling, **self._conversations.stops(asked.sampling)}
        self.shell.handle(
            TurnAsked(session.id, key, prompt, sampling, self.callers.clock(), parent, claim, note)
        )
        turn = session.turn_of(key)
        assert turn is not None, "the machine took the turn"
        return turn

    async def _until_told(self, session: Session, turn: Turn) -> None:
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

    def _reply(self, session: Session, turn: Turn, asked: ChatRequest) -> Reply:
        ids, logprobs = turn.sample.tokens()
        return Reply(
            id=f"{session.id}-{turn.number}",
            created=int(session.began_at or 0),
            model=asked.model or self._settings.model,
            message=self._conversations.message_of(session, turn)
            if asked.prompt_ids is None
            else Message("assistant"),
            finish=turn.sample.finish,
            prompt_ids=turn.prompt_ids.tolist(),
            token_ids=ids.tolist(),
            logprobs=logprobs.tolist(),
            token_texts=self._conversations.texts(ids.tolist()),
            versions=turn.sample.runs,
        )

    def _repeats_of(self, session: Session) -> Repeats:
        found = self._repeats.get((session.id, session.claim))
        if found is None:
            self._repeats = {
                named: one for named, one in self._repeats.items() if named[0] in self.ledger.sessions
            }
            # after a new claim the agent is at its beginning; of one that an earlier manager gave, in the middle
            known = [turn.key for turn in session.turns] if not session.given_at else []
            found = self._repeats[session.id, session.claim] = Repeats(known)
        return found

    # -- waiting ------------------------------------------------------------------------------------

    async def _written(self, session: Session) -> None:
        """Wait until the ledger has what was done to the session."""
        with self._waits(session.id) as woken:
            until = self.shell.now() + ANSWER_WITHIN_S
            while not session.is_written and self.ledger.sessions.get(session.id) is session:
                if self._is_closed:
                    raise refused(503, "unfinished", "The manager is being replaced.", "Ask again.")
                async with asyncio.timeout(until - self.shell.now()):
                    await woken.wait()
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


def _named(text: str) -> tuple[str, int | None]:
    """A session's id, and the claim that is written behind it."""
    name, dot, claim = text.rpartition(".")
    if dot and claim.isascii() and claim.isdecimal():
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


def _text(told: dict[str, Any], key: str) -> str:
    value = told.get(key)
    if not isinstance(value, str) or not 0 < len(value) <= 200:
        raise refused(422, "invalid", f"{key}: {value!r:.40}, expected a name of at most 200 characters.")
    return value


def _whole(told: dict[str, Any], key: str, least: int, most: int) -> int:
    value = told.get(key, least)
    if type(value) is not int or not least <= value <= most:
        raise refused(422, "invalid", f"{key}: {value!r:.40}, expected a number from {least} to {most}.")
    return value


def _outcome(told: dict[str, Any]) -> Outcome:
    try:
        return Outcome(str(told.get("outcome")))
    except ValueError:
        known = ", ".join(Outcome)
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
