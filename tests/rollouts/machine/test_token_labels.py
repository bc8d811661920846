"""Every token knows its policy, whoever dies between two messages of a publish: what a sample says of each token is the
version of the weights that made it.

The manager's state, an agent's samples and its reports are the product's own. The engines are not: a token of theirs is
the version that made it, so a wrong label shows. They tell versions as real ones do: with each chunk (the embedded
engine), with the last (SGLang that reads versions from disk), or by counts in the pause (SGLang with Gyre's loader).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.engines.dialect import Finish, FinishKind, StreamChunk, VersionSpan
from gyre.rollouts.agent.generation import Generation
from gyre.rollouts.agent.held_samples import HeldSample, request_id
from gyre.rollouts.agent.reports import Reports
from gyre.rollouts.plane.groups import Given
from gyre.rollouts.protocol.codec import decode, encode
from gyre.rollouts.protocol.frames import Assignment, Held, Hello, Prompt
from gyre.rollouts.protocol.progress import GenerationProgress
from gyre.testing.clock import VirtualClock
from tests.examples import examples
from tests.rollouts.machine.fleet import went_through
from tests.rollouts.machine.simulated_agents import Rows
from tests.rollouts.machine.small_groups import asked

LIMIT = 24
SEEN: Counter[str] = Counter()


@dataclass
class Stream:
    """A request at an engine."""

    limit: int
    made: list[int] = field(default_factory=list)
    sent: int = 0


@dataclass
class Engine:
    tells: str
    version: int
    streams: dict[str, Stream] = field(default_factory=dict)

    def step(self) -> None:
        for stream in self.streams.values():
            if len(stream.made) < stream.limit:
                stream.made.append(self.version)

    def chunk(self, rid: str, *, abort: bool = False) -> StreamChunk | None:
        """What the request got since the last one."""
        stream = self.streams[rid]
        some, over = stream.made[stream.sent :], len(stream.made) == stream.limit
        if not some and not abort:
            return None
        stream.sent = len(stream.made)
        finish = Finish(FinishKind.LENGTH) if over else Finish(FinishKind.ABORT) if abort else None
        spans = [VersionSpan(str(version), at, at + 1) for at, version in enumerate(stream.made)]
        says = self.tells == "each" or (self.tells == "last" and finish is not None)
        if finish is not None:
            del self.streams[rid]
        return StreamChunk(
            np.array(some, np.int32),
            np.zeros(len(some), np.float32),
            str(self.version),
            finish,
            tuple(spans) if says else (),
        )


class Agent:
    def __init__(self, name: str, incarnation: int, tells: str, version: int) -> None:
        self.name, self.incarnation = name, incarnation
        self.engine = Engine(tells, version)
        self.version = self.said = version
        """What it knows that its engine serves, and what the manager was told."""
        self.counts_from = version if tells == "counts" else -1
        self.is_connected = False
        self.loading: list[str] = []
        """What is left of a load."""
        self.wanted = version
        self.outbox: list[int | bytes] = []
        """Versions that are loaded, and reports."""
        self.reports = Reports(8)
        host: Any = SimpleNamespace(client=None, reads_apart=False)
        self.generation = Generation(host, self, clock=VirtualClock())

    def spawn(self, work: Awaitable[Any]) -> None:
        """Nothing is begun here."""

    def report_soon(self) -> None:
        """Reports are made when the world wants them."""

    @property
    def held(self) -> list[HeldSample]:
        return list(self.generation.samples.values())

    def hello(self) -> Hello:
        return Hello(
            protocol=1,
            instance=self.name,
            incarnation=str(self.incarnation),
            model="unset",
            engine="sim",
            max_running=4,
            kv_tokens=4096,
            version=self.version,
            held=[
                Held(key=one.key, lease=one.lease, start=one.start, length=one.start + one.made)
                for one in self.held
            ],
        )

    def begin(self, work: Assignment, prompt: Prompt) -> None:
        prior = np.frombuffer(work.prior, "<i4").astype(np.int32)
        held = HeldSample(
            work.key,
            work.row,
            work.lease,
            np.frombuffer(prompt.tokens, "<i4").astype(np.int32),
            prior,
            prompt.sampling,
            work.seed,
            rid=request_id(work.lease),
            seen=self.version,
        )
        held.asked(self.counts_from)
        self.generation.samples[held.lease] = held
        self.engine.streams[held.rid] = Stream(LIMIT - len(prior))

    def take(self, held: HeldSample, chunk: StreamChunk | None) -> None:
        if chunk is None:
            return
        held.take(chunk, self.version)
        if chunk.finish is not None:
            held.end = "length" if chunk.finish.kind is FinishKind.LENGTH else "released"

    def deliver(self, only: int | None = None) -> None:
        """Chunks come, of one sample or of all."""
        running = [one for one in self.held if not one.end]
        for held in running if only is None else running[only : only + 1]:
            self.take(held, self.engine.chunk(held.rid))

    def recall(self) -> None:
        for held in [one for one in self.held if not one.end][:1]:
            self.take(held, self.engine.chunk(held.rid, abort=True))

    def load_on(self) -> None:
        """One step of a load: the engine has the weights, the agent knows, the manager is to hear."""
        if not self.loading and self.wanted > self.version:
            self.loading = ["weights", "known", "told"]
        if not self.loading:
            return
        step = self.loading.pop(0)
        if step == "weights":
            made = {rid: len(stream.made) for rid, stream in self.engine.streams.items()}
            self.engine.version = self.wanted
            self.counts_from = self.wanted if self.engine.tells == "counts" else -1
            for held in self.held:
                if not held.end:
                    held.changed(self.wanted, made if self.engine.tells == "counts" else None)
        elif step == "known":
            self.version = self.engine.version
        elif self.is_connected:
            self.outbox.append(self.version)
            self.said = self.version

    def report(self) -> None:
        more = self.is_connected
        while more:
            frame, more = self.reports.next(
                self.held, everything=True, made_tokens=0, interval_s=1.0, now=0.0, newest=self.said
            )
            self.outbox.append(encode(frame))


class World:
    def __init__(self, tells: list[str]) -> None:
        self.tells = tells
        self.rows = Rows()
        self.epoch, self.incarnations, self.version, self.committed = 1, 0, 0, 0
        self.blamed = False
        """Whether an engine or an agent died: then nobody may be left who can put a provisional label right."""
        self.groups = self.rows.restored(self.epoch)
        self.waiting: list[tuple[int, str, Assignment, Prompt]] = []
        self.agents = [self.new(0), self.new(1)]
        for agent in self.agents:
            self.dial(agent)
        self.groups.open(asked(2, n=3, limit=LIMIT))
        self.assign()

    def new(self, at: int) -> Agent:
        self.incarnations += 1
        return Agent("ab"[at], self.incarnations, self.tells[at], self.rows.served)

    # -- the manager ---

    def dial(self, agent: Agent) -> None:
        keep = self.groups.join(agent.hello())
        self.groups.cancelled = []
        agent.is_connected, agent.outbox, agent.reports.seq = True, [], 0
        agent.said = agent.version
        instance = self.groups.instances[agent.name]
        instance.loaded.came_back(agent.version)
        self.groups.serve(agent.name, agent.version)
        leases = {held.rid for held in agent.held}
        agent.generation.keep(keep)
        for rid in leases - {held.rid for held in agent.held if not held.end}:
            agent.engine.streams.pop(rid, None)
        agent.wanted = max(agent.wanted, self.groups.served_version)

    def assign(self) -> None:
        self.give(self.groups.assign())

    def give(self, given: Given) -> None:
        for name, (prompts, works) in given.items():
            known = {prompt.request_id: prompt for prompt in prompts}
            for work in works:
                state = self.groups.sample(work.key)
                assert state is not None
                needed = self.groups.last_delta(state) if work.prior else 0
                self.waiting.append((needed, name, work, known[work.request_id]))
        self.hand_out()

    def hand_out(self) -> None:
        waiting, self.waiting = self.waiting, []
        for needed, name, work, prompt in waiting:
            agent = next(one for one in self.agents if one.name == name)
            if needed > self.committed:
                self.waiting.append((needed, name, work, prompt))
            elif agent.is_connected:
                agent.begin(work, prompt)

    def hear(self, agent: Agent) -> None:
        """The manager gets the agent's next message."""
        if not agent.is_connected or not agent.outbox:
            return
        said = agent.outbox.pop(0)
        if isinstance(said, int):
            self.groups.serve(agent.name, said)
            return
        frame = decode(said)
        assert isinstance(frame, GenerationProgress)
        self.give(self.groups.progress(agent.name, frame))

    def commit(self) -> None:
        batch = self.groups.take_batch()
        rows = self.rows
        rows.counters, rows.newest = batch.counters, self.version
        rows.groups |= batch.opened
        rows.deltas |= dict(batch.encoded())
        for number in batch.closed:
            rows.groups.pop(number, None)
        for seq in batch.forgotten:
            rows.deltas.pop(seq)
        if batch.deltas:
            self.committed = batch.deltas[-1].seq
        for number, seq in batch.reports.items():
            for agent in self.agents:
                instance = self.groups.instances.get(agent.name)
                if instance is not None and instance.number == number:
                    agent.generation.acknowledged(seq)
        self.hand_out()
        if rows.served < self.version:  # published means durable: it is served after this
            rows.served = self.version
            self.groups.promote(self.version)
            for agent in self.agents:
                agent.wanted = self.version if agent.is_connected else agent.wanted

    def publish(self) -> None:
        if self.version < 5:
            self.version += 1
            self.groups.newest_version = self.version

    def manager_dies(self) -> None:
        SEEN["the manager died"] += 1
        SEEN["in a load"] += any(agent.loading for agent in self.agents)
        self.epoch += 1
        self.commit_nothing()

    def commit_nothing(self) -> None:
        if not self.rows.groups:
            return  # nothing was ever written: there is nothing to restore
        self.groups = self.rows.restored(self.epoch)
        self.version = self.rows.newest
        self.waiting, self.committed = [], max(self.rows.deltas, default=0)
        for agent in self.agents:
            agent.is_connected = False

    # -- who dies ---

    def agent_dies(self, at: int) -> None:
        self.blamed = True
        SEEN["an agent died"] += 1
        self.groups.leave(self.agents[at].name, died="connection_lost")
        self.waiting = [one for one in self.waiting if one[1] != self.agents[at].name]
        self.agents[at] = self.new(at)

    def engine_dies(self, at: int) -> None:
        """The agent starts another, over the version that it serves, and its samples go on elsewhere."""
        self.blamed = True
        SEEN["an engine died"] += 1
        agent = self.agents[at]
        agent.engine = Engine(agent.engine.tells, agent.version)
        agent.counts_from = agent.version if agent.engine.tells == "counts" else -1
        agent.loading = ["told"]
        for held in agent.held:
            held.end = held.end or "died"

    def cut(self, at: int) -> None:
        """The connection breaks, and is dialled again."""
        self.waiting = [one for one in self.waiting if one[1] != self.agents[at].name]
        self.dial(self.agents[at])

    def do(self, what: str, at: int) -> None:
        agent = self.agents[at]
        if what in ("step", "chunk"):
            agent.engine.step()
            if what == "chunk":
                agent.deliver(0)
        elif what == "chunks":
            agent.deliver()
        elif what == "recall":
            agent.recall()
        elif what == "load":
            agent.load_on()
        elif what == "report":
            agent.report()
        elif what == "hear":
            self.hear(agent)
        elif what == "redial":
            if not agent.is_connected:
                self.dial(agent)
                self.assign()
        elif what in ("agent_dies", "engine_dies", "cut"):
            if what != "cut" or agent.is_connected:
                getattr(self, what)(at)
        else:
            getattr(self, what)()

    def finish(self) -> None:
        for _ in range(300):
            if not self.unfinished:
                break
            for at, agent in enumerate(self.agents):
                if not agent.is_connected or agent.name not in self.groups.instances:
                    self.dial(agent)
                for what in ("load", "step", "chunks", "report"):
                    self.do(what, at)
                while agent.outbox:
                    self.hear(agent)
            self.commit()
            self.assign()
        assert not self.unfinished, "the samples never end"

    @property
    def unfinished(self) -> bool:
        return any(request.left for request in self.groups.requests.values())

    def check(self) -> None:
        for state in self.groups.samples():
            made = state.tokens()[0].tolist()
            labels = [version for version, start, end in state.runs for _ in range(start, end)]
            assert len(labels) == len(made) == LIMIT
            SEEN["samples of several versions"] += len(set(made)) > 1
            if self.blamed and "last" in self.tells:
                assert all(label <= true for label, true in zip(labels, made, strict=True)), (labels, made)
            else:
                assert labels == made


