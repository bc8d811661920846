"""A live manager over real sockets and a real database, and peers that say what a test tells them to say."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeVar, cast

import aiohttp
import msgspec
import numpy as np

from gyre.ports.bounds import PortBounds
from gyre.rollouts.manager.connections import Connection
from gyre.rollouts.manager.rollout_manager import RolloutManager
from gyre.rollouts.manager.shell import HearsOfPlane
from gyre.rollouts.plane.settings import ManagerSettings
from gyre.rollouts.plane.trainer import TrainerRequester
from gyre.rollouts.protocol.codec import decode, encode
from gyre.rollouts.protocol.frames import (
    PROTOCOL,
    Ack,
    Assign,
    Assignment,
    Attach,
    Attached,
    Done,
    Frame,
    Held,
    Hello,
    Loaded,
    Publish,
    Request,
    Weights,
    Welcome,
)
from gyre.rollouts.protocol.progress import End, GenerationProgress
from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from gyre.store import RolloutStore, open_store
from gyre.weights.version.model_folder import ModelFolder, list_model_folder

TOKEN = "secret"
"""The job's own."""
JOIN_TOKEN = "for those who join"
QUICK = ManagerSettings(
    report_interval_s=0.05,
    commit_interval_s=0.01,
    urgent_commit_s=0.001,
    silence_timeout_s=30.0,
    reconnect_grace_s=0.2,
    restart_grace_s=0.3,
    hello_timeout_s=20.0,
    rebalance_every_s=1e6,
    tokens_every_s=0.05,
)
SOON_S = 60.0
"""For what should take milliseconds, on a machine that does much else."""

ROUNDS = 3
"""A report, the commit that holds it, and what the commit lets go out."""

Kind = TypeVar("Kind", bound=Frame)


def small_folder(path: Path, version: int, *, hidden: int = 8) -> ModelFolder:
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps({"model_type": "tiny", "hidden_size": hidden}))
    (path / "model.safetensors").write_bytes(bytes([version]) * 1000)
    return list_model_folder(path, version=version)


