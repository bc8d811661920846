"""The rollout manager: where agents and the trainer dial in, and what keeps the book and its ledger together.

One asyncio loop, one WebSocket a peer. What a frame brings about is decided by `OpenGroups` (samples), `Router` (who
gets what) and here (versions, sessions, deadlines); the ledger is written by one thread, a batch at a time.

Invariants:
- *acknowledged means durable*: an agent's progress is acknowledged, and a group is delivered, after the commit that
  holds it. An agent keeps what was not acknowledged, so this process can be killed at any moment;
- *admitted means verified*: an instance is given work after it said that it loaded a version new enough, with the
  checksum that was published;
- *published means durable*: a version is sent out after the commit that holds it, so none is ever heard of that the
  next manager does not know;
- *continued means durable*: a sample goes on elsewhere after the commit that holds its tokens;
- *pinned waits*: while a request that must not see a newer policy is open, no newer one is sent out;
- *nobody waits for one*: a peer that does not read is cut off, and never slows the loop.

This module must not know about Ray, graphs or how a trainer trains.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import hmac
import ssl
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from aiohttp import WSMsgType, web
from msgspec.structs import replace

from gyre.config import WeightsSpec
from gyre.errors import GyreError
from gyre.rollouts.core.groups import Given, OpenGroups, Recalled
from gyre.rollouts.core.requests import InFlightSample
from gyre.rollouts.manager.autoscaler import Autoscaler, Fleet
from gyre.rollouts.manager.delivery import Delivery
from gyre.rollouts.manager.device_sharing import TRAINER_AWAY_S, LocalWindows
from gyre.rollouts.manager.malloc_tuning import give_large_blocks_back
from gyre.rollouts.manager.policy_versions import PolicyVersions
from gyre.rollouts.manager.report_queue import ReportQueue
from gyre.rollouts.manager.sessions import AgentSession, AgentSessions, Connection, RefusedVersion
from gyre.rollouts.manager.status import book_status, instance_status
from gyre.rollouts.protocol.codec import MAX_FRAME_BYTES, checked, unpack
from gyre.rollouts.protocol.fields import FrameError, refuse
from gyre.rollouts.protocol.frames import (
    PROTOCOL,
    Ack,
    Asleep,
    Assign,
    Attach,
    Attached,
    Awake,
    Cancel,
    Drain,
    Draining,
    EngineDied,
    Failed,
    Frame,
    Hello,
    LendDevices,
    Loaded,
    LoadFailed,
    Publish,
    Pulse,
    ReclaimDevices,
    Reject,
    Request,
    Taken,
    Weights,
    WeightsTrouble,
    Welcome,
    Work,
)
from gyre.rollouts.protocol.heartbeat import HEARTBEAT_S, watch_acknowledgements
from gyre.rollouts.protocol.progress import Progress, Report
from gyre.rollouts.samples import unpack_groups
from gyre.rollouts.scheduling.elasticity import ElasticSettings
from gyre.rollouts.token_log.group_commit import GroupCommit
from gyre.rollouts.token_log.write_buffer import WriteBatch
from gyre.store import RolloutRows, RolloutStore

ACK_WITHIN_S = 10.0
"""Of a report that ended nothing: an agent only wants to know what of its ends is in the ledger. A thousand instances
would read a thousand of them a second for nothing. Others are acknowledged with their commit."""

WORK_PORTION_BYTES = 4 << 20
"""Of one frame with samples that go on: far below the frame limit, however long they are."""

ASSIGN_PER_TURN = 2048
"""Samples given out before the loop looks at its sockets again: about 20 ms."""

DEATHS = frozenset(("connection_lost", "silent", "replaced"))
"""Ways to leave that a sample may be to blame for."""

TICK_S = 0.1

RELOAD_FIRST_S, RELOAD_MAX_S = 0.5, 60.0
"""Pause before an instance is told to load a version again that it could not load, doubled each time. Each try costs a
row in the journal, and what failed often will most likely fail again."""

SOURCES_TOLD = 16
"""Of those who have a version; more find each other."""


def calm_collector() -> None:
    """For a process that runs a manager and little else. What the manager lets go of is freed at once; to look
    through all that it keeps takes a tenth of a second at 16,384 samples, and would find nothing. What was imported
    stays as long as the process, and is not looked through either. Large blocks go back to the system, for thousands of
    them come and go."""
    give_large_blocks_back()
    if not gc.get_freeze_count():
        gc.collect()
        gc.freeze()
    gc.set_threshold(20_000, 50, 1000)


@dataclass(frozen=True, slots=True)
class ManagerSettings:
    report_interval_s: float = 0.25
    commit_interval_s: float = 0.1
    """How long progress is collected before it is committed."""
    urgent_commit_s: float = 0.05
    """The same when a whole group waits for it, or a sample to go on elsewhere. A commit costs some two milliseconds
    however little is in it."""
    silence_timeout_s: float = 3.0
    """An agent that reported nothing for this long is lost, though its connection stands."""
    reconnect_grace_s: float = 0.75
    """After a connection broke, before its samples go on elsewhere: a short cut costs nothing."""
    restart_grace_s: float = 2.0
    """After a start, before samples that somebody may still hold are given out anew."""
    hello_timeout_s: float = 10.0
    heartbeat_s: float = HEARTBEAT_S
    """Silence of a connection after which a ping is sent; half as long again is left for the answer."""
    send_timeout_s: float = 30.0
    """For a peer to read one frame; one that does not is cut off."""
    load_timeout_s: float = 600.0
    """For fetching and loading a version, the start of an engine with it included."""
    update_mode: str = "in_place"
    weights: WeightsSpec = field(default_factory=WeightsSpec)
    role: str = "rollout"
    """Of the instances that Gyre places: they are named by it and their rank."""
    elastic: ElasticSettings | None = None
    """How many of them there are to be; None leaves that to people."""
    rebalance_every_s: float = 1.0


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
        self.book = OpenGroups(epoch=term)
        self.sessions = AgentSessions(self.book)
        self.weights = PolicyVersions()
        self._store = store
        self._term = term
        self._token = token
        self._on_event = on_event = _telling(on_event)
        self._on_fatal = on_fatal
        self._now = monotonic
        self._trainer: Connection | None = None
        self._trainer_term = -1
        self._delivery = Delivery(self.book.requests)
        self._commits = GroupCommit(
            self._batch,
            lambda batch: self._write(batch),
            self._committed,
            interval_s=self.settings.commit_interval_s,
            urgent_s=self.settings.urgent_commit_s,
        )
        self._intake = ReportQueue(self.book, self._refused)
        self._dispatch_scheduled = False
        self._admission_stale = True
        """Something other than a report came since admission was computed."""
        self._hold_until = 0.0
        self._rebalanced_at = 0.0
        self._fleet = Autoscaler(self.settings.elastic) if self.settings.elastic is not None else None
        self._tasks: list[asyncio.Task[None]] = []
        self._runner: web.AppRunner | None = None
        self._committed_seq = 0
        self._restored = False
        self._failures_told: set[int] = set()
        self._windows = LocalWindows(
            self.book,
            self.sessions,
            tell=self._tell,
            call_back=self._call_back,
            lose=self._lost,
            refresh=self._refresh,
            answer=self._answer,
            on_event=on_event,
            now=monotonic(),
            grace_s=self.settings.restart_grace_s + TRAINER_AWAY_S,
        )
        self.refused = 0

    # -- life ---------------------------------------------------------------------------------------

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Take the ledger over, listen, and give the port. Raises Fenced where a newer manager exists."""
        loop = asyncio.get_running_loop()
        if not self._restored:
            self._restore(await loop.run_in_executor(self._commits.thread, self._take_over))
            self._restored = True
        application = web.Application(client_max_size=MAX_FRAME_BYTES)
        application.add_routes(
            [
                web.get("/v1/agent", self._agent_route),
                web.get("/v1/trainer", self._trainer_route),
                web.post("/v1/drain", self._drain_route),
                web.get("/v1/status", self._status_route),
            ]
        )
        self._runner = web.AppRunner(application, access_log=None, handle_signals=False)
        await self._runner.setup()
        try:
            await web.TCPSite(self._runner, host, port, ssl_context=tls, reuse_address=True).start()
        except OSError:
            await self._runner.cleanup()
            raise
        for work in (self._commits.run, self._tick_loop):
            self._tasks.append(asyncio.create_task(self._guarded(work)))
        sockets = self._runner.addresses
        return int(sockets[0][1])

    def _restore(self, rows: RolloutRows) -> None:
        counters = rows.counters
        self.weights.restore(counters)
        self.book.newest_version = self.weights.newest
        if self.weights.served is not None:
            self.book.promote(self.weights.served.version)
        self.book.restore(counters, rows.groups, rows.deltas)
        self._committed_seq = max((seq for seq, _ in rows.deltas), default=0)
        self._promote()
        self._failures()
        # Whole groups were told to nobody yet; they go out when the trainer attaches.
        self._commits.now()
        if any(not state.finish for state in self.book.samples()):
            self._hold_until = self._now() + self.settings.restart_grace_s

    def _take_over(self) -> RolloutRows:
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
        with contextlib.suppress(
            GyreError
        ):  # fenced: somebody else has the ledger, and has what was acknowledged
            await self._commits.last()
        if self._runner is not None:
            await self._runner.cleanup()
        self._commits.close()

    async def let_go(self) -> None:
        """Of the sockets, and write nothing: what a death does. Harmless after `stop`."""
        if self._runner is not None:
            await self._runner.cleanup()

    async def _guarded(self, work: Callable[[], Any]) -> None:
        """A background task that fails ends the manager: it is started again, and the ledger has everything."""
        try:
            await work()
        except (asyncio.CancelledError, SystemExit):
            raise
        except BaseException as error:
            self._on_fatal(error)

    # -- who dials in -------------------------------------------------------------------------------

    def _authorised(self, request: web.Request) -> bool:
        given = request.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode("utf-8", "surrogateescape"), f"Bearer {self._token}".encode())

    def _refuse_http(self) -> web.Response:
        self.refused += 1
        return web.json_response(
            {"code": "unauthorised", "message": "Give the rollout plane's token: --token."}, status=401
        )

    async def _agent_route(self, request: web.Request) -> web.StreamResponse:
        if not self._authorised(request):
            return self._refuse_http()
        socket = self._websocket(request)
        await socket.prepare(request)
        peer = Connection(socket, "an agent", request.transport, self.settings.send_timeout_s)
        writer = asyncio.create_task(peer.write())
        session: AgentSession | None = None
        try:
            session = self._join(await self._first(socket), peer)
            async for message in socket:
                if message.type is WSMsgType.BINARY:
                    if session.peer is not peer or peer.closing:
                        return socket  # the same instance dialled again: this connection is history
                    self._hear(session, unpack(message.data))
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

    def _websocket(self, request: web.Request) -> web.WebSocketResponse:
        if request.transport is not None:
            watch_acknowledgements(request.transport.get_extra_info("socket"))
        return web.WebSocketResponse(
            max_msg_size=MAX_FRAME_BYTES, compress=False, heartbeat=self.settings.heartbeat_s
        )

    async def _first(self, socket: web.WebSocketResponse) -> Frame | Report:
        try:
            message = await socket.receive(timeout=self.settings.hello_timeout_s)
        except TimeoutError:
            raise refuse("no_hello", "nothing came within the time for a hello") from None
        if message.type is not WSMsgType.BINARY:
            raise refuse("no_hello", "the first message is no frame")
        return unpack(message.data)

    def _reject(self, peer: Connection, error: FrameError) -> None:
        """Said to the peer and told once; the connection ends, and nobody else notices."""
        self.refused += 1
        reason = str(error.details.get("reason", "malformed"))
        self._on_event("PeerRefused", {"peer": peer.name, "reason": reason, "message": str(error)[:2000]})
        peer.send(Reject(code=reason, message=str(error)[:2000]))

    # -- agents -------------------------------------------------------------------------------------

    def _join(self, frame: Frame | Report, peer: Connection) -> AgentSession:
        if not isinstance(frame, Hello):
            raise refuse("no_hello", f"the first frame is {type(frame).__name__}, not Hello")
        if frame.protocol != PROTOCOL:
            raise refuse(
                "protocol", f"{frame.instance} speaks protocol {frame.protocol}, this manager {PROTOCOL}"
            )
        model = self.weights.model
        if model is not None and frame.model not in (model, "unset"):
            raise refuse("model", f"{frame.instance} serves model {frame.model}; this job's is {model}")
        if frame.version > self.book.newest_version:
            raise refuse(
                "unknown_version",
                f"{frame.instance} says it serves version {frame.version}; the newest is {self.book.newest_version}",
            )
        peer.name = frame.instance
        self._intake.take_in()
        before = self.sessions.get(frame.instance)
        back = before is not None and before.hello.incarnation == frame.incarnation
        if before is not None and not back:
            if before.peer is not None:
                message = f"another process has joined as {frame.instance}"
                before.peer.send(Reject(code="superseded", message=message))
            self._lost(before, "drained" if before.draining else "superseded" if before.peer else "replaced")
        elif before is not None and before.peer is not None:
            before.peer.close()
        now = self._now()
        keep = self.book.join(frame)
        instance = self.book.instances[frame.instance]
        session = AgentSession(frame, peer, instance.number, heard_at=now, joined_at=now, source=frame.source)
        self.sessions[frame.instance] = session
        version = frame.version
        if version >= 0 and not self.weights.is_known(version, frame.checksum):
            version = -1  # the same number, other bytes: an instance of another history
        instance.version = version
        session.resting = "asleep" if frame.asleep else ""
        if before is not None and back:
            session.refused = before.refused
        weights = self.weights.served
        if weights is not None and (
            version == weights.version
            or not self._windows.may_load(session)
            or session.waits_to_reload(weights.version, now)
        ):
            weights = None
        peer.send(
            Welcome(
                protocol=PROTOCOL,
                epoch=self._term,
                interval_s=self.settings.report_interval_s,
                keep=keep,
                weights=self._with_sources(weights) if weights is not None else None,
                update_mode=self.settings.update_mode,  # type: ignore[arg-type]
                plane=self.settings.weights,
            )
        )
        if weights is not None:
            session.loading, session.loading_since = weights.version, now
        self._update(session)
        self._cancel()
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

    def _hear(self, session: AgentSession, frame: Frame | Report) -> None:
        session.heard_at = self._now()
        if isinstance(frame, Report):
            self._report(session, frame)
            return
        self._intake.take_in()
        if session.peer is None or session.peer.closing:
            return  # for what it said before
        if isinstance(frame, Loaded):
            self._loaded(session, frame)
        elif isinstance(frame, LoadFailed):
            self._load_failed(session, frame)
        elif isinstance(frame, WeightsTrouble):
            told = {"instance": session.name, "version": frame.version, "what": frame.what}
            self._on_event("WeightsTrouble", {**told, "evidence": frame.evidence[:4000]})
        elif isinstance(frame, Draining):
            self._drain(session, frame.deadline_s, frame.reason)
        elif isinstance(frame, EngineDied):
            self._engine_died(session, frame)
        elif isinstance(frame, Asleep):
            self._windows.asleep(session, frame, session.heard_at)
        elif isinstance(frame, Awake):
            self._windows.awake(session, frame, session.heard_at)
        else:
            raise refuse("unexpected", f"an agent does not send {type(frame).__name__}")

    def _report(self, session: AgentSession, report: Report) -> None:
        session.running, session.waiting, session.used_tokens, session.rate_tokens_s = report.load
        if self._intake.has(session.name):
            if report.ends:
                self._intake.take_in_of(session.name)
            else:
                self._intake.take_in()
            if session.peer is None or session.peer.closing:
                return  # for what it said before
        if report.ends:
            self._ended(session, report.unfold())
        elif report.columns[0]:
            self._intake.add(session.name, report)
        elif any(report.columns):
            report.unfold()  # which refuses it: something of no sample
        else:
            self.book.nothing_new(session.name, report)
            return  # nothing for the ledger: an idle fleet costs no commits
        self._commits.soon()

    def _ended(self, session: AgentSession, frame: Progress) -> None:
        self._compute_admission()
        self._send_work(self.book.progress(session.name, frame))
        self._dispatch()  # at once: what else this turn of the loop brings may take milliseconds
        self._failures()
        if session.draining and not self.book.instances[session.name].held:
            self._drained(session)
        if self.book.has_complete:
            if any(one.held for one in self.book.instances.values()):
                self._commits.now()
            else:
                self._commits.at_once()  # nobody generates anything that could be written along
        self._windows.ended(session, session.heard_at)

    def _refused(self, name: str, error: FrameError) -> None:
        """What an instance reported cannot be, which shows when it is taken in."""
        session = self.sessions[name]
        if session.peer is not None:
            self._reject(session.peer, error)
            session.peer.close()

    def _loaded(self, session: AgentSession, frame: Loaded) -> None:
        if session.loading is not None and frame.version >= session.loading:
            session.loading = None  # else it is on its way to a newer one already
        if frame.version > self.book.newest_version:
            raise refuse("unknown_version", f"{session.name} loaded version {frame.version}, never published")
        if self.weights.is_forgotten(frame.version):
            self._update(session)  # its engine took that long to start; it works when it has a newer one
            return
        if not self.weights.is_known(frame.version, frame.checksum):
            raise refuse(
                "checksum", f"{session.name} loaded version {frame.version} with checksum {frame.checksum}"
            )
        session.source = frame.source
        self.book.serve(session.name, frame.version)
        self._on_event(
            "WeightsLoaded",
            {
                "instance": session.name,
                "version": frame.version,
                "fetch_s": frame.fetch_s,
                "load_s": frame.load_s,
                "fetched": frame.fetched,
                "pause_s": frame.pause_s,
                "how": frame.how,
                "note": frame.note,
            },
        )
        chosen = self.weights.way_changed(session.name, frame, self._now())
        if chosen is not None:
            self._on_event("TransferChosen", chosen)
        session.refused.pop(frame.version, None)
        self._update(session)
        self._windows.loaded(session, session.heard_at)
        self._dispatch_later()

    def _load_failed(self, session: AgentSession, frame: LoadFailed) -> None:
        """It is told to load the version again after a while, each time after a longer one."""
        session.loading = None
        count = session.refused[frame.version].count + 1 if frame.version in session.refused else 1
        pause_s = min(RELOAD_MAX_S, RELOAD_FIRST_S * 2 ** (count - 1))
        session.refused = {frame.version: RefusedVersion(count, self._now() + pause_s)}
        self._on_event(
            "WeightsRefused",
            {"instance": session.name, "version": frame.version, "error": frame.error[:4000]},
        )
        self._give_up_pinned(frame)
        self._dispatch_later()

    def _compute_admission(self) -> bool:
        """Compute who may be given samples now; whether anybody may who might not before. A report changes nothing of
        it, and there are thousands of reports."""
        if not self._admission_stale:
            return False
        self._admission_stale = False
        handover = self.settings.update_mode == "handover"
        return self.sessions.admit(self._windows.device_use, handover=handover)

    def _engine_died(self, session: AgentSession, frame: EngineDied) -> None:
        session.engine_deaths += 1
        self._windows.engine_died(session)
        self.book.engine_died(session.name)
        self._on_event(
            "EngineDied",
            {"instance": session.name, "error": frame.message[:2000], "tail": frame.tail[-8000:]},
        )
        session.loading = None
        self._update(session)
        self._commits.soon()
        self._dispatch_later()

    def _failures(self) -> None:
        """Tell of samples that were set aside, and of groups that are given up."""
        aside, self.book.quarantined = self.book.quarantined, []
        for state in aside:
            self._on_event("SampleSetAside", {**_told(state), "evidence": list(state.evidence)})
        for state in list(self.book.given_up.values()):
            ticket = state.request
            if self._trainer is None or ticket.number in self._failures_told:
                continue
            self._failures_told.add(ticket.number)
            said = "; ".join(state.evidence) or "see the events of its instances"
            message = f"Group {ticket.group.id} cannot be generated; sample {state.index} failed: {said}"
            self._trainer.send(
                Failed(purpose=ticket.purpose, ids=[ticket.group.id], message=message[:60_000])
            )

    def _give_up_pinned(self, frame: LoadFailed) -> None:
        """An instance cannot load a version that only pinned requests keep served, and no other instance has it: its
        publisher and everybody who had it have died. The requests fail, or nobody would ever generate again."""
        served = self.weights.served
        if self._trainer is None or served is None or served.version != frame.version:
            return
        if any(instance.version == served.version for instance in self.book.instances.values()):
            return
        message = f"Version {served.version} is to be had nowhere any more: {frame.error}"
        if served.version < self.weights.durable:
            for ticket in self.book.pinned_to(served.version):
                ids = [ticket.group.id]
                self._trainer.send(Failed(purpose=ticket.purpose, ids=ids, message=message[:60_000]))

    def _disconnected(self, session: AgentSession) -> None:
        self._intake.take_in()
        if not self.sessions.disconnected(session, self._now()):
            return
        if session.draining:
            self._lost(session, "drained")
        self._dispatch_later()

    def _lost(self, session: AgentSession, reason: str) -> None:
        self._intake.take_in()
        if self.sessions.get(session.name) is session:
            del self.sessions[session.name]
        if session.peer is not None:
            session.peer.close()
            session.peer = None
        instance = self.book.instances.get(session.name)
        if instance is None or instance.number != session.number:
            return
        died = f"its machine or agent was lost ({reason})" if reason in DEATHS else ""
        orphans = self.book.leave(session.name, died=died)
        self._failures()
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
        self._dispatch_later()
        self._on_event(
            "InstanceDraining", {"instance": session.name, "reason": reason, "deadline_s": deadline_s}
        )
        if not self.book.instances[session.name].held:
            self._drained(session)

    def _drained(self, session: AgentSession) -> None:
        # Its last progress must be durable before it may forget: the acknowledgement goes out with the commit.
        self._commits.now()

    # -- work ---------------------------------------------------------------------------------------

    def _dispatch_later(self) -> None:
        """Once for everything that this turn of the loop brings, with admission computed anew."""
        self._admission_stale = True
        if not self._dispatch_scheduled:
            self._dispatch_scheduled = True
            asyncio.get_running_loop().call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._dispatch_scheduled = False
        self._compute_admission()
        if self._now() < self._hold_until:
            return
        given = self.book.assign(ASSIGN_PER_TURN)
        self._send_work(given)
        if sum(len(work) for _, work in given.values()) == ASSIGN_PER_TURN:
            self._dispatch_later()

    def _send_work(self, given: Given) -> None:
        for name, (prompts, work) in given.items():
            session = self.sessions.get(name)
            if session is None or session.peer is None:
                continue
            known = {prompt.ticket: prompt for prompt in prompts}
            for portion in _portions(work):
                needed = 0
                for one in portion:
                    state = self.book.sample(one.key)
                    if one.prior and state is not None:
                        needed = max(needed, self.book.last_delta(state))
                tickets = dict.fromkeys(one.ticket for one in portion)
                self._tell(
                    session, Assign(prompts=[known[number] for number in tickets], work=portion), needed
                )

    def _tell(self, session: AgentSession, frame: Frame, needed: int = 0) -> None:
        """Send it when the delta `needed` is committed, and after what waits for that already."""
        if session.deferred or needed > self._committed_seq:
            session.deferred.append((needed, frame))
            self._commits.now()
        elif session.peer is not None:
            session.peer.send(frame)

    def _call_back(self, states: Iterable[InFlightSample]) -> None:
        """What runs there goes on elsewhere, from its last token."""
        self._tell_recalled(self.book.recall(states))

    def _tell_recalled(self, recalled: Recalled) -> None:
        for name, rows in recalled.items():
            if (session := self.sessions.get(name)) is not None:
                self._tell(session, Cancel(rows=rows))

    def _refresh(self, session: AgentSession) -> None:
        """What may be done with a local instance has changed: its window opens or closes, or it woke."""
        if session.name in self.book.instances:
            self._update(session)
            self._dispatch_later()

    def _answer(self, frame: Frame) -> None:
        if self._trainer is not None:
            self._trainer.send(frame)

    def _cancel(self) -> None:
        """Stop what went on elsewhere."""
        cancelled, self.book.cancelled = self.book.cancelled, []
        for name, row, lease in cancelled:
            session = self.sessions.get(name)
            if session is not None:
                self._tell(session, Cancel(rows=[(row, lease)]))

    def _rebalance(self, now: float) -> None:
        self._rebalanced_at = now
        recalled = self.book.rebalance(now)
        self._tell_recalled(recalled)
        for name, rows in recalled.items():
            self._on_event("SamplesMoved", {"instance": name, "count": len(rows)})

    # -- versions -----------------------------------------------------------------------------------

    def _promote(self) -> None:
        """Send the newest version out that is in the ledger and that nobody must not see yet."""
        served = self.weights.promote(self.book.pinned_version)
        if served is None:
            return
        self._commits.soon()
        self.book.promote(served.version)
        for session in self.sessions.values():
            self._update(session)
        self._dispatch_later()

    def _update(self, session: AgentSession) -> None:
        """Send the served version, unless the instance has it or is loading it. One that it is still fetching is not
        finished then: the agent goes on with the newer."""
        served = self.weights.served
        if served is None or session.peer is None or session.draining:
            return
        if session.loading is not None and session.loading >= served.version:
            return
        if self.book.instances[session.name].version == served.version:
            return
        if session.waits_to_reload(served.version, self._now()):
            return
        if self._windows.may_load(session):
            session.loading, session.loading_since = served.version, self._now()
            session.peer.send(self._with_sources(served))
            self._dispatch_later()
        elif session.loading is None and session.told_ahead != served.version:
            # It loads it when its window opens; that it has it by then costs no memory of the trainer's devices.
            # What it is loading it finishes first: the window's end waits for that.
            session.told_ahead = served.version
            session.peer.send(replace(self._with_sources(served), ahead=True))

    def _with_sources(self, weights: Weights) -> Weights:
        """Instances that have it serve it as well: the publisher may be gone."""
        others = [
            session.source
            for session in self.sessions.values()
            if session.source
            and session.peer is not None
            and self.book.instances[session.name].version == weights.version
        ]
        return replace(weights, sources=[*weights.sources, *others][:SOURCES_TOLD])

    def _sources_moved(self) -> None:
        """The publisher serves the version from elsewhere now: instances that are fetching it, or could not, hear of
        it."""
        served = self.weights.served
        for session in self.sessions.values():
            if served is not None and session.loading == served.version and session.peer is not None:
                session.peer.send(self._with_sources(served))
            elif session.refused:
                session.refused = {}
                self._update(session)

    # -- the trainer --------------------------------------------------------------------------------

    async def _trainer_route(self, request: web.Request) -> web.StreamResponse:
        if not self._authorised(request):
            return self._refuse_http()
        socket = self._websocket(request)
        await socket.prepare(request)
        peer = Connection(
            socket,
            "the trainer",
            request.transport,
            self.settings.send_timeout_s,
            written=self._delivery.pump,
        )
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
            self._windows.trainer_attached(self._now(), other=first.term != self._trainer_term)
            self._trainer, self._trainer_term = peer, first.term
            self._delivery.attached(peer)
            self._failures_told = set()
            peer.send(Attached(protocol=PROTOCOL, epoch=self._term, version=self.weights.newest))
            async for message in socket:
                if message.type is WSMsgType.BINARY and self._trainer is peer:
                    self._hear_trainer(peer, unpack(message.data))
        except FrameError as error:
            self._reject(peer, error)
        finally:
            if self._trainer is peer:
                self._trainer = None
                self._windows.trainer_left(self._now())
                self._delivery.attached(None)
                if self._fleet is not None:
                    self._fleet.detached()
            peer.close()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(writer), 3.0)
            writer.cancel()
        return socket

    def _hear_trainer(self, peer: Connection, frame: Frame | Report) -> None:
        if not isinstance(frame, Request | Pulse):
            self._intake.take_in()
        if isinstance(frame, Request):
            required = self.book.required_version
            try:
                opened = self.book.open(frame)
            except FrameError as error:
                if error.details["reason"] != "pinned_late":
                    raise
                ids = [group.id for group in unpack_groups(frame.groups)]
                peer.send(Failed(purpose=frame.purpose, ids=ids, message=str(error)))
                return
            if opened or self.book.required_version != required:
                self._commits.soon()
                self._dispatch_later()
            if self._delivery.holds(frame.purpose):
                self._delivery.again(frame.purpose, [group.id for group in unpack_groups(frame.groups)])
            self._failures()
        elif isinstance(frame, Taken):
            self.book.cancelled += self.book.close(frame.purpose, frame.ids)
            self._cancel()
            self._delivery.taken(frame.purpose, frame.ids)
            self._commits.soon()
            self._promote()
        elif isinstance(frame, Publish):
            known = self.weights.served
            if self.weights.publish(frame):
                self.book.newest_version = self.weights.newest
                self._commits.at_once()  # once a step, and every instance waits for it
                if self._fleet is not None:
                    self._fleet.step_done(self._now())
            if self.weights.served is not known:
                self._sources_moved()
        elif isinstance(frame, LendDevices):
            self._windows.lend(frame, self._now())
        elif isinstance(frame, ReclaimDevices):
            self._windows.reclaim(frame.window, self._now())
        elif isinstance(frame, Pulse):
            if self._fleet is not None:
                self._fleet.pulse(frame, self._now())
        else:
            raise refuse("unexpected", f"a trainer does not send {type(frame).__name__}")

    # -- the ledger ---------------------------------------------------------------------------------

    def _batch(self) -> WriteBatch | None:
        self._intake.take_in()
        if not self.book.is_dirty and not self.weights.changed:
            return None
        batch = self.book.take_batch()
        batch.counters |= self.weights.take_counters()
        return batch

    def _write(self, batch: WriteBatch) -> None:
        """On the ledger's thread."""
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
            self._committed_seq = batch.deltas[-1].seq
        now = self._now()
        for session in list(self.sessions.values()):
            seq = batch.sessions.get(session.number)
            due = session.number in batch.ended or now - session.acked_at >= ACK_WITHIN_S
            if seq is not None and session.peer is not None and due:
                session.acked_at = now
                session.peer.send(Ack(seq=seq))
            while session.deferred and session.deferred[0][0] <= self._committed_seq:
                _, frame = session.deferred.popleft()
                if session.peer is not None:
                    session.peer.send(frame)
        complete = [one for number in batch.complete if (one := self.book.requests.get(number)) is not None]
        self._delivery.whole(complete)
        if self.weights.committed(batch.counters) or any(request.pinned for request in complete):
            self._promote()

    # -- time ---------------------------------------------------------------------------------------

    async def _tick_loop(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            self._intake.take_in()
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
                elif session.refused:
                    self._update(session)
            self._admission_stale = True
            if self._compute_admission():
                self._dispatch_later()
            if self._hold_until and now >= self._hold_until:
                self._hold_until = 0.0
                self._dispatch_later()
            if now - self._rebalanced_at > settings.rebalance_every_s:
                self._rebalance(now)
                self._dispatch_later()
            self._windows.look(now)
            self._advise(now)

    def _advise(self, now: float) -> None:
        """Say how many instances there should be, where that is the policy's to say."""
        if self._fleet is None:
            return
        own = f"{self.settings.role}-"
        here = [s for s in self.sessions.values() if not s.draining and not s.hello.local]
        serving = [one for s in here if (one := self.book.instances.get(s.name)) and one.version >= 0]
        placed = sum(one.name.startswith(own) and one.name[len(own) :].isdecimal() for one in serving)
        placement = self.book.placement
        fleet = Fleet(
            placed=placed,
            others=len(serving) - placed,
            serving=len(serving),
            busy=sum(bool(one.held) for one in serving),
            queued_tokens=placement.queue.tokens,
            rate_tokens_s=placement.load.rate_tokens_s,
        )
        advice = self._fleet.look(fleet, now, window_open=self._windows.is_open)
        if advice is not None:
            self._on_event(
                "ScaleAdvised",
                {
                    "role": self.settings.role,
                    "seen": advice.seen,
                    "count": advice.count,
                    "reason": advice.reason,
                    "observed": asdict(advice.observed),
                },
            )

    # -- HTTP ---------------------------------------------------------------------------------------

    async def _drain_route(self, request: web.Request) -> web.StreamResponse:
        if not self._authorised(request):
            return self._refuse_http()
        try:
            body = await request.json()
            name = str(body["instance"])
            asked = checked(
                Drain,
                deadline_s=float(body.get("deadline_s", 30.0)),
                reason=str(body.get("reason", "asked to")),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError, FrameError) as error:
            return web.json_response(
                {"code": "invalid", "message": f'expected {{"instance": NAME, "deadline_s": S}}: {error!r}'},
                status=422,
            )
        if not self.drain(name, asked.deadline_s, asked.reason):
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
        self._intake.take_in()
        return {
            "epoch": self._term,
            "version": self.weights.newest,
            "served_version": self.book.served_version,
            **book_status(self.book),
            "refused": self.refused,
            "local_window": self._windows.status(self._now()),
            "instances": [
                instance_status(
                    session,
                    instance,
                    self._now(),
                    checksum=self.weights.checksum_of(instance.version),
                )
                for session in self.sessions.values()
                if (instance := self.book.instances.get(session.name)) is not None
            ],
        }


def _telling(on_event: Callable[[str, dict[str, Any]], None]) -> Callable[[str, dict[str, Any]], None]:
    """What people should know is no reason to stop: an event that cannot be told is left out, which is printed."""

    def tell(kind: str, fields: dict[str, Any]) -> None:
        try:
            on_event(kind, fields)
        except Exception as error:  # whatever the listener makes of what peers said
            print(f"the event {kind} could not be told: {error!r}"[:1000], file=sys.stderr, flush=True)

    return tell


def _told(state: InFlightSample) -> dict[str, Any]:
    return {
        "group": state.request.group.id,
        "purpose": state.request.purpose,
        "index": state.index,
        "prompt": state.request.group.prompt_ids[:256].tolist(),
    }


def _portions(work: list[Work]) -> Iterator[list[Work]]:
    """Fresh samples first, for they wait for nothing; then those that go on, by size."""
    if fresh := [one for one in work if not one.prior]:
        yield fresh
    portion: list[Work] = []
    size = 0
    for one in work:
        if one.prior:
            portion.append(one)
            size += len(one.prior)
            if size >= WORK_PORTION_BYTES:
                yield portion
                portion, size = [], 0
    if portion:
        yield portion
