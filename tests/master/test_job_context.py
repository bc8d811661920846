"""The state and its journal together: nothing before its commit, and nothing lost when it cannot be written."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gyre.errors import StoreFull
from gyre.failover import FailoverCoordinator, JobPhase, differences, fold
from gyre.failover import events as e
from gyre.graph import compile_job
from gyre.master.job_context import RETRY_S, Issued, JobContext
from gyre.store import Store, open_store
from gyre.testing.clock import VirtualClock, VirtualTimeLoop, run_virtual
from tests.doubles.standing_job import small_spec
from tests.store.fault_points import AFTER_COMMIT, BEGUN, at_points
from tests.waits import GENEROUS_S

ROLES = {"trainer": 1, "actor": 2, "rollout": 2, "reward": 1}


class Bench:
    def __init__(self, store: Store) -> None:
        compiled = compile_job(small_spec())
        self.store = store
        self.clock = VirtualClock()
        self.coordinator = FailoverCoordinator(compiled.spec, compiled.graph.region_or_alone)
        self.issued: list[Issued] = []
        self.seqs_at_issue: list[int] = []
        self.fences: list[BaseException] = []
        self.was_fenced = asyncio.Event()
        self.commits = 0
        self.context = self.new_context()

    def new_context(self) -> JobContext:
        return JobContext(
            self.store.journal("j1"),
            self.coordinator,
            clock=self.clock,
            owner=self,
        )

    def carry_out(self, issued: list[Issued]) -> None:
        self.issued += issued
        self.seqs_at_issue.append(self.store.journal("j1").last_seq())

    def fenced(self, error: BaseException) -> None:
        self.fences.append(error)
        self.was_fenced.set()

    def committed(self) -> None:
        self.commits += 1

    async def opened(self) -> JobContext:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        context = self.context
        loop.outside(lambda: bool(context._queued) and not context._retrying and not self.fences)
        context.open(pid=1)
        return context

    def run(self, scenario: Callable[[], object]) -> None:
        try:
            run_virtual(scenario(), self.clock)  # type: ignore[arg-type]
        finally:
            self.context.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    with open_store(f"sqlite:///{tmp_path / 'gyre.db'}") as store:
        store.create_job(job_id="j1", name="small", spec={}, now=0.0)
        bench = Bench(store)
        yield bench
        journal = store.journal("j1")
        assert differences(fold(bench.coordinator, journal.events()), journal.snapshot()) == []


def started(vertex: str) -> e.VertexStarted:
    return e.VertexStarted(vertex, 1, pid=1, node="n0")


def test_commands_are_issued_after_their_commit_and_in_order(bench: Bench) -> None:
    async def scenario() -> None:
        context = await bench.opened()
        first = context.submit(e.JobSubmitted("j1", "small", ROLES), actor="user")
        second = context.submit(e.ScaleRequested("rollout", 3))
        assert bench.issued == []
        assert context.committed.vertices == {}
        assert len(context.state.vertices) == 7, "decided at once"
        assert await asyncio.gather(first, second) == [1, 2]
        assert context.committed is context.state
        assert context.seq == 2

    bench.run(scenario)
    assert [issued.id for issued in bench.issued] == [f"e1.1/{n}" for n in range(5)] + ["e1.2/0"]
    assert bench.seqs_at_issue[0] >= 1
    assert bench.commits == 2


def test_what_was_done_is_noted_with_the_next_event(bench: Bench) -> None:
    async def scenario() -> None:
        context = await bench.opened()
        await context.submit(e.JobSubmitted("j1", "small", ROLES))
        context.finished("e1.1/0")
        assert len(bench.store.journal("j1").pending_commands()) == 5
        await context.submit(started("reward-0"))
        assert [row.id for row in bench.store.journal("j1").pending_commands()] == [
            f"e1.1/{n}" for n in range(1, 5)
        ]

    bench.run(scenario)


def test_a_repeated_report_is_done_at_once_and_not_written(bench: Bench) -> None:
    report = e.StepCompleted(1, step=1, version=1, report=1)

    async def scenario() -> None:
        context = await bench.opened()
        await context.submit(e.JobSubmitted("j1", "small", ROLES))
        assert await context.submit(report, event_id="trainer-0/1/1") == 2
        again = context.submit(report, event_id="trainer-0/1/1")
        assert again.done()
        assert again.result() == 2

    bench.run(scenario)
    assert len(bench.store.journal("j1").events()) == 2


def test_a_repeated_report_is_done_no_sooner_than_what_it_may_repeat(bench: Bench) -> None:
    """What a vertex is told to forget is in the journal, also where the last of its reports is not written again."""
    restored = e.GangRestored(1, "actor", "memory", step=3, checkpoint_step=2, gang=2, number=1)

    async def scenario() -> None:
        context = await bench.opened()
        context.submit(e.JobSubmitted("j1", "small", ROLES))
        first = context.submit(replace(restored, report=1))
        step = context.submit(e.StepCompleted(1, step=4, version=4, report=2))
        again = context.submit(replace(restored, report=3))
        assert not again.done()
        assert await again == 3
        assert first.done()
        assert step.done()

    bench.run(scenario)
    kinds = [event.kind for event in bench.store.journal("j1").events()]
    assert kinds == ["JobSubmitted", "GangRestored", "StepCompleted"]


def test_a_successor_has_the_state_and_what_was_left_undone(bench: Bench) -> None:
    async def scenario() -> None:
        context = await bench.opened()
        await context.submit(e.JobSubmitted("j1", "small", ROLES))
        successor = bench.new_context()
        undone = successor.open(pid=2)
        assert successor.epoch == 2
        assert successor.state == context.state
        assert undone == bench.issued
        await successor.submit(started("reward-0"))
        context.submit(started("reward-0"))
        await bench.was_fenced.wait()
        successor.close()

    bench.run(scenario)
    assert [event.epoch for event in bench.store.journal("j1").events()] == [1, 2]


def test_what_cannot_be_written_is_kept_and_written_in_order(bench: Bench) -> None:
    full = True

    def no_space(point: str) -> None:
        if full and point == BEGUN:
            raise StoreFull("No space left.")

    async def scenario() -> None:
        nonlocal full
        context = await bench.opened()
        at_points(bench.store, no_space)
        waiting = [context.submit(e.JobSubmitted("j1", "small", ROLES))]
        for vertex in list(context.state.vertices):
            waiting.append(context.submit(started(vertex)))
            await asyncio.sleep(RETRY_S * 0.7)
        assert context.error == "No space left."
        assert bench.issued == []
        assert context.committed.vertices == {}
        assert not any(future.done() for future in waiting)
        full = False
        assert await asyncio.gather(*waiting) == list(range(1, 8))
        assert context.error == ""
        assert context.committed.job.phase is JobPhase.RUNNING

    bench.run(scenario)
    assert [event.seq for event in bench.store.journal("j1").events()] == list(range(1, 8))


def test_a_commit_whose_outcome_is_unknown_is_sent_again_and_stored_once(bench: Bench) -> None:
    broken = iter([True])

    def lose_the_answer(point: str) -> None:
        if point == AFTER_COMMIT and next(broken, False):
            raise StoreFull("The connection broke.")

    async def scenario() -> None:
        context = await bench.opened()
        at_points(bench.store, lose_the_answer)
        assert await context.submit(e.JobSubmitted("j1", "small", ROLES)) == 1
        assert await context.submit(started("reward-0")) == 2

    bench.run(scenario)
    assert [event.kind for event in bench.store.journal("j1").events()] == ["JobSubmitted", "VertexStarted"]
    assert len(bench.issued) == 5


def test_late_news_of_a_failed_attempt_do_not_send_it_a_third_time(bench: Bench) -> None:
    async def scenario() -> None:
        context = await bench.opened()
        done = context.submit(e.JobSubmitted("j1", "small", ROLES))
        context._attempt += 1
        context._failed(StoreFull("No space left."), 0)
        assert not context._retrying
        assert await done == 1

    bench.run(scenario)


def test_readers_on_other_threads_are_woken_by_a_commit(bench: Bench) -> None:
    async def scenario() -> None:
        context = await bench.opened()

        def wait() -> bool:
            with context.news:
                return context.news.wait_for(lambda: context.seq >= 1, GENEROUS_S)

        waiting = asyncio.get_running_loop().run_in_executor(None, wait)
        await context.submit(e.JobSubmitted("j1", "small", ROLES))
        assert await waiting

    bench.run(scenario)


def test_rows_that_no_decision_holds_any_more_are_deleted(bench: Bench) -> None:
    """More incidents than are kept: the oldest leave the snapshot with the event that pushed them out."""

    async def scenario() -> None:
        context = await bench.opened()
        await context.submit(e.JobSubmitted("j1", "small", ROLES))
        for vertex in list(context.state.vertices):
            context.submit(started(vertex))
        for number in range(1, 231):
            bench.clock.advance(60.0)
            await context.submit(
                e.OperatorFailed(1, "reward-0", 1, "score", "no", "", user_code=False, report=number)
            )

    bench.run(scenario)
    incidents = [key for key in bench.store.journal("j1").snapshot() if key[0] == "incident"]
    assert len(incidents) == 200
