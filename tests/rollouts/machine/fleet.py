"""The open groups against a fleet that does anything: joins, cuts, crashes, engine deaths, drains, moves, restarts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gyre.rollouts.plane.requests import EarlierLease, InFlightSample, seed_of
from gyre.rollouts.plane.stored_account import account_in, stored_account
from gyre.rollouts.protocol.codec import decode
from gyre.rollouts.protocol.frames import Assignment, Prompt, Request
from gyre.rollouts.protocol.progress import GenerationProgress
from gyre.rollouts.samples import Group, pack_groups
from gyre.store import RolloutRows
from tests.examples import SHARE
from tests.rollouts.machine.simulated_agents import (
    Rows,
    SimAgent,
    goal_of,
    logprob_of,
    mix,
    picture,
    token_of,
)

NAMES = st.sampled_from(["a", "b"])


class Fleet(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.epoch = 1
        self.rows = Rows()
        self.open_groups = self.rows.restored(1)
        self.agents: dict[str, SimAgent] = {}
        self.links: dict[int, SimAgent] = {}
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
        self.now = 0.0
        self.cursed: dict[int, str] = {}
        """Samples that fail, or kill their engine, whenever they are generated."""
        self.seen: Counter[str] = Counter()
        self.authors: dict[tuple[int, int], list[str]] = {}
        """Of each sample, and each time that it was begun anew, the agent that reported each of its tokens."""

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
        self.links[self.open_groups.instances[agent.name].number] = agent
        agent.welcomed(keep)
        instance = self.open_groups.instances[agent.name]
        instance.version = agent.version
        if agent.version >= 0:
            instance.loaded.came_back(agent.version)
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

    def ask_for_long_ones(self) -> None:
        """So that there is something to take over."""
        self.ask(2, 40, 1, False, False)  # and so few that the other has room for them

    @rule(name=NAMES, data=st.data())
    def cut_for_long(self, name: str, data: st.DataObject) -> None:
        """The other takes over, and gets on or not, before it is back."""
        self.heal()
        self.ask_for_long_ones()
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

    @rule()
    def restart_while_held(self) -> None:
        """What agents hold then is of leases that the ledger may not have."""
        self.heal()
        self.ask_for_long_ones()
        self.a_while_passes([2, 2], False, False)
        self.restart()

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
        assert isinstance(frame, GenerationProgress)
        given = self.open_groups.progress(agent.name, frame)
        for state in self.open_groups.samples():
            authors = self.authors.setdefault((state.key, state.resets), [])
            authors += [agent.name] * (state.length - len(authors))
        self.send(given)
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
        assert isinstance(frame, GenerationProgress)
        reported = self.open_groups._store.write_buffer._reports
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
        if limit is None:
            self.deal(0.1)

    @rule(passed_s=st.sampled_from([0.01, 1.0, 40.0]))
    def deal(self, passed_s: float) -> None:
        self.now += passed_s
        for name, rows in self.open_groups.deal(self.now).items():
            self.seen["dealt"] += len(rows)
            for _, lease in rows:
                self.tell(name, lease)

    def send(self, given: dict[str, tuple[list[Prompt], list[Assignment]]]) -> None:
        for name, (prompts, works) in given.items():
            assert self.can(name)
            known = {prompt.request_id: prompt for prompt in prompts}
            for work in works:
                state = self.open_groups.sample(work.key)
                assert state is not None
                identity = (work.key, state.resets)
                assert identity not in self.finished, "a finished sample is generated again"
                assert len(work.prior) // 4 >= self.committed_lengths.get(identity, 0)
                assert state.request.min_version <= self.agents[name].version <= self.version
                needed = self.open_groups.last_delta(state) if work.prior else 0
                self.tell(name, (known[work.request_id], work), needed)

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
        stored = stored_account(
            RolloutRows(
                self.epoch, rows.counters, dict(sorted(rows.groups.items())), sorted(rows.deltas.items())
            )
        )
        assert stored == account_in(self.open_groups), "whoever looks at the store sees another account"
        self.committed_lengths = {(s.key, s.resets): s.length for s in self.open_groups.samples()}
        self.finished |= {(s.key, s.resets) for s in self.open_groups.samples() if s.finish}
        for number, seq in batch.reports.items():
            agent = self.links[number]
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
            authors = [run.name for run in state.instances for _ in range(run.start, run.end)]
            assert authors == self.authors[state.key, state.resets]
            self.seen["joints"] += len(state.instances) > 1
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
        known, self.authors = self.authors, {}
        for (
            state
        ) in self.open_groups.samples():  # keys of requests that were not committed are given out again
            identity = state.key, state.resets
            self.authors[identity] = known.get(identity, [])[: state.length]
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
        self.links = {}
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
        assert set(self.open_groups.account.discarded) <= {"superseded", "quarantined", "withdrawn"}

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

EVERYTHING = ("groups", "joints", "discarded", "restarts", "restarts while held", "back", "back with more")


def went_through(seen: Counter[str], kinds: Iterable[str]) -> None:
    """Raises AssertionError where the runs together never came to one of these: what holds of it was not looked at. Of
    all examples alone: what a few come to depends on what else the process has loaded."""
    if SHARE < 1:
        return
    missing = [kind for kind in kinds if not seen[kind]]
    assert not missing, f"no run went through {', '.join(missing)}: {dict(seen)}"
