"""The rollout manager, which agents and the trainer dial, and which keeps the open groups and their ledger together.

It has one asyncio loop, and one WebSocket for each connection. `InstanceLifecycle` and `TrainerSession` handle frames,
over `OpenGroups` (samples), `Dispatch` (assignments) and `PolicyPush` (versions); one thread writes the ledger, a batch
at a time. This module has the sockets, the commits and the clock.

Invariants:
- *acknowledged means durable*: an agent's progress is acknowledged, and a group is delivered, after the commit that
  holds it. An agent keeps what was not acknowledged, so this process can be killed at any moment;
- *published means durable*: a version is sent out after the commit that holds it, so instances never hear of a version
  that the next manager does not know;
- *nobody waits for one*: a connection that nobody reads, or that is silent, is cut, and never slows the loop;
- *nobody fills the journal*: events that one peer brings about are folded, and its dials and frames are limited;
- *every request has an end*: `gyre.ports` stands before the server, and a WebSocket's first frame has a deadline;
- *reporting never fails the manager*: an event that cannot be reported is left out.

This module must not know about Ray, graphs or how a trainer trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from aiohttp import WSMsgType, web

from gyre.config import JOIN_SCOPE, JOIN_TOKEN
from gyre.errors import GyreError, StoreError, Unauthorized
from gyre.ports.bounds import PortBounds
from gyre.ports.http_gate import Credentials
from gyre.ports.listener import Listener, bind
from gyre.rollouts.core.admission import NotAdmitted
from gyre.rollouts.core.groups import MOST_RESETS, OpenGroups
from gyre.rollouts.core_usage import CoreUsage
from gyre.rollouts.manager.autoscaler import Autoscaler, Fleet
from gyre.rollouts.manager.delivery import Delivery
from gyre.rollouts.manager.device_sharing import TRAINER_AWAY_S, DeviceSharing
from gyre.rollouts.manager.dispatch import Dispatch
from gyre.rollouts.manager.door.dialects import DIALECTS
from gyre.rollouts.manager.door.door import BODY_BYTES, Door
from gyre.rollouts.manager.door.publishing import FolderServer, PlaneKey, Publishing
from gyre.rollouts.manager.instance_lifecycle import InstanceLifecycle
from gyre.rollouts.manager.join_tokens import Caller, JoinTokens, UnknownToken
from gyre.rollouts.manager.peer_events import PeerEvents
from gyre.rollouts.manager.peer_limits import RateLimit
from gyre.rollouts.manager.policy_push import PolicyPush
from gyre.rollouts.manager.policy_versions import PolicyVersions
from gyre.rollouts.manager.refusals import error_body, no_such_route
from gyre.rollouts.manager.report_queue import ReportQueue
from gyre.rollouts.manager.sessions import AgentSession, AgentSessions, Connection
from gyre.rollouts.manager.settings import DoorSettings, ManagerSettings
from gyre.rollouts.manager.status import (
    groups_status,
    instance_status,
    pools_status,
    rates_by_role,
    underway,
)
from gyre.rollouts.manager.token_reader import TokenReader
from gyre.rollouts.manager.trainer_session import TrainerSession
from gyre.rollouts.protocol.codec import MAX_FRAME_BYTES, checked, encode, unpack
from gyre.rollouts.protocol.connection import watch_acknowledgements
from gyre.rollouts.protocol.credentials import weights_key
from gyre.rollouts.protocol.fields import FrameError, refuse
from gyre.rollouts.protocol.frames import PROTOCOL, Attached, Drain, Frame, Reject, TrainerStatus
from gyre.rollouts.protocol.progress import Report
from gyre.rollouts.token_log.group_commit import GroupCommit
from gyre.rollouts.token_log.write_buffer import WriteBatch
from gyre.store import RolloutRows, RolloutStore

TICK_S = 0.1

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

CHECKPOINT_EVERY_S = 0.5
"""At two hundred commits a second the store's log has a thousand pages by then, SQLite's own measure."""

DOOR_BOUNDS = PortBounds(unproven=8192, unproven_per_address=4096)
"""A trainer asks a fleet for all prompts of a step at once, from one address, and its connections are there before its
loop has written the first token. As many as one key may have open, by default."""

CLOSE_WITHIN_S = 3.0
"""How long a closing connection may take to send its queue."""


class RolloutManager:
    """The rollout manager of one job. `term` fences older managers. `token` is the job's own secret, with which its
    processes dial; `join_token` the default one of machines that join. `on_event(kind, fields)` is called for events
    that people should know: instances that join and go, quarantined samples. `clock` is in seconds since 1970."""

    def __init__(
        self,
        store: RolloutStore,
        *,
        term: int,
        token: str,
        join_token: str = "",
        settings: ManagerSettings | None = None,
        on_event: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None,
        on_fatal: Callable[[BaseException], None] = lambda error: None,
        monotonic: Callable[[], float] = time.monotonic,
        clock: Callable[[], float] = time.time,
        bounds: PortBounds | None = None,
    ) -> None:
        self.settings = settings or ManagerSettings()
        door = self.settings.door
        self.groups = OpenGroups(
            epoch=term,
            vocabulary=self.settings.vocabulary,
            most_resets=MOST_RESETS if door is None else 0,  # a door never takes back what it told
        )
        self.sessions = AgentSessions(self.groups, self.settings.wanted)
        self.weights = PolicyVersions()
        self.refused = 0
        """Requests and frames that were refused."""
        self._store = store
        self._term = term
        self._tokens = JoinTokens(token, join_token)
        self._token_reader = TokenReader(
            lambda: store.snapshot_rows(JOIN_TOKEN), lambda rows: self._tokens.update(rows), now=monotonic
        )
        self._clock = clock
        self._told = _telling(on_event)
        self._on_event = on_event = self._tell
        self._folded = PeerEvents(self._is_ours)
        self._dials = RateLimit(DIALS_AT_ONCE, DIALS_S)
        self._on_fatal = on_fatal
        self._now = now = monotonic
        self._tasks: list[asyncio.Task[None]] = []
        self._bounds = bounds or (PortBounds() if door is None else DOOR_BOUNDS)
        self._runner: web.AppRunner | None = None
        self._listener: Listener | None = None
        self._restored = False
        self._commits = GroupCommit(
            self._batch,
            lambda batch: self._write(batch),
            self._committed,
            interval_s=self.settings.commit_interval_s,
            urgent_s=self.settings.urgent_commit_s if door is None else door.urgent_commit_s,
        )
        self._reports = ReportQueue(
            self.groups, lambda name, error: self.instances.report_refused(name, error)
        )
        pools = self.settings.pools
        self._autoscaler = Autoscaler(pools, of_fleet=door is not None) if pools else None
        self._cores = CoreUsage() if self._autoscaler is not None and self.settings.on_cores else None
        self._delivery = Delivery(self.groups.requests)
        self.dispatch = Dispatch(
            self.groups,
            self.sessions,
            devices=lambda session: self.windows.device_use(session),
            handover=lambda: self.settings.update_mode == "handover",
            commit_now=self._commits.now,
            commit_soon=self._commits.soon,
            on_event=on_event,
            now=now,
        )
        self.policies = PolicyPush(
            self.weights,
            self.groups,
            self.sessions,
            self.dispatch,
            may_load=lambda session: self.windows.may_load(session),
            commit_soon=self._commits.soon,
            on_event=on_event,
            now=now,
        )
        self.trainer = TrainerSession(
            self.groups,
            self.weights,
            self._delivery,
            self.dispatch,
            self.policies,
            self._reports,
            self._commits,
            self._autoscaler,
            windows=lambda: self.windows,
            underway=lambda: underway(self.groups, self.sessions.values(), now()),
            on_event=on_event,
            now=now,
            has_door=door is not None,
        )
        self.door = None if door is None else self._door(door, weights_key(token))
        self.instances = InstanceLifecycle(
            self.groups,
            self.sessions,
            self.weights,
            self.dispatch,
            self.policies,
            self.trainer,
            self._reports,
            self._commits,
            epoch=term,
            weights_key=weights_key(token),
            windows=lambda: self.windows,
            settings=lambda: self.settings,
            reject=self._reject,
            on_event=on_event,
            now=now,
        )
        self.windows = DeviceSharing(
            self.groups,
            self.sessions,
            tell=self.dispatch.tell,
            recall=self.dispatch.recall,
            lose=self.instances.lost,
            refresh=self.instances.refresh,
            answer=self.trainer.answer,
            on_event=on_event,
            now=now(),
            grace_s=self.settings.restart_grace_s + TRAINER_AWAY_S,
        )

    def _door(self, settings: DoorSettings, key: str) -> Door:
        server = FolderServer(f"manager of {key}", key, self.settings.weights, root=settings.cache)
        publishing = Publishing(
            self.weights,
            self.trainer.publish,
            server=server if settings.serves_folders else None,
            plane=PlaneKey(key, self.settings.weights),
            tokenizer=settings.tokenizer,
            context_length=settings.context_length,
            folders=settings.policy_folders,
        )
        return Door(
            self.groups,
            self.weights,
            self.dispatch,
            self.policies,
            self._commits,
            publishing,
            settings,
            caller=self._admitted,
            why_not=lambda caller: self._tokens.why_not(caller, self._clock()),
            now=self._now,
            clock=self._clock,
        )

    # -- life ---------------------------------------------------------------------------------------

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Take the ledger over and listen; returns the port. Raises Fenced if a newer manager exists."""
        loop = asyncio.get_running_loop()
        if not self._restored:
            self._restore(await loop.run_in_executor(self._commits.thread, self._take_over))
            self._restored = True
        bounds = self._bounds
        if self.door is not None:
            large = {dialect.path: BODY_BYTES for dialect in DIALECTS}
            bounds = replace(bounds, body_bytes_of={**large, **bounds.body_bytes_of})
        largest = max(bounds.body_bytes, *bounds.body_bytes_of.values(), 0)
        application = web.Application(client_max_size=largest, middlewares=[self._refuse_strangers])
        application.add_routes(
            [
                web.get("/v1/agent", self._agent_route),
                web.post("/v1/drain", self._drain_route),
                web.get("/v1/status", self._status_route),
            ]
        )
        if self.door is not None:
            application.add_routes(self.door.routes())
        else:
            application.add_routes([web.get("/v1/trainer", self._trainer_route)])
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
            is_proven=self._is_proven,
            websockets=WEBSOCKETS,
        )
        self._listener.start()
        for work in (self._commits.run, self._tick_loop, self._token_loop, self._checkpoint_loop):
            self._tasks.append(asyncio.create_task(self._guarded(work)))
        bound = int(sockets[0].getsockname()[1])
        if self.door is not None:
            self._tasks.append(asyncio.create_task(self._guarded(partial(self.door.opened, host, bound))))
        return bound

    def _restore(self, rows: RolloutRows) -> None:
        counters = rows.counters
        self.weights.restore(counters)
        self.groups.newest_version = self.weights.newest
        if self.weights.served is not None:
            self.groups.promote(self.weights.served.version)
        self.groups.restore(counters, rows.groups, rows.deltas)
        self.dispatch.committed_seq = max((seq for seq, _ in rows.deltas), default=0)
        self.policies.promote()
        self.trainer.tell_failures()
        if self.door is not None:
            self.door.restore()
        # Complete groups were not delivered yet; they are sent when the trainer attaches.
        self._commits.now()
        if any(not state.finish for state in self.groups.samples()):
            self.dispatch.hold_until = self._now() + self.settings.restart_grace_s

    def _take_over(self) -> RolloutRows:
        self._store.take_over(term=self._term)
        self._tokens.update(self._store.snapshot_rows(JOIN_TOKEN))
        return self._store.load()

    async def stop(self) -> None:
        """Stop without a word to agents: they keep their samples and dial the next manager."""
        if self.door is not None:
            self.door.close()
        self._token_reader.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in (
            *(session.connection for session in self.sessions.values()),
            self.trainer.connection,
        ):
            if connection is not None:
                connection.close()
        with contextlib.suppress(
            GyreError
        ):  # fenced: another manager has the ledger, with everything that was acknowledged
            await self._commits.last()
        await self.let_go()
        self._commits.close()

    async def let_go(self) -> None:
        """Close the sockets and write nothing, as a death does. Harmless after `stop`."""
        if self.door is not None:
            self.door.close()
        if self._listener is not None:
            self._listener.close()
            await self._listener.wait_closed()
        if self._runner is not None:
            await self._runner.cleanup()

    async def _guarded(self, work: Callable[[], Any]) -> None:
        """Run a background task whose failure ends the manager: it is started again, and the ledger has everything."""
        try:
            await work()
        except (asyncio.CancelledError, SystemExit):
            raise
        except BaseException as error:
            self._on_fatal(error)

    def _tell(self, kind: str, fields: dict[str, Any]) -> None:
        """Tell an event, or count it where its source brings about too many."""
        now = self._now()
        self._tell_counted(now)
        if (told := self._folded.add(kind, fields, now)) is not None:
            self._told(*told)

    def _tell_counted(self, now: float) -> None:
        for told in self._folded.due(now):
            self._told(*told)

    def _is_ours(self, name: str) -> bool:
        session = self.sessions.get(name)
        return session is not None and session.caller.is_ours

    # -- who dials in -------------------------------------------------------------------------------

    def _caller(self, request: web.Request) -> Caller:
        """Raises Unauthorized."""
        return self._tokens.caller(request.headers.get("Authorization", ""), self._clock())

    async def _admitted(self, request: web.Request) -> Caller:
        """The same, after a look at the store where the token is not known: it may be a moment old."""
        try:
            return self._caller(request)
        except UnknownToken:
            await self._token_reader.anew()
            return self._caller(request)

    def _is_proven(self, shown: Credentials) -> bool:
        """Whether a token is shown that is good now."""
        try:
            self._tokens.caller(shown.authorization.decode("utf-8", "surrogateescape"), self._clock())
        except Unauthorized:
            return False
        return True

    def _only_ours(self, request: web.Request, what: str) -> None:
        """Raises Unauthorized for anybody but the job's own processes."""
        caller = self._caller(request)
        if not caller.is_ours:
            raise Unauthorized(f"The token {caller.token!r} is an instance's: it may not {what}.")

    @web.middleware
    async def _refuse_strangers(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            return await handler(request)
        except Unauthorized as error:
            self.refused += 1
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
            caller = self._caller(request)
        except UnknownToken:
            await self._admitted(request)
            # It is known now, but the port's gate, which did not know it, reads no frames of this connection.
            raise web.HTTPServiceUnavailable(headers={"Retry-After": "0"}) from None
        caller.check(JOIN_SCOPE, "join as an instance")
        if not caller.is_ours and (wait_s := self._dials.wait_s((caller.token, request.remote), self._now())):
            self.refused += 1
            raise web.HTTPTooManyRequests(headers={"Retry-After": str(math.ceil(wait_s))})
        socket = await self._websocket(request)
        frames = RateLimit(FRAMES_AT_ONCE, FRAMES_S, most=1)
        received_bytes = RateLimit(4 * MAX_FRAME_BYTES, MAX_FRAME_BYTES, most=1)
        async with self._connected(
            Connection(socket, "an agent", request.transport, self.settings.send_timeout_s)
        ) as connection:
            session: AgentSession | None = None
            try:
                session = self.instances.join(await self._first(socket), connection, caller)
                async for message in socket:
                    if message.type is WSMsgType.BINARY:
                        if session.connection is not connection or connection.closing:
                            break  # the same instance dialled again: this connection is obsolete
                        if not caller.is_ours and (
                            frames.wait_s("", self._now())
                            or received_bytes.wait_s("", self._now(), cost=len(message.data))
                        ):
                            raise refuse(
                                "flood", f"more than {FRAMES_S} frames or {MAX_FRAME_BYTES} bytes a second"
                            )
                        self.instances.received(session, unpack(message.data))
                    elif message.type is WSMsgType.TEXT:
                        raise refuse("malformed", "a text message; frames are binary")
            except FrameError as error:
                self._reject(connection, error)
            finally:
                if session is not None and session.connection is connection:
                    self.instances.disconnected(session)
        return socket

    async def _trainer_route(self, request: web.Request) -> web.StreamResponse:
        self._only_ours(request, "attach as the trainer")
        socket = await self._websocket(request)
        trainer = Connection(
            socket,
            "the trainer",
            request.transport,
            self.settings.send_timeout_s,
            written=self._delivery.pump,
        )
        async with self._connected(trainer) as connection:
            try:
                self.trainer.attach(await self._first(socket), connection)
                connection.send(Attached(protocol=PROTOCOL, epoch=self._term, version=self.weights.newest))
                async for message in socket:
                    if message.type is WSMsgType.BINARY and self.trainer.connection is connection:
                        await self.trainer.received(connection, unpack(message.data))
            except FrameError as error:
                self._reject(connection, error)
            finally:
                self.trainer.left(connection)
        return socket

    @contextlib.asynccontextmanager
    async def _connected(self, connection: Connection) -> AsyncIterator[Connection]:
        """A block during which the connection's queue is written; the rest is written at its end, within a limit."""
        writer = asyncio.create_task(connection.write())
        try:
            yield connection
        finally:
            connection.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(writer), CLOSE_WITHIN_S)
            writer.cancel()

    async def _websocket(self, request: web.Request) -> web.WebSocketResponse:
        if request.transport is not None:
            watch_acknowledgements(request.transport.get_extra_info("socket"))
        socket = web.WebSocketResponse(
            max_msg_size=MAX_FRAME_BYTES, compress=False, heartbeat=self.settings.heartbeat_s
        )
        try:
            await socket.prepare(request)
        except ValueError:  # a header that is no text, which the library reads or repeats all the same
            self.refused += 1
            said = '{"code": "invalid", "message": "A header is not text."}'
            raise web.HTTPUnprocessableEntity(text=said, content_type="application/json") from None
        return socket

    async def _first(self, socket: web.WebSocketResponse) -> Frame | Report:
        try:
            message = await socket.receive(timeout=self.settings.hello_timeout_s)
        except TimeoutError:
            raise refuse("no_hello", "nothing came within the time for a hello") from None
        if message.type is not WSMsgType.BINARY:
            raise refuse("no_hello", "the first message is no frame")
        return unpack(message.data)

    def _reject(self, connection: Connection, error: FrameError) -> None:
        """Tell the peer the reason, and people once, and end the connection; no other peer notices."""
        self.refused += 1
        reason = str(error.details.get("reason", "malformed"))
        self._on_event(
            "PeerRefused", {"peer": connection.name, "reason": reason, "message": str(error)[:2000]}
        )
        connection.send(Reject(code=reason, message=str(error)[:2000]))

    # -- the ledger ---------------------------------------------------------------------------------

    def _batch(self) -> WriteBatch | None:
        self._reports.take_in()
        if not self.groups.is_dirty and not self.weights.changed:
            return None
        batch = self.groups.take_batch()
        batch.counters |= self.weights.take_counters()
        if self.door is not None:
            self.door.collect(batch)
        finished = [self.groups.sample(key) for key in batch.finished]
        self._delivery.finished(sample for sample in finished if sample is not None)
        return batch

    def _write(self, batch: WriteBatch) -> None:
        """Write a batch; runs on the ledger's thread."""
        self._store.write(
            self._term,
            counters=batch.counters,
            opened=batch.opened,
            deltas=batch.encoded(),
            closed=batch.closed,
            forgotten=batch.forgotten,
        )

    def _committed(self, batch: WriteBatch) -> None:
        if batch.deltas:
            self.dispatch.committed_seq = batch.deltas[-1].seq
        self.instances.committed(batch)
        complete = [one for number in batch.complete if (one := self.groups.requests.get(number)) is not None]
        if self.door is None:
            self._delivery.complete(complete)
        else:
            self.door.committed()
        if self.weights.committed(batch.counters) or any(request.pinned for request in complete):
            self.policies.promote()

    # -- time ---------------------------------------------------------------------------------------

    async def _tick_loop(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._reports.take_in()
            now = self._now()
            self._tell_counted(now)
            self.instances.look(now)
            self.policies.tell_service()
            self.dispatch.look(
                now,
                rebalance_every_s=self.settings.rebalance_every_s,
                recall_timeout_s=self.settings.recall_timeout_s,
            )
            self.windows.look(now)
            if self.door is not None:
                self.door.look(now)
            self._advise(now)

    async def _token_loop(self) -> None:
        """Every so often: who joined with a token that is revoked or has expired is cut."""
        while True:
            await asyncio.sleep(self.settings.tokens_every_s)
            await self._token_reader.read()
            self.instances.cut_unadmitted(lambda caller: self._tokens.why_not(caller, self._clock()))

    async def _checkpoint_loop(self) -> None:
        """Every so often: what was committed goes from the store's log into its file, beside the commits."""
        seen = self._commits.count
        while True:
            await asyncio.sleep(CHECKPOINT_EVERY_S)
            if seen != self._commits.count:
                seen = self._commits.count
                # Where it fails, the next one does it, or a commit when the log is long.
                with contextlib.suppress(StoreError):
                    await asyncio.to_thread(self._store.checkpoint)

    def _advise(self, now: float) -> None:
        """Ask the elasticity policy, if there is one, how many instances there should be."""
        if self._autoscaler is None:
            return
        here = [s for s in self.sessions.values() if not s.draining and not s.hello.local]
        serving = [
            (session, one)
            for session in here
            if (one := self.groups.instances.get(session.name)) and one.version >= 0
            if session.not_admitted is not NotAdmitted.SPARE  # it is nobody's help yet
        ]
        placed = Counter(session.role for session, _ in serving if session.role in self.settings.pools)
        spares = sum(session.is_spare for session, _ in serving)  # they do what missing ones would
        placement = self.groups.placement
        fleet = Fleet(
            placed=placed,
            others=len(serving) - placed.total() - spares,
            serving=len(serving),
            busy=sum(bool(one.held) for _, one in serving),
            queued_tokens=placement.queue.tokens,
            rate_tokens_s=placement.load.rate_tokens_s,
            cores_busy=self._cores_busy(here),
            rates=rates_by_role(here),
        )
        for advice in self._autoscaler.look(fleet, now, window_open=self.windows.is_open):
            told = {"role": advice.role, "seen": advice.seen, "count": advice.count, "reason": advice.reason}
            self._on_event("ScaleAdvised", {**told, "observed": asdict(advice.observed)})

    def _cores_busy(self, sessions: list[AgentSession]) -> float | None:
        """Share of the cores in use, where all engines compute on those of this machine."""
        own = socket.gethostname()
        if self._cores is None or any(session.hello.node != own for session in sessions):
            return None
        return self._cores.look()

    # -- HTTP ---------------------------------------------------------------------------------------

    async def _drain_route(self, request: web.Request) -> web.StreamResponse:
        caller = await self._admitted(request)
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
        session = self.sessions.get(name)
        if session is not None and not caller.is_ours and session.caller != caller:
            raise Unauthorized(f"The token {caller.token!r} may not drain {name}, which joined otherwise.")
        if not self.instances.drain(name, asked.deadline_s, asked.reason):
            return web.json_response(
                {"code": "not_found", "message": f"no instance {name!r}; there are {sorted(self.sessions)}"},
                status=404,
            )
        return web.json_response({"instance": name, "draining": True})

    async def _status_route(self, request: web.Request) -> web.StreamResponse:
        self._only_ours(request, "see the plane's status")
        return web.json_response(self.status())

    def looked_at(self, wanted: dict[str, int]) -> dict[str, Any]:
        """Of a fleet: `wanted` is how many vertices each role is to have. The clients of the door are to the elasticity
        policy what a trainer is: it waits while one of their samples has no place."""
        now = self._now()
        self.dispatch.wants(wanted)
        if self._autoscaler is not None and self.door is not None:
            waited_s = self.door.waited_s
            self._autoscaler.pulse(TrainerStatus(at_s=now, waited_s=waited_s, wanted=wanted), now)
        return {
            "serving": sum(one.admitted for one in self.groups.instances.values()),
            "open": self.door.ledger.open_count if self.door is not None else 0,
            "generated": self.groups.account.generated,
        }

    def status(self) -> dict[str, Any]:
        """The plane's status, as plain data."""
        self._reports.take_in()
        return {
            "epoch": self._term,
            "version": self.weights.newest,
            "served_version": self.groups.served_version,
            **groups_status(self.groups),
            "refused": self.refused,
            **({"door": self.door.status()} if self.door is not None else {}),
            "local_window": self.windows.status(self._now()),
            "pools": pools_status(self.sessions.values(), self.settings.prices),
            "instances": [
                instance_status(
                    session,
                    instance,
                    self._now(),
                    checksum=self.weights.checksum_of(instance.version),
                )
                for session in self.sessions.values()
                if (instance := self.groups.instances.get(session.name)) is not None
            ],
        }


def _telling(on_event: Callable[[str, dict[str, Any]], None]) -> Callable[[str, dict[str, Any]], None]:
    """A wrapper of `on_event` that does not raise: an event that cannot be reported is left out, and that is
    printed."""

    def tell(kind: str, fields: dict[str, Any]) -> None:
        try:
            on_event(kind, fields)
        except Exception as error:  # the listener may fail in any way on what a peer sent
            print(f"the event {kind} could not be told: {error!r}"[:1000], file=sys.stderr, flush=True)

    return tell
