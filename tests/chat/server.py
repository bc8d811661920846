"""A server of sessions made of the dialects: what a manager does with them, in a hundred lines, over a model that draws
what it is told to."""

from __future__ import annotations

import string
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from gyre.chat.dialects import COUNT_TOKENS, DIALECTS, Dialect
from gyre.chat.history import ROOT, TurnHistory, locate
from gyre.chat.messages import Message
from gyre.chat.plain import PlainFrame, PlainRenderer
from gyre.chat.requests import ChatRefused, ChatRequest, FinishedTurn, said
from gyre.chat.retries import Repeats
from gyre.workloads.tasks.arithmetic import CharTokenizer

TOKENIZER = CharTokenizer(string.printable + "«»¦")
RENDERER = PlainRenderer(TOKENIZER, PlainFrame("«", "»", "¦", "?"))
SCRIPT = ("«37*58»", "let me go on «2146-9»", "It is 2137.$")
"""What the model draws in a turn, by its depth; `$` is the end token."""


def ids_of(text: str) -> list[int]:
    return [TOKENIZER.eos_id if one == "$" else int(TOKENIZER.encode(one)[0]) for one in text]


@dataclass
class Session:
    """`faults` come in this order, one a request, `""` for none: `503`; `cut`, where the connection ends before the
    answer; `cut body`, where it ends within it."""

    faults: list[str] = field(default_factory=list)
    script: Sequence[str] = SCRIPT
    is_by_number: bool = False
    """The script is by the turn's number, in place of its depth."""
    turns: list[TurnHistory] = field(default_factory=list)
    parts: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Of each turn, its prompt and what was drawn."""
    replies: dict[str, FinishedTurn] = field(default_factory=dict)
    repeats: Repeats = field(default_factory=Repeats)
    causes: list[str] = field(default_factory=list)
    asked: Counter[str] = field(default_factory=Counter)
    retry_counts: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    @property
    def paths(self) -> list[list[int]]:
        return [prompt + drawn for prompt, drawn in self.parts]

    def reply_to(self, key: str, request: ChatRequest, name: str) -> FinishedTurn:
        """The turn that a request gets: the one that it had, or a new one."""
        if key not in self.replies:
            self.replies[key] = self._turn(request, name)
        return self.replies[key]

    def _turn(self, request: ChatRequest, name: str) -> FinishedTurn:
        number = len(self.turns)
        if request.prompt_ids is None:
            found = locate(self.turns, request.messages)
            parent, new, cause = found.parent, found.new, found.cause
            before, ids = self.parts[parent] if parent != ROOT else ([], [])
            added = RENDERER.bridge(before, ids, new, request.tools) if before else None
            prompt = (
                before + ids + added
                if added is not None
                else RENDERER.render(request.messages, request.tools)
            )
        else:
            parent, new, cause, prompt = ROOT, (), "", request.prompt_ids.tolist()
        depth, at = 0, parent
        while at != ROOT:
            depth, at = depth + 1, self.turns[at].parent
        if request.prompt_ids is not None:
            depth = len(self.script) - 1
        if self.is_by_number:
            depth = number
        drawn = ids_of(self.script[min(depth, len(self.script) - 1)])
        finish = "stop"
        if (most := request.sampling.get("max_new_tokens")) and most < len(drawn):
            drawn, finish = drawn[:most], "length"
        message = said(
            RENDERER.parse(prompt, drawn, request.tools), request, TOKENIZER.decode(drawn), number, name
        )
        self.turns.append(TurnHistory(parent, tuple(new), message))
        self.parts.append((prompt, drawn))
        self.causes.append(cause)
        return FinishedTurn(
            f"turn-{number}",
            1_700_000_000 + number,
            request.model,
            message,
            finish,
            len(prompt),
            prompt,
            drawn,
            [-0.5] * len(drawn),
            [TOKENIZER.piece(one) for one in drawn],
            [[7, 0, len(drawn)]],
        )


class Server:
    """Sessions by name, below `/s/NAME`, and one below the root by `X-Session-ID`."""

    def __init__(self) -> None:
        self.sessions: dict[str, Session] = {}
        self.port = 0
        self._runner: web.AppRunner | None = None

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.port}/s/{name}"

    async def __aenter__(self) -> Server:
        app = web.Application(client_max_size=1 << 26)
        for dialect in (*DIALECTS, COUNT_TOKENS):
            for prefix in ("", "/s/{session}"):
                app.router.add_post(prefix + dialect.path, self._route(dialect))
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def _route(self, dialect: Dialect) -> Any:
        async def handle(request: web.Request) -> web.StreamResponse:
            try:
                return await self._answered(dialect, request)
            except ChatRefused as error:
                return _json(
                    dialect.refusal(error.status, error.reason, str(error), error.param), error.status
                )

        return handle

    async def _answered(self, dialect: Dialect, request: web.Request) -> web.StreamResponse:
        name = request.match_info.get("session") or request.headers.get("X-Session-ID", "")
        key_given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if (key_given or request.headers.get("x-api-key")) != "secret":
            return _json(dialect.refusal(401, "unauthorised", "The key is none of this job's."), 401)
        session = self.sessions.get(name)
        if session is None:
            return _json(dialect.refusal(404, "unknown_session", f"There is no session {name!r}."), 404)
        body = await request.read()
        session.bodies.append(msgspec.json.decode(body))
        retries = request.headers.get("x-stainless-retry-count", "")
        session.retry_counts.append(retries)
        session.asked[dialect.path] += 1
        asked = dialect.read(body)
        if dialect is COUNT_TOKENS:
            prompt = RENDERER.render(asked.messages, asked.tools)
            return _json(
                dialect.answer(asked, FinishedTurn("", 0, "", Message("assistant"), "stop", len(prompt)))
            )
        fault = session.faults.pop(0) if session.faults else ""
        if fault == "503":
            return _json(dialect.refusal(503, "unavailable", "No engine is there."), 503)
        key = session.repeats.key(dialect.path, body, int(retries or 0))
        reply = session.reply_to(key, asked, name)
        return await self._sent(request, session, dialect, asked, reply, key, fault)

    async def _sent(
        self,
        request: web.Request,
        session: Session,
        dialect: Dialect,
        asked: ChatRequest,
        reply: FinishedTurn,
        key: str,
        fault: str,
    ) -> web.StreamResponse:
        kind = "text/event-stream" if asked.stream else "application/json"
        whole = (
            b"".join(dialect.events(asked, reply))
            if asked.stream
            else msgspec.json.encode(dialect.answer(asked, reply))
        )
        response = web.StreamResponse(headers={"Content-Type": kind, "Content-Length": str(len(whole))})
        assert request.transport is not None
        if fault == "cut":
            request.transport.close()
            return response
        await response.prepare(request)
        if fault == "cut body":
            await response.write(whole[: len(whole) // 2])
            request.transport.close()
            return response
        await response.write(whole)
        await response.write_eof()
        session.repeats.left(key)
        return response


def _json(told: Any, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(told), content_type="application/json")