async def until(condition: Callable[[], Any], within_s: float = SOON_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110 - what is waited for is inside the manager
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """What is inside takes no longer, but for the time that this process waited for a core, which is the machine's."""
    began, waited = time.monotonic(), waited_for_a_core()
    yield
    took, held_up = time.monotonic() - began, waited_for_a_core() - waited
    assert took - held_up < seconds, f"it took {took:.2f} s, {held_up:.2f} s of it waiting for a core"


def waited_for_a_core() -> float:
    """In seconds, all threads together; 0 where the system does not count it."""
    waited_ns = 0
    for thread in Path("/proc/self/task").glob("*"):
        with contextlib.suppress(OSError):  # it has ended
            waited_ns += int((thread / "schedstat").read_text().split()[1])
    return waited_ns / 1e9


@dataclass
class Plane(HearsOfPlane):
    """The manager, which can be killed and started again over the same database."""

    store: RolloutStore
    tmp_path: Path
    settings: ManagerSettings = QUICK
    bounds: PortBounds | None = None
    term: int = 0
    port: int = 0
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    fatal: list[BaseException] = field(default_factory=list)
    peers: list[Wire] = field(default_factory=list)
    ticks: int = 0
    """How often the managers have looked at everything."""
    http: aiohttp.ClientSession | None = None
    manager: RolloutManager = field(init=False)

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        self.events.append((kind, fields))

    def fail(self, error: BaseException) -> None:
        self.fatal.append(error)

    def change(self, **changed: Any) -> None:
        """Settings of the manager that runs, and of those that come after it."""
        self.settings = replace(self.settings, **changed)
        self.manager.plane.settings = self.settings

    def end_restart_grace(self) -> None:
        """As if it had passed: samples that nobody came back with are given out anew."""
        self.manager.plane.placing.hold_until = min(
            self.manager.plane.placing.hold_until, self.manager.shell.now()
        )

    async def start(self, **changed: Any) -> RolloutManager:
        self.term += 1
        self.settings = replace(self.settings, **changed)
        self.manager = RolloutManager(
            self.store,
            term=self.term,
            token=TOKEN,
            join_token=JOIN_TOKEN,
            settings=self.settings,
            bounds=self.bounds,
            owner=self,
        )
        self._count_ticks(self.manager)
        self.port = await self.manager.start("127.0.0.1", self.port)
        return self.manager

    def _count_ticks(self, manager: RolloutManager) -> None:
        tick = manager.shell.tick

        def counted() -> None:
            tick()
            self.ticks += 1

        manager.shell.tick = counted  # type: ignore[method-assign]

    @property
    def requester(self) -> TrainerRequester:
        """Of a job that has a trainer."""
        return next(one for one in self.manager.plane.requesters if isinstance(one, TrainerRequester))

    @property
    def trainer_connection(self) -> Connection | None:
        return cast("Connection | None", self.requester.peer)

    async def settled(self) -> None:
        """The manager has handled every frame that was sent to it, and has sent whatever that leads to.

        A peer's frames are handled in order, and a ping among them. What follows from a frame waits for timers of the
        manager's loop that are shorter than a tick, and for the ledger's thread, each of which is waited for: however
        slow the machine is, this ends later than they do.
        """
        for peer in self.peers:
            with contextlib.suppress(ConnectionError, aiohttp.ClientError):  # of a manager that was killed
                await peer.echo()
        loop = asyncio.get_running_loop()
        for _ in range(ROUNDS):
            ticks = self.ticks
            await until(lambda ticks=ticks: self.ticks >= ticks + 2)  # the first may have begun before
            await loop.run_in_executor(self.manager.shell.commits.thread, lambda: None)

    async def kill(self) -> None:
        """As SIGKILL would: nothing is written or said any more, and every connection breaks."""
        manager = self.manager
        for task in manager._tasks:
            task.cancel()
        await asyncio.gather(*manager._tasks, return_exceptions=True)
        manager.shell.commits._write = lambda batch: None
        assert manager._runner is not None
        for link in manager.links.values():
            if link.connection is not None:
                cut(link.connection)
        for front in manager.fronts:
            for connection in front.connections():
                cut(connection)
        manager.groups.take_batch()
        manager.versions.changed = False
        await manager.stop()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def session(self) -> aiohttp.ClientSession:
        if self.http is None:
            self.http = aiohttp.ClientSession()
        return self.http

    async def dial(self, route: str = "agent", token: str = TOKEN) -> Wire:
        socket = await self.session().ws_connect(
            f"{self.url}/v1/{route}",
            headers={"Authorization": f"Bearer {token}"},
            max_msg_size=0,
            autoping=False,
        )
        wire = Wire(self, socket)
        self.peers.append(wire)
        return wire

    async def agent(self, name: str, *, token: str = TOKEN, **hello: Any) -> ScriptedAgent:
        agent = ScriptedAgent(self, name)
        agent.token = token
        await agent.dial(**hello)
        return agent

    async def working(self, name: str, **hello: Any) -> ScriptedAgent:
        """An agent that has loaded what it was given."""
        agent = await self.agent(name, **hello)
        await agent.load()
        return agent

    async def trainer(self, term: int = 1) -> ScriptedTrainer:
        wire = await self.dial("trainer")
        await wire.send(Attach(protocol=PROTOCOL, term=term))
        await wire.expect(Attached)
        return ScriptedTrainer(self, wire)

    async def one_sample(self) -> tuple[ScriptedTrainer, ScriptedAgent, Sample]:
        """A trainer that has published version 0 and asked for one sample, and the agent `a` that has it."""
        trainer = await self.trainer()
        await trainer.publish(0)
        agent = await self.working("a")
        await trainer.ask([0])
        (sample,) = await agent.work(1)
        return trainer, agent, sample

    async def get(self, path: str, token: str = TOKEN) -> tuple[int, bytes]:
        headers = {"Authorization": f"Bearer {token}"}
        async with self.session().get(f"{self.url}{path}", headers=headers) as reply:
            return reply.status, await reply.read()

    async def post(self, path: str, body: Any, token: str = TOKEN) -> tuple[int, Any]:
        headers = {"Authorization": f"Bearer {token}"}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session().post(f"{self.url}{path}", data=data, headers=headers) as reply:
            return reply.status, await reply.json()

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [fields for told, fields in self.events if told == kind]

    def exact(self) -> None:
        assert self.manager.groups.missing_tokens() == 0
        assert not self.fatal


def cut(connection: Any) -> None:
    """As a dead process's."""
    connection.transport.abort()


class Wire:
    """A peer's connection. `seen` has the frames that were passed over."""

    def __init__(self, plane: Plane, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.plane = plane
        self.socket = socket
        self.seen: list[Frame | GenerationProgress] = []
        self._arrived: deque[Frame | GenerationProgress] = deque()
        """Frames that came before the answer to a ping, and were not asked for yet."""
        self._pings = 0

    async def send(self, frame: Frame | GenerationProgress | bytes) -> None:
        await self.socket.send_bytes(frame if isinstance(frame, bytes) else encode(frame))

    async def expect(self, kind: type[Kind], within_s: float = SOON_S) -> Kind:
        """The next frame of this kind; those before it go into `seen`."""
        async with asyncio.timeout(within_s):
            while True:
                frame = self._arrived.popleft() if self._arrived else await self._frame(kind.__name__)
                if isinstance(frame, kind):
                    return frame
                self.seen.append(frame)

    async def nothing(self, kind: type[Frame]) -> None:
        """No frame of this kind has come since the last one that was waited for, nor does one come of anything that
        was sent so far."""
        await self._all(kind)
        unexpected = [frame for frame in self._arrived if isinstance(frame, kind)]
        assert not unexpected, f"unexpected: {unexpected}"

    async def passed(self, kind: type[Kind]) -> list[Kind]:
        """All frames of this kind that were passed over, and that come of anything that was sent so far."""
        await self._all(kind)
        self.seen += self._arrived
        self._arrived.clear()
        return [frame for frame in self.seen if isinstance(frame, kind)]

    async def _all(self, kind: type[Frame]) -> None:
        """Read all that the manager sends until somebody sends it something else."""
        await self.plane.settled()
        assert await self.echo(), f"the connection ended, and {kind.__name__} could not have come"

    async def echo(self) -> bool:
        """The manager answers a ping after it has handled all that was sent before, and this reads all that it sent
        before the answer. False where the connection has ended."""
        if self.socket.closed:
            return False
        self._pings += 1
        mark = str(self._pings).encode()
        await self.socket.ping(mark)
        async with asyncio.timeout(SOON_S):
            while True:
                message = await self._message()
                if message.type is aiohttp.WSMsgType.PONG and message.data == mark:
                    return True
                if message.type is aiohttp.WSMsgType.BINARY:
                    self._arrived.append(decode(message.data))
                elif message.type is not aiohttp.WSMsgType.PONG:
                    return False

    async def closed(self, within_s: float = SOON_S) -> None:
        async with asyncio.timeout(within_s):
            while (await self._message()).type in (aiohttp.WSMsgType.BINARY, aiohttp.WSMsgType.PONG):
                pass

    async def _frame(self, wanted: str) -> Frame | GenerationProgress:
        message = await self._message()
        assert message.type is aiohttp.WSMsgType.BINARY, f"{message.type} instead of {wanted}"
        return decode(message.data)

    async def _message(self) -> aiohttp.WSMessage:
        """The next message, with the manager's own pings answered."""
        while (message := await self.socket.receive()).type is aiohttp.WSMsgType.PING:
            await self.socket.pong(message.data)
        return message


@dataclass(eq=False)
class Sample:
    work: Assignment
    tokens: list[int]


class ScriptedAgent:
    """Speaks the protocol, and generates 1, 2, 3, … whatever it is asked for."""

    def __init__(self, plane: Plane, name: str, incarnation: str = "1") -> None:
        self.plane, self.name, self.incarnation = plane, name, incarnation
        self.samples: dict[int, Sample] = {}
        self.weights: Weights | None = None
        self.seq = 0
        self.token = TOKEN
        self.wire: Wire

    def hello(self, **changed: Any) -> Hello:
        fields: dict[str, Any] = {
            "protocol": PROTOCOL,
            "instance": self.name,
            "incarnation": self.incarnation,
            "model": "unset",
            "engine": "scripted",
            "max_running": 8,
            "kv_tokens": 1 << 16,
        }
        return Hello(**(fields | changed))

    async def dial(self, **hello: Any) -> Welcome:
        self.wire = await self.plane.dial(token=self.token)
        await self.wire.send(self.hello(**hello))
        welcome = await self.wire.expect(Welcome)
        self.seq = 0
        self.weights = welcome.weights or self.weights
        kept = {keep.key: keep for keep in welcome.keep}
        for row in list(self.samples):
            sample = self.samples.pop(row)
            keep = kept.get(sample.work.key)
            if keep is not None:
                sample.work = msgspec.structs.replace(sample.work, row=keep.row, lease=keep.lease)
                self.samples[keep.row] = sample
        return welcome

    async def back(self, **hello: Any) -> Welcome:
        """Dial again, and say what is held."""
        held = [
            Held(
                key=sample.work.key,
                lease=sample.work.lease,
                start=len(sample.work.prior) // 4,
                length=len(sample.tokens),
            )
            for sample in self.samples.values()
        ]
        loaded = {
            "version": self.weights.version if self.weights else -1,
            "checksum": self.weights.checksum if self.weights else "",
        }
        return await self.dial(**({"held": held} | loaded | hello))

    async def load(self) -> None:
        if self.weights is None:
            self.weights = await self.wire.expect(Weights)
        await self.loaded(self.weights)

    async def loaded(self, weights: Weights, how: str = "") -> None:
        self.weights = weights
        await self.wire.send(
            Loaded(version=weights.version, checksum=weights.checksum, fetch_s=0.0, load_s=0.0, how=how)
        )

    async def work(self, count: int) -> list[Sample]:
        """So many assigned samples."""
        got: list[Sample] = []
        while len(got) < count:
            assign = await self.wire.expect(Assign)
            for work in assign.work:
                sample = Sample(work, np.frombuffer(work.prior, "<i4").tolist())
                self.samples[work.row] = sample
                got.append(sample)
        return got

    async def report(
        self,
        grow: dict[int, int],
        ends: dict[int, str] | None = None,
        *,
        version: int | None = None,
        message: str = "",
    ) -> int:
        """So many more tokens by row, and ends by row. Gives the report's number."""
        self.seq += 1
        rows = sorted(grow)
        starts, tokens = [], []
        for row in rows:
            sample = self.samples[row]
            starts.append(len(sample.tokens))
            new = list(range(len(sample.tokens) + 1, len(sample.tokens) + grow[row] + 1))
            sample.tokens += new
            tokens += new
        assert self.weights is not None
        over = [
            End(row, self.samples[row].work.lease, kind, message, ()) for row, kind in (ends or {}).items()
        ]
        number = version if version is not None else self.weights.version
        await self.wire.send(
            GenerationProgress(
                self.seq,
                np.array(rows, np.uint32),
                np.array([self.samples[row].work.lease for row in rows], np.uint64),
                np.array(starts, np.uint32),
                np.array([grow[row] for row in rows], np.uint32),
                np.array([number] * len(rows), np.int32),
                np.array(tokens, np.int32),
                -np.array(tokens, np.float32),
                over,
            )
        )
        for row in ends or {}:
            del self.samples[row]
        return self.seq

    async def say(self, row: int, tokens: Sequence[int], end: Literal["stop", "length", ""] = "stop") -> None:
        """These are the sample's next tokens, and its last unless `end` is ""."""
        self.seq += 1
        sample = self.samples.pop(row) if end else self.samples[row]
        start = len(sample.tokens)
        sample.tokens += tokens
        assert self.weights is not None
        await self.wire.send(
            GenerationProgress(
                self.seq,
                np.array([row], np.uint32),
                np.array([sample.work.lease], np.uint64),
                np.array([start], np.uint32),
                np.array([len(tokens)], np.uint32),
                np.array([self.weights.version], np.int32),
                np.array(tokens, np.int32),
                np.full(len(tokens), -0.5, np.float32),
                [End(row, sample.work.lease, end, "", ())] if end else [],
            )
        )

    async def acknowledged(self, seq: int) -> None:
        while (await self.wire.expect(Ack)).seq < seq:
            pass


class ScriptedTrainer:
    def __init__(self, plane: Plane, wire: Wire) -> None:
        self.plane, self.wire = plane, wire

    async def publish(self, version: int, **folder: Any) -> ModelFolder:
        path = self.plane.tmp_path / f"v{version}"
        made = small_folder(path, version, **folder) if not path.exists() else ModelFolder.read(path)
        await self.wire.send(Publish(version=version, checksum=made.checksum, path=str(path)))
        return made

    async def ask(
        self,
        ids: Sequence[int],
        *,
        n: int = 1,
        limit: int = 100,
        own: Mapping[int, int] = MappingProxyType({}),
        **other: Any,
    ) -> None:
        """`own` are the limits of prompts that have one."""
        groups = [
            Group(index, np.array([7, 8], np.int32), {"max_new_tokens": own[index]} if index in own else {})
            for index in ids
        ]
        fields = {"purpose": "train", "seed": 3, "min_version": 0} | other
        await self.wire.send(
            Request(
                groups=pack_groups(groups),
                n=n,
                sampling={"max_new_tokens": limit},
                **fields,
            )
        )

    async def groups(self, count: int, purpose: str = "train") -> dict[int, Group]:
        got: dict[int, Group] = {}
        while len(got) < count:
            done = await self.wire.expect(Done)
            assert not done.more, "a group in parts: use a RolloutClient"
            if done.purpose == purpose:
                got |= {group.id: group for group in unpack_groups(done.groups)}
        return got


@contextlib.asynccontextmanager
async def live_plane(tmp_path: Path, **settings: Any) -> AsyncIterator[Plane]:
    with open_store(f"sqlite:///{tmp_path}/gyre.db") as store:
        plane = Plane(store.rollouts("job"), tmp_path)
        await plane.start(**settings)
        try:
            yield plane
        finally:
            for peer in plane.peers:
                await peer.socket.close()
            if plane.http is not None:
                await plane.http.close()
            await plane.manager.stop()
