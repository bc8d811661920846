"""A rollout manager that speaks the session API, in memory: no ledger, no engines, and a policy that is a function.

`Direct` asks it without a socket, so that time can be virtual; `served` puts it behind a real port.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from aiohttp import web

from gyre.agents.client import ClientAnswer, SessionClient

SECRET = "the job's own secret"
SILENCE_S, TAKEN_WITHIN_S = 15.0, 10.0
MOST_REWARD = 1e30


@dataclass
class Ledger:
    """What is kept of one session."""

    id: str
    group: int
    index: int
    task: dict[str, Any]
    seconds: float = 600.0
    max_turns: int = 16
    turns: dict[tuple[str, str, int], bytes] = field(default_factory=dict)
    """By path, digest of the body, and how often that body had come before: the answer's bytes."""
    drawn: int = 0
    """Turns that were really drawn, and not answered from here."""
    seen: dict[tuple[str, str], int] = field(default_factory=dict)
    owner: str = ""
    snapshot: bytes | None = None
    ended: dict[str, Any] | None = None
    claims: int = 0
    seen_at: float = 0.0
    asked: list[dict[str, Any]] = field(default_factory=list)


Policy = Callable[[list[dict[str, Any]]], str]


class Manager:
    """`policy(messages)` is the assistant's text."""

    def __init__(self, policy: Policy = lambda messages: "yes") -> None:
        self.policy = policy
        self.sessions: dict[str, Ledger] = {}
        self.heard: dict[str, float] = {}
        self.away = False
        self.beats = 0
        self.latency_s = 0.0
        """How long a turn takes."""

    def add(
        self, count: int = 1, *, group: int = 0, task: dict[str, Any] | None = None, **limits: Any
    ) -> list[Ledger]:
        """Members of a group, to be handed out."""
        made = []
        for index in range(count):
            one = Ledger(f"train-{group}-{index}-0", group, index, task or {}, **limits)
            self.sessions[one.id] = one
            made.append(one)
        return made

    async def handle(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> ClientAnswer:
        self._release()
        if headers.get("Authorization") != f"Bearer {SECRET}":
            return refused(401, "unauthorized")
        if path == "/v1/sessions/claim":
            return await self._claim(json.loads(body))
        if path == "/v1/sessions/beat":
            return self._beat(json.loads(body))
        if path.startswith("/v1/sessions/"):
            name, _, what = path.removeprefix("/v1/sessions/").partition("/")
            one, is_current = self._named(name)
            if not is_current:
                return refused(410, "lost")
            if what == "snapshot":
                one.snapshot = body
                return ClientAnswer(200, {}, b"{}")
            told = json.loads(body)
            if abs(told["reward"]) > MOST_REWARD:
                return refused(422, "reward")
            if one.ended is not None and one.ended != told:
                return refused(422, "ended")
            one.ended = told
            return answered({"id": one.id, "outcome": told["outcome"]})
        name, _, route = path.removeprefix("/s/").partition("/")
        one, is_current = self._named(name)
        return await self._turn(one, f"/{route}", headers, body) if is_current else refused(410, "lost")

    def _named(self, text: str) -> tuple[Ledger, bool]:
        """The session, and whether its newest claim is meant."""
        name, _, claim = text.rpartition(".")
        one = self.sessions[name]
        return one, one.claims == int(claim)

    def _release(self) -> None:
        now = asyncio.get_running_loop().time()
        if self.away:
            return
        for one in self.sessions.values():
            if one.owner and one.ended is None and now - self.heard[one.owner] > SILENCE_S:
                one.owner = ""

    async def _claim(self, told: dict[str, Any]) -> ClientAnswer:
        loop = asyncio.get_running_loop()
        self.heard[told["worker"]] = loop.time()
        until = loop.time() + told["wait_s"]
        while True:
            self._release()
            free = [one for one in self.sessions.values() if not one.owner and one.ended is None]
            taken = sorted(free, key=lambda one: (one.group, one.index))[: told["most"]]
            if taken or loop.time() >= until:
                return answered({"sessions": [self._handed_out(one, told["worker"]) for one in taken]})
            await asyncio.sleep(0.5)

    def _handed_out(self, one: Ledger, worker: str) -> dict[str, Any]:
        one.owner, one.seen = worker, {}
        one.claims += 1
        one.seen_at = asyncio.get_running_loop().time()
        return {
            "id": one.id,
            "purpose": "train",
            "group": one.group,
            "index": one.index,
            "attempt": 0,
            "path": f"/s/{one.id}.{one.claims}",
            "task": one.task,
            "prompt_ids": [1, 5, 6],
            "sampling": {"temperature": 1.0},
            "turns": len(one.turns),
            "snapshot": None if one.snapshot is None else base64.b64encode(one.snapshot).decode(),
            "seconds_left": one.seconds,
            "max_turns": one.max_turns,
            "max_tokens": 4096,
        }

    def _beat(self, told: dict[str, Any]) -> ClientAnswer:
        self.beats += 1
        worker = told["worker"]
        self.heard[worker] = asyncio.get_running_loop().time()
        for one in self.sessions.values():
            if one.id in told["sessions"]:
                one.seen_at = self.heard[worker]
            is_old = self.heard[worker] - one.seen_at > TAKEN_WITHIN_S
            is_back = f"{one.id}.{one.claims}" in told["back"]
            if one.owner == worker and one.ended is None and (is_old or is_back):
                one.owner = ""
        lost = [name for name in told["sessions"] if self.sessions[name].owner != worker]
        return answered({"lost": lost})

    async def _turn(self, one: Ledger, route: str, headers: Mapping[str, str], body: bytes) -> ClientAnswer:
        if one.ended is not None:
            return refused(410, "ended")
        digest = blake2b(body).hexdigest()
        number = one.seen.get((route, digest), 0)
        if headers.get("x-stainless-retry-count", "0") != "0":
            number = max(0, number - 1)
        else:
            one.seen[route, digest] = number + 1
        key = (route, digest, number)
        if key not in one.turns:
            if len(one.turns) >= one.max_turns:
                return refused(422, "budget")
            told = json.loads(body)
            one.asked.append(told)
            await asyncio.sleep(self.latency_s)
            one.turns[key] = json.dumps(self._drawn(one, route, told)).encode()
        if json.loads(body).get("stream"):
            return ClientAnswer(
                200, {"Content-Type": "text/event-stream"}, as_stream(json.loads(one.turns[key]))
            )
        return ClientAnswer(200, {"Content-Type": "application/json"}, one.turns[key])

    def _drawn(self, one: Ledger, route: str, told: dict[str, Any]) -> dict[str, Any]:
        one.drawn += 1
        if route == "/inference/v1/generate":
            ids = [sum(told["token_ids"]) % 7, 2]
            content = [{"token": f"token_id:{each}", "logprob": -0.5} for each in ids]
            choice = {"token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}}
            return {"request_id": str(one.drawn), "choices": [choice]}
        message = {"role": "assistant", "content": self.policy(told["messages"])}
        return {
            "id": f"turn-{one.drawn}",
            "object": "chat.completion",
            "created": 1,
            "model": "policy",
            "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        }


def answered(told: dict[str, Any]) -> ClientAnswer:
    return ClientAnswer(200, {"Content-Type": "application/json"}, json.dumps(told).encode())


def as_stream(told: dict[str, Any]) -> bytes:
    """A chat's answer as server-sent events."""
    (choice,) = told.pop("choices")
    delta = {"index": 0, "delta": choice["message"], "finish_reason": None}
    end = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks = [{**told, "object": "chat.completion.chunk", "choices": [one]} for one in (delta, end)]
    return b"".join(
        b"data: %s\n\n" % text for text in (*(json.dumps(one).encode() for one in chunks), b"[DONE]")
    )


def refused(status: int, code: str) -> ClientAnswer:
    error = {"message": f"no: {code}", "type": "invalid_request_error", "code": code, "param": None}
    return ClientAnswer(status, {"Content-Type": "application/json"}, json.dumps({"error": error}).encode())


class Direct(SessionClient):
    """A client that calls the manager instead of sending bytes."""

    def __init__(self, manager: Manager, worker: str = "agent-0") -> None:
        super().__init__(lambda: ("", SECRET), worker=worker)
        self.manager = manager

    async def _attempt(
        self, method: str, path: str, body: bytes, headers: Mapping[str, str], answer_s: float
    ) -> ClientAnswer | None:
        if self.manager.away:
            return None
        return await self.manager.handle(method, path, {**headers, "Authorization": f"Bearer {SECRET}"}, body)


@asynccontextmanager
async def served(manager: Manager) -> AsyncIterator[str]:
    """The manager behind a real port; yields its URL."""

    async def handle(request: web.Request) -> web.Response:
        answer = await manager.handle(
            request.method, request.path, dict(request.headers), await request.read()
        )
        return web.Response(status=answer.status, headers=dict(answer.headers), body=answer.body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
