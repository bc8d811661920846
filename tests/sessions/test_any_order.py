"""Sessions against workers, engines, a trainer and a manager that do anything in any order: claims, turns, the same
turns again, branches, deaths, silence, ends, commits, kills. Time is virtual, and what is stored are the real rows."""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from gyre.rollouts.plane.session_ledger import SessionEnded
from gyre.rollouts.plane.session_tree import SessionOutcome
from gyre.rollouts.protocol.frames import GroupsStored
from tests.examples import examples
from tests.rollouts.machine.fleet import went_through
from tests.sessions.session_machine import SILENCE_S, Claim, SessionWorld

NEWEST = 5
WORKERS = st.sampled_from(["w", "w", "x"])
NAMES = st.sampled_from(["a", "b"])
OUTCOMES = st.sampled_from(
    [
        *[SessionOutcome.SCORED] * 4,
        SessionOutcome.TRUNCATED,
        SessionOutcome.POLICY_FAULT,
        SessionOutcome.INFRA_FAULT,
    ]
)

SEEN: Counter[str] = Counter()
"""Of all runs."""


class Sessions(RuleBasedStateMachine):
    @initialize(
        recovery=st.sampled_from(["replayable", "replayable", "snapshot", "restart"]),
        redraws=st.integers(0, 3),
        oversample=st.sampled_from([1.0, 1.0, 1.5]),
    )
    def begin(self, recovery: str, redraws: int, oversample: float) -> None:
        self.world = SessionWorld(
            recovery=recovery, redraws=redraws, oversample=oversample, breaker=3, max_turns=6
        )
        self.seen = self.world.witness.seen
        self.groups = 0
        self.keys: Counter[str] = Counter()
        """Turns that were asked for in each session, for their names."""
        world = self.world
        world.attach()
        world.publish()
        world.commit()
        for name in ("a", "b"):
            world.dial(name)
            world.load(name)
        self.ask_groups(2, 2, False)
        world.commit()
        world.claim("w", 2)
        world.commit()

    # -- the trainer --------------------------------------------------------------------------------

    @rule(count=st.integers(1, 2), n=st.integers(1, 2), newer=st.booleans())
    def ask_groups(self, count: int, n: int, newer: bool) -> None:
        world = self.world
        if world.trainer is None or len(world.ledger.by_number) > 5:
            return
        newest = world.plane.versions.newest
        wants = newest + (newer and newest < NEWEST)
        world.ask_groups("train", range(self.groups, self.groups + count), n, min_version=wants, pinned=False)
        self.groups += count

    @rule(n=st.integers(1, 2))
    def evaluate(self, n: int) -> None:
        world = self.world
        if world.trainer is None or len(world.ledger.by_number) > 5:
            return
        self.groups += 1
        newest = world.plane.versions.newest
        world.ask_groups(f"evaluate/{newest}/x", [-self.groups], n, min_version=newest, pinned=True)
        self.seen["evaluation"] += 1

    @rule()
    def publish(self) -> None:
        if self.world.plane.versions.newest < NEWEST:
            self.world.publish()

    @rule(again=st.booleans())
    def trainer_dies(self, again: bool) -> None:
        """And the next one asks for what it does not have."""
        self.world.detach()
        if again:
            self.trainer_is_back()

    @rule()
    def trainer_is_back(self) -> None:
        world = self.world
        if world.trainer is not None:
            return
        world.attach()
        self.seen["trainer back"] += 1
        for purpose, group_id in sorted(world.witness.stored):  # a manager that died may not have written it
            if (purpose, group_id) in world.ledger._by_name:
                world.tell(GroupsStored(purpose=purpose, ids=[group_id]))
        for (purpose, group_id), n in list(world.witness.wanted.items()):
            if (purpose, group_id) not in world.witness.stored | world.witness.failed:
                pinned = purpose != "train"
                wants = int(purpose.split("/")[1]) if pinned else 0
                world.ask_groups(purpose, [group_id], n, min_version=wants, pinned=pinned)

    @rule(data=st.data())
    def store(self, data: st.DataObject) -> None:
        witness = self.world.witness
        left = sorted(set(witness.delivered) - witness.stored)
        if left and self.world.trainer is not None:
            self.world.store(*data.draw(st.sampled_from(left)))

    @rule(data=st.data(), often=st.integers(0, 3))
    def withdraw(self, data: st.DataObject, often: int) -> None:
        """The trainer does not want a group any more whose sessions run."""
        witness, world = self.world.witness, self.world
        left = sorted(set(witness.wanted) - witness.stored - set(witness.delivered))
        if left and world.trainer is not None and not often:
            named = data.draw(st.sampled_from(left))
            witness.masked[named] = 0
            world.store(*named)
            self.seen["withdrawn"] += 1

    # -- workers ------------------------------------------------------------------------------------

    @rule(worker=WORKERS, most=st.integers(1, 3))
    def claim(self, worker: str, most: int) -> None:
        self.world.claim(worker, most)

    @rule(worker=WORKERS, all_of_them=st.booleans())
    def beat(self, worker: str, all_of_them: bool) -> None:
        running = self.world.runs(worker)
        told = running if all_of_them else running[:-1]
        assert self.world.beat(worker, [*told, "forged"]) == ["forged"]

    def a_claim(self, data: st.DataObject) -> Claim | None:
        """One that is good, or any: also one that somebody else has since, or of a session that is over."""
        claims = [one for one in self.world.witness.claims if one.is_told]
        there = self.world.ledger.sessions
        good = [one for one in claims if one.session in there and there[one.session].claim == one.number]
        some = good if good and data.draw(st.integers(0, 5)) else claims[-9:]
        return data.draw(st.sampled_from(some)) if some else None

    @rule(data=st.data(), added=st.lists(st.integers(40, 45), min_size=1, max_size=4))
    def ask(self, data: st.DataObject, added: list[int]) -> None:
        claim = self.a_claim(data)
        if claim is None:
            return
        known = self.world.witness.turns.get(claim.session, {})
        told = [one.key for one in known.values() if one.told is not None]
        parent = data.draw(st.sampled_from([told[-1], *told, None])) if told else None
        self.keys[claim.session] += 1
        why = self.world.ask(claim, f"{self.keys[claim.session]:x}-0", added, parent)
        self.seen[f"ask: {why}"] += 1

    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        claim = self.a_claim(data)
        known = self.world.witness.turns.get(claim.session, {}) if claim is not None else {}
        if claim is None or not known:
            return
        one = data.draw(st.sampled_from(list(known.values())))
        before = self.world.plane.groups.account.generated
        if not self.world.ask(claim, one.key, one.prompt, None):
            self.seen["asked again"] += 1
        assert self.world.plane.groups.account.generated == before

    @rule(data=st.data(), outcome=OUTCOMES, reward=st.sampled_from([0.0, 0.5, 1.0]), often=st.integers(0, 2))
    def end(self, data: st.DataObject, outcome: SessionOutcome, reward: float, often: int) -> None:
        claim = self.a_claim(data)
        if claim is not None and often < 2:
            why = self.world.end(claim, outcome, reward)
            self.seen[f"end: {why}"] += 1
            if not why:
                self.end_again(claim, other=True)
                self.end_again(claim, other=False)

    def end_again(self, claim: Claim, *, other: bool) -> None:
        """The same end, or another one of the same session, which may be forgotten since."""
        world = self.world
        outcome, reward = world.witness.ends[claim.session]
        is_there = claim.session in world.ledger.sessions
        why = world.end(
            claim, SessionOutcome.POLICY_FAULT if other else outcome, 0.25 if other else reward or 0.0
        )
        assert why == (("ended" if other else "") if is_there else "not_found")
        self.seen[f"end again: {why}"] += 1

    @rule(data=st.data(), size=st.sampled_from([3, 3, (1 << 20) + 1]))
    def snapshot(self, data: st.DataObject, size: int) -> None:
        claim = self.a_claim(data)
        if claim is not None:
            self.world.snapshot(claim, bytes(size))

    # -- engines ------------------------------------------------------------------------------------

    @rule(name=NAMES, tokens=st.integers(1, 14), whole=st.booleans())
    def draw(self, name: str, tokens: int, whole: bool) -> None:
        self.world.load(name)
        self.world.draw(name, tokens, whole=whole)

    @rule(name=NAMES, how=st.sampled_from(["engine", "process", "wire"]))
    def trouble(self, name: str, how: str) -> None:
        if how == "engine":
            self.world.engine_dies(name)
        else:
            self.world.lose(name, process=how == "process")
            self.seen[how] += 1

    @rule(name=NAMES)
    def dial(self, name: str) -> None:
        self.world.dial(name)
        self.world.load(name)

    # Rules are drawn alike; most of what happens is that things go on.
    @rule(tokens=st.integers(1, 9))
    def a_while(self, tokens: int) -> None:
        for name in ("a", "b"):
            agent = self.world.agents[name]
            if not agent.connected:
                self.world.dial(name)
            self.world.load(name)
            self.world.draw(name, tokens)
        self.world.commit()

    @rule(
        data=st.data(), tokens=st.integers(1, 9), added=st.lists(st.integers(40, 45), min_size=1, max_size=3)
    )
    def a_turn(self, data: st.DataObject, tokens: int, added: list[int]) -> None:
        self.world.claim("w", 2)
        self.world.commit()
        self.ask(data, added)
        self.a_while(tokens)
        self.a_while(14)

    @rule(
        data=st.data(), tokens=st.integers(1, 9), added=st.lists(st.integers(40, 45), min_size=1, max_size=3)
    )
    def another_turn(self, data: st.DataObject, tokens: int, added: list[int]) -> None:
        self.a_turn(data, tokens, added)
        self.begin_commit()

    # -- the manager --------------------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.1, 0.1, 2.0, 6.0, SILENCE_S + 1]))
    def pass_time(self, seconds: float) -> None:
        for worker in ("w", "x"):
            self.world.beat(worker, self.world.runs(worker))
        self.world.pass_time(seconds)

    @rule()
    def begin_commit(self) -> None:
        self.world.begin_commit()

    @rule()
    def end_commit(self) -> None:
        self.world.end_commit()

    @rule()
    def commit(self) -> None:
        self.world.commit()
        self.seen["folded"] += self.world.check_fold()

    @rule(whole=st.booleans())
    def kill(self, whole: bool) -> None:
        """With what was written and not told of, or without it."""
        world = self.world
        if whole:
            world.begin_commit()
            if world.batch is not None:
                world.rows.commit(world.batch)
                self.seen["killed before it heard"] += 1
        world.start()
        self.seen["killed"] += 1
        for name in ("a", "b"):
            world.dial(name)
        self.trainer_is_back()

    @rule(data=st.data(), outcome=st.sampled_from([SessionOutcome.INFRA_FAULT, SessionOutcome.SCORED]))
    def kill_after_an_end(self, data: st.DataObject, outcome: SessionOutcome) -> None:
        """The end is written, and what follows of it is not."""
        claim, world = self.a_claim(data), self.world
        world.commit()
        session = world.ledger.sessions.get(claim.session) if claim is not None else None
        if claim is None or session is None or session.outcome is not None or session.claim != claim.number:
            return
        world.do(SessionEnded(session.id, outcome, None if outcome is SessionOutcome.INFRA_FAULT else 1.0))
        self.kill(True)
        self.seen["killed after an end"] += 1

    @rule()
    def kill_while_tools_run(self) -> None:
        """An evaluation has no turn at an engine, and a newer version waits for it."""
        self.trainer_is_back()
        self.evaluate(1)
        self.publish()
        self.world.commit()
        self.kill(True)
        self.world.commit()

    @precondition(lambda self: hasattr(self, "world"))
    @rule(worker=WORKERS)
    def worker_dies(self, worker: str) -> None:
        self.world.pass_time(SILENCE_S / 2)
        for other in {"w", "x"} - {worker}:
            self.world.beat(other, self.world.runs(other))
        self.world.pass_time(SILENCE_S / 2 + 1)
        assert not self.world.runs(worker), "a silent worker has sessions"
        self.seen["worker silent"] += 1

    # -- in the end ---------------------------------------------------------------------------------

    def teardown(self) -> None:
        """All that was asked for comes out, once whoever was in trouble is well again."""
        if not hasattr(self, "world"):
            return
        world, witness = self.world, self.world.witness
        self.trainer_is_back()
        world.publish()  # some want a version that is not there yet
        for turn in range(200):
            self.settle(turn)
            if set(witness.wanted) <= witness.stored | witness.failed:
                break
        left = set(witness.wanted) - witness.stored - witness.failed
        assert not left, f"{sorted(left)} never came: {world.ledger.status()}"
        for purpose, group_id in sorted(witness.failed - witness.stored):
            witness.masked[purpose, group_id] = 0
            world.store(purpose, group_id)
        world.commit()
        account = world.plane.groups.account
        assert not world.ledger.sessions
        assert account.delivered == witness.trained, "what was delivered is not what was in the masks"
        assert account.generated == account.delivered + sum(account.discarded.values())
        assert world.check_fold()
        SEEN.update(self.seen)

    def settle(self, turn: int) -> None:
        world, witness = self.world, self.world.witness
        world.pass_time(2.0)
        self.a_while(14)
        world.commit()
        for worker in ("w", "x"):
            world.claim(worker, 8)
            world.beat(worker, world.runs(worker))
        world.commit()
        for session in [one for one in world.ledger.sessions.values() if one.worker and one.outcome is None]:
            claim = Claim(
                session.id, session.claim, session.worker, session.purpose, session.group_id, session.index
            )
            if any(one.is_written for one in session.turns):
                world.end(claim, SessionOutcome.SCORED, 1.0)
            elif not session.turns:
                world.ask(claim, "settle-0", [40], None)
        for named in sorted(set(witness.delivered) - witness.stored):
            world.store(*named)


class TestSessions(Sessions.TestCase):
    settings = settings(
        max_examples=examples(120),
        stateful_step_count=50,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # a failure is told as it came: making it smaller takes minutes
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )


def test_the_runs_went_everywhere() -> None:
    """After the runs above: what none of them came to was not looked at."""
    if SEEN:
        went_through(
            SEEN,
            [
                *(
                    "delivered",
                    "turn",
                    "asked again",
                    "killed",
                    "killed before it heard",
                    "engine died",
                    "folded",
                ),
                *("evaluation", "withdrawn", "worker silent", "trainer back", "ask: not_found"),
                *("end scored", "end infra_fault", "end again: ", "end again: ended", "end again: not_found"),
            ],
        )
