"""The door of a fleet, the front of its keys: the HTTP routes by which others' trainers ask for samples and
publish policies.

    POST /generate, /v1/completions    a request, answered whole or streamed
    POST /v1/chat/completions, …       the same in the dialects of `gyre.chat`, also below /s/{session}
    GET, DELETE /v1/requests/{id}      how far one is; forget it
    POST, GET /v1/policies             publish a version; what is published and served
    GET /v1/policies/{version}         who serves a version, or why nobody does
    GET /v1/policies/plane             what a publisher needs to serve its versions itself
    GET /v1/models, /v1/models/{id}    what OpenAI's clients ask for first
    GET /health                        and SGLang's
    POST /abort_request                SGLang's: end requests, and answer them with what is there
    GET /workers, /v1/loads            SGLang's router's and engines': the door is one worker; what runs there

A request is a group like a trainer's: admission, balance, continuation and the ledger are the machine's, and its
requester `KeysRequester` knows whose it is and what may be told.

Invariants:
- *written before answered*, *same id same tokens*, *a key sees its own*: see `gyre.rollouts.plane.door_ledger`;
- *published means durable*: a publish is answered after the commit that holds it, and so is a delete;
- *every wait has an end*: a client that waited so long is told to ask again with the same id; what it asked for goes
  on;
- *the newest hears*: of many that wait for one id the oldest are sent away, so that nobody who is gone is in the way.

This module must not know how samples are generated or given out.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import web

from gyre.chat import dialects as chat_dialects
from gyre.config import GENERATE_SCOPE, PUBLISH_SCOPE
from gyre.errors import GyreError, Unauthorized
from gyre.ports.bounds import PortBounds
from gyre.request_body import RequestRefused, error_body, refused
from gyre.rollouts.manager.callers import Callers
from gyre.rollouts.manager.door.chats import Chats
from gyre.rollouts.manager.door.counts import KEYS_TOLD, DoorCounts, key_of
from gyre.rollouts.manager.door.dialects import DIALECTS, Dialect, Told, aborted_id, encode
from gyre.rollouts.manager.door.keys import decoded
from gyre.rollouts.manager.door.publishing import DURABLE_WITHIN_S, FolderServer, PlaneKey, Publishing
from gyre.rollouts.manager.door.words import ModelWords
from gyre.rollouts.manager.front import Front
from gyre.rollouts.manager.sessions.chat_http import SESSION_PATH, is_there, retries_of, streamed, whole
from gyre.rollouts.manager.shell import PlaneShell
from gyre.rollouts.plane.door_ledger import Asked, DoorRequest
from gyre.rollouts.plane.events import Published
from gyre.rollouts.plane.instructions import Answer
from gyre.rollouts.plane.keys import KeysRequester, RequestDeleted, RequestsAborted, SamplesAsked
from gyre.rollouts.plane.peers import Caller
from gyre.rollouts.plane.reported import DoorStatus
from gyre.rollouts.plane.settings import DoorSettings, ManagerSettings
from gyre.rollouts.plane.updates import standing
from gyre.rollouts.protocol.frames import Publish

BODY_BYTES = 8 << 20
"""Largest body of a request: a prompt of a million tokens."""

BODIES_BYTES = 64 << 20
"""Of bodies of one key that are read at one time: eight of the largest. While there are more, another one is refused
before it is read."""

MOST_WAITING = 8
"""Most clients that wait for one id; one more, and the oldest is sent away."""

KEEP_ALIVE_S = 15.0
"""Silence of a stream after which a comment is sent, so that nobody between cuts it; a key is looked at as often."""

READ_APART_BYTES = 64 << 10
"""A body of this size is read on a thread of its own: the loop has other work."""


DOOR_BOUNDS = PortBounds(unproven=8192, unproven_per_address=4096)
"""A trainer asks a fleet for all prompts of a step at once, from one address, and its connections are there before its
loop has written the first token. As many as one key may have open, by default."""


@dataclass(eq=False, slots=True)
class _Waiter:
    """A client that waits for a request."""

    wake: asyncio.Event = field(default_factory=asyncio.Event)
    sent_away: bool = False


class Door(Front):
    requester = KeysRequester
    bounds = DOOR_BOUNDS
    open_paths = frozenset({"/health"})
    body_bytes = {dialect.path: BODY_BYTES for dialect in DIALECTS}  # noqa: RUF012 - nobody changes it

    def __init__(self, shell: PlaneShell, callers: Callers, *, weights_key: str) -> None:
        super().__init__(shell, callers, weights_key=weights_key)
        plane = shell.plane
        self.keys = next(one for one in plane.requesters if isinstance(one, KeysRequester))
        self.ledger = self.keys.ledger
        self._groups = plane.groups
        self._versions = plane.versions
        self._settings = settings = plane.settings.door or DoorSettings()
        server = FolderServer(
            f"manager of {weights_key}", weights_key, plane.settings.weights, root=settings.cache
        )
        self._publishing = Publishing(
            plane.versions,
            self,
            server=server if settings.serves_folders else None,
            plane=PlaneKey(weights_key, plane.settings.weights),
            tokenizer=settings.tokenizer,
            context_length=settings.context_length,
            folders=settings.policy_folders,
        )
        self._waiting: dict[int, deque[_Waiter]] = {}
        """By the number of the request."""
        self._deleted: list[asyncio.Event] = []
        """Of deletes that no batch has yet."""
        self._deleting: list[asyncio.Event] = []
        """Of those in the batch that is written."""
        self._chats = Chats(self.ledger, settings.renderer)
        self._is_closed = False
        self._counts = DoorCounts()
        self._reading: Counter[str] = Counter()
        """Bytes of the bodies that are read, by key."""

    @classmethod
    def urgent_commit_s(cls, settings: ManagerSettings) -> float:
        return (settings.door or DoorSettings()).urgent_commit_s

    def take(self, frame: Publish, model: str) -> None:
        """Publish a version. Raises FrameError."""
        self.shell.handle(Published(frame, model))

    def routes(self) -> list[web.RouteDef]:
        asks = [web.post(dialect.path, self._route(partial(self._ask, dialect))) for dialect in DIALECTS]
        chats = [
            web.post(f"{before}{dialect.path}", self._route(partial(self._chat, dialect)))
            for dialect in chat_dialects.DIALECTS
            for before in ("", SESSION_PATH)
        ]
        return [
            *asks,
            *chats,
            web.get("/v1/requests/{id:.+}", self._route(self._look_at)),
            web.delete("/v1/requests/{id:.+}", self._route(self._delete)),
            web.post("/v1/policies", self._route(self._publish)),
            web.get("/v1/policies", self._route(self._list_policies)),
            web.get("/v1/policies/plane", self._route(self._plane)),
            web.get("/v1/policies/{version}", self._route(self._look_at_policy)),
            web.get("/v1/models", self._route(self._list_models)),
            web.get("/v1/models/{id:.+}", self._route(self._tell_model)),
            web.post("/abort_request", self._route(self._abort)),
            web.get("/workers", self._route(self._list_workers)),
            web.get("/v1/loads", self._route(self._list_loads)),
            web.get("/health", self._health),
        ]

    # -- what the manager tells ---------------------------------------------------------------------

    def restored(self) -> None:
        published = self._versions.published
        if published is not None and published.local_path:
            self._publishing.learn(Path(published.local_path))

    async def opened(self, host: str, port: int) -> None:
        """The manager listens there: folders that an earlier one served are served from here."""
        self._publishing.url = f"http://{self._settings.address or host}:{port}"
        await self._publishing.again()

    async def publish_first(self, folder: Path) -> None:
        """Publish the folder as version 0, unless something was published. Raises RequestRefused."""
        if self._versions.newest < 0:
            await self._publishing.publish({"version": 0, "path": str(folder)})
        elif self._versions.published is not None and not self._versions.published.local_path:
            self._publishing.learn(folder)  # a publisher's sources say nothing of the model's end tokens

    def collected(self) -> None:
        self._deleting, self._deleted = self._deleted, []

    def answer(self, requests: Sequence[DoorRequest]) -> None:
        now = self.plane.now
        self._counts.ended((known for known in requests if known.ended_at == now), self.callers.clock())
        for known in requests:
            for waiter in self._waiting.get(known.request.number, ()):
                waiter.wake.set()

    def committed(self) -> None:
        self._publishing.committed()
        for event in self._deleting:
            event.set()
        self._deleting = []

    def close(self) -> None:
        """Send everybody away: they ask the next manager."""
        self._is_closed = True
        for waiters in self._waiting.values():
            for waiter in waiters:
                waiter.wake.set()
        self._publishing.close()

    def status(self) -> dict[str, Any]:
        """A `DoorStatus` but for its address, which its vertex knows."""
        largest = self.ledger.bytes_of.most_common(KEYS_TOLD)
        door = DoorStatus(
            open=self.ledger.open_count,
            kept=len(self.ledger),
            kept_tokens=self.ledger.kept_tokens,
            key_bytes={key_of(owner): taken for owner, taken in largest},
            waiting=sum(map(len, self._waiting.values())),
            requests=self._counts.status(),
        )
        return {"door": vars(door)}

    # -- samples ------------------------------------------------------------------------------------

    def _route(
        self, handler: Callable[[web.Request, Caller], Awaitable[web.StreamResponse]]
    ) -> Callable[[web.Request], Awaitable[web.StreamResponse]]:
        async def handle(request: web.Request) -> web.StreamResponse:
            caller = await self.callers.admitted(request)
            try:
                return await handler(request, caller)
            except RequestRefused as error:
                return _refusal(error)

        return handle

    async def _ask(self, dialect: Dialect, request: web.Request, caller: Caller) -> web.StreamResponse:
        caller.check(GENERATE_SCOPE, "ask for samples")
        words = self._publishing.words
        body = await self._read(request, caller)
        read = partial(dialect.read, body, request.headers.get("X-Request-Id"), words, self._settings.model)
        told: Told = await asyncio.to_thread(read) if len(body) > READ_APART_BYTES else read()
        # An id that is there was taken once, whatever the model is by now.
        if told.asked.id not in self.ledger.requests():
            self._check_fits(told.asked, words)
        self.shell.handle(SamplesAsked(_owner(caller), told.asked, self.callers.clock()))
        known = self.ledger.requests()[told.asked.id]
        with self._waits(known) as waiter:
            if told.stream:
                return await self._stream(request, caller, dialect, told, known, waiter, words)
            while not known.is_over:
                await self._more(caller, known, waiter, self._settings.answer_within_s)
        if known.failed:
            raise _failed(known)
        return _json(dialect.answer(known, told, words), known.id)

    async def _chat(
        self, dialect: chat_dialects.Dialect, request: web.Request, caller: Caller
    ) -> web.StreamResponse:
        """A stream's head waits for the whole answer, for no client asks again for a stream that broke."""
        caller.check(GENERATE_SCOPE, "ask for samples")
        words, owner = self._publishing.words, _owner(caller)
        body = await self._read(request, caller)
        chat = (
            await asyncio.to_thread(dialect.read, body)
            if len(body) > READ_APART_BYTES
            else dialect.read(body)
        )
        session = request.match_info.get("session") or request.headers.get("X-Session-ID") or ""
        request_id = self._chats.id_of(owner, session, dialect.path, body, retries_of(request))
        with self._chats.asking(request_id, partial(is_there, request)):
            if request_id not in self.ledger.requests():
                asked = await self._chats.asked(owner, session, request_id, chat, words)
                self._check_fits(asked, words)
                if (
                    request_id not in self.ledger.requests()
                ):  # else the same came while it was put into tokens
                    self.shell.handle(SamplesAsked(owner, asked, self.callers.clock()))
            known = self.ledger.requests()[request_id]
            with self._waits(known) as waiter:
                while not known.is_over:
                    await self._more(caller, known, waiter, self._settings.answer_within_s)
            if known.failed:
                raise _failed(known)
            reply = self._chats.reply(known, chat, chat.model or self._settings.model)
            if chat.stream:
                response = await streamed(request, dialect.events(chat, reply))
            else:
                response = await whole(request, _json(dialect.answer(chat, reply), known.id))
            if is_there(request):
                self._chats.left(known)
            return response

    async def _read(self, request: web.Request, caller: Caller) -> bytes:
        """The request's body. Raises RequestRefused where the key has too much under way."""
        owner, size = _owner(caller), request.content_length
        size = BODY_BYTES if size is None else size
        if self._reading[owner] and self._reading[owner] + size > BODIES_BYTES:
            raise refused(
                429,
                "too_much_at_once",
                f"Requests of this key are read whose bodies have {self._reading[owner]} bytes together, and no more "
                f"than {BODIES_BYTES} may have at one time.",
                "Ask again in a moment.",
            )
        self._reading[owner] += size
        try:
            return await _body_of(request)
        finally:
            self._reading[owner] -= size
            if not self._reading[owner]:
                del self._reading[owner]

    def _check_fits(self, asked: Asked, words: ModelWords) -> None:
        """Raises RequestRefused where the model has not these tokens, or does not take so many."""
        highest, known = int(asked.prompt_ids.max()), self._settings.vocabulary
        if highest >= known:
            raise refused(422, "invalid", f"{highest} is no token of the model, which has {known}.")
        prompt, new = len(asked.prompt_ids), asked.sampling["max_new_tokens"]
        if words.positions is not None and prompt + new > words.positions:
            raise refused(
                422,
                "invalid",
                f"{prompt} tokens of prompt and {new} new ones are more than the {words.positions} that the model "
                "takes.",
                "Ask for fewer.",
            )

    @contextlib.contextmanager
    def _waits(self, known: DoorRequest) -> Iterator[_Waiter]:
        """A block that waits for the request."""
        number = known.request.number
        waiters = self._waiting.setdefault(number, deque())
        waiter = _Waiter()
        waiters.append(waiter)
        if len(waiters) > MOST_WAITING:
            oldest = waiters.popleft()
            oldest.sent_away = True
            oldest.wake.set()
        try:
            yield waiter
        finally:
            if not waiter.sent_away:
                waiters.remove(waiter)
            if not waiters and self._waiting.get(number) is waiters:
                del self._waiting[number]

    async def _more(self, caller: Caller, known: DoorRequest, waiter: _Waiter, within_s: float) -> None:
        """Wait until more can be told of the request. Raises RequestRefused where nobody waits any longer, and
        Unauthorized where the key was revoked."""
        try:
            async with asyncio.timeout(within_s):
                await waiter.wake.wait()
        except TimeoutError:
            raise _unfinished(f"It is not whole after {self._settings.answer_within_s:g} s") from None
        waiter.wake.clear()
        self._check_waits(caller, known, waiter)

    def _check_waits(self, caller: Caller, known: DoorRequest, waiter: _Waiter) -> None:
        if why := self.callers.why_not(caller):
            raise Unauthorized(why)
        if self._is_closed:
            raise _unfinished("The manager is being replaced", status=503)
        if waiter.sent_away:
            raise refused(
                409, "asked_again", "The request was asked for again, by others that now wait for it."
            )
        if known.aborted is None and self.ledger.requests().get(known.id) is not known:
            raise refused(410, "deleted", f"The request {known.id!r} was deleted.")

    async def _stream(
        self,
        request: web.Request,
        caller: Caller,
        dialect: Dialect,
        told: Told,
        known: DoorRequest,
        waiter: _Waiter,
        words: ModelWords,
    ) -> web.StreamResponse:
        """Server-sent events, each with what came into the ledger since the last. What goes wrong after the first is an
        event too."""
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-cache",
                "X-Request-Id": known.id,
            }
        )
        await response.prepare(request)
        sent, ended = [0] * known.request.n, [False] * known.request.n
        until = self.shell.now() + self._settings.answer_within_s
        try:
            while True:
                if known.failed:
                    raise _failed(known)
                is_over = known.is_over  # what is committed while this is written comes the next time
                for event in dialect.events(known, told, words, sent, ended):
                    await response.write(b"data: " + encode(event) + b"\n\n")
                if is_over:
                    break
                left_s = until - self.shell.now()
                if left_s <= 0:
                    raise _unfinished(f"It is not whole after {self._settings.answer_within_s:g} s")
                try:
                    async with asyncio.timeout(min(left_s, KEEP_ALIVE_S)):
                        await waiter.wake.wait()
                except TimeoutError:
                    await response.write(b": it goes on\n\n")
                waiter.wake.clear()
                self._check_waits(caller, known, waiter)
        except (RequestRefused, Unauthorized) as error:
            with contextlib.suppress(ConnectionError, RuntimeError):  # the client has gone
                await response.write(b"data: " + encode(_error_of(error)) + b"\n\n")
        except (ConnectionError, RuntimeError):  # the client has gone; what it asked for goes on
            return response
        with contextlib.suppress(ConnectionError, RuntimeError):
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        return response

    async def _look_at(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        caller.check(GENERATE_SCOPE, "look at requests")
        known = self.ledger.find(_owner(caller), request.match_info["id"])
        state = "failed" if known.failed else "running" if known.ended_at is None else "done"
        told: dict[str, Any] = {
            "id": known.id,
            "state": state,
            "created": known.at,
            "samples": [{"tokens": one.length, "finish": one.finish or None} for one in known.told],
        }
        if known.failed:
            told["error"] = known.failed
        return _json(told, known.id)

    async def _delete(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        caller.check(GENERATE_SCOPE, "delete requests")
        known = self.ledger.find(_owner(caller), request.match_info["id"])
        self.shell.handle(RequestDeleted(known.owner, known.id))
        await self._forgotten()
        return _json({"id": known.id, "deleted": True}, known.id)

    async def _abort(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        caller.check(GENERATE_SCOPE, "end requests")
        done = self.shell.handle(RequestsAborted(_owner(caller), aborted_id(await _body_of(request))))
        some = [known for one in done if isinstance(one, Answer) for known in one.requests]
        if some:
            await self._forgotten()
        return _json({"aborted": [known.id for known in some]})

    async def _forgotten(self) -> None:
        """Wait until what was closed is so in the ledger."""
        written = asyncio.Event()
        self._deleted.append(written)
        self.shell.commits.now()
        try:
            async with asyncio.timeout(DURABLE_WITHIN_S):
                await written.wait()
        except TimeoutError:
            raise refused(504, "unfinished", "The delete is not in the ledger yet.", "Ask again.") from None

    async def _list_workers(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        """The door, under the address by which it was asked: to a client it is the only engine."""
        worker = {
            "id": self._settings.model,
            "url": str(request.url.origin()),
            "worker_type": "regular",
            "is_healthy": self._is_serving(),
        }
        return _json({"workers": [worker], "total": 1})

    async def _list_loads(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        """The key's own requests."""
        running = self.ledger.running(_owner(caller))
        placed = sum(any(one.instance is not None for one in known.request.samples) for known in running)
        load = {"dp_rank": 0, "num_running_reqs": placed, "num_waiting_reqs": len(running) - placed}
        return _json({"loads": [load]})

    # -- policies -----------------------------------------------------------------------------------

    async def _publish(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        caller.check(PUBLISH_SCOPE, "publish")
        told = await self._publishing.publish(decoded(await _body_of(request)))
        return _json(told)

    async def _plane(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        caller.check(PUBLISH_SCOPE, "serve versions")
        response = _json(self._publishing.plane())
        response.headers["Cache-Control"] = "no-store"  # it has a secret
        return response

    async def _list_policies(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        instances = {one.name: one.version for one in self._groups.instances.values() if one.version >= 0}
        newest, served = self._versions.newest, self._served()
        return _json(
            {
                "newest": newest if newest >= 0 else None,
                "served": served if served >= 0 else None,
                "instances": instances,
            }
        )

    async def _look_at_policy(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        told = request.match_info["version"]
        found = (
            standing(self.plane, int(told))
            if told.isascii() and told.isdecimal() and len(told) < 11
            else None
        )
        if found is None:
            raise refused(
                404, "not_found", f"Version {told[:60]!r} was not published, or is long superseded."
            )
        return _json(found)

    def _served(self) -> int:
        """The newest version that an instance serves; -1 where none does."""
        return max((one.version for one in self._groups.instances.values() if one.admitted), default=-1)

    async def _list_models(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        return _json({"object": "list", "data": [self._model()]})

    async def _tell_model(self, request: web.Request, caller: Caller) -> web.StreamResponse:
        name = request.match_info["id"]
        if name != self._settings.model:
            raise refused(
                404,
                "model_not_found",
                f"There is no model {name[:60]!r}; this fleet serves {self._settings.model!r}.",
                param="model",
            )
        return _json(self._model())

    def _model(self) -> dict[str, Any]:
        """In OpenAI's form."""
        return {
            "id": self._settings.model,
            "object": "model",
            "created": 0,
            "owned_by": "gyre",
            "policy_version": self._served(),
            "max_model_len": self._publishing.words.positions,
        }

    async def _health(self, request: web.Request) -> web.StreamResponse:
        """Whether an instance serves a policy. It needs no key and says no more."""
        return web.Response(status=200 if self._is_serving() else 503)

    def _is_serving(self) -> bool:
        return any(one.admitted for one in self._groups.instances.values())


def _owner(caller: Caller) -> str:
    """Whose a request is: the same name again, for another token, is another key."""
    return f"{caller.token}:{caller.digest}"


async def _body_of(request: web.Request) -> bytes:
    try:
        return await request.read()
    except (web.RequestPayloadError, ValueError) as error:  # a body that is not as its head says
        raise refused(400, "invalid", f"The body cannot be read: {str(error)[:200]}.") from None


def _failed(known: DoorRequest) -> RequestRefused:
    return refused(500, "cannot_generate", f"The request {known.id!r} cannot be generated: {known.failed}")


def _unfinished(why: str, *, status: int = 504) -> RequestRefused:
    return refused(status, "unfinished", f"{why}; it goes on.", "Ask again with the same id.")


def _error_of(error: GyreError) -> dict[str, Any]:
    details = error.details
    status, reason = int(details.get("status", 401)), details.get("reason", "unauthorised")
    return error_body(status, reason, str(error), details.get("param"))


def _refusal(error: RequestRefused) -> web.Response:
    status = int(error.details["status"])
    headers = {"Retry-After": "1"} if status in (429, 503, 504) else {}
    return web.Response(
        status=status, body=encode(_error_of(error)), content_type="application/json", headers=headers
    )


def _json(told: Any, request_id: str = "") -> web.Response:
    headers = {"X-Request-Id": request_id} if request_id else {}
    return web.Response(body=encode(told), content_type="application/json", headers=headers)
