"""The rollout manager's sessions: frames in any order, from an agent, a trainer, or who is neither.

An honest agent works for an honest trainer meanwhile. A refused frame changes nothing of what they have, the account
stays exact, what was taken is read by the next manager, and the honest agent's sample reaches the trainer.
"""

from __future__ import annotations

import asyncio
import gc
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import msgpack
import msgspec
import numpy as np

from gyre.rollouts.manager.connections import Connection
from gyre.rollouts.manager.rollout_manager import RolloutManager
from gyre.rollouts.manager.shell import HearsOfPlane
from gyre.rollouts.manager.trainer_front import TrainerFront
from gyre.rollouts.plane.events import AgentGone, AgentSent, DispatchDue, PeerRefused, ReportsDue
from gyre.rollouts.plane.links import AgentLink
from gyre.rollouts.plane.peers import Caller
from gyre.rollouts.plane.requests import InFlightSample
from gyre.rollouts.plane.settings import ManagerSettings
from gyre.rollouts.plane.trainer import TrainerDialled, TrainerGone
from gyre.rollouts.protocol.codec import decode, encode, unpack
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import (
    PROTOCOL,
    Asleep,
    Assign,
    Assignment,
    Attach,
    Awake,
    Done,
    Draining,
    EngineDied,
    EngineLimits,
    FetchFault,
    Frame,
    GroupsStored,
    Held,
    Hello,
    LendDevices,
    Loaded,
    LoadFailed,
    Publish,
    ReclaimDevices,
    Request,
    TrainerStatus,
)
from gyre.rollouts.protocol.progress import End, GenerationProgress, Report
from gyre.rollouts.samples import Group, pack_groups
from gyre.store.rollouts import RolloutRows
from gyre.store.tables import encode_body
from tests.fuzz.frames import good_trees, hostile_frame
from tests.fuzz.inputs import damaged, packed, twisted
from tests.fuzz.target import Broken, Target
from tests.rollouts.frames import SELDOM

MOST_FRAMES = 14
"""Of one case."""


COLLECT_EACH = 50
"""Every so many cases their managers are collected: each is a cycle, and has tables of some megabytes."""


class Rows:
    """A ledger in memory, which takes what a database would."""

    def __init__(self) -> None:
        self.counters: dict[str, Any] = {}
        self.groups: dict[int, bytes] = {}
        self.deltas: dict[int, bytes] = {}

    def write(
        self,
        term: int,
        *,
        counters: Any,
        opened: Any,
        deltas: Any,
        closed: Any,
        forgotten: Any,
        sessions: Any,
    ) -> None:
        self.counters = msgspec.json.decode(encode_body(dict(counters), "the counters"))
        self.groups |= opened
        self.deltas |= dict(deltas)
        for key in closed:
            self.groups.pop(key, None)
        for key in forgotten:
            self.deltas.pop(key, None)
        if any(not 0 <= key < 2**63 for key in (*self.groups, *self.deltas)):
            raise Broken("a number that no database has room for")
        if sessions:
            raise Broken("a job without agents has sessions")

    def load(self) -> RolloutRows:
        return RolloutRows(1, self.counters, dict(self.groups), sorted(self.deltas.items()))


class Wire(asyncio.WriteTransport):
    """A connection whose other end reads all: the frames that were sent are in `got`."""

    def __init__(self) -> None:
        super().__init__()
        self.got: deque[Frame | GenerationProgress] = deque()

    def get_write_buffer_size(self) -> int:
        return 0

    def abort(self) -> None:
        pass

    async def send_bytes(self, data: bytes, compress: int | None = None) -> None:
        self.got.append(decode(data))  # whatever the manager sends is a frame

    def connection(self, name: str) -> Connection:
        return Connection(self, name, self)  # type: ignore[arg-type]

    def flush(self, connection: Connection) -> None:
        while not connection.queue.empty():
            if (data := connection.queue.get_nowait()) is not None:
                self.got.append(decode(data))
        connection.waiting_bytes = 0

    def first(self, kind: type[Any]) -> Any:
        return next((frame for frame in self.got if isinstance(frame, kind)), None)


