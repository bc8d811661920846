"""The door's ledger against clients, a fleet and a manager that do anything in any order: asks, reports, publishes,
deaths, commits, kills. Time is virtual, and what is stored are the real rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from gyre.request_body import RequestRefused
from gyre.rollouts.plane.door_ledger import ANY, Asked, DoorLedger, DoorRequest, Wish
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.requests import seed_of
from gyre.rollouts.plane.versions import PolicyVersions
from gyre.rollouts.protocol.frames import Publish
from gyre.rollouts.token_log.write_buffer import WriteBatch
from tests.examples import examples
from tests.rollouts.machine.fleet import Fleet, went_through
from tests.rollouts.machine.simulated_agents import SimAgent, logprob_of, mix, token_of

NEWEST = 6
OWNERS = st.sampled_from(["lab", "lab", "lab", "other"])
IDS = st.sampled_from(["one", "two", "three", "four"])
WISHES = st.sampled_from(
    [ANY, ANY, ANY, Wish(0, exact=True), Wish(1, exact=True), Wish(1), Wish(3), Wish(NEWEST)]
)
MOST_OPEN, KEEP_TOKENS, KEEP_S = 2, 10, 20.0


class Heard(NamedTuple):
    """What a client knows of a sample."""

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    """Of each token."""
    finish: str

    def goes_on_as(self, later: Heard) -> bool:
        """Whether nothing of it is taken back."""
        count = len(self.tokens)
        if self.finish:
            return later == self
        return (later.tokens[:count], later.logprobs[:count], later.versions[:count]) == self[:3]


NOTHING = Heard([], [], [], "")


@dataclass
class Promise:
    """A request as its client sees it."""

    owner: str
    asked: Asked
    heard: list[Heard]
    failed: str = ""
    is_deleted: bool = field(default=False, kw_only=True)

    @property
    def is_told(self) -> bool:
        """Whether anything was told of it."""
        return bool(self.failed) or any(one.tokens or one.finish for one in self.heard)


def heard_of(known: DoorRequest) -> list[Heard]:
    heard = []
    for view in known.view():
        versions = [run.version for run in view.versions for _ in range(run.start, run.end)]
        assert len(versions) == len(view.token_ids) == len(view.logprobs)
        heard.append(Heard(view.token_ids.tolist(), view.logprobs.tolist(), versions, view.finish))
    return heard


class DoorFleet(Fleet):
    """The fleet of the open groups' own test, with a door in the trainer's place. Promises are named by the numbers of
    their requests."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.promises: dict[int, Promise] = {}
        self.in_rows: dict[int, tuple[list[Heard], str]] = {}
        """What the rows say of each request."""
        self.writing: WriteBatch | None = None
        """A batch that the ledger's thread has."""
        self.versions, self.open_groups, self.door = self.restored(1)

    def restored(self, epoch: int) -> tuple[PolicyVersions, OpenGroups, DoorLedger]:
        """As the manager restores itself from the rows."""
        versions = PolicyVersions()
        versions.restore(self.rows.counters)
        open_groups = OpenGroups(epoch=epoch, most_resets=0)
        open_groups.newest_version = versions.newest
        if versions.served is not None:
            open_groups.promote(versions.served.version)
        groups, deltas = dict(sorted(self.rows.groups.items())), sorted(self.rows.deltas.items())
        open_groups.restore(self.rows.counters, groups, deltas)
        door = DoorLedger(open_groups, keep_s=KEEP_S, keep_tokens=KEEP_TOKENS, most_open=MOST_OPEN)
        door.restore(self.now)
        return versions, open_groups, door

    @initialize(deterministic=st.booleans())
    def begin(self, deterministic: bool) -> None:
        self.makers = [0] if deterministic else [0, 1, 2]
        self.version = -1
        self.publish_next()
        self.commit()
        for at, name in enumerate(("a", "b")):
            self.incarnations += 1
            self.agents[name] = SimAgent(name, self.makers[at % len(self.makers)], self.incarnations)
            self.dial(self.agents[name])
            self.load(name)
        self.ask("lab", "one", n=2)

    # -- the clients ---

    @rule(
        owner=OWNERS,
        request_id=IDS,
        prompt=st.sampled_from([7, 7, 7, 8]),
        n=st.sampled_from([1, 1, 1, 2]),
        limit=st.sampled_from([12, 12, 30]),
        wish=WISHES,
        pinned=st.integers(0, 3),
    )
    def ask(
        self,
        owner: str,
        request_id: str,
        prompt: int = 7,
        n: int = 1,
        limit: int = 12,
        wish: Wish = ANY,
        pinned: int = 1,
    ) -> None:
        if not pinned:
            wish = Wish(self.versions.newest, exact=True)
        asked = Asked(request_id, np.array([prompt, 2], np.int32), n, {"max_new_tokens": limit}, wish)
        self.asks(owner, asked)

    @rule(owner=OWNERS)
    def rush(self, owner: str) -> None:
        """A client asks for more than it may have open, for what is too old, and for what is not there yet."""
        self.publish()
        self.ask_for_long_ones(owner)
        self.ask(owner, "five", wish=Wish(0, exact=True))
        self.ask(owner, "five", wish=Wish(NEWEST + 1))
        self.a_while_passes([20, 20], True, True)
        self.a_while_passes([20, 20], True, True)
        self.ask(owner, "six")
        self.ask_again(owner, "one")
        self.ask_again("other" if owner == "lab" else "lab", "one")

    @rule(owner=OWNERS, request_id=IDS)
    def change_ones_mind(self, owner: str, request_id: str) -> None:
        self.ask_for_long_ones(owner)
        self.a_while_passes([2, 2], True, True)
        self.withdraw(owner, request_id, 0)
        self.abort(owner, None, 0)

    @rule(data=st.data(), how=st.sampled_from(["fails", "kills"]))
    def come_to_grief(self, data: st.DataObject, how: str) -> None:
        self.ask_for_long_ones()
        self.cursed.clear()
        self.curse(data, how)
        for _ in range(4):
            self.a_while_passes([3, 3], True, True)

    @rule(in_time=st.booleans())
    def restart_while_a_batch_is_written(self, in_time: bool) -> None:
        self.a_while_passes([2, 2], True, False)
        self.end_commit()
        self.begin_commit()
        self.restart(in_time)

    def ask_for_long_ones(self, owner: str = "lab") -> None:
        self.take(KEEP_S + 1.0)  # what has ended makes room
        for request_id in ("one", "two", "three", "four"):
            self.ask(owner, request_id, n=2, limit=30)

    @rule(owner=OWNERS, request_id=IDS)
    def ask_again(self, owner: str, request_id: str) -> None:
        known = self.door.requests().get(request_id)
        if known is not None:
            self.asks(owner, self.promises[known.request.number].asked)

    def asks(self, owner: str, asked: Asked) -> None:
        before = dict(self.door.requests())
        if expected := self.refusal(owner, asked):
            with pytest.raises(RequestRefused) as caught:
                self.door.ask(owner, asked, newest=self.versions.newest, now=self.now)
            assert caught.value.details["reason"] == expected
            assert dict(self.door.requests()) == before
            self.seen[f"refused: {expected}"] += 1
            return
        known, is_new = self.door.ask(owner, asked, newest=self.versions.newest, now=self.now)
        assert is_new == (asked.id not in before)
        number = known.request.number
        if is_new:
            assert number not in self.promises, "a request's number is given out twice"
            self.promises[number] = Promise(owner, asked, [NOTHING] * asked.n)
        else:
            self.seen["asked again"] += 1
        promise = self.promises[number]
        assert (promise.owner, promise.asked.digest) == (owner, asked.digest)
        for name in self.open_groups.instances:  # what is required may have risen
            self.open_groups.admit(name, able=self.can(name))

    def refusal(self, owner: str, asked: Asked) -> str:
        """Why the ask has to be refused; "" if it has not."""
        kept = {promise.asked.id: promise for promise in self.promises.values() if not promise.is_deleted}
        known = kept.get(asked.id)
        if known is not None:
            if known.owner != owner:
                return "not_yours"
            return "other_request" if known.asked.digest != asked.digest else ""
        newest = self.versions.newest
        if asked.wish.at_least > newest:
            return "policy_unknown"
        if asked.wish.exact and asked.wish.at_least < newest:
            return "policy_gone"
        theirs = [one for one in self.door.requests().values() if one.owner == owner]
        if sum(one.ended_at is None for one in theirs) >= MOST_OPEN:
            return "too_many_open"
        is_full = self.kept_tokens() >= KEEP_TOKENS
        return "ledger_full" if is_full and not self.has_less_than_others(owner) else ""

    def has_less_than_others(self, owner: str) -> bool:
        """Whether the key has less than its equal share of what all keys have: it is not kept out by the others."""
        taken = {one: size for one, size in self.door.bytes_of.items() if size}
        others = [one for one in taken if one != owner]
        return taken.get(owner, 0) * (len(others) + 1) < sum(taken.values())

    def kept_tokens(self) -> int:
        return sum(one.tokens for one in self.door.requests().values() if one.ended_at is not None)

    @rule(owner=OWNERS, request_id=IDS, often=st.integers(0, 1))
    def withdraw(self, owner: str, request_id: str, often: int) -> None:
        """A client deletes its request, or tries to delete another's."""
        known = self.door.requests().get(request_id)
        if known is None or self.promises[known.request.number].owner != owner:
            with pytest.raises(RequestRefused) as caught:
                self.door.find(owner, request_id)
            assert caught.value.details["reason"] == ("not_found" if known is None else "not_yours")
            return
        assert self.door.find(owner, request_id) is known
        if often == 0:
            self.seen["deleted"] += 1
            self.closed([known], lambda: self.door.close([known]))

    @rule(owner=OWNERS, request_id=st.one_of(st.none(), IDS), often=st.integers(0, 2))
    def abort(self, owner: str, request_id: str | None, often: int) -> None:
        """A client ends its requests that run, and hears what the ledger has of them."""
        due = [
            one
            for one in self.door.requests().values()
            if one.owner == owner and one.ended_at is None and request_id in (None, one.id)
        ]
        assert {one.id for one in self.door.running(owner)} >= {one.id for one in due}
        if often or not due:
            return
        before = [heard_of(one) for one in due]
        aborted: list[DoorRequest] = []
        self.closed(due, lambda: aborted.extend(self.door.abort(owner, request_id)))
        assert aborted == due
        for one, heard in zip(due, before, strict=True):
            assert one.is_over
            assert heard_of(one) == [sample._replace(finish=sample.finish or "abort") for sample in heard]
        self.seen["aborted"] += len(due)

    @rule(passed_s=st.integers(0, 12))
    def take(self, passed_s: float) -> None:
        """Time passes, and what was kept for long enough is forgotten."""
        self.now += passed_s
        due = [
            one
            for one in self.door.requests().values()
            if one.ended_at is not None and self.now - one.ended_at >= KEEP_S
        ]
        forgotten: list[DoorRequest] = []
        self.closed(due, lambda: forgotten.extend(self.door.forget(self.now)))
        assert set(map(id, forgotten)) == set(map(id, due))
        self.seen["forgotten"] += len(due)

    def closed(self, some: list[DoorRequest], close: Any) -> None:
        numbers = [one.request.number for one in some]
        close()
        for number in numbers:
            self.promises[number].is_deleted = True
            if number not in self.in_rows and not self.is_written(number):
                del self.promises[number]
        self.cancel()
        self.promote()

    def is_written(self, number: int) -> bool:
        return self.writing is not None and number in self.writing.opened

    # -- policies ---

    @rule()
    def publish(self) -> None:
        if self.versions.newest < NEWEST:
            self.publish_next()

    def publish_next(self) -> None:
        version = self.versions.newest + 1
        frame = Publish(version=version, checksum=f"{version:016x}", path="", sources=["h:1"])
        self.versions.publish(frame, "unset")
        self.open_groups.newest_version = self.versions.newest

    def promote(self) -> None:
        served = self.versions.promote(self.open_groups.pinned_version)
        if served is not None:
            self.version = served.version
            self.open_groups.promote(served.version)
            for name in self.open_groups.instances:
                self.open_groups.admit(name, able=self.can(name))

    @rule(name=st.sampled_from(["a", "b"]))
    def load(self, name: str) -> None:
        if self.version >= 0:
            super().load(name)

    # -- the manager ---

    def commit(self) -> None:
        self.end_commit()
        self.begin_commit()
        self.end_commit()

    @precondition(lambda self: self.writing is None)
    @rule()
    def begin_commit(self) -> None:
        """A batch goes to the ledger's thread; the loop goes on."""
        self.writing = self.open_groups.take_batch()
        self.writing.counters |= self.versions.take_counters()
        self.door.collect(self.writing)

    @rule()
    def end_commit(self) -> None:
        """The thread has written it, and the loop hears of that."""
        batch = self.writing
        if batch is None:
            return
        self.write(batch)
        self.writing = None
        if batch.deltas:
            self.committed_seq = batch.deltas[-1].seq
        changed = self.door.committed(self.now)
        whole = [self.open_groups.requests[one] for one in batch.complete if one in self.open_groups.requests]
        if self.versions.committed(batch.counters) or any(
            request.pinned for request in (*whole, *(known.request for known in changed if known.failed))
        ):
            self.promote()
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
        for known in self.door.requests().values():
            rows, failed = self.in_rows.get(known.request.number, ([NOTHING] * known.request.n, ""))
            assert known.failed == failed
            if not any(sample.resets for sample in known.request.samples):
                assert heard_of(known) == rows, "the rows have all that can be told, and no more"
        self.seen["failed"] += sum(bool(known.failed) for known in changed)

    def write(self, batch: WriteBatch) -> None:
        rows = self.rows
        rows.counters = batch.counters
        rows.groups |= batch.opened
        for seq, body in batch.encoded():
            assert seq not in rows.deltas
            rows.deltas[seq] = body
        for number in batch.closed:
            rows.groups.pop(number, None)
            self.promises.pop(number, None)
        for seq in batch.forgotten:
            rows.deltas.pop(seq)
        _, groups, door = self.restored(self.epoch + 1)
        self.in_rows = {one.request.number: (heard_of(one), one.failed) for one in door.requests().values()}
        self.committed_lengths = {(one.key, one.resets): one.length for one in groups.samples()}
        self.finished |= {(one.key, one.resets) for one in groups.samples() if one.finish}

    @rule(in_time=st.booleans())
    def restart(self, in_time: bool = True) -> None:
        """The manager is killed; a batch that was being written is in the ledger, or is not."""
        self.seen["restarts"] += 1
        if self.writing is not None:
            self.seen["restarts while a batch is written"] += 1
            if in_time:
                self.write(self.writing)
            self.writing = None
        self.epoch += 1
        self.versions, self.open_groups, self.door = self.restored(self.epoch)
        self.version = self.open_groups.served_version
        for agent in self.agents.values():
            agent.connected = False
            assert agent.version <= self.versions.newest, "an instance had a policy that is not in the ledger"
        self.authors, self.pending, self.links = {}, {}, {}
        self.committed_seq = max(self.rows.deltas, default=0)
        for number in [number for number in self.promises if number not in self.rows.groups]:
            assert not self.promises.pop(number).is_told, "something was told of a request that is lost"
        for promise in self.promises.values():
            promise.is_deleted = False
        assert {one.request.number for one in self.door.requests().values()} == set(self.promises)
        self.promote()

    # -- what always holds ---

    @invariant()
    def nothing_told_is_taken_back(self) -> None:
        for known in self.door.requests().values():
            promise = self.promises[known.request.number]
            assert not promise.is_deleted
            if promise.failed:
                assert known.failed == promise.failed
                continue
            promise.failed = known.failed
            if known.failed or any(sample.resets for sample in known.request.samples):
                continue  # it has failed, or its failure waits for the commit: nothing more is told
            heard = heard_of(known)
            for before, after in zip(promise.heard, heard, strict=True):
                assert before.goes_on_as(after), (known.id, before, after)
            self.seen["tokens told"] += sum(len(one.tokens) for one in heard)
            self.seen["tokens told"] -= sum(len(one.tokens) for one in promise.heard)
            promise.heard = heard

    @invariant()
    def nothing_is_told_that_is_not_in_the_rows(self) -> None:
        for known in self.door.requests().values():
            promise = self.promises[known.request.number]
            if not promise.is_told:
                continue
            rows, failed = self.in_rows[known.request.number]
            assert promise.failed in ("", failed)
            if not failed:
                assert all(told.goes_on_as(one) for told, one in zip(promise.heard, rows, strict=True))

    @invariant()
    def each_token_is_of_a_policy_that_was_asked_for(self) -> None:
        for known in self.door.requests().values():
            promise = self.promises[known.request.number]
            if known.failed:
                continue
            wish, prompt = promise.asked.wish, promise.asked.prompt_ids
            for sample, heard in zip(known.request.samples, promise.heard, strict=True):
                if sample.resets:
                    continue
                digest = mix(seed_of(sample), *map(int, prompt))
                for token, logprob, version in zip(*heard[:3], strict=True):
                    assert wish.at_least <= version
                    assert not wish.exact or version == wish.at_least
                    assert token in [token_of(digest, version, maker) for maker in self.makers]
                    assert np.float32(logprob) == np.float32(logprob_of(token))
                    digest = mix(digest, token)

    @invariant()
    def the_door_is_bounded(self) -> None:
        owners: Counter[str] = Counter()
        for known in self.door.requests().values():
            owners[known.owner] += known.ended_at is None
        assert all(count <= MOST_OPEN for count in owners.values())
        assert +self.door._open == +owners
        assert self.door.open_count == owners.total()
        assert self.door.kept_tokens == self.kept_tokens()

    @invariant()
    def no_request_is_lost(self) -> None:
        kept = {number for number, promise in self.promises.items() if not promise.is_deleted}
        assert {one.request.number for one in self.door.requests().values()} == kept
        assert set(self.open_groups.requests) == kept

    def teardown(self) -> None:
        """With one agent that works, every request ends, every pin with it, and everything is forgotten in time."""
        self.cursed.clear()
        for name in list(self.open_groups.instances):
            self.open_groups.leave(name)
        self.makers = [*self.makers, 99]
        self.agents, self.pending = {"z": SimAgent("z", 99, 0)}, {}
        self.commit()
        self.dial(self.agents["z"])
        for _ in range(60):
            self.load("z")
            self.assign(None)
            self.commit()
            self.generate("z", 50)
            self.hear(self.agents["z"], self.agents["z"].report(lambda sim: None))
            self.nothing_told_is_taken_back()
            if all(one.ended_at is not None for one in self.door.requests().values()):
                break
        self.each_token_is_of_a_policy_that_was_asked_for()
        self.no_request_is_lost()
        assert all(one.ended_at is not None for one in self.door.requests().values()), (
            "a request does not end"
        )
        assert self.versions.served is self.versions.published, "a pin has not ended"
        self.take(KEEP_S + 1.0)  # a moment of the clock may be rounded
        self.commit()
        assert not len(self.door)
        assert not self.rows.groups
        assert not self.rows.deltas
        assert self.open_groups.missing_tokens() == 0
        SEEN.update(self.seen)


SEEN: Counter[str] = Counter()
"""What the runs went through."""

EVERYTHING = (
    "tokens told",
    "asked again",
    *(
        f"refused: {reason}"
        for reason in (
            "not_yours",
            "other_request",
            "policy_unknown",
            "policy_gone",
            "too_many_open",
            "ledger_full",
        )
    ),
    "deleted",
    "aborted",
    "forgotten",
    "failed",
    "restarts",
    "restarts while a batch is written",
    "back",
)
"""What the runs must have come to."""


class TestDoorFleet(DoorFleet.TestCase):
    settings = settings(
        max_examples=examples(50),
        stateful_step_count=50,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a failure is told as it came: making it smaller takes minutes
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )

    @classmethod
    def setUpClass(cls) -> None:
        SEEN.clear()

    @classmethod
    def tearDownClass(cls) -> None:
        went_through(SEEN, EVERYTHING)
