"""The rollout manager, which agents and requesters dial, and which keeps the open groups and their ledger together.

It has one asyncio loop, and one WebSocket for each agent. `gyre.rollouts.plane` decides; `PlaneShell` gives it what
happens and carries out what it says; each kind of requester comes in by a `Front`. This module has the port, and what
dials there.

Invariants:
- *nobody waits for one*: a connection that nobody reads, or that is silent, is cut, and never slows the loop;
- *nobody fills the journal*: the dials and frames of one peer are limited;
- *every request has an end*: `gyre.ports` stands before the server, and a WebSocket's first frame has a deadline.

This module must not know about Ray, graphs, how a trainer trains, or what is decided.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from gyre.clock import Clock
from gyre.config import JOIN_SCOPE
from gyre.errors import GyreError, Unauthorized
from gyre.ports.bounds import PortBounds
from gyre.ports.listener import Listener, bind
from gyre.request_body import error_body
from gyre.rollouts.manager.callers import Callers
from gyre.rollouts.manager.connections import Connection
from gyre.rollouts.manager.door.door import Door
from gyre.rollouts.manager.front import Front
from gyre.rollouts.manager.join_tokens import UnknownToken
from gyre.rollouts.manager.refusals import no_such_route
from gyre.rollouts.manager.sessions.front import SessionFront
from gyre.rollouts.manager.shell import HearsOfPlane, PlaneShell
from gyre.rollouts.manager.sockets import connected, first_frame, websocket
from gyre.rollouts.manager.trainer_front import TrainerFront
from gyre.rollouts.plane.events import (
    AgentDialled,
    AgentDrainRequested,
    AgentGone,
    AgentSent,
    AgentUnadmitted,
    PeerRefused,
    ReportsDue,
    RolesWanted,
)
from gyre.rollouts.plane.links import AgentLink
from gyre.rollouts.plane.peer_limits import RateLimit
from gyre.rollouts.plane.peers import Caller
from gyre.rollouts.plane.settings import ManagerSettings
from gyre.rollouts.plane.status import plane_status
from gyre.rollouts.protocol.codec import MAX_FRAME_BYTES, checked, encode, unpack
from gyre.rollouts.protocol.credentials import weights_key
from gyre.rollouts.protocol.fields import FrameError, refuse
from gyre.rollouts.protocol.frames import Drain
from gyre.store import RolloutRows, RolloutStore

NO_REQUEST = (
    *(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError),
    web.RequestPayloadError,
)
"""What reading a request raises that is no JSON, or not of the form: text in no known encoding, lists without end, a
number for a name."""

DIALS_AT_ONCE, DIALS_S = 1024, 50
"""Of one host and join token: a site's whole fleet comes back at once after a restart of the manager."""

FRAMES_AT_ONCE, FRAMES_S = 8192, 1024
"""Of one machine that joined. An agent sends some ten a second."""

WEBSOCKETS = frozenset({"/v1/agent", "/v1/trainer"})


def fronts_of(settings: ManagerSettings) -> Sequence[type[Front]]:
    """Who asks a job's manager for samples, in order: the first that owns a request has it, and a trainer owns every
    one that nobody before it does."""
    if settings.door is not None:
        return (Door,)
    return (TrainerFront,) if settings.sessions is None else (SessionFront,)