def front_of(manager: RolloutManager) -> TrainerFront:
    return next(one for one in manager.fronts if isinstance(one, TrainerFront))


class Plane(HearsOfPlane):
    """A manager without sockets, an honest trainer that asked for two groups, and an honest agent that works."""

    def __init__(self) -> None:
        self.now = 100.0
        self.rows = Rows()
        self.untold: list[str] = []
        """Why events could not be told."""
        self.manager = self._manager(1)
        self.trainer, self.agent = Wire(), Wire()
        self.at_trainer = self.trainer.connection("the trainer")
        self.at_agent = self.agent.connection("good")
        self.link: AgentLink
        self.work: list[Assignment] = []

    async def open(self) -> None:
        manager = self.manager
        manager.shell.handle(TrainerDialled(self.at_trainer, Attach(protocol=PROTOCOL, term=TERM)))
        await self.tell_trainer(published(0))
        await self.turn()
        honest = hello("good", incarnation="honest", max_running=2)
        self.link = manager.join(honest, self.at_agent, Caller())
        manager.shell.handle(AgentSent(self.link, LOADED))
        await self.turn()
        await self.tell_trainer(asked(range(2)))
        await self.turn()
        assigned = self.agent.first(Assign)
        if assigned is None:
            raise Broken("the honest agent got nothing to do")
        self.work = assigned.work

    def _manager(self, term: int) -> RolloutManager:
        return RolloutManager(
            self.rows,  # type: ignore[arg-type]
            term=term,
            token="secret",
            settings=ManagerSettings(rebalance_every_s=1e9),
            join_token="join",
            owner=self,
            clock=self,
        )

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        try:
            encode_body(fields, f"the event {kind}")  # as the journal keeps it
        except Exception as error:
            self.untold.append(f"{kind}: {error!r}")

    async def tell_trainer(self, frame: Frame | Report) -> None:
        await front_of(self.manager).received(self.at_trainer, frame)

    async def turn(self) -> None:
        """What a turn of the loop, a commit and a tick bring."""
        manager = self.manager
        await asyncio.sleep(0)
        if (batch := manager.shell.collect()) is not None:
            manager.shell.write(batch)
            manager.shell.committed(batch)
        manager.shell.handle(DispatchDue())
        manager.shell.read(self.at_trainer)
        self.trainer.flush(self.at_trainer)
        self.agent.flush(self.at_agent)

    def look(self) -> None:
        self.now += 0.1
        self.manager.shell.tick()
        msgspec.json.encode(self.manager.status())

    def known(self) -> dict[int, tuple[int, int, str | None, str]]:
        """What the manager has of each sample."""
        self.manager.shell.handle(ReportsDue())
        return {
            one.key: (one.length, one.lease, one.instance, one.finish)
            for one in self.manager.groups.samples()
        }

    async def check(self) -> None:
        """The account is exact, all events could be told, and another manager reads what this one wrote."""
        self.look()
        await self.turn()
        if self.manager.groups.missing_tokens():
            raise Broken("the account lacks tokens")
        if self.untold:
            raise Broken(self.untold[0])
        self._manager(2).shell.restore(self.rows.load())

    def close(self) -> None:
        self.manager.shell.commits.close()

    async def serve_the_honest(self) -> None:
        """The honest agent ends its samples, and the honest trainer gets their group."""
        mine = sorted(self.manager.groups.held_by("good"), key=lambda one: one.row)
        if {one.key for one in mine} < {one.key for one in self.work} or self.link.connection is None:
            raise Broken("the honest agent lost its samples")
        told = unpack(encode(report(mine, 1, stop=True)))
        self.manager.shell.handle(AgentSent(self.link, told))
        await self.turn()
        if self.trainer.first(Done) is None:
            raise Broken("the honest trainer did not get its group")


TERM = 3
LOADED = Loaded(version=0, checksum="c0", fetch_s=0.0, load_s=0.0)


def published(version: int) -> Publish:
    return Publish(
        version=version, checksum=f"c{version}", path="/nowhere/weights", model="tiny", sources=["a:1"]
    )


