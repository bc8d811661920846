"""The rollout manager: where agents and the trainer dial in, and what keeps the book and its ledger together.

One asyncio loop, one WebSocket a peer. What a frame brings about is decided by `Book` (samples), `Router` (who gets
what) and here (versions, sessions, deadlines); the ledger is written by one thread, a batch at a time.

Invariants:
- *acknowledged means durable*: an agent's progress is acknowledged, and a group is delivered, after the commit that
  holds it. An agent keeps what was not acknowledged, so this process can be killed at any moment;
- *admitted means verified*: an instance is given work after it said that it loaded a version new enough, with the
  checksum that was published;
- *pinned waits*: while a request that must not see a newer policy is open, no newer one is sent out;
- *nobody waits for one*: a peer that does not read is cut off, and never slows the loop.

This module must not know about Ray, graphs or how a trainer trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import ssl
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web

from gyre.errors import GyreError
from gyre.rollouts.book import Batch, Book
from gyre.rollouts.frames import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Ack,
    Assign,
    Attach,
    Attached,
    Cancel,
    Done,
    Drain,
    Draining,
    EngineDied,
    Frame,
    FrameError,
    Hello,
    Loaded,
    LoadFailed,
    Progress,
    Publish,
    Reject,
    Request,
    Taken,
    Weights,
    Welcome,
    decode,
    encode,
    refuse,
)
from gyre.rollouts.model_folder import LISTING, ModelFolder
from gyre.rollouts.samples import pack_groups
from gyre.rollouts.tickets import SampleState, Ticket
from gyre.store import RolloutStore

SEND_LIMIT_BYTES = 256 << 20
"""Waiting for one peer that does not read; beyond it the connection is cut and the peer dials again."""

GROUPS_PER_FRAME = 64
"""Whole groups in one frame to the trainer: some hundreds of kilobytes, and never near the frame limit."""

ASSIGN_PER_TURN = 2048
"""Samples given out before the loop looks at its sockets again: about 20 ms."""

TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    report_interval_s: float = 0.25
    commit_interval_s: float = 0.1
    """How long progress is collected before it is committed."""
    urgent_commit_s: float = 0.005
    """The same when a whole group waits for it."""
    silence_timeout_s: float = 3.0
    """An agent that reported nothing for this long is lost, though its connection stands."""
    reconnect_grace_s: float = 0.75
    """After a connection broke, before its samples go on elsewhere: a short cut costs nothing."""
    restart_grace_s: float = 2.0
    """After a start, before samples that somebody may still hold are given out anew."""
    hello_timeout_s: float = 10.0
    load_timeout_s: float = 600.0
    """For fetching and loading a version, the start of an engine with it included."""
    update_mode: str = "in_place"
    rebalance_every_s: float = 1.0


@dataclass(eq=False, slots=True)
class Peer:
    """One connection. Frames to it are queued; a task of its own writes them."""

    socket: web.WebSocketResponse
    name: str
    queue: asyncio.Queue[bytes | None] = field(default_factory=asyncio.Queue)
    waiting_bytes: int = 0
    closing: bool = False

    def send(self, frame: Frame) -> None:
        if self.closing:
            return
        data = encode(frame)
        self.waiting_bytes += len(data)
        if self.waiting_bytes > SEND_LIMIT_BYTES:
            self.close()
            return
        self.queue.put_nowait(data)

    def close(self) -> None:
        if not self.closing:
            self.closing = True
            self.queue.put_nowait(None)

    async def write(self) -> None:
        while (data := await self.queue.get()) is not None:
            try:
                await self.socket.send_bytes(data)
            except (ConnectionError, RuntimeError):  # gone, which the reading side notices and tells
                return
            self.waiting_bytes -= len(data)
        with contextlib.suppress(ConnectionError, RuntimeError, TimeoutError):
            await asyncio.wait_for(self.socket.close(), 2.0)


@dataclass(eq=False, slots=True)
class AgentSession:
    hello: Hello
    peer: Peer | None
    number: int
    heard_at: float
    joined_at: float
    lost_at: float | None = None
    draining: bool = False
    drain_until: float | None = None
    loading: int | None = None
    loading_since: float = 0.0
    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    rate_tokens_s: float = 0.0
    engine_deaths: int = 0

    @property
    def name(self) -> str:
        return self.hello.instance


class RolloutManager:
    """`term` fences older managers; `token` is what peers must present. `on_event(kind, fields)` is told what
    people should know: instances that join and go, samples that are set aside."""

    def __init__(
        self,
        store: RolloutStore,
        *,
        term: int,
        token: str,
        settings: ManagerSettings | None = None,
        on_event: Callable[[str, dict[str, Any]], None] = lambda kind, fields: None,
        on_fatal: Callable[[BaseException], None] = lambda error: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or ManagerSettings()
        self.book = Book(epoch=term)
        self.sessions: dict[str, AgentSession] = {}
        self.published: Weights | None = None
        """The newest version."""
        self.served: Weights | None = None
        """The version that instances are to have; behind `published` while a pinned request is open."""
        self._store = store
        self._term = term
        self._token = token
        self._on_event = on_event
        self._on_fatal = on_fatal
        self._now = monotonic
        self._trainer: Peer | None = None
        self._trainer_term = -1
        self._ready: dict[str, dict[int, Ticket]] = defaultdict(dict)
        """Whole groups in the ledger that the trainer has not taken."""
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="gyre-rollout-ledger")
        self._commit_soon = asyncio.Event()
        self._commit_now = asyncio.Event()
        self._dispatch_scheduled = False
        self._hold_until = 0.0
        self._rebalanced_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self._model: str | None = None
        self._folders: dict[int, ModelFolder] = {}
        self.commits = 0
        self.refused = 0

    # -- life ---------------------------------------------------------------------------------------

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Take the ledger over, listen, and give the port. Raises Fenced where a newer manager exists."""
        loop = asyncio.get_running_loop()
        rows = await loop.run_in_executor(self._writer, self._take_over)
        self.book.restore(rows.counters, rows.groups, rows.deltas)
        known = rows.counters.get("weights")
        if known is not None:
            self._set_published(Weights.model_validate(known))
            self.served = self.published
        self.book.newest_version = max(self.book.newest_version, rows.counters.get("newest_version", -1))
        # Whole groups were told to nobody yet; they go out when the trainer attaches.
        self._commit_now.set()
        if any(not state.finish for state in self.book.samples()):
            self._hold_until = self._now() + self.settings.restart_grace_s
        application = web.Application(client_max_size=MAX_FRAME_BYTES)
        application.add_routes(
            [
                web.get("/v1/agent", self._agent_route),
                web.get("/v1/trainer", self._trainer_route),
                web.get("/v1/weights/{version}/{name}", self._weights_route),
                web.post("/v1/drain", self._drain_route),
                web.get("/v1/status", self._status_route),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port, ssl_context=tls, reuse_address=True)
        await site.start()
        for work in (self._commit_loop, self._tick_loop):
            self._tasks.append(asyncio.create_task(self._guarded(work)))
        sockets = self._runner.addresses
        return int(sockets[0][1])

    def _take_over(self) -> Any:
        self._store.take_over(term=self._term)
        return self._store.load()

    async def stop(self) -> None:
        """Agents are told nothing: they keep what they have and dial whoever comes next."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        peers = [session.peer for session in self.sessions.values() if session.peer] + [self._trainer]
        for peer in peers:
            if peer is not None:
                peer.close()
        if self.book.is_dirty:
            batch = self.book.take_batch()
            with contextlib.suppress(GyreError):
                await asyncio.get_running_loop().run_in_executor(self._writer, self._write, batch)
        if self._runner is not None:
            await self._runner.cleanup()
        self._writer.shutdown()

    async def _guarded(self, work: Callable[[], Any]) -> None:
        """A background task that fails ends the manager: it is started again, and the ledger has everything."""
        try:
            await work()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            self._on_fatal(error)

    # -- who dials in -------------------------------------------------------------------------------

    def _authorised(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode(), f"Bearer {self._token}".encode())

    def _refuse_http(self) -> web.Response:
        self.refused += 1
        return web.json_response(
            {"code": "unauthorised", "message": "Give the rollout plane's token: --token."}, status=401
        )

    async def _agent_route(self, request: web.Request) -> web.StreamResponse:
        if not self._authorised(request):
            return self._refuse_http()
        socket = web.WebSocketResponse(max_msg_size=MAX_FRAME_BYTES, compress=False)
        await socket.prepare(request)
        peer = Peer(socket, "an agent")
        writer = asyncio.create_task(peer.write())
        session: AgentSession | None = None
        try:
            session = self._join(await self._first(socket), peer)
            async for message in socket:
                if message.type is WSMsgType.BINARY:
                    if session.peer is not peer:
                        return socket  # the same instance dialled again: this connection is history
                    self._hear(session, decode(message.data))
                elif message.type is WSMsgType.TEXT:
                    raise refuse("malformed", "a text message; frames are binary")
        except FrameError as error:
            self._reject(peer, error)
        finally:
            if session is not None and session.peer is peer:
                self._disconnected(session)
            peer.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(writer), 3.0)
            writer.cancel()
        return socket

    async def _first(self, socket: web.WebSocketResponse) -> Frame | Progress:
        try:
            message = await socket.receive(timeout=self.settings.hello_timeout_s)
        except TimeoutError:
            raise refuse("no_hello", "nothing came within the time for a hello") from None
        if message.type is not WSMsgType.BINARY:
            raise refuse("no_hello", "the first message is no frame")
        return decode(message.data)

    def _reject(self, peer: Peer, error: FrameError) -> None:
        """Said to the peer and told once; the connection ends, and nobody else notices."""
        self.refused += 1
        reason = str(error.details.get("reason", "malformed"))
        self._on_event("PeerRefused", {"peer": peer.name, "reason": reason, "message": str(error)[:2000]})
        peer.send(Reject(code=reason, message=str(error)[:2000]))

    # -- agents -------------------------------------------------------------------------------------

    def _join(self, frame: Frame | Progress, peer: Peer) -> AgentSession:
        if not isinstance(frame, Hello):
            raise refuse("no_hello", f"the first frame is {type(frame).__name__}, not Hello")
        if frame.protocol != PROTOCOL:
            raise refuse(
                "protocol", f"{frame.instance} speaks protocol {frame.protocol}, this manager {PROTOCOL}"
            )
        if self._model is not None and frame.model not in (self._model, "unset"):
            raise refuse("model", f"{frame.instance} serves model {frame.model}; this job's is {self._model}")
        if frame.version > self.book.newest_version:
            raise refuse(
                "unknown_version",
                f"{frame.instance} says it serves version {frame.version}; the newest is {self.book.newest_version}",
            )
        peer.name = frame.instance
        before = self.sessions.get(frame.instance)
        back = before is not None and before.hello.incarnation == frame.incarnation
        if before is not None and before.peer is not None:
            before.peer.close()
        now = self._now()
        keep = self.book.join(frame)
        instance = self.book.instances[frame.instance]
        session = AgentSession(frame, peer, instance.number, heard_at=now, joined_at=now)
        self.sessions[frame.instance] = session
        version = frame.version
        if version >= 0 and not self._is_known(version, frame.checksum):
            version = -1  # the same number, other bytes: an instance of another history
        instance.version = version
        weights = self.served
        if weights is not None and version == weights.version:
            weights = None
        peer.send(
            Welcome(
                protocol=PROTOCOL,
                epoch=self._term,
                interval_s=self.settings.report_interval_s,
                keep=keep,
                weights=weights,
                update_mode=self.settings.update_mode,  # type: ignore[arg-type]
            )
        )
        if weights is not None:
            session.loading, session.loading_since = weights.version, now
        self.book.admit(frame.instance)
        self._on_event(
            "InstanceJoined",
            {
                "instance": frame.instance,
                "incarnation": frame.incarnation,
                "engine": frame.engine,
                "held": len(frame.held),
                "kept": len(keep),
                "back": back,
            },
        )
        self._dispatch_later()
        return session

    def _is_known(self, version: int, checksum: str) -> bool:
        folder = self._folders.get(version)
        return folder is None or folder.checksum == checksum

    def _hear(self, session: AgentSession, frame: Frame | Progress) -> None:
        session.heard_at = self._now()
        if isinstance(frame, Progress):
            self._progress(session, frame)
        elif isinstance(frame, Loaded):
            self._loaded(session, frame)
        elif isinstance(frame, LoadFailed):
            session.loading = None
            self._on_event(
                "WeightsRefused",
                {"instance": session.name, "version": frame.version, "error": frame.error[:4000]},
            )
            assert session.peer is not None
            session.peer.close()  # it dials again, and is given the version again
        elif isinstance(frame, Draining):
            self._drain(session, frame.deadline_s, frame.reason)
        elif isinstance(frame, EngineDied):
            self._engine_died(session, frame)
        else:
            raise refuse("unexpected", f"an agent does not send {type(frame).__name__}")

    def _progress(self, session: AgentSession, frame: Progress) -> None:
        session.running, session.waiting = frame.running, frame.waiting
        session.used_tokens, session.rate_tokens_s = frame.used_tokens, frame.rate_tokens_s
        back = self.book.progress(session.name, frame)
        for state in back:
            if state.key in self.book.moving:
                self._send_work(self.book.hand_on(state))
        if frame.ends:
            self._dispatch_later()
            if session.draining and not self.book.instances[session.name].held:
                self._drained(session)
        if self.book.has_whole:
            self._commit_now.set()
        self._commit_soon.set()

    def _loaded(self, session: AgentSession, frame: Loaded) -> None:
        session.loading = None
        if not self._is_known(frame.version, frame.checksum):
            raise refuse(
                "checksum", f"{session.name} loaded version {frame.version} with checksum {frame.checksum}"
            )
        if frame.version > self.book.newest_version:
            raise refuse("unknown_version", f"{session.name} loaded version {frame.version}, never published")
        self.book.serve(session.name, frame.version)
        self._on_event(
            "WeightsLoaded",
            {
                "instance": session.name,
                "version": frame.version,
                "fetch_s": frame.fetch_s,
                "load_s": frame.load_s,
            },
        )
        self._update(session)
        self._admit(session)
        self._dispatch_later()

    def _admit(self, session: AgentSession) -> None:
        able = session.peer is not None and not session.draining
        self.book.admit(session.name, able=able)

    def _engine_died(self, session: AgentSession, frame: EngineDied) -> None:
        session.engine_deaths += 1
        poisoned = self.book.engine_died(session.name)
        instance = self.book.instances[session.name]
        instance.version = -1
        self._admit(session)
        self._on_event(
            "EngineDied",
            {"instance": session.name, "error": frame.message[:2000], "tail": frame.tail[-8000:]},
        )
        for state in poisoned:
            self._on_event("SampleSetAside", {**_told(state), "tail": frame.tail[-2000:]})
        if self.served is not None and session.peer is not None:
            session.loading, session.loading_since = self.served.version, self._now()
            session.peer.send(self.served)
        self._commit_soon.set()
        self._dispatch_later()

    def _disconnected(self, session: AgentSession) -> None:
        session.peer = None
        session.loading = None
        if session.draining:
            self._lost(session, "drained")
            return
        session.lost_at = self._now()
        if session.name in self.book.instances:
            self._admit(session)

    def _lost(self, session: AgentSession, reason: str) -> None:
        if self.sessions.get(session.name) is session:
            del self.sessions[session.name]
        if session.peer is not None:
            session.peer.close()
            session.peer = None
        instance = self.book.instances.get(session.name)
        if instance is None or instance.number != session.number:
            return
        orphans = self.book.leave(session.name)
        self._on_event(
            "InstanceLeft",
            {
                "instance": session.name,
                "reason": reason,
                "moved": len(orphans),
                "tokens": sum(state.length for state in orphans),
            },
        )
        self._dispatch_later()

    # -- draining -----------------------------------------------------------------------------------

    def drain(self, name: str, deadline_s: float, reason: str) -> bool:
        """Ask an instance to hand its samples over and leave. False where there is none of that name."""
        session = self.sessions.get(name)
        if session is None:
            return False
        if session.peer is not None:
            session.peer.send(Drain(deadline_s=deadline_s, reason=reason))
        self._drain(session, deadline_s, reason)
        return True

    def _drain(self, session: AgentSession, deadline_s: float, reason: str) -> None:
        if session.draining:
            return
        session.draining = True
        session.drain_until = self._now() + deadline_s
        self._admit(session)
        self._on_event(
            "InstanceDraining", {"instance": session.name, "reason": reason, "deadline_s": deadline_s}
        )
        if not self.book.instances[session.name].held:
            self._drained(session)

    def _drained(self, session: AgentSession) -> None:
        # Its last progress must be durable before it may forget: the acknowledgement goes out with the commit.
        self._commit_now.set()
        self._commit_soon.set()

    # -- work ---------------------------------------------------------------------------------------

    def _dispatch_later(self) -> None:
        """Once for everything that this turn of the loop brings."""
        if not self._dispatch_scheduled:
            self._dispatch_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_scheduled = False
        if self._now() < self._hold_until:
            return
        given = self.book.assign(ASSIGN_PER_TURN)
        self._send_work(given)
        if sum(len(work) for _, work in given.values()) == ASSIGN_PER_TURN:
            self._dispatch_later()

    def _send_work(self, given: dict[str, Any]) -> None:
        for name, (prompts, work) in given.items():
            session = self.sessions.get(name)
            if session is not None and session.peer is not None:
                session.peer.send(Assign(prompts=prompts, work=work))

    def _rebalance(self, now: float) -> None:
        self._rebalanced_at = now
        router = self.book.router
        moves = [*router.rebalance(now), *router.stragglers(now)]
        called: dict[str, list[tuple[int, int]]] = defaultdict(list)
        for move in moves:
            state = self.book.sample(move.sample)
            if state is None or state.instance != move.source:
                continue
            self.book.call_back(state, move.target)
            called[move.source].append((state.row, state.lease))
        for name, rows in called.items():
            session = self.sessions.get(name)
            if session is not None and session.peer is not None:
                session.peer.send(Cancel(rows=rows))
            self._on_event("SamplesMoved", {"instance": name, "count": len(rows)})

    # -- versions -----------------------------------------------------------------------------------

    def _publish(self, frame: Publish) -> None:
        newest = self.published
        if newest is not None and frame.version <= newest.version:
            if frame.version == newest.version and frame.checksum != newest.checksum:
                raise refuse(
                    "checksum",
                    f"version {frame.version} was published with checksum {newest.checksum}, now {frame.checksum}",
                )
            return
        folder = ModelFolder.read(Path(frame.path))
        if folder.checksum != frame.checksum:
            raise refuse(
                "checksum",
                f"{frame.path}/{LISTING} says {folder.checksum}, the trainer published {frame.checksum}",
            )
        weights = Weights(
            version=frame.version,
            checksum=frame.checksum,
            files=folder.files,
            path=f"/v1/weights/{frame.version}",
            local_path=str(folder.path),
        )
        self._set_published(weights)
        self._commit_soon.set()
        self._promote()

    def _set_published(self, weights: Weights) -> None:
        folder = ModelFolder(Path(weights.local_path), weights.files, weights.checksum)
        self.published = weights
        self.book.newest_version = weights.version
        self._folders[weights.version] = folder
        for old in sorted(self._folders)[:-4]:
            del self._folders[old]
        self._model = self._model or folder.fingerprint()

    def _promote(self) -> None:
        """Send the newest version out, unless somebody must not see it yet."""
        newest = self.published
        if newest is None or self.served is newest:
            return
        if any(
            ticket.pinned and ticket.left and ticket.min_version < newest.version
            for ticket in self.book.tickets.values()
        ):
            return
        self.served = newest
        for session in self.sessions.values():
            self._update(session)

    def _update(self, session: AgentSession) -> None:
        """Send the served version, unless the instance has it or is loading one."""
        served = self.served
        if served is None or session.peer is None or session.loading is not None or session.draining:
            return
        if self.book.instances[session.name].version != served.version:
            session.loading, session.loading_since = served.version, self._now()
            session.peer.send(served)

    # -- the trainer --------------------------------------------------------------------------------

    async def _trainer_route(self, request: web.Request) -> web.StreamResponse:
        if not self._authorised(request):
            return self._refuse_http()
        socket = web.WebSocketResponse(max_msg_size=MAX_FRAME_BYTES, compress=False)
        await socket.prepare(request)
        peer = Peer(socket, "the trainer")
        writer = asyncio.create_task(peer.write())
        try:
            first = await self._first(socket)
            if not isinstance(first, Attach) or first.protocol != PROTOCOL:
                raise refuse("no_hello", "the first frame is no Attach of this protocol")
            if first.term < self._trainer_term:
                raise refuse(
                    "fenced", f"a trainer of term {self._trainer_term} has attached; this one is {first.term}"
                )
            if self._trainer is not None:
                self._trainer.close()
            self._trainer, self._trainer_term = peer, first.term
            version = self.published.version if self.published is not None else -1
            peer.send(Attached(protocol=PROTOCOL, epoch=self._term, version=version))
            async for message in socket:
                if message.type is WSMsgType.BINARY and self._trainer is peer:
                    self._hear_trainer(peer, decode(message.data))
        except FrameError as error:
            self._reject(peer, error)
        finally:
            if self._trainer is peer:
                self._trainer = None
            peer.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(writer), 3.0)
            writer.cancel()
        return socket

    def _hear_trainer(self, peer: Peer, frame: Frame | Progress) -> None:
        if isinstance(frame, Request):
            required = self.book.required_version
            opened = self.book.open(frame)
            if self.book.required_version != required:
                for session in self.sessions.values():
                    self._admit(session)
            if opened:
                self._commit_soon.set()
                self._dispatch_later()
            self._deliver(list(self._ready[frame.purpose].values()))
        elif isinstance(frame, Taken):
            for name, row, lease in self.book.close(frame.purpose, frame.ids):
                holder = self.sessions.get(name)
                if holder is not None and holder.peer is not None:
                    holder.peer.send(Cancel(rows=[(row, lease)]))
            ready = self._ready[frame.purpose]
            for group_id in frame.ids:
                ready.pop(group_id, None)
            if not ready:
                del self._ready[frame.purpose]
            self._commit_soon.set()
            self._promote()
        elif isinstance(frame, Publish):
            self._publish(frame)
        else:
            raise refuse("unexpected", f"a trainer does not send {type(frame).__name__}")

    def _deliver(self, tickets: list[Ticket]) -> None:
        if self._trainer is None:
            return
        by_purpose: dict[str, list[Ticket]] = defaultdict(list)
        for ticket in tickets:
            by_purpose[ticket.purpose].append(ticket)
        for purpose, some in by_purpose.items():
            for at in range(0, len(some), GROUPS_PER_FRAME):
                groups = [ticket.whole() for ticket in some[at : at + GROUPS_PER_FRAME]]
                self._trainer.send(Done(purpose=purpose, groups=pack_groups(groups)))

    # -- the ledger ---------------------------------------------------------------------------------

    async def _commit_loop(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            if not self._commit_now.is_set():
                await self._commit_soon.wait()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._commit_now.wait(), self.settings.commit_interval_s)
            if self._commit_now.is_set():
                await asyncio.sleep(self.settings.urgent_commit_s)
            self._commit_now.clear()
            self._commit_soon.clear()
            if not self.book.is_dirty:
                continue
            batch = self.book.take_batch()
            if self.published is not None:
                batch.counters["weights"] = self.published.model_dump()
            batch.counters["newest_version"] = self.book.newest_version
            await loop.run_in_executor(self._writer, self._write, batch)
            self.commits += 1
            self._committed(batch)

    def _write(self, batch: Batch) -> None:
        """On the ledger's thread."""
        self._store.write(
            self._term,
            counters=batch.counters,
            opened=batch.opened,
            deltas=batch.encoded(),
            closed=batch.closed,
            forgotten=batch.forgotten,
        )

    def _committed(self, batch: Batch) -> None:
        for session in list(self.sessions.values()):
            seq = batch.sessions.get(session.number)
            if seq is not None and session.peer is not None:
                session.peer.send(Ack(seq=seq))
        for ticket in batch.whole:
            if ticket.number in self.book.tickets:
                self._ready[ticket.purpose][ticket.group.id] = ticket
        self._deliver([ticket for ticket in batch.whole if ticket.number in self.book.tickets])
        if any(ticket.pinned for ticket in batch.whole):
            self._promote()

    # -- time ---------------------------------------------------------------------------------------

    async def _tick_loop(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._now()
            settings = self.settings
            for session in list(self.sessions.values()):
                if session.lost_at is not None and session.peer is None:
                    if now - session.lost_at > settings.reconnect_grace_s:
                        self._lost(session, "connection_lost")
                elif now - session.heard_at > settings.silence_timeout_s:
                    self._lost(session, "silent")
                elif session.drain_until is not None and now > session.drain_until + 1.0:
                    self._lost(session, "drain_deadline")
                elif session.loading is not None and now - session.loading_since > settings.load_timeout_s:
                    self._lost(session, "weights_not_loaded")
            if self._hold_until and now >= self._hold_until:
                self._hold_until = 0.0
                self._dispatch_later()
            if now - self._rebalanced_at > settings.rebalance_every_s:
                self._rebalance(now)
                self._dispatch_later()

    # -- HTTP ---------------------------------------------------------------------------------------

    async def _weights_route(self, request: web.Request) -> web.StreamResponse:
        if not self._authorised(request):
            return self._refuse_http()
        name = request.match_info["name"]
        version = request.match_info["version"]
        folder = self._folders.get(int(version)) if version.isdecimal() else None
        if folder is None or name not in {file.name for file in folder.files}:
            return web.json_response(
                {"code": "not_found", "message": f"version {version} has no file {name} here"}, status=404
            )
        return web.FileResponse(folder.path / name)

    async def _drain_route(self, request: web.Request) -> web.StreamResponse:
        if not self._authorised(request):
            return self._refuse_http()
        try:
            body = await request.json()
            name, deadline_s = str(body["instance"]), float(body.get("deadline_s", 30.0))
            reason = str(body.get("reason", "asked to"))
        except (json.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            return web.json_response(
                {"code": "invalid", "message": f'expected {{"instance": NAME, "deadline_s": S}}: {error!r}'},
                status=422,
            )
        if not self.drain(name, deadline_s, reason):
            return web.json_response(
                {"code": "not_found", "message": f"no instance {name!r}; there are {sorted(self.sessions)}"},
                status=404,
            )
        return web.json_response({"instance": name, "draining": True})

    async def _status_route(self, request: web.Request) -> web.StreamResponse:
        if not self._authorised(request):
            return self._refuse_http()
        return web.json_response(self.status())

    def status(self) -> dict[str, Any]:
        """How the plane is, as plain data."""
        account = self.book.account
        now = self._now()
        return {
            "epoch": self._term,
            "version": self.published.version if self.published is not None else -1,
            "served_version": self.served.version if self.served is not None else -1,
            "queued": self.book.router.queued(),
            "open_groups": len(self.book.tickets),
            "account": {
                "generated": account.generated,
                "delivered": account.delivered,
                "in_flight": self.book.in_flight_tokens,
                "discarded": dict(account.discarded),
                "missing": self.book.missing_tokens(),
            },
            "samples_set_aside": account.samples_set_aside,
            "refused": self.refused,
            "instances": [
                {
                    "instance": session.name,
                    "incarnation": session.hello.incarnation,
                    "engine": session.hello.engine,
                    "node": session.hello.node,
                    "pid": session.hello.pid,
                    "version": self.book.instances[session.name].version,
                    "state": (
                        "cut"
                        if session.peer is None
                        else "draining"
                        if session.draining
                        else "loading"
                        if session.loading is not None
                        else "working"
                        if self.book.instances[session.name].held
                        else "idle"
                    ),
                    "samples": len(self.book.instances[session.name].held),
                    "running": session.running,
                    "tokens": self.book.instances[session.name].tokens,
                    "rate_tokens_s": round(session.rate_tokens_s, 1),
                    "kv_used_tokens": session.used_tokens,
                    "silent_s": round(now - session.heard_at, 2),
                }
                for session in self.sessions.values()
                if session.name in self.book.instances
            ],
        }


def _told(state: SampleState) -> dict[str, Any]:
    return {
        "group": state.ticket.group.id,
        "purpose": state.ticket.purpose,
        "index": state.index,
        "prompt": state.ticket.group.prompt_ids[:256].tolist(),
    }