class RolloutManager:
    """The rollout manager of one job. `term` fences older managers. `token` is the job's own secret, with which its
    processes dial; `join_token` the default one of machines that join. Its `owner` hears of what happens."""

    def __init__(
        self,
        store: RolloutStore,
        *,
        term: int,
        token: str,
        join_token: str = "",
        settings: ManagerSettings | None = None,
        owner: HearsOfPlane | None = None,
        clock: Clock = time,
        bounds: PortBounds | None = None,
    ) -> None:
        settings = settings or ManagerSettings()
        self._owner = owner or HearsOfPlane()
        kinds = fronts_of(settings)
        key = weights_key(token)
        self.callers = Callers(store, token, join_token, clock)
        self.shell = PlaneShell(
            store,
            settings,
            [kind.requester for kind in kinds],
            term=term,
            weights_key=key,
            urgent_commit_s=min(kind.urgent_commit_s(settings) for kind in kinds),
            owner=self._owner,
            clock=clock,
        )
        self.plane = plane = self.shell.plane
        self.groups, self.links, self.versions = plane.groups, plane.links, plane.versions
        self.fronts = [kind(self.shell, self.callers, weights_key=key) for kind in kinds]
        self.shell.fronts = self.fronts
        self._dials = RateLimit(DIALS_AT_ONCE, DIALS_S)
        self._bounds = bounds or max((kind.bounds for kind in kinds), key=_size)
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self._is_restored = False

    # -- life ---------------------------------------------------------------------------------------

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Take the ledger over and listen; returns the port. Raises Fenced if a newer manager exists."""
        loop = asyncio.get_running_loop()
        if not self._is_restored:
            self.shell.restore(await loop.run_in_executor(self.shell.commits.thread, self._take_over))
            self._is_restored = True
        bounds = self._bounds
        large = {path: size for front in self.fronts for path, size in front.body_bytes.items()}
        bounds = replace(bounds, body_bytes_of={**large, **bounds.body_bytes_of})
        largest = max(bounds.body_bytes, *bounds.body_bytes_of.values(), 0)
        application = web.Application(client_max_size=largest, middlewares=[self._refuse_strangers])
        application.add_routes(
            [
                web.get("/v1/agent", self._agent_route),
                web.post("/v1/drain", self._drain_route),
                web.get("/v1/status", self._status_route),
                *(self._guarded_route(front, route) for front in self.fronts for route in front.routes()),
            ]
        )
        self._runner = web.AppRunner(
            application,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=bounds.keep_alive_s,
            max_line_size=bounds.head_bytes,  # the listener's bound is the one that holds
            max_field_size=bounds.head_bytes,
        )
        await self._runner.setup()
        try:
            sockets = bind(host, port, backlog=self._bounds.unproven_per_address)
        except OSError:
            await self._runner.cleanup()
            raise
        self._listener = Listener(
            sockets,
            self._runner.server,  # type: ignore[arg-type]  # it makes a protocol for a connection
            bounds,
            tls=tls,
            tokens=self.callers,
            websockets=WEBSOCKETS,
        )
        self._listener.start()
        shell = self.shell
        for work in (shell.commits.run, shell.tick_loop, self._token_loop, shell.checkpoint_loop):
            self._tasks.append(asyncio.create_task(self._guarded(work)))
        bound = int(sockets[0].getsockname()[1])
        for front in self.fronts:
            self._tasks.append(asyncio.create_task(self._guarded(partial(front.opened, host, bound))))
        return bound

    def _guarded_route(self, front: Front, route: web.RouteDef) -> web.RouteDef:
        """The front's route, for callers with a good token."""
        handler = route.handler

        async def admitted(request: web.Request) -> web.StreamResponse:
            await self.callers.admitted(request)
            return await handler(request)

        return route if route.path in front.open_paths else web.route(route.method, route.path, admitted)

    async def publish_first(self, folder: Path) -> None:
        """Publish the model's folder as version 0, where no trainer does and nothing was published. Raises
        GyreError."""
        for front in self.fronts:
            await front.publish_first(folder)

    def _take_over(self) -> RolloutRows:
        rows = self.shell.take_over()
        self.callers.load()
        return rows

    async def stop(self) -> None:
        """Stop without a word to agents: they keep their samples and dial the next manager."""
        for front in self.fronts:
            front.close()
        self.callers.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for link in self.links.values():
            if link.connection is not None:
                _connection(link).close()
        for front in self.fronts:
            for connection in front.connections():
                connection.close()
        with contextlib.suppress(
            GyreError
        ):  # fenced: another manager has the ledger, with everything that was acknowledged
            await self.shell.commits.last()
        await self.let_go()
        self.shell.commits.close()

    async def let_go(self) -> None:
        """Close the sockets and write nothing, as a death does. Harmless after `stop`."""
        for front in self.fronts:
            front.close()
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _guarded(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run a background task whose failure ends the manager: it is started again, and the ledger has everything."""
        try:
            await work()
        except (asyncio.CancelledError, SystemExit):
            raise
        except BaseException as error:
            self._owner.fail(error)

    async def _token_loop(self) -> None:
        """Every so often: who joined with a token that is revoked or has expired is cut."""
        while True:
            await asyncio.sleep(self.plane.settings.tokens_every_s)
            await self.callers.read()
            for link in list(self.links.values()):
                if message := self.callers.why_not(link.caller):
                    self.shell.handle(AgentUnadmitted(link, message))

    # -- who dials in -------------------------------------------------------------------------------

    @web.middleware
    async def _refuse_strangers(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except Unauthorized as error:
            self.plane.refused += 1
            return web.json_response(
                error_body(401, "unauthorised", error.message),
                status=401,
                headers={
                    "WWW-Authenticate": f'Bearer error="invalid_token", error_description="{error.message}"'
                },
            )
        except web.HTTPMethodNotAllowed as error:
            told = no_such_route(request.method, request.path, frozenset(error.allowed_methods))
            return web.json_response(told, status=405, headers={"Allow": error.headers["Allow"]})
        except web.HTTPNotFound:
            return web.json_response(no_such_route(request.method, request.path), status=404)

    async def _agent_route(self, request: web.Request) -> web.StreamResponse:
        try:
            caller = self.callers.known(request)
        except UnknownToken:
            await self.callers.admitted(request)
            # It is known now, but the port's gate, which did not know it, reads no frames of this connection.
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "0"}) from None
        caller.check(JOIN_SCOPE, "join as an instance")
        dialler = (caller.token, request.remote)
        if not caller.is_ours and (wait_s := self._dials.wait_s(dialler, self.shell.now())):
            self.plane.refused += 1
            raise web.HTTPTooManyRequests(headers={"Retry-After": str(math.ceil(wait_s))})
        socket = await websocket(request, self.plane)
        settings = self.plane.settings
        async with connected(
            Connection(socket, "an agent", request.transport, settings.send_timeout_s)
        ) as connection:
            link: AgentLink | None = None
            try:
                link = self.join(await first_frame(socket, settings), connection, caller)
                await self._receive(socket, link, connection)
            except FrameError as error:
                self.shell.handle(PeerRefused(connection, error))
            finally:
                if link is not None and link.connection is connection:
                    self.shell.handle(AgentGone(link))
        return socket

    def join(self, frame: Any, connection: Connection, caller: Caller) -> AgentLink:
        """The link of an agent that joins by this frame. Raises FrameError."""
        self.shell.handle(AgentDialled(connection, frame, caller))
        return self.links[frame.instance]

    async def _receive(self, socket: web.WebSocketResponse, link: AgentLink, connection: Connection) -> None:
        """Raises FrameError for what is no frame of an agent, and where too many come."""
        frames = RateLimit(FRAMES_AT_ONCE, FRAMES_S, most=1)
        received_bytes = RateLimit(4 * MAX_FRAME_BYTES, MAX_FRAME_BYTES, most=1)
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                if link.connection is not connection or connection.closing:
                    break  # the same instance dialled again: this connection is obsolete
                now = self.shell.now()
                if not link.caller.is_ours and (
                    frames.wait_s("", now) or received_bytes.wait_s("", now, cost=len(message.data))
                ):
                    raise refuse("flood", f"more than {FRAMES_S} frames or {MAX_FRAME_BYTES} bytes a second")
                self.shell.handle(AgentSent(link, unpack(message.data)))
            elif message.type is WSMsgType.TEXT:
                raise refuse("malformed", "a text message; frames are binary")

    # -- HTTP ---------------------------------------------------------------------------------------

    async def _drain_route(self, request: web.Request) -> web.StreamResponse:
        caller = await self.callers.admitted(request)
        try:
            body = await request.json()
            name = str(body["instance"])
            asked = checked(
                Drain,
                deadline_s=float(body.get("deadline_s", 30.0)),
                reason=str(body.get("reason", "asked to")),
            )
            encode(asked)  # half a character of a JSON text has no wire form: a ValueError
        except (*NO_REQUEST, FrameError) as error:
            return web.json_response(
                {"code": "invalid", "message": f'expected {{"instance": NAME, "deadline_s": S}}: {error!r}'},
                status=422,
            )
        link = self.links.get(name)
        if link is None:
            return web.json_response(
                {"code": "not_found", "message": f"no instance {name!r}; there are {sorted(self.links)}"},
                status=404,
            )
        if not caller.is_ours and link.caller != caller:
            raise Unauthorized(f"The token {caller.token!r} may not drain {name}, which joined otherwise.")
        self.shell.handle(AgentDrainRequested(link, asked.deadline_s, asked.reason))
        return web.json_response({"instance": name, "draining": True})

    async def _status_route(self, request: web.Request) -> web.StreamResponse:
        self.callers.only_ours(request, "see the plane's status")
        return web.json_response(self.status())

    def looked_at(self, wanted: dict[str, int]) -> dict[str, Any]:
        """Of a fleet: `wanted` is how many vertices each role is to have."""
        self.shell.handle(RolesWanted(wanted))
        return {
            "serving": sum(one.admitted for one in self.groups.instances.values()),
            "open": sum(one.open_count for one in self.plane.requesters),
            "generated": self.groups.account.generated,
        }

    def status(self) -> dict[str, Any]:
        """The plane's status, as plain data."""
        self.shell.handle(ReportsDue())
        told = plane_status(self.plane)
        for front in self.fronts:
            told |= front.status()
        return told


def _connection(link: AgentLink) -> Connection:
    assert isinstance(link.connection, Connection)
    return link.connection


def _size(bounds: PortBounds) -> int:
    return bounds.unproven