def asked(ids: Iterable[int], **changed: Any) -> Request:
    groups = pack_groups([Group(number, np.arange(1, 4, dtype=np.int32), {"a": 1}) for number in ids])
    fields: dict[str, Any] = {
        "purpose": "train",
        "groups": groups,
        "n": 2,
        "sampling": {"max_new_tokens": 16},
        "seed": 1,
        "min_version": 0,
    }
    return Request(**(fields | changed))


def hello(name: str, **changed: Any) -> Hello:
    fields: dict[str, Any] = {
        "protocol": PROTOCOL,
        "instance": name,
        "incarnation": "1",
        "model": "unset",
        "engine": "fuzz",
        "max_running": 8,
        "kv_tokens": 1 << 16,
    }
    return Hello(**(fields | changed))


def report(samples: Sequence[InFlightSample], seq: int, *, stop: bool) -> GenerationProgress:
    """One token more of each, and maybe the end."""
    size = len(samples)
    return GenerationProgress(
        seq,
        np.array([one.row for one in samples], np.uint32),
        np.array([one.lease for one in samples], np.uint64),
        np.array([one.length for one in samples], np.uint32),
        np.ones(size, np.uint32),
        np.zeros(size, np.int32),
        np.arange(size, dtype=np.int32),
        -np.ones(size, np.float32),
        [End(one.row, one.lease, "stop", "", ()) for one in samples] if stop else [],
    )


