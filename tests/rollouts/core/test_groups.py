"""The open groups against a fleet that does anything: joins, cuts, crashes, engine deaths, drains, moves, restarts.

The agents here generate nothing; what they call a token is a hash of everything before it, of the policy's version
and of who made it. So a sample that was put together from pieces that do not belong together shows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gyre.rollouts.core.groups import MOST_RESETS, OpenGroups
from gyre.rollouts.core.quarantine import CLEARED_AFTER_TOKENS, QUARANTINE_AFTER
from gyre.rollouts.core.requests import EarlierLease, InFlightSample
from gyre.rollouts.core.seeds import seed_of
from gyre.rollouts.protocol.codec import decode, encode
from gyre.rollouts.protocol.fields import FrameError
from gyre.rollouts.protocol.frames import Held, Hello, Keep, Prompt, Request, Work
from gyre.rollouts.protocol.lineage import lineage
from gyre.rollouts.protocol.progress import End, Progress
from gyre.rollouts.samples import Group, pack_groups

MASK = (1 << 64) - 1


def mix(state: int, *more: int) -> int:
    for value in more:
        state = ((state ^ (value & MASK)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & MASK
        state ^= state >> 29
    return state


def token_of(state: int, version: int, maker: int) -> int:
    return mix(state, version + 1, maker) & 0x3FFFFF


def logprob_of(token: int) -> float:
    return -(token % 1000) / 64


def goal_of(seed: int, limit: int) -> int:
    """How long the sample is to be; at the limit it ends by `length`."""
    return min(limit, 1 + seed % (limit + 2))


@dataclass(eq=False)
class Sim:
    """A sample at an agent."""

    key: int
    row: int
    lease: int
    prompt: Any
    seed: int
    limit: int
    tokens: list[int]
    start: int
    versions: list[int] = field(default_factory=list)
    sent: int = 0
    end: str = ""
    end_seq: int = 0

    def __post_init__(self) -> None:
        self.state = mix(self.seed, *(int(token) for token in self.prompt))
        for token in self.tokens:
            self.state = mix(self.state, token)

    def advance(self, count: int, version: int, maker: int) -> None:
        goal = goal_of(self.seed, self.limit)
        while count and not self.end:
            token = token_of(self.state, version, maker)
            self.state = mix(self.state, token)
            self.tokens.append(token)
            self.versions.append(version)
            count -= 1
            if len(self.tokens) >= goal:
                self.end = "stop" if goal < self.limit else "length"


@dataclass(eq=False)
class SimAgent:
    name: str
    maker: int
    incarnation: int
    version: int = -1
    connected: bool = False
    draining: bool = False
    seq: int = 0
    samples: dict[int, Sim] = field(default_factory=dict)
    """By lease."""
    inbox: list[Any] = field(default_factory=list)
    frames: list[bytes] = field(default_factory=list)
    """Reported over this connection."""

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
                Held(key=sim.key, lease=lease, start=sim.start, length=len(sim.tokens))
                for lease, sim in self.samples.items()
            ],
        )

    def welcomed(self, keep: list[Keep]) -> None:
        self.connected, self.seq, self.frames, self.inbox = True, 0, [], []
        kept = {one.key: one for one in keep}
        mine, self.samples = self.samples, {}
        for sim in mine.values():
            one = kept.get(sim.key)
            if one is None:
                continue
            sim.row, sim.lease, sim.end_seq = one.row, one.lease, 0
            sim.sent = one.known - sim.start
            if (
                lineage(np.array(sim.prompt, np.int32), sim.seed, np.array(sim.tokens[: one.known], np.int32))
                != one.lineage
            ):
                sim.tokens, sim.versions, sim.sent, sim.end = sim.tokens[: sim.start], [], 0, "released"
            self.samples[sim.lease] = sim

    def read(self) -> None:
        inbox, self.inbox = self.inbox, []
        for frame in inbox:
            if isinstance(frame, tuple):  # an assignment
                prompt, work = frame
                prior = np.frombuffer(work.prior, "<i4").tolist()
                sim = Sim(
                    work.key,
                    work.row,
                    work.lease,
                    np.frombuffer(prompt.tokens, "<i4"),
                    work.seed,
                    prompt.sampling["max_new_tokens"],
                    prior,
                    len(prior),
                )
                if self.version < 0 or self.draining:
                    sim.end = "released"
                self.samples[sim.lease] = sim
            else:  # a cancelled lease
                sim_or_none = self.samples.get(frame)
                if sim_or_none is not None and not sim_or_none.end:
                    sim_or_none.end = "released"

    def report(self, choose: Callable[[Sim], int | None]) -> bytes:
        """`choose` says of each sample how many of its unsent tokens go out; None for all, and its end."""
        self.seq += 1
        rows: list[tuple[Sim, int, int]] = []
        ends = []
        for sim in sorted(self.samples.values(), key=lambda sim: sim.row):
            made = len(sim.tokens) - sim.start
            if rows and rows[-1][0].row == sim.row:
                continue  # one of them was called off, and its row has been given again
            some = choose(sim)
            if some is None and sim.end and not sim.end_seq:
                # Of several versions, those before the last went out in a frame before.
                pass
            count = made - sim.sent if some is None else min(some, max(made - sim.sent - 1, 0))
            if count:
                version = sim.versions[sim.sent]
                same = 1
                while same < count and sim.versions[sim.sent + same] == version:
                    same += 1
                rows.append((sim, same, version))
                sim.sent += same
            if some is None and sim.sent == made and sim.end and not sim.end_seq:
                sim.end_seq = self.seq
                ends.append(End(sim.row, sim.lease, sim.end, "sim", ()))
        tokens = [
            t for sim, n, _ in rows for t in sim.tokens[sim.start + sim.sent - n : sim.start + sim.sent]
        ]
        frame = Progress(
            self.seq,
            np.array([sim.row for sim, _, _ in rows], np.uint32),
            np.array([sim.lease for sim, _, _ in rows], np.uint64),
            np.array([sim.start + sim.sent - n for sim, n, _ in rows], np.uint32),
            np.array([n for _, n, _ in rows], np.uint32),
            np.array([version for _, _, version in rows], np.int32),
            np.array(tokens, np.int32),
            np.array([logprob_of(token) for token in tokens], np.float32),
            ends,
            rate_tokens_s=10.0,
        )
        data = encode(frame)
        self.frames.append(data)
        return data

    def acknowledged(self, seq: int) -> None:
        for lease in [lease for lease, sim in self.samples.items() if sim.end_seq and sim.end_seq <= seq]:
            del self.samples[lease]


@dataclass
class Rows:
    """What is in the ledger."""

    counters: dict[str, Any] = field(default_factory=dict)
    groups: dict[int, bytes] = field(default_factory=dict)
    deltas: dict[int, bytes] = field(default_factory=dict)
    newest: int = 0
    served: int = 0

    def restored(self, epoch: int) -> OpenGroups:
        open_groups = OpenGroups(epoch=epoch)
        open_groups.newest_version = self.newest
        open_groups.promote(self.served)
        open_groups.restore(self.counters, dict(sorted(self.groups.items())), sorted(self.deltas.items()))
        return open_groups


def picture(open_groups: OpenGroups) -> dict[str, Any]:
    """Everything that a restart must bring back."""
    return {
        "account": {k: v for k, v in open_groups.counters().items() if not k.startswith("next_")},
        "samples": {
            state.key: (
                state.length,
                state.finish,
                state.resets,
                state.tokens()[0].tolist(),
                state.tokens()[1].tobytes(),
                [run for run in state.runs if run[1] != run[2]],
                seed_of(state),
                state.record,
                state.evidence,
            )
            for state in open_groups.samples()
        },
        "left": {number: request.left for number, request in open_groups.requests.items()},
        "missing": open_groups.missing_tokens(),
    }


NAMES = st.sampled_from(["a", "b"])


class Fleet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.epoch = 1
        self.rows = Rows()
        self.open_groups = self.rows.restored(1)
        self.agents: dict[str, SimAgent] = {}
        self.sessions: dict[int, SimAgent] = {}
        self.pending: dict[str, list[tuple[int, Any]]] = {}
        self.committed_seq = 0
        self.incarnations = 0
        self.next_group = 0
        self.finished: set[tuple[int, int]] = set()
        self.committed_lengths: dict[tuple[int, int], int] = {}
        self.delivered: set[int] = set()
        self.ready: list[tuple[str, int]] = []
        self.makers: list[int] = [0]
        self.version = 0
        self.cursed: dict[int, str] = {}
        """Samples that fail, or kill their engine, whenever they are generated."""
        self.seen: Counter[str] = Counter()

    @initialize(deterministic=st.booleans())
    def begin(self, deterministic: bool) -> None:
        self.makers = [0] if deterministic else [0, 1, 2]
        for at, name in enumerate(("a", "b")):
            self.incarnations += 1
            self.agents[name] = SimAgent(name, self.makers[at % len(self.makers)], self.incarnations)
            self.dial(self.agents[name])
            self.load(name)
        self.ask(2, 30, 2, False, False)

    # -- the trainer ---

    @rule(
        n=st.integers(1, 3),
        limit=st.integers(1, 40),
        groups=st.integers(1, 3),
        newer=st.booleans(),
        again=st.booleans(),
    )
    def ask(self, n: int, limit: int, groups: int, newer: bool, again: bool) -> None:
        if len(self.open_groups.requests) > 8:
            return
        first = max(0, self.next_group - 1) if again else self.next_group
        asked = [Group(first + i, np.arange(1, 4 + (first + i) % 3, dtype=np.int32)) for i in range(groups)]
        self.next_group = max(self.next_group, first + groups)
        self.open_groups.open(
            Request(
                purpose="train",
                groups=pack_groups(asked),
                n=n,
                sampling={"max_new_tokens": limit},
                seed=5,
                min_version=self.version + 1 if newer else max(0, self.version - 1),
            )
        )
        for name in self.open_groups.instances:  # what is required may have risen
            self.open_groups.admit(name, able=self.can(name))

    @precondition(lambda self: self.ready)
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        purpose, group_id = self.ready.pop(data.draw(st.integers(0, len(self.ready) - 1)))
        for name, row, lease in self.open_groups.close(purpose, [group_id]):
            raise AssertionError(f"{(name, row, lease)} still runs of a whole group")

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        """The trainer does not want a group any more that is not whole."""
        open_ids = [request.group.id for request in self.open_groups.requests.values() if request.left]
        if open_ids and data.draw(st.integers(0, 5)) == 0:
            self.open_groups.cancelled += self.open_groups.close(
                "train", [data.draw(st.sampled_from(open_ids))]
            )
            self.cancel()

    @rule()
    def publish(self) -> None:
        if self.version < 6:
            self.version += 1
            self.open_groups.newest_version = self.version
            self.open_groups.promote(self.version)
            for name in self.open_groups.instances:
                self.open_groups.admit(name, able=self.can(name))

    # -- the fleet ---

    def can(self, name: str) -> bool:
        agent = self.agents.get(name)
        return agent is not None and agent.connected and not agent.draining

    @rule(name=NAMES, data=st.data())
    def start(self, name: str, data: st.DataObject) -> None:
        """A new process of this name, whatever became of the one before."""
        self.incarnations += 1
        agent = SimAgent(name, data.draw(st.sampled_from(self.makers)), self.incarnations)
        self.agents[name] = agent
        self.dial(agent)

    def dial(self, agent: SimAgent) -> None:
        keep = self.open_groups.join(agent.hello())
        self.pending[agent.name] = []
        self.sessions[self.open_groups.instances[agent.name].number] = agent
        agent.welcomed(keep)
        self.open_groups.instances[agent.name].version = agent.version
        self.open_groups.admit(agent.name, able=self.can(agent.name))
        self.cancel()

    @rule(name=NAMES)
    def load(self, name: str) -> None:
        """The newest policy, in place."""
        agent = self.agents.get(name)
        if agent is not None and agent.connected and agent.name in self.open_groups.instances:
            agent.version = self.version
            self.open_groups.serve(name, self.version)
            self.open_groups.admit(name, able=self.can(name))

    @rule(name=NAMES)
    def cut(self, name: str) -> None:
        agent = self.agents.get(name)
        if agent is not None and agent.connected:
            agent.connected = False
            self.pending[name] = []
            if name in self.open_groups.instances:
                self.open_groups.admit(name, able=False)

    @rule(name=NAMES, died=st.sampled_from(["", "connection_lost"]))
    def lose(self, name: str, died: str) -> None:
        """Its grace is over, or it was silent for too long; or it left in order."""
        if name in self.open_groups.instances and (agent := self.agents.get(name)) is not None:
            agent.connected = False
            self.pending[name] = []
            self.open_groups.leave(name, died=died)

    @rule(name=NAMES)
    def redial(self, name: str) -> None:
        """With or without having noticed the cut."""
        if (agent := self.agents.get(name)) is not None:
            self.dial(agent)

    @rule(name=NAMES, count=st.integers(1, 30))
    def generate(self, name: str, count: int) -> None:
        if (agent := self.agents.get(name)) is not None:
            agent.read()
            if agent.version < 0:
                return
            for at, sim in enumerate(agent.samples.values()):
                how = self.cursed.get(sim.key)
                sim.advance(max(1, count - 3 * at) if how is None else 1, agent.version, agent.maker)
                if how == "fails":
                    sim.end = sim.end or "failed"
                elif how == "kills":
                    self.engine_dies(name)
                    return

    def heal(self) -> None:
        """Both are there and work."""
        for name in ("a", "b"):
            agent = self.agents.get(name)
            if agent is None or agent.draining:
                self.incarnations += 1
                agent = SimAgent(name, self.makers[self.incarnations % len(self.makers)], self.incarnations)
                self.agents[name] = agent
            if not agent.connected or name not in self.open_groups.instances:
                self.dial(agent)
            if agent.version < 0:
                self.load(name)

    def a_while_passes(self, counts: list[int], whole: bool, commit: bool) -> None:
        self.heal()
        self.assign(None)
        for name, count in zip(("a", "b"), counts, strict=True):
            self.generate(name, count)
            agent = self.agents[name]
            for _ in range(3):
                self.hear(agent, agent.report(lambda sim: None if whole else 3))
        if commit:
            self.commit()

    # Rules are drawn alike; most of what happens is that nothing happens.
    @rule(counts=st.lists(st.integers(1, 5), min_size=2, max_size=2), whole=st.booleans())
    def a_moment(self, counts: list[int], whole: bool) -> None:
        self.a_while_passes(counts, whole, True)

    @rule(counts=st.lists(st.integers(1, 5), min_size=2, max_size=2), commit=st.booleans())
    def another_moment(self, counts: list[int], commit: bool) -> None:
        self.a_while_passes(counts, True, commit)

    @rule(
        counts=st.lists(st.integers(1, 20), min_size=2, max_size=2), whole=st.booleans(), commit=st.booleans()
    )
    def a_longer_while(self, counts: list[int], whole: bool, commit: bool) -> None:
        self.a_while_passes(counts, whole, commit)

    @rule(data=st.data(), how=st.sampled_from(["fails", "kills"]))
    def curse(self, data: st.DataObject, how: str) -> None:
        keys = sorted(state.key for state in self.open_groups.samples() if not state.finish)
        if keys and not self.cursed:
            self.cursed[data.draw(st.sampled_from(keys))] = how

    @precondition(lambda self: self.cursed)
    @rule()
    def bless(self) -> None:
        self.cursed.clear()

    @rule(name=NAMES, data=st.data())
    def cut_for_long(self, name: str, data: st.DataObject) -> None:
        """The other takes over, and gets on or not, before it is back."""
        self.a_while_passes([3, 3], True, True)
        agent = self.agents[name]
        helper = self.agents["b" if name == "a" else "a"]
        self.lose(name, "connection_lost")
        for sim in agent.samples.values():
            if agent.version >= 0:
                sim.advance(data.draw(st.integers(0, 12)), agent.version, agent.maker)
        self.assign(None)
        self.commit()
        self.generate(helper.name, data.draw(st.integers(1, 6)))
        self.hear(helper, helper.report(lambda sim: None))
        held = len(agent.samples)
        if data.draw(st.booleans()):
            self.dial(agent)
            self.seen["back"] += held
            self.seen["back with more"] += sum(1 for sim in agent.samples.values() if sim.end != "released")
            self.seen["back with other tokens"] += sum(
                1 for s in agent.samples.values() if s.end == "released"
            )

    @rule(name=NAMES, data=st.data())
    def report(self, name: str, data: st.DataObject) -> None:
        agent = self.agents.get(name)
        if agent is not None and agent.connected and name in self.open_groups.instances:
            whole = data.draw(st.booleans())
            self.hear(
                agent, agent.report(lambda sim: None if whole or sim.end else data.draw(st.integers(0, 8)))
            )
            if whole:
                for _ in range(6):  # the versions after
                    self.hear(agent, agent.report(lambda sim: None))

    def hear(self, agent: SimAgent, data: bytes) -> None:
        frame = decode(data)
        assert isinstance(frame, Progress)
        self.send(self.open_groups.progress(agent.name, frame))
        assert self.open_groups.missing_tokens() == 0

    @rule(name=NAMES, data=st.data())
    def replay(self, name: str, data: st.DataObject) -> None:
        """A frame comes a second time, after later ones, or as if from another instance."""
        agent = self.agents.get(name)
        if agent is None or not agent.connected or name not in self.open_groups.instances or not agent.frames:
            return
        at = data.draw(st.integers(0, len(agent.frames) - 1))
        to = data.draw(st.sampled_from(sorted(self.open_groups.instances)))
        before = {state.key: (state.length, state.lease) for state in self.open_groups.samples()}
        frame = decode(agent.frames[at])
        assert isinstance(frame, Progress)
        reported = self.open_groups._store.write_buffer._sessions
        ack = reported.get(self.open_groups.instances[to].number)
        assert not self.open_groups.progress(to, frame)
        if ack is not None:
            reported[self.open_groups.instances[to].number] = ack
        else:
            reported.pop(self.open_groups.instances[to].number)
        assert before == {state.key: (state.length, state.lease) for state in self.open_groups.samples()}

    @rule(name=NAMES)
    def engine_dies(self, name: str) -> None:
        agent = self.agents.get(name)
        if agent is not None and agent.version >= 0:
            agent.read()
            agent.version = -1
            for sim in agent.samples.values():
                sim.end = sim.end or "died"
            if agent.connected and name in self.open_groups.instances:
                for _ in range(7):
                    self.hear(agent, agent.report(lambda sim: None))
                self.open_groups.engine_died(name)

    @rule(name=NAMES, data=st.data())
    def request_fails(self, name: str, data: st.DataObject) -> None:
        agent = self.agents.get(name)
        running = [sim for sim in agent.samples.values() if not sim.end] if agent is not None else []
        if running:
            data.draw(st.sampled_from(running)).end = "failed"

    @rule(name=NAMES)
    def drain(self, name: str) -> None:
        agent = self.agents.get(name)
        if agent is not None and agent.connected and name in self.open_groups.instances:
            agent.read()
            agent.draining = True
            self.open_groups.admit(name, able=False)
            for sim in agent.samples.values():
                sim.end = sim.end or "released"

    # -- the manager ---

    @rule(limit=st.none() | st.integers(1, 3))
    def assign(self, limit: int | None) -> None:
        self.send(self.open_groups.assign(limit))

    def send(self, given: dict[str, tuple[list[Prompt], list[Work]]]) -> None:
        for name, (prompts, works) in given.items():
            assert self.can(name)
            known = {prompt.ticket: prompt for prompt in prompts}
            for work in works:
                state = self.open_groups.sample(work.key)
                assert state is not None
                identity = (work.key, state.resets)
                assert identity not in self.finished, "a finished sample is generated again"
                assert len(work.prior) // 4 >= self.committed_lengths.get(identity, 0)
                assert state.request.min_version <= self.agents[name].version <= self.version
                needed = self.open_groups.last_delta(state) if work.prior else 0
                self.tell(name, (known[work.ticket], work), needed)

    def tell(self, name: str, frame: Any, needed: int = 0) -> None:
        """As the manager does: what goes on elsewhere waits until it is committed, and what follows behind it."""
        waiting = self.pending.setdefault(name, [])
        if waiting or needed > self.committed_seq:
            waiting.append((needed, frame))
        elif self.agents[name].connected:
            self.agents[name].inbox.append(frame)

    def cancel(self) -> None:
        cancelled, self.open_groups.cancelled = self.open_groups.cancelled, []
        for name, _, lease in cancelled:
            self.tell(name, lease)

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        held = [
            s
            for name in self.open_groups.instances
            for s in self.open_groups.held_by(name)
            if not s.placed.recalled
        ]
        targets = [i.name for i in self.open_groups.instances.values() if i.accepting]
        if not held or not targets:
            return
        state = data.draw(st.sampled_from(sorted(held, key=lambda s: s.key)))
        target = data.draw(st.sampled_from(targets))
        if target == state.instance or state.deaths:
            return
        self.open_groups.placement.migrate(state.placed, self.open_groups.instances[target], 0.0)
        assert state.instance is not None
        self.tell(state.instance, state.lease)

    @rule()
    def commit(self) -> None:
        before = picture(self.open_groups)
        batch = self.open_groups.take_batch()
        rows = self.rows
        rows.counters = batch.counters
        rows.newest, rows.served = self.open_groups.newest_version, self.open_groups.served_version
        rows.groups |= batch.opened
        for seq, body in batch.encoded():
            assert seq not in rows.deltas
            rows.deltas[seq] = body
        for number in batch.closed:
            rows.groups.pop(number, None)
        for seq in batch.forgotten:
            rows.deltas.pop(seq)
        if batch.deltas:
            self.committed_seq = batch.deltas[-1].seq
        restored = self.rows.restored(self.epoch + 1)
        after = picture(restored)
        assert before == after, "the fold is not the state"
        for state in self.open_groups.samples():
            if (holder := state.placed.holder) is not None:
                again = restored.sample(state.key)
                assert again is not None
                expected = EarlierLease(state.lease, holder.incarnation, state.length)
                assert again.earlier_leases[-1] == expected, "a lease is not stored"
        self.committed_lengths = {(s.key, s.resets): s.length for s in self.open_groups.samples()}
        self.finished |= {(s.key, s.resets) for s in self.open_groups.samples() if s.finish}
        for number, seq in batch.sessions.items():
            agent = self.sessions[number]
            instance = self.open_groups.instances.get(agent.name)
            if agent.connected and instance is not None and instance.number == number:
                agent.acknowledged(seq)
        for name, waiting in self.pending.items():
            while waiting and waiting[0][0] <= self.committed_seq:
                _, frame = waiting.pop(0)
                if self.agents[name].connected:
                    self.agents[name].inbox.append(frame)
        for number in batch.complete:
            request = self.open_groups.requests.get(number)
            if request is not None:
                self.check(request.samples)
                self.seen["groups"] += 1
                request.complete()  # its version runs cover its tokens, or this raises
                if (request.purpose, request.group.id) not in self.ready:
                    self.ready.append((request.purpose, request.group.id))

    def check(self, states: list[InFlightSample]) -> None:
        """Each token is what an agent that had exactly the tokens before it made with that policy."""
        for state in states:
            tokens, logprobs = state.tokens()
            seed = seed_of(state)
            limit = state.request.max_new_tokens
            assert len(tokens) == goal_of(seed, limit)
            assert state.finish == ("stop" if len(tokens) < limit else "length")
            versions = [version for version, start, end in state.runs for _ in range(start, end)]
            digest = mix(seed, *(int(token) for token in state.request.group.prompt_ids))
            for token, logprob, version in zip(tokens.tolist(), logprobs.tolist(), versions, strict=True):
                assert token in [token_of(digest, version, maker) for maker in self.makers]
                assert np.float32(logprob) == np.float32(logprob_of(token))
                digest = mix(digest, token)

    @rule()
    def restart(self) -> None:
        """The manager is killed: what was not committed is gone with it."""
        self.epoch += 1
        self.seen["restarts"] += 1
        self.seen["restarts while held"] += any(agent.samples for agent in self.agents.values())
        self.open_groups = self.rows.restored(self.epoch)
        self.version = self.rows.newest
        # A policy is durable before anybody hears of it, so nobody has a newer one.
        for agent in self.agents.values():
            agent.connected = False
            if agent.version > self.version:
                agent.version, agent.samples = -1, {}
            else:
                agent.samples = {
                    lease: sim
                    for lease, sim in agent.samples.items()
                    if all(version <= self.version for version in sim.versions)
                }
        self.pending = {}
        self.sessions = {}
        self.committed_seq = max(self.rows.deltas, default=0)
        self.ready = [
            (request.purpose, request.group.id)
            for request in self.open_groups.requests.values()
            if not request.left
        ]

    # -- what always holds ---

    @invariant()
    def the_account_is_exact(self) -> None:
        assert self.open_groups.missing_tokens() == 0
        assert set(self.open_groups.account.discarded) <= {"superseded", "poison", "withdrawn"}

    @invariant()
    def every_sample_is_in_one_place(self) -> None:
        open_groups = self.open_groups
        for state in open_groups.samples():
            holders = [i.name for i in open_groups.instances.values() if state.key in i.held]
            placed = state.placed
            queued = placed.queue_key is not None
            places = [
                *holders,
                *(["queue"] if queued else []),
                *(["early"] if state.key in open_groups._early else []),
                *(["suspect"] if state.key in open_groups._suspects else []),
                *(["given up"] if state.key in open_groups.given_up else []),
            ]
            assert len(places) == (0 if state.finish else 1), (places, state.finish, state.key)
            assert state.instance == (holders[0] if holders else None)
            counted = [i for i in open_groups.instances.values() if state.key in i.counted]
            assert counted == ([placed.counted_at] if placed.counted_at is not None else [])
            assert (placed.counted_at is None) == (placed.holder is None)
            assert placed.recalled or placed.destination is None

    @invariant()
    def final_suspects_are_apart(self) -> None:
        for instance in self.open_groups.instances.values():
            assert instance.on_trial is None or instance.on_trial.key in instance.held
            assert instance.on_trial is None or not instance.has_room

    def teardown(self) -> None:
        """And in the end, with one agent that works, everything that can be finished is."""
        self.cursed.clear()
        for name in list(self.open_groups.instances):
            self.open_groups.leave(name)
        self.makers = [*self.makers, 99]
        self.agents = {"z": SimAgent("z", 99, 0)}
        self.pending = {}
        if self.version < 7:
            self.version = 7
            self.open_groups.newest_version = 7
            self.open_groups.promote(7)
        self.dial(self.agents["z"])
        self.load("z")
        for _ in range(400):
            self.assign(None)
            self.commit()
            self.generate("z", 50)
            agent = self.agents["z"]
            self.hear(agent, agent.report(lambda sim: None))
            if all(
                state.finish or state.key in self.open_groups.given_up for state in self.open_groups.samples()
            ):
                break
        assert all(
            state.finish or state.key in self.open_groups.given_up for state in self.open_groups.samples()
        )
        self.commit()
        assert self.open_groups.missing_tokens() == 0
        self.seen["reset"] += self.open_groups.account.samples_quarantined
        self.seen["discarded"] += sum(self.open_groups.account.discarded.values())
        SEEN.update(self.seen)


SEEN: Counter[str] = Counter()
"""What the runs went through, to see that they go through something."""

TestFleet = Fleet.TestCase
TestFleet.settings = settings(
    max_examples=50,
    stateful_step_count=50,
    deadline=None,
    database=None,
    phases=[Phase.generate],  # a failure is told as it came: making it smaller takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)


# -- suspects, one case each ------------------------------------------------------------------------


def asked(groups: int, n: int = 1, limit: int = 1000, **other: Any) -> Request:
    return Request(
        purpose="train",
        groups=pack_groups([Group(index, np.array([1, 2], np.int32)) for index in range(groups)]),
        n=n,
        sampling={"max_new_tokens": limit},
        seed=1,
        **({"min_version": 0} | other),
    )


def groups_with(*names: str, slots: int = 32) -> OpenGroups:
    open_groups = OpenGroups(epoch=1)
    open_groups.newest_version = 5
    open_groups.promote(0)
    for name in names:
        join(open_groups, name, slots)
    return open_groups


def join(open_groups: OpenGroups, name: str, slots: int = 32) -> None:
    hello = SimAgent(name, 0, 0).hello()
    open_groups.join(msgspec.structs.replace(hello, max_running=slots, kv_tokens=1 << 30))
    open_groups.serve(name, open_groups.served_version)


def report(
    open_groups: OpenGroups,
    name: str,
    grown: dict[InFlightSample, int],
    ends: dict[InFlightSample, str] | None = None,
) -> list[InFlightSample]:
    some = sorted(grown, key=lambda state: state.row)
    total = sum(grown.values())
    return open_groups.progress(
        name,
        Progress(
            1,
            np.array([s.row for s in some], np.uint32),
            np.array([s.lease for s in some], np.uint64),
            np.array([s.length for s in some], np.uint32),
            np.array([grown[s] for s in some], np.uint32),
            np.zeros(len(some), np.int32),
            np.zeros(total, np.int32),
            np.zeros(total, np.float32),
            [End(s.row, s.lease, kind, f"{name} said so", ()) for s, kind in (ends or {}).items()],
        ),
    )


def die(open_groups: OpenGroups, name: str) -> None:
    report(open_groups, name, {}, dict.fromkeys(open_groups.held_by(name), "died"))
    open_groups.engine_died(name)
    open_groups.serve(name, open_groups.served_version)


def all_samples(open_groups: OpenGroups) -> Iterator[InFlightSample]:
    return open_groups.samples()


def test_what_takes_a_whole_machine_down_is_found_too() -> None:
    """Sample 0 ends agent, engine and machine at once, each time under another name."""
    open_groups = groups_with("m0", "m1")
    requests = open_groups.open(asked(24, limit=200))
    poison = requests[0].samples[0]
    machines = 2
    for _ in range(2000):
        open_groups.assign()
        for name in list(open_groups.instances):
            held = list(open_groups.held_by(name))
            if poison in held:
                open_groups.leave(name, died="its machine or agent was lost (connection_lost)")
                join(open_groups, f"m{machines}")
                machines += 1
            elif held:
                ends = {state: "length" for state in held if state.length + 20 >= 200}
                report(open_groups, name, {state: min(20, 200 - state.length) for state in held}, ends)
        if poison.key in open_groups.given_up and all(
            s.finish for s in open_groups.samples() if s is not poison
        ):
            break
    assert set(open_groups.given_up) == {poison.key}
    assert {state.key for state in open_groups.quarantined} == {poison.key}
    assert machines - 2 <= QUARANTINE_AFTER * (MOST_RESETS + 1)
    assert all("connection_lost" in text for text in poison.evidence)


def test_machines_that_go_by_themselves_quarantine_nothing() -> None:
    """Preempted every hundred tokens, without notice."""
    open_groups = groups_with("m0")
    open_groups.open(asked(16, limit=1000))
    for turn in range(1, 200):
        open_groups.assign()
        (name,) = open_groups.instances
        held = list(open_groups.held_by(name))
        if not held:
            break
        ends = {state: "length" for state in held if state.length + 20 >= 1000}
        report(open_groups, name, {state: min(20, 1000 - state.length) for state in held}, ends)
        if turn % 5 == 0:
            open_groups.leave(name, died="connection_lost")
            join(open_groups, f"m{turn}")
    assert all(state.finish for state in open_groups.samples())
    assert open_groups.account.samples_quarantined == 0


def test_who_comes_back_after_a_cut_had_not_died() -> None:
    open_groups = groups_with("a")
    (request,) = open_groups.open(asked(1))
    (state,) = request.samples
    for _ in range(2 * QUARANTINE_AFTER):
        open_groups.assign()
        lease = state.lease
        open_groups.leave("a", died="connection_lost")
        assert state.deaths == 1
        hello = SimAgent("a", 0, 0).hello()
        held = [Held(key=state.key, lease=lease, start=0, length=state.length)]
        open_groups.join(msgspec.structs.replace(hello, held=held, kv_tokens=1 << 30))
        open_groups.serve("a", 0)
        assert state.instance == "a"
        assert state.deaths == 0
    assert open_groups.missing_tokens() == 0


def test_what_a_sample_answers_for_outlasts_the_manager() -> None:
    """It kills an engine under each of three managers, and the third quarantines it."""
    rows: tuple[dict[str, Any], dict[int, bytes], dict[int, bytes]] = ({}, {}, {})
    counters, groups, deltas = rows
    for term in range(1, QUARANTINE_AFTER + 1):
        open_groups = OpenGroups(epoch=term)
        open_groups.newest_version = 5
        open_groups.promote(0)
        open_groups.restore(counters, groups, sorted(deltas.items()))
        if term == 1:
            open_groups.open(asked(1))
        (state,) = open_groups.samples()
        join(open_groups, "a")
        open_groups.assign()
        assert state.deaths == term - 1
        assert len(state.evidence) == term - 1
        die(open_groups, "a")
        batch = open_groups.take_batch()
        counters |= batch.counters
        groups |= batch.opened
        deltas |= dict(batch.encoded())
        for gone in batch.forgotten:
            deltas.pop(gone, None)
    assert open_groups.account.samples_quarantined == 1
    assert len(state.evidence) == QUARANTINE_AFTER


@pytest.mark.parametrize("names", ["a", "ab", "abcd"])
def test_poison_is_found_and_no_innocent_neighbour_is_quarantined(names: str) -> None:
    """Sample 0 kills any engine at once; all others would finish. Only it is quarantined, again and again, until its
    group is given up; every other finishes with all tokens that it ever had."""
    open_groups = groups_with(*names)
    requests = open_groups.open(asked(24, limit=200))
    poison = requests[0].samples[0]
    engine_deaths = 0
    for _ in range(2000):
        open_groups.assign()
        for name in names:
            held = list(open_groups.held_by(name))
            if poison in held:
                engine_deaths += 1
                die(open_groups, name)
                continue
            if held:
                ends = {state: "length" for state in held if state.length + 20 >= 200}
                report(open_groups, name, {state: min(20, 200 - state.length) for state in held}, ends)
        assert open_groups.missing_tokens() == 0
        for instance in open_groups.instances.values():
            assert (
                sum(state.deaths >= QUARANTINE_AFTER - 1 for state in open_groups.held_by(instance.name)) <= 1
            )
        if poison.key in open_groups.given_up and all(
            s.finish for s in open_groups.samples() if s is not poison
        ):
            break
    assert set(open_groups.given_up) == {poison.key}
    assert {state.key for state in open_groups.quarantined} == {poison.key}
    assert open_groups.account.samples_quarantined == MOST_RESETS + 1
    assert engine_deaths <= QUARANTINE_AFTER * (MOST_RESETS + 1)
    assert not open_groups.account.discarded["superseded"]
    assert len(poison.evidence) == QUARANTINE_AFTER
    assert all("said so" in text for text in poison.evidence)


def test_engines_that_die_by_themselves_quarantine_nothing() -> None:
    """An engine that dies every hundred tokens, whatever it runs: everybody gets on, so nobody is to blame."""
    open_groups = groups_with("a")
    open_groups.open(asked(16, limit=1000))
    for turn in range(1, 200):
        open_groups.assign()
        held = list(open_groups.held_by("a"))
        if not held:
            break
        ends = {state: "length" for state in held if state.length + 20 >= 1000}
        report(open_groups, "a", {state: min(20, 1000 - state.length) for state in held}, ends)
        if turn % 5 == 0:
            die(open_groups, "a")
    assert all(state.finish for state in open_groups.samples())
    assert open_groups.account.samples_quarantined == 0
    assert open_groups.account.generated == 16 * 1000


def test_a_suspect_that_gets_further_than_where_it_died_is_cleared() -> None:
    open_groups = groups_with("a")
    (request,) = open_groups.open(asked(1))
    (state,) = request.samples
    for _ in range(2):
        open_groups.assign()
        die(open_groups, "a")
    assert state.deaths == QUARANTINE_AFTER - 1
    open_groups.assign()
    assert open_groups.instances["a"].on_trial is state.placed
    report(open_groups, "a", {state: CLEARED_AFTER_TOKENS + 1})
    assert state.deaths == 0
    assert open_groups.instances["a"].on_trial is None


def test_a_request_that_fails_is_tried_elsewhere_first() -> None:
    open_groups = groups_with("a", "b")
    (request,) = open_groups.open(asked(1))
    (state,) = request.samples
    tried = []
    for _ in range(QUARANTINE_AFTER):
        open_groups.assign()
        assert state.instance is not None
        tried.append(state.instance)
        report(open_groups, state.instance, {}, {state: "failed"})
    assert all(one != next_ for one, next_ in pairwise(tried))
    assert open_groups.account.samples_quarantined == 1


def test_work_is_given_for_its_policy_only() -> None:
    """What needs version 1 waits for it, what came before does not wait, and an old instance gets nothing then."""
    open_groups = groups_with("a")
    (later,) = open_groups.open(asked(1, min_version=1))
    (now,) = open_groups.open(msgspec.structs.replace(asked(1, min_version=0), purpose="other"))
    open_groups.assign()
    assert now.samples[0].instance == "a"
    assert later.samples[0].instance is None
    open_groups.promote(1)
    open_groups.admit("a")
    open_groups.assign()
    assert later.samples[0].instance is None
    open_groups.serve("a", 1)
    open_groups.assign()
    assert later.samples[0].instance == "a"


def test_a_pinned_request_that_comes_too_late_is_refused_and_an_open_one_is_not() -> None:
    open_groups = groups_with("a")
    open_groups.open(asked(1, pinned=True))
    open_groups.promote(3)
    assert open_groups.open(asked(1, pinned=True)) == []
    with pytest.raises(FrameError) as caught:
        open_groups.open(asked(2, pinned=True))
    assert caught.value.details["reason"] == "pinned_late"
    assert len(open_groups.requests) == 1


def test_a_sample_that_lost_its_end_is_finished_and_not_generated_again() -> None:
    open_groups = groups_with("a")
    (request,) = open_groups.open(asked(1, limit=10))
    (state,) = request.samples
    open_groups.assign()
    report(open_groups, "a", {state: 10})
    open_groups.leave("a")
    assert state.finish == "length"
    assert open_groups.take_batch().complete == [request.number]


@pytest.mark.parametrize(
    ("group", "sampling"),
    [
        (Group(0, np.array([], np.int32)), {"max_new_tokens": 4}),
        (Group(2**63, np.array([1], np.int32)), {"max_new_tokens": 4}),
        (Group(0, np.array([-1], np.int32)), {"max_new_tokens": 4}),
        (Group(0, np.array([[1]], np.int32)), {"max_new_tokens": 4}),
        (Group(0, np.array([1.5], np.float32)), {"max_new_tokens": 4}),
        (Group(0, np.array([1], np.int32)), {"max_new_tokens": 0}),
        (Group(0, np.array([1], np.int32)), {}),
    ],
)
def test_a_request_that_nobody_can_generate_is_refused_whole(group: Group, sampling: dict[str, Any]) -> None:
    open_groups = groups_with("a")
    good = Group(7, np.array([1], np.int32))
    request = Request(
        purpose="train", groups=pack_groups([good, group]), n=1, sampling=sampling, seed=1, min_version=0
    )
    with pytest.raises(FrameError) as caught:
        open_groups.open(request)
    assert caught.value.details["reason"] == "invalid"
    assert not open_groups.requests
    assert not open_groups.is_dirty


def test_impossible_progress_is_refused_and_changes_nothing() -> None:
    open_groups = groups_with("a", "b")
    (request,) = open_groups.open(asked(1, limit=10))
    (state,) = request.samples
    open_groups.assign()
    assert state.instance is not None
    report(open_groups, state.instance, {state: 4})
    kept = picture(open_groups)

    def sent(**changed: Any) -> Progress:
        columns = {
            "seq": 2,
            "rows": np.array([state.row], np.uint32),
            "leases": np.array([state.lease], np.uint64),
            "starts": np.array([4], np.uint32),
            "counts": np.array([2], np.uint32),
            "versions": np.array([0], np.int32),
            "tokens": np.zeros(2, np.int32),
            "logprobs": np.zeros(2, np.float32),
        }
        return Progress(**(columns | changed))

    wrong = {
        "gap": sent(starts=np.array([6], np.uint32)),
        "too_long": sent(
            counts=np.array([7], np.uint32), tokens=np.zeros(7, np.int32), logprobs=np.zeros(7, np.float32)
        ),
        "unknown_version": sent(versions=np.array([6], np.int32)),
        "unknown_row": sent(rows=np.array([1 << 20], np.uint32)),
    }
    for code, frame in wrong.items():
        with pytest.raises(FrameError) as caught:
            open_groups.progress(state.instance, frame)
        assert caught.value.details["reason"] == code
        assert picture(open_groups) == kept
    for end, code in (
        (End(1 << 20, 1, "stop", "", ()), "unknown_row"),
        (End(state.row, state.lease, "stop", "", ((6, 4),)), "unknown_version"),
    ):
        with pytest.raises(FrameError) as caught:
            open_groups.progress(state.instance, sent(ends=[end]))
        assert caught.value.details["reason"] == code
        assert picture(open_groups) == kept


def test_version_runs_that_the_engine_tells_in_the_end_are_the_ones_kept() -> None:
    """Over two instances and an update in place; and the same after a restart."""
    open_groups = groups_with("a")
    (request,) = open_groups.open(asked(1, limit=100))
    (state,) = request.samples
    open_groups.assign()
    report(open_groups, "a", {state: 6})
    open_groups.leave("a")
    join(open_groups, "b")
    open_groups.assign()
    report(open_groups, "b", {state: 10})
    end = End(state.row, state.lease, "stop", "", ((0, 3), (2, 5), (3, 2)))
    open_groups.progress("b", Progress(9, *[np.empty(0, t) for t in "IQIIiif"], [end]))
    assert state.runs == [[0, 0, 9], [2, 9, 14], [3, 14, 16]]
    batch = open_groups.take_batch()
    rows = Rows(batch.counters, batch.opened, dict(batch.encoded()), 5, 0)
    assert picture(rows.restored(2)) == picture(open_groups)


def test_a_sample_that_was_given_up_is_not_taken_back() -> None:
    open_groups = groups_with("a", "b")
    (request,) = open_groups.open(asked(1))
    (state,) = request.samples
    for _ in range(QUARANTINE_AFTER + MOST_RESETS):
        open_groups.assign()
        assert state.instance is not None
        report(open_groups, state.instance, {}, {state: "failed"})
    assert state.key in open_groups.given_up
    hello = SimAgent("a", 0, 0).hello()
    assert (
        open_groups.join(
            msgspec.structs.replace(hello, held=[Held(key=state.key, lease=9, start=0, length=5)])
        )
        == []
    )
    assert state.instance is None
