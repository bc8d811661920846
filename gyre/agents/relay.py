"""What SDKs in an agent's code ask: a port on loopback that hands their requests on to the rollout manager.

An SDK knows one address, and gives up after two more attempts. A manager may be away for longer, and come back at
another port. So the relay asks in the SDK's place for as long as the session lives, with the same bytes.

Invariants:
- *whole or not at all*: an answer goes out when all of it is here, a stream's too, for nobody asks for a stream again
  that broke;
- *a key for each session*: the job's secret stays in this process's own requests.

This module must not know what the requests say.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import secrets
from dataclasses import dataclass

from aiohttp import web

from gyre.agents.client import ClientAnswer
from gyre.agents.outcomes import BudgetSpent, SessionLost, SessionRefused
from gyre.agents.session import Session

MOST_REQUEST_BYTES = 64 << 20
"""A conversation of megabytes with its tools' results; more is no prompt for any model."""

ASKS = ("/chat/completions", "/responses", "/messages", "/completions", "/generate")
"""How the routes end that ask for a turn; others look something up."""

_PASSED = ("x-stainless-retry-count", "anthropic-version", "anthropic-beta")
"""Headers that mean something to the manager."""


@dataclass(slots=True)
class _Guest:
    session: Session
    key: str


class Relay:
    """Serves the sessions that it was told of. `start` it in the loop of their requests, and `close` it there."""

    def __init__(self) -> None:
        self._guests: dict[str, _Guest] = {}
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        app = web.Application(client_max_size=MOST_REQUEST_BYTES)
        for key in ("", "/k/{key}"):
            app.router.add_route("*", key + "/s/{session}/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def close(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(
                    runner.cleanup(), 2.0
                )  # who still asks belongs to a session that is over

    def admit(self, session: Session) -> None:
        """Serve the session's requests, and give it its address and key."""
        session.url = f"{self.url}/s/{session.id}"
        session.api_key = f"gyre-{secrets.token_urlsafe(24)}"
        session.keyed_url = f"{self.url}/k/{session.api_key}/s/{session.id}"
        self._guests[session.id] = _Guest(session, session.api_key)

    def dismiss(self, session: Session) -> None:
        guest = self._guests.get(session.id)
        if guest is not None and guest.session is session:
            del self._guests[session.id]

    async def _handle(self, request: web.Request) -> web.Response:
        guest = self._guests.get(request.match_info["session"])
        if guest is None:
            return _refused(410, "lost", "The session is over, or another process has it.")
        if not hmac.compare_digest(_key_of(request), guest.key.encode()):
            return _refused(401, "unauthorized", "This is not the session's key: take session.api_key.")
        session, path = guest.session, f"/{request.match_info['path']}"
        body, key = await request.read(), ""
        headers = {name: request.headers[name] for name in _PASSED if name in request.headers}
        try:
            if request.method == "POST" and path.endswith(ASKS):
                is_repeated = _is_repeated(request)
                if not is_repeated:
                    session.take_turn()
                key = session.repeats.key(path, body, is_repeated)
                answer = await session.ask_turn(path, body, key, headers)
            else:
                answer = await session.client.ask(
                    request.method,
                    session.claimed.path + path,
                    body,
                    within_s=session.seconds_left,
                    headers=headers,
                )
        except BudgetSpent as error:
            return _refused(422, "budget", str(error))
        except TimeoutError:
            return _refused(422, "budget", f"session {session.id} has had its time")
        except SessionLost as error:
            return _refused(410, "lost", str(error))
        except SessionRefused as error:
            return _refused(422, "refused", str(error))
        response = _response(answer)
        if key and answer.status < 400:
            with contextlib.suppress(ConnectionError):  # the SDK has gone, and asks again
                await response.prepare(request)
                await response.write_eof()
            if request.transport is not None and not request.transport.is_closing():
                session.repeats.left(key)
        return response


def _is_repeated(request: web.Request) -> bool:
    """Whether an SDK asks for the same turn again."""
    return request.headers.get("x-stainless-retry-count", "0") != "0"


def _key_of(request: web.Request) -> bytes:
    own = request.headers
    given = request.match_info.get("key") or own.get("Authorization", "").removeprefix("Bearer ")
    given = given or own.get("x-api-key", "")
    return given.encode(errors="replace")


def _response(answer: ClientAnswer) -> web.Response:
    return web.Response(status=answer.status, headers=dict(answer.headers), body=answer.body)


def _refused(status: int, code: str, message: str) -> web.Response:
    error = {"message": message, "type": "invalid_request_error", "code": code, "param": None}
    return web.json_response({"error": error, "type": "error"}, status=status)