class Sessions(Target, ABC):
    share = 0.02
    traced = False  # what the manager keeps of what it took is no fault

    def start(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._fed = 0
        good_trees()

    def stop(self) -> None:
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def feed(self, draw: Random, sent: list[bytes]) -> bool:
        self._fed += 1
        if self._fed % COLLECT_EACH == 0:
            gc.collect()
        return self._loop.run_until_complete(self._case(draw, sent))

    async def _case(self, draw: Random, sent: list[bytes]) -> bool:
        plane = Plane()
        await plane.open()
        taken = 0
        dialled = self.dial(plane)
        for _ in range(draw.randrange(1, MOST_FRAMES)):
            good = self.good(plane, draw, dialled)
            match draw.randrange(6):
                case 0:
                    data = hostile_frame(draw)
                case 1 | 2:
                    data = encode(good)
                case 3 if sent:
                    data = draw.choice(sent)  # once more
                case 4:
                    data = damaged(encode(good), draw)
                case _:
                    tree = msgpack.unpackb(encode(good), raw=False, strict_map_key=False)
                    data = packed(twisted(tree, draw))
            sent.append(data)
            await asyncio.sleep(0)  # what is scheduled already is not this frame's doing
            before = plane.known()
            try:
                await self.send(plane, dialled, unpack(data))
                taken += 1
            except FrameError as error:
                if not error.details.get("reason"):
                    raise Broken("a refusal without a code") from error
                if plane.known() != before:
                    raise Broken(f"a refused frame changed what is known: {error}") from error
                plane.manager.shell.handle(PeerRefused(dialled.connection, error))
                self.hang_up(plane, dialled)
                dialled = self.dial(plane)
            if draw.randrange(3):
                await plane.turn()
            dialled.wire.flush(dialled.connection)
            if draw.randrange(4) == 0:
                plane.look()
        await plane.check()
        await self.at_the_end(plane)
        plane.close()
        return taken == len(sent)

    def dial(self, plane: Plane) -> Dialled:
        wire = Wire()
        return Dialled(wire, wire.connection("a stranger"))

    @abstractmethod
    def good(self, plane: Plane, draw: Random, dialled: Dialled) -> Frame | GenerationProgress:
        """What an honest peer could say now."""

    @abstractmethod
    async def send(self, plane: Plane, dialled: Dialled, frame: Frame | Report) -> None:
        """As the manager's route does. Raises FrameError."""

    @abstractmethod
    def hang_up(self, plane: Plane, dialled: Dialled) -> None: ...

    async def at_the_end(self, plane: Plane) -> None:
        pass


@dataclass
class Dialled:
    wire: Wire
    connection: Connection
    link: AgentLink | None = None
    attached: bool = False


class AgentSessions(Sessions):
    """A machine that joined, on the agents' route: it harms nobody but itself."""

    name = "agent sessions"

    def good(self, plane: Plane, draw: Random, dialled: Dialled) -> Frame | GenerationProgress:
        groups = plane.manager.groups
        own = sorted(groups.held_by("bad"), key=lambda one: one.row) if "bad" in groups.instances else []
        if dialled.link is None and draw.randrange(5):
            held = [
                Held(key=one.key, lease=one.lease, start=0, length=one.length + draw.randrange(3))
                for one in groups.samples()
                if draw.randrange(2)
            ]
            return hello("bad", incarnation=draw.choice("12"), held=held, version=draw.choice((-1, 0)))
        match draw.randrange(8):
            case 0:
                return LOADED
            case 1:
                return EngineLimits(max_running=draw.choice((1, 1 << 20)), kv_tokens=draw.choice((1, 2**39)))
            case 2:  # of samples that are the honest agent's
                others = sorted(groups.samples(), key=lambda one: one.row)
                return report(others, draw.randrange(9), stop=draw.random() < 0.5)
            case 3 | 4 | 5 if own:
                some = sorted(draw.sample(own, draw.randrange(1, len(own) + 1)), key=lambda one: one.row)
                return report(some, draw.randrange(9), stop=draw.random() < 0.5)
            case _:
                return draw.choice(FROM_AGENTS)

    async def send(self, plane: Plane, dialled: Dialled, frame: Frame | Report) -> None:
        if dialled.link is None:
            caller = Caller("machine", "its digest")
            dialled.link = plane.manager.join(frame, dialled.connection, caller)
        elif dialled.link.connection is dialled.connection and not dialled.connection.closing:
            plane.manager.shell.handle(AgentSent(dialled.link, frame))

    def hang_up(self, plane: Plane, dialled: Dialled) -> None:
        if dialled.link is not None and dialled.link.connection is dialled.connection:
            plane.manager.shell.handle(AgentGone(dialled.link))

    async def at_the_end(self, plane: Plane) -> None:
        await plane.serve_the_honest()


class TrainerSessions(Sessions):
    """Who has the job's secret and speaks as a trainer: what it may do it does, and nothing breaks."""

    name = "trainer sessions"

    def good(self, plane: Plane, draw: Random, dialled: Dialled) -> Frame | GenerationProgress:
        if not dialled.attached and draw.randrange(5):
            return Attach(protocol=PROTOCOL, term=draw.randrange(5), samples_ahead=bool(draw.randrange(2)))
        match draw.randrange(6):
            case 0:
                return asked(
                    (draw.randrange(-3, 6) for _ in range(draw.randrange(1, 4))),
                    min_version=draw.randrange(-1, 3),
                    pinned=draw.random() < 0.3,
                    n=draw.randrange(1, 4),
                )
            case 1:
                return GroupsStored(purpose="train", ids=[draw.randrange(4)])
            case 2:
                return published(draw.randrange(3))
            case _:
                return draw.choice(FROM_TRAINERS)

    async def send(self, plane: Plane, dialled: Dialled, frame: Frame | Report) -> None:
        front = front_of(plane.manager)
        if not dialled.attached:
            plane.manager.shell.handle(TrainerDialled(dialled.connection, frame))
            dialled.attached = True
        elif front.connection is dialled.connection:
            await front.received(dialled.connection, frame)

    def hang_up(self, plane: Plane, dialled: Dialled) -> None:
        plane.manager.shell.handle(TrainerGone(dialled.connection))


FROM_AGENTS = [
    frame
    for frame in SELDOM
    if isinstance(frame, Loaded | LoadFailed | FetchFault | Draining | EngineDied | Asleep | Awake)
]
FROM_TRAINERS = [
    frame
    for frame in SELDOM
    if isinstance(frame, Request | GroupsStored | Publish | TrainerStatus | LendDevices | ReclaimDevices)
]
