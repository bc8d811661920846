"""The real rollout manager in virtual time, with honest instances and one that says anything at all."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import msgspec
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gyre.rollouts.manager.connections import Connection
from gyre.rollouts.manager.rollout_manager import RolloutManager
from gyre.rollouts.manager.shell import HearsOfPlane
from gyre.rollouts.plane import peer_events
from gyre.rollouts.plane.events import AgentGone, AgentSent, PeerRefused, ReportsDue
from gyre.rollouts.plane.links import AgentLink
from gyre.rollouts.plane.peers import Caller
from gyre.rollouts.plane.settings import ManagerSettings
from gyre.rollouts.plane.trainer import TrainerDialled, TrainerSent
from gyre.rollouts.protocol.codec import decode, encode, unpack
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import (
    KINDS,
    PROTOCOL,
    Assign,
    Assignment,
    Attach,
    Cancel,
    Frame,
    Held,
    Hello,
    Loaded,
    Publish,
    Reject,
    Request,
    Weights,
    Welcome,
)
from gyre.rollouts.protocol.progress import End, GenerationProgress
from gyre.rollouts.sample_checks import problem_with_group
from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from tests.examples import examples

VOCABULARY, STALL_S, STEP_S = 50, 5.0, 0.25
GROUPS, N, LIMIT = 6, 2, 24
MOST_STEPS, MOST_LIES = 2000, 40


class Peer:
    """One end of a connection without a socket: what the manager sends stands in its queue."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.connection: Any = None
        self.link: AgentLink | None = None
        self.work: dict[int, tuple[Assignment, int]] = {}
        """Samples by row, with their lengths."""
        self.weights: Weights | None = None
        self.rejected: list[Reject] = []
        self.loaded = -1
        self.proven: set[int] = set()
        """Versions whose checksums it named as it joined."""

    @property
    def is_up(self) -> bool:
        return (
            self.link is not None and self.link.connection is self.connection and not self.connection.closing
        )

    def dial(self, hello: Frame | GenerationProgress | bytes, caller: Caller) -> None:
        self.connection = Connection(None, "an agent")  # type: ignore[arg-type]
        self.work, self.link = {}, None
        try:
            first = unpack(hello if isinstance(hello, bytes) else encode(hello))
            self.link = self.world.manager.join(first, self.connection, caller)
        except FrameError as error:
            self.world.manager.shell.handle(PeerRefused(self.connection, error))
            self.connection.close()

    def say(self, frame: Frame | GenerationProgress | bytes) -> None:
        """What the route of agents does with a frame."""
        if not self.is_up or self.link is None:
            return
        shell = self.world.manager.shell
        try:
            told = unpack(frame if isinstance(frame, bytes) else encode(frame))
            shell.handle(AgentSent(self.link, told))
        except FrameError as error:
            shell.handle(PeerRefused(self.connection, error))
            self.hang_up()

    def hang_up(self) -> None:
        if self.link is not None and self.link.connection is self.connection:
            self.connection.close()
            self.world.manager.shell.handle(AgentGone(self.link))

    def hear(self) -> list[Frame]:
        heard = []
        while self.connection is not None and not self.connection.queue.empty():
            data = self.connection.queue.get_nowait()
            if data is None:
                break
            self.connection.waiting_bytes -= len(data)
            frame = decode(data)
            heard.append(frame)
            if isinstance(frame, Welcome):
                self.weights = frame.weights or self.weights
            elif isinstance(frame, Weights):
                self.weights = frame
            elif isinstance(frame, Assign):
                for work in frame.work:
                    self.work[work.row] = (work, len(work.prior) // 4)
            elif isinstance(frame, Reject):
                self.rejected.append(frame)
        return heard  # type: ignore[return-value]

    def hello(self, **changed: Any) -> Hello:
        known: dict[str, Any] = {
            "protocol": PROTOCOL, "instance": self.name, "incarnation": "1", "model": "unset", "engine": "none",
            "max_running": 4, "kv_tokens": 1 << 16,
        }  # fmt: skip
        return Hello(**(known | changed))


class Honest(Peer):
    def step(self) -> None:
        for frame in self.hear():
            if isinstance(frame, Weights | Welcome) and self.weights is not None:
                self.loaded = self.weights.version
                self.say(Loaded(version=self.loaded, checksum=self.weights.checksum, fetch_s=0.1, load_s=0.1))
            elif isinstance(frame, Cancel):
                over = [(row, lease) for row, lease in frame.rows if self._has(row, lease)]
                for row, _ in over:
                    del self.work[row]
                if over:
                    self.say(progress(ends=[End(row, lease, "released", "", ()) for row, lease in over]))
        rows = sorted(self.work)
        grown = {row: min(3, LIMIT - self.work[row][1]) for row in rows}
        some = [row for row in rows if grown[row]]
        ends = []
        for row in rows:
            work, length = self.work[row]
            if length + grown[row] >= LIMIT:
                ends.append(End(row, work.lease, "length", "", ()))
        self.say(
            progress(
                rows=some,
                leases=[self.work[row][0].lease for row in some],
                starts=[self.work[row][1] for row in some],
                counts=[grown[row] for row in some],
                versions=[self.loaded] * len(some),
                tokens=[1] * sum(grown.values()),
                logprobs=[-1.0] * sum(grown.values()),
                ends=ends,
                load=(len(rows), 0, 0, 10.0),
            )
        )
        for row in rows:
            self.work[row] = (self.work[row][0], self.work[row][1] + grown[row])
        for end in ends:
            del self.work[end.row]

    def _has(self, row: int, lease: int) -> bool:
        return row in self.work and self.work[row][0].lease == lease


def progress(
    *,
    rows: Any = (), leases: Any = (), starts: Any = (), counts: Any = (), versions: Any = (), tokens: Any = (),
    logprobs: Any = (), ends: Any = (), load: Any = (0, 0, 0, 0.0),
) -> GenerationProgress:  # fmt: skip
    columns = zip((rows, leases, starts, counts, versions, tokens, logprobs), "IQIIiif", strict=True)
    running, waiting, used, rate = load
    return GenerationProgress(
        1,
        *(np.array(list(values), kind) for values, kind in columns),
        list(ends),
        running,
        waiting,
        used,
        rate,
    )


class World(HearsOfPlane):
    """The manager, its virtual clock, a trainer, and the fleet."""

    def __init__(self) -> None:
        self.now = 100.0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.manager = RolloutManager(
            None,  # type: ignore[arg-type]
            term=1,
            token="secret",
            settings=ManagerSettings(
                stall_timeout_s=STALL_S,
                vocabulary=VOCABULARY,
                silence_timeout_s=3.0,
                load_timeout_s=10.0,
                recall_timeout_s=2.0,
            ),
            owner=self,
            clock=self,
        )
        self.trainer = Connection(None, "the trainer")  # type: ignore[arg-type]
        self.manager.shell.handle(TrainerDialled(self.trainer, Attach(protocol=PROTOCOL, term=1)))
        self.honest = [Honest(self, name) for name in ("a", "b")]
        self.liar = Liar(self, "liar")

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        self.events.append((kind, fields))

    def time(self) -> float:
        return self.now

    def monotonic(self) -> float:
        return self.now

    async def publish(self, version: int) -> None:
        frame = Publish(
            version=version, checksum=f"sum-{version}", path="", sources=["10.0.0.1:1"], model="unset"
        )
        self.manager.shell.handle(TrainerSent(self.trainer, frame, frame.model))
        await self.settle()

    async def ask(self, first: int) -> None:
        groups = [Group(first + at, np.array([7, 8], np.int32)) for at in range(GROUPS)]
        asked = Request(
            purpose="train",
            groups=pack_groups(groups),
            n=N,
            sampling={"max_new_tokens": LIMIT},
            seed=3,
            min_version=0,
        )
        self.manager.shell.handle(TrainerSent(self.trainer, asked))
        await self.settle()

    async def settle(self) -> None:
        """Everything that is due, and a commit."""
        for _ in range(3):
            await asyncio.sleep(0)
            if (batch := self.manager.shell.collect()) is not None:
                self.manager.shell.committed(batch)

    async def step(self) -> None:
        self.now += STEP_S
        for one in self.honest:
            one.step()
        self.manager.shell.tick()
        await self.settle()

    def done(self) -> bool:
        return not any(request.left for request in self.manager.groups.requests.values())


NAMES = st.sampled_from(["liar", "a", "b", "rollout-0", "x" * 200, "trainer"])
JUNK = st.one_of(
    st.integers(-2, 3), st.integers(), st.floats(), st.text(max_size=9), st.booleans(), st.none(),
    st.sampled_from(["a..b:80", "10.0.0.1:22", "[fe80::1%lo]:80", 2**31 - 1, 2**63 - 1, 1e308, -1]),
    st.binary(max_size=9),
    st.lists(st.integers(0, 9), max_size=4),
)  # fmt: skip


KINDS_OF_END = ["stop", "length", "released", "failed", "died"]


class Liar(Peer):
    """Says anything: any frame with any fields, and right ones with one thing in them that is not so."""

    def act(self, data: st.DataObject) -> None:
        self.hear()
        if not self.is_up:
            token = data.draw(st.sampled_from(["spot", "other"]))
            self.name = "liar" if data.draw(st.sampled_from([True, True, True, False])) else data.draw(NAMES)
            changed = (
                {}
                if data.draw(st.sampled_from([True, True, False]))
                else data.draw(
                    st.fixed_dictionaries(
                        {},
                        optional={
                            "incarnation": st.sampled_from(["1", "2", "3"]),
                            "max_running": st.sampled_from([1, 4, 1 << 20]),
                            "kv_tokens": st.sampled_from([1, 2**39]),
                            "version": st.integers(-1, 3),
                            "checksum": st.sampled_from(["sum-0", "sum-1", "no"]),
                            "source": st.sampled_from(["", "10.0.0.1:22", "127.0.0.1:80"]),
                            "local": st.booleans(),
                            "asleep": st.booleans(),
                        },
                    )
                )
            )
            held = [
                Held(key=work.key, lease=work.lease, start=0, length=data.draw(st.integers(0, 2 * LIMIT)))
                for work, _ in self.work.values()
            ]
            hello = self.hello(held=held, **changed)
            self.dial(hello, Caller(token, token))
            if self.is_up and hello.checksum == f"sum-{hello.version}":
                self.proven.add(hello.version)
            return
        match data.draw(st.sampled_from([5, 0, 1, 3, 4, 5, 5, 5, 5])):
            case 0:
                self.say(self._anything(data))
            case 1 | 2:
                self._load(data)
            case 3:
                pass  # silent
            case 4:
                self.hang_up()
            case _:
                self._claim(self._report(data))

    def _claim(self, report: GenerationProgress) -> None:
        """Tokens of a version that it never acknowledged end its connection, whatever else is right."""
        mine = [
            row in self.work and self.work[row][0].lease == lease
            for row, lease in zip(report.rows.tolist(), report.leases.tolist(), strict=True)
        ]
        link = self.link
        assert link is not None
        held = {s.row: s.lease for s in self.world.manager.groups.held_by(link.name)}
        lies = any(
            here and held.get(row) == self.work[row][0].lease and version not in self.proven
            for here, row, version in zip(mine, report.rows.tolist(), report.versions.tolist(), strict=True)
        )
        self.say(report)
        self.world.manager.shell.handle(ReportsDue())
        assert not (lies and self.is_up), "tokens of a version that it never loaded are believed"

    def _anything(self, data: st.DataObject) -> bytes:
        kind = data.draw(st.sampled_from(sorted(KINDS)))
        fields = {
            one.name: data.draw(JUNK)
            for one in msgspec.structs.fields(KINDS[kind])
            if one.required or data.draw(st.booleans())
        }
        try:
            return msgspec.msgpack.encode([kind, fields])
        except OverflowError:  # an integer that msgpack does not have
            return b"\xc1"

    def _load(self, data: st.DataObject) -> None:
        told = self._version()
        version = told if data.draw(st.integers(0, 2)) else data.draw(st.integers(-1, 3))
        checksum = f"sum-{version}" if data.draw(st.integers(0, 3)) else "no"
        self.load(version, checksum, data.draw(st.sampled_from(["", "10.0.0.1:22"])))

    def load(self, version: int, checksum: str = "sum-0", source: str = "") -> None:
        if checksum == f"sum-{version}":
            self.proven.add(version)
        self.say(Loaded(version=version, checksum=checksum, fetch_s=0.0, load_s=1e308, source=source))

    def _report(self, data: st.DataObject) -> GenerationProgress:
        rows = sorted(self.work)[: data.draw(st.sampled_from([4, 1, 2, 0]))]
        lie = data.draw(
            st.sampled_from(
                [
                    "",
                    "",
                    "",
                    "version",
                    "token",
                    "row",
                    "lease",
                    "start",
                    "version",
                    "token",
                    "logprob",
                    "count",
                ]
            )
        )
        counts = [data.draw(st.integers(1, LIMIT + 2 if lie == "count" else 3)) for _ in rows]
        starts = [self.work[row][1] + (lie == "start") for row in rows]
        versions = [data.draw(st.integers(0, 3)) if lie == "version" else self._version() for _ in rows]
        leases = [self.work[row][0].lease + (lie == "lease") for row in rows]
        ends = [
            End(row, self.work[row][0].lease, data.draw(st.sampled_from(KINDS_OF_END)),
                "no", data.draw(st.sampled_from([(), ((1, 3),), ((3, 3),), ((1, 1), (0, 2))])))
            for row in rows if data.draw(st.sampled_from([False, False, False, True]))
        ]  # fmt: skip
        for row, count in zip(rows, counts, strict=True):
            self.work[row] = (self.work[row][0], self.work[row][1] + count)
        return progress(
            rows=[row + (1000 if lie == "row" else 0) for row in rows], leases=leases, starts=starts, counts=counts,
            versions=versions, tokens=[VOCABULARY if lie == "token" else 2] * sum(counts),
            logprobs=[math.nan if lie == "logprob" else -1.0] * sum(counts), ends=ends,
            load=(1, 0, 0, data.draw(st.sampled_from([0.0, 1.0, 1e11]))),
        )  # fmt: skip

    def _version(self) -> int:
        return max(0, self.weights.version if self.weights is not None else 0)


async def run(data: st.DataObject) -> World:
    world = World()
    await world.publish(0)
    for one in world.honest:
        one.dial(one.hello(), Caller())
    world.liar.dial(world.liar.hello(), Caller("spot", "spot"))
    world.liar.load(0)
    for one in world.honest:
        one.step()
    await world.ask(0)
    version = 0
    for _ in range(MOST_LIES):
        world.liar.act(data)
        if version < 2 and data.draw(st.integers(0, 9)) == 0:
            version += 1
            await world.publish(version)
        if data.draw(st.booleans()):
            await world.step()
    await world.ask(100)
    steps = 0
    while not world.done():  # it is silent from now on, or says that it is alive
        world.liar.hear()
        world.liar.say(progress(load=(1, 0, 0, 1e11)))
        await world.step()
        steps += 1
        assert steps < MOST_STEPS, "a sample does not finish"
    return world


@settings(
    max_examples=examples(80),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.data())
def test_one_that_says_anything_harms_nobody(data: st.DataObject) -> None:
    world = asyncio.run(run(data))
    manager = world.manager
    for one in world.honest:
        assert not one.rejected
        assert one.is_up
    assert not manager.groups.given_up
    assert manager.groups.missing_tokens() == 0
    done = [request.complete() for request in manager.groups.requests.values()]
    assert len(done) == 2 * GROUPS
    assert unpack_groups(pack_groups(done))
    for group in done:
        assert not problem_with_group(group, vocabulary=VOCABULARY, newest=manager.versions.newest)
    windows = (world.now - 100.0) / peer_events.WINDOW_S + 1
    for kind, count in Counter(kind for kind, _ in world.events).items():
        if kind not in ("SamplesMoved", "SampleQuarantined"):
            assert count <= windows * (6 * peer_events.EACH + peer_events.ALL_SOURCES), kind
