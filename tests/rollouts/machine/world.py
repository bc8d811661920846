"""A random life of a rollout manager: agents that generate, are cut, die, drain and lie; a trainer, or clients at the
door; commits that come late; managers that are killed. Each seed is one life."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np
from msgspec.structs import replace

from gyre.rollouts.protocol.codec import decode, encode
from gyre.rollouts.protocol.frames import (
    PROTOCOL,
    Ack,
    Asleep,
    Assign,
    Attach,
    Awake,
    Cancel,
    DevicesReturned,
    Done,
    Drain,
    Draining,
    EngineDied,
    EngineLimits,
    Failed,
    FetchFault,
    Frame,
    GroupsStored,
    LendDevices,
    Loaded,
    LoadFailed,
    Publish,
    ReclaimDevices,
    Reject,
    Request,
    Sleep,
    TrainerStatus,
    Wake,
    Weights,
    Welcome,
)
from gyre.rollouts.protocol.progress import GenerationProgress
from gyre.rollouts.samples import Group, pack_groups, unpack_groups
from tests.rollouts.machine.player import Player, Rows, Step, in_order, packed, unpacked
from tests.rollouts.machine.simulated_agents import SimAgent

OURS = ("rollout-0", "rollout-1", "spare_rollout-0")
OWNERS, IDS = ("lab:1", "lab:1", "other:2"), ("one", "two", "three", "four", "five")


@dataclass(eq=False)
class Agent(SimAgent):
    """An agent at one connection; its incarnation outlives it."""

    number: int = -1
    local: bool = False
    asleep: bool = False
    due: list[Frame] = field(default_factory=list)
    """What it says next."""
    weights: Weights | None = None
    """To be loaded."""
    checksum: str = ""
    prompts: dict[int, Any] = field(default_factory=dict)

    def hello(self) -> Any:
        return replace(
            super().hello(),
            protocol=PROTOCOL,
            checksum=self.checksum,
            local=self.local,
            asleep=self.asleep,
            node="here",
        )

    def hear(self, frame: Frame | GenerationProgress) -> None:
        if isinstance(frame, Welcome):
            self.welcomed(frame.keep)
            self.prompts.clear()
            self.weights = frame.weights
        elif isinstance(frame, Weights) and not frame.ahead:
            self.weights = frame
        elif isinstance(frame, Assign):
            self.prompts |= {prompt.request_id: prompt for prompt in frame.prompts}
            self.inbox += [(self.prompts[work.request_id], work) for work in frame.work]
        elif isinstance(frame, Cancel):
            self.inbox += [lease for _, lease in frame.rows]
        elif isinstance(frame, Ack):
            self.acknowledged(frame.seq)
        elif isinstance(frame, Drain):
            self.draining = True
        elif isinstance(frame, Sleep):
            self.asleep = True
            self.due.append(Asleep(seconds=0.1))
        elif isinstance(frame, Wake):
            self.asleep = False
            self.due.append(Awake(seconds=0.1))
        elif isinstance(frame, Reject):
            self.connected = False


class World:
    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.draw = kind, Random(seed)
        self.now, self.term, self.numbers = 1000.0, 1, 0
        self.rows = Rows()
        self.player = Player(kind, self.rows, 1, self.now)
        self.history: list[Step] = [["began", kind, self.now]]
        self.agents: dict[str, Agent] = {}
        self.incarnations = 0
        self.trainer: int | None = None
        self.trainer_term = 0
        self.version, self.next_group, self.window, self.waited_s = -1, 0, 0, 0.0
        self.received: list[tuple[str, int]] = []
        self.publishers = 0

    async def do(self, *event: Any) -> None:
        done = await self.player.play(list(event), self.now)
        self.history.append([self.now, list(event), in_order(done)])
        for step in done:
            if step[0] == "send":
                self.hear(step[1], decode(unpacked(step[2])))
            elif step[0] == "close":
                for agent in self.agents.values():
                    if agent.number == step[1]:
                        agent.connected = False

    def hear(self, number: int, frame: Frame | GenerationProgress) -> None:
        for agent in self.agents.values():
            if agent.number == number:
                agent.hear(frame)
        if number == self.trainer:
            if isinstance(frame, Done):
                self.received += [(frame.purpose, group.id) for group in unpack_groups(frame.groups)]
            elif isinstance(frame, Failed):
                self.received += [(frame.purpose, one) for one in frame.ids]
            elif isinstance(frame, DevicesReturned):
                self.window = max(self.window, frame.window)

    def new_number(self) -> int:
        self.numbers += 1
        return self.numbers

    def pass_time(self, seconds: float) -> None:
        self.now = round(self.now + seconds, 6)

    # -- what happens -------------------------------------------------------------------------------

    async def live(self, steps: int) -> list[Step]:
        await self.do("tick")
        for _ in range(steps):
            await self.something()
            self.pass_time(self.draw.choice((0.0, 0.01, 0.05, 0.1, 0.1)))
        await self.do("status")
        return self.history

    async def something(self) -> None:
        draw = self.draw.random()
        if draw < 0.22:
            self.pass_time(0.1)
            await self.do("tick")
        elif draw < 0.34:
            await self.commit()
        elif draw < 0.74:
            await self.some_agent()
        elif draw < 0.97:
            await (self.client() if self.kind == "door" else self.some_trainer())
        elif draw < 0.985:
            self.pass_time(self.draw.choice((0.5, 1.0, 3.5, 7.0)))
            await self.do("tick")
        elif draw < 0.988:
            await self.killed()
        elif draw < 0.993 and self.agents:
            await self.do("drain", self.draw.choice(sorted(self.agents)), 5.0, "asked to")
        elif draw < 0.994:
            await self.do("revoke", "spot")
        else:
            await self.do("status")

    async def commit(self) -> None:
        await self.do("collect")
        for _ in range(self.draw.choice((0, 0, 1, 3))):
            await self.some_agent()
        await self.do("committed")

    async def killed(self) -> None:
        self.term += 1
        self.player = Player(self.kind, self.rows, self.term, self.now)
        self.history.append([self.now, ["killed", self.term], in_order(self.player.restored)])
        for agent in self.agents.values():
            agent.connected = False
        self.trainer = None

    # -- agents -------------------------------------------------------------------------------------

    async def some_agent(self) -> None:
        names = [*OURS, "far"] if self.kind == "door" else [*OURS, "far", "local-0", "local-1"]
        name = self.draw.choice(names)
        agent = self.agents.get(name)
        if agent is None or self.draw.random() < 0.01:
            self.incarnations += 1
            agent = self.agents[name] = Agent(
                name, self.incarnations % 3, self.incarnations, local=name.startswith("local")
            )
        if not agent.connected:
            await self.dial(agent)
            return
        agent.read()
        draw = self.draw.random()
        if agent.due:
            await self.say(agent, agent.due.pop(0))
        elif agent.weights is not None and draw < 0.7:
            await self.load(agent, agent.weights)
        elif draw < 0.8:
            await self.report(agent)
        elif draw < 0.86:
            await self.trouble(agent)
        elif draw < 0.88:
            await self.do("left", agent.number)
            agent.connected = False
        elif draw < 0.9:
            await self.dial(agent)  # which has not noticed that it was cut
        else:
            await self.report(agent, whole=True)

    async def dial(self, agent: Agent) -> None:
        if agent.draining:
            self.incarnations += 1
            agent = self.agents[agent.name] = Agent(
                agent.name, agent.maker, self.incarnations, local=agent.local
            )
        agent.number, agent.due = self.new_number(), []
        agent.connected = True
        await self.do("dial", agent.number, "10.0.0.9", agent.name == "far", packed(encode(agent.hello())))

    async def say(self, agent: Agent, frame: Frame) -> None:
        await self.do("said", agent.number, packed(encode(frame)))

    async def load(self, agent: Agent, weights: Weights) -> None:
        agent.weights = None
        if self.draw.random() < 0.08:
            starting = agent.version < 0 and self.draw.random() < 0.5
            failed = LoadFailed(version=weights.version, error="no room", starting=starting, said="x")
            await self.say(agent, failed)
            return
        how = "start" if agent.version < 0 else self.draw.choice(("loader", "disk"))
        agent.version, agent.checksum = weights.version, weights.checksum
        note = "no memory" if how == "disk" else ""
        loaded = Loaded(
            version=weights.version,
            checksum=weights.checksum if self.draw.random() < 0.98 else "other",
            fetch_s=0.5,
            load_s=0.2,
            how=how,  # type: ignore[arg-type]
            note=note,
            source="10.0.0.9:7000" if self.draw.random() < 0.5 else "10.0.0.1:7000",
            way=self.draw.choice(("tcp", "here", "linked")),
        )
        await self.say(agent, loaded)

    async def report(self, agent: Agent, *, whole: bool = False) -> None:
        if agent.version >= 0:
            for sim in agent.samples.values():
                sim.advance(self.draw.randint(0, 9), agent.version, agent.maker)
                if self.draw.random() < 0.004:
                    sim.end = sim.end or "failed"
        data = agent.report(lambda sim: None if whole or sim.end else self.draw.randint(0, 6))
        await self.do("said", agent.number, packed(data))

    async def trouble(self, agent: Agent) -> None:
        draw = self.draw.random()
        if draw < 0.25:
            await self.say(agent, EngineLimits(max_running=self.draw.randint(2, 5), kv_tokens=4096, why="x"))
        elif draw < 0.45:
            await self.say(agent, FetchFault(version=max(agent.version, 0), what="stalled", evidence="{}"))
        elif draw < 0.65 and agent.version >= 0:
            agent.version, agent.checksum = -1, ""
            for sim in agent.samples.values():
                sim.end = sim.end or "died"
            for _ in range(4):
                await self.do("said", agent.number, packed(agent.report(lambda sim: None)))
            await self.say(agent, EngineDied(message="killed", tail="out of memory"))
        elif draw < 0.75:
            agent.draining = True
            await self.say(agent, Draining(reason="preempted", deadline_s=3.0))
        elif draw < 0.8 and agent.frames:
            await self.do("said", agent.number, packed(self.draw.choice(agent.frames)))  # again
        elif draw < 0.82:
            await self.say(agent, Loaded(version=99, checksum="c", fetch_s=0.0, load_s=0.0))

    # -- who asks -----------------------------------------------------------------------------------

    def published(self) -> Publish:
        self.publishers += self.draw.random() < 0.1
        return Publish(
            version=max(self.version, 0),
            checksum=f"c{self.version}",
            path="",
            model="unset",
            sources=[f"10.0.0.1:{7000 + self.publishers}"],
        )

    async def some_trainer(self) -> None:
        if self.trainer is None:
            self.trainer_term += self.draw.random() < 0.7
            self.trainer = self.new_number()
            ahead = self.draw.random() < 0.5
            frame = Attach(protocol=PROTOCOL, term=self.trainer_term, samples_ahead=ahead)
            await self.do("attach", self.trainer, packed(encode(frame)))
            if self.version >= 0:
                await self.tell(self.published())
            return
        draw = self.draw.random()
        if self.version < 0 or draw < 0.08:
            self.version += 1
            await self.tell(self.published())
        elif draw < 0.35:
            await self.request()
        elif draw < 0.7 and self.received:
            purpose, number = self.received.pop(self.draw.randrange(len(self.received)))
            await self.tell(GroupsStored(purpose=purpose, ids=[number]))
        elif draw < 0.8:
            self.waited_s += self.draw.random()
            wanted = {"rollout": self.draw.choice((2, 2, 3, 5)), "spare_rollout": 1}
            await self.tell(TrainerStatus(at_s=self.now - 1000.0, waited_s=self.waited_s, wanted=wanted))
        elif draw < 0.88:
            self.window += 1
            lend = LendDevices(
                window=self.window,
                begun=self.draw.random() < 0.5,
                arrived_tokens=50,
                train_s_per_token=self.draw.choice((0.0, 0.001, 0.1)),
                last_share=0.5,
            )
            await self.tell(lend)
        elif draw < 0.9:
            await self.tell(ReclaimDevices(window=self.window))
        elif draw < 0.92:
            number, self.trainer = self.trainer, None
            await self.do("trainer_left", number)

    async def request(self) -> None:
        again = self.draw.random() < 0.2
        first = max(0, self.next_group - 2) if again else self.next_group
        count = self.draw.randint(1, 3)
        self.next_group = max(self.next_group, first + count)
        groups = [Group(first + i, np.arange(1, 4 + (first + i) % 3, dtype=np.int32)) for i in range(count)]
        pinned = self.draw.random() < 0.15
        newer = self.draw.random() < 0.15
        asked = Request(
            purpose=self.draw.choice(("train", "train", "eval")),
            groups=pack_groups(groups),
            n=self.draw.randint(1, 3),
            sampling={"max_new_tokens": self.draw.choice((8, 30, 60))},
            seed=5,
            min_version=max(0, self.version + newer - (self.draw.random() < 0.3)),
            pinned=pinned and not newer,
        )
        await self.tell(asked)

    async def tell(self, frame: Frame) -> None:
        if self.trainer is not None:
            await self.do("trainer", self.trainer, packed(encode(frame)))

    async def client(self) -> None:
        draw, owner, one = self.draw.random(), self.draw.choice(OWNERS), self.draw.choice(IDS)
        if self.version < 0 or draw < 0.08:
            self.version += 1
            await self.do("publish", packed(encode(self.published())))
        elif draw < 0.6:
            wish = self.draw.choice(([0, False], [0, False], [self.version, True], [self.version, False]))
            most = self.draw.choice((8, 30))
            await self.do("ask", owner, one, [7, 8, len(one)], self.draw.randint(1, 2), most, wish)
        elif draw < 0.8:
            await self.do("delete", owner, one)
        elif draw < 0.88:
            await self.do("abort", owner, self.draw.choice((None, one)))
        elif draw < 0.92:
            await self.do("looked_at", {"rollout": self.draw.choice((2, 3))})