OFTEN = ["step", "chunk", "chunks", "load", "report", "hear", "hear", "commit", "redial"]
SELDOM = ["publish", "manager_dies", "agent_dies", "engine_dies", "cut", "recall"]
A_PUBLISH = [
    "step",
    "chunks",
    "publish",
    "commit",
    "load",
    "step",
    "chunk",
    "load",
    "load",
    "report",
    "hear",
    "hear",
    "commit",
]
"""The messages of one, in order."""


@pytest.fixture(scope="module", autouse=True)
def seen() -> Iterator[None]:
    SEEN.clear()
    yield
    went_through(
        SEEN,
        ("the manager died", "in a load", "an agent died", "an engine died", "samples of several versions"),
    )


@settings(max_examples=examples(300), deadline=None)
@given(
    tells=st.lists(st.sampled_from(["each", "last", "counts"]), min_size=2, max_size=2),
    moves=st.lists(
        st.tuples(st.sampled_from([*OFTEN, *SELDOM]) | st.sampled_from(OFTEN), st.integers(0, 1)), max_size=60
    ),
)
def test_every_token_knows_its_policy(tells: list[str], moves: list[tuple[str, int]]) -> None:
    world = World(tells)
    for what, at in moves:
        world.do(what, at)
    world.finish()
    world.check()


@pytest.mark.parametrize("dies", ["manager_dies", "agent_dies", "engine_dies", "cut"])
@pytest.mark.parametrize("tells", ["each", "last", "counts"])
def test_whoever_dies_between_two_messages_of_a_publish(tells: str, dies: str) -> None:
    for at in range(len(A_PUBLISH) + 1):
        world = World([tells, tells])
        world.commit()
        for number, what in enumerate(A_PUBLISH):
            if number == at:
                world.do(dies, 0)
            world.do(what, 0)
            world.do(what, 1)
        if at == len(A_PUBLISH):
            world.do(dies, 0)
        world.finish()
        world.check()
