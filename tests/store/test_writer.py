"""The group-commit writer: order, one answer each, and a failure that leaves no hole."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from gyre.errors import Fenced, GyreError, StoreError, StoreFull
from gyre.store import GroupCommitWriter, Journal, Store
from tests.store.fault_points import AFTER_COMMIT, BEFORE_COMMIT, at_points
from tests.store.store_processes import entries
from tests.waits import GENEROUS_S


@pytest.fixture
def journal(store: Store, make_job) -> Journal:
    return store.journal(make_job())


@pytest.fixture
def epoch(journal: Journal) -> int:
    return journal.take_over(now=1.0, pid=1)


@pytest.fixture
def writer(journal: Journal, epoch: int) -> Iterator[GroupCommitWriter]:
    opened = GroupCommitWriter(journal, epoch)
    yield opened
    opened.close()


class Gate:
    """A fault hook that holds a commit at `point`, or fails it there, on request."""

    def __init__(self, store: Store, point: str = BEFORE_COMMIT) -> None:
        self.open, self.reached, self.point = threading.Event(), threading.Event(), point
        self.raises: GyreError | None = None
        at_points(store, self)

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.reached.set()
            assert self.open.wait(GENEROUS_S)
            if self.raises is not None:
                raise self.raises


def test_what_two_hundred_submit_is_stored_in_order_in_few_commits(
    store: Store, journal: Journal, writer: GroupCommitWriter
) -> None:
    commits: list[str] = []
    gate = Gate(store)  # the first commit waits until everybody has submitted

    def count(point: str) -> None:
        gate(point)
        if point == AFTER_COMMIT:
            commits.append(point)

    at_points(store, count)

    async def submit_all() -> None:
        submitted = [asyncio.wrap_future(writer.submit(entry)) for entry in entries(1, 200)]
        gate.open.set()
        await asyncio.gather(*submitted)

    asyncio.run(submit_all())
    assert [event.seq for event in journal.events()] == list(range(1, 201))
    assert len(commits) <= 2, "what came before the writer looked, and all the rest"


def test_a_future_is_done_only_after_the_commit(
    store: Store, journal: Journal, writer: GroupCommitWriter
) -> None:
    gate = Gate(store)
    future = writer.submit(entries(1, 1)[0])
    assert gate.reached.wait(GENEROUS_S)
    assert not future.done()
    gate.open.set()
    assert future.result(GENEROUS_S) is None
    assert journal.last_seq() == 1


def test_a_full_disk_fails_batch_and_queue_until_resumed_with_the_same_entries(
    store: Store, journal: Journal, writer: GroupCommitWriter
) -> None:
    gate, (one, two, three) = Gate(store), entries(1, 3)
    gate.raises = StoreFull("No space left.")
    first = writer.submit(one)
    assert gate.reached.wait(GENEROUS_S)
    second = writer.submit(two)  # queued behind a commit that will fail
    gate.open.set()
    for future in (first, second):
        with pytest.raises(StoreFull):
            future.result(GENEROUS_S)
    with pytest.raises(StoreFull):
        writer.submit(three)
    assert isinstance(writer.error, StoreFull)
    assert journal.last_seq() == 0
    gate.raises = None
    writer.resume()
    for future in [writer.submit(entry) for entry in (one, two, three)]:
        future.result(GENEROUS_S)
    assert [event.event_id for event in journal.events()] == ["e1", "e2", "e3"]


def test_a_commit_that_failed_after_all_is_recognised_when_sent_again(
    store: Store, journal: Journal, writer: GroupCommitWriter
) -> None:
    gate = Gate(store, AFTER_COMMIT)
    gate.open.set()
    gate.raises = StoreError("The connection broke while it was answering.")
    [one, two] = entries(1, 2)
    with pytest.raises(StoreError, match="while it was answering"):
        writer.submit(one).result(GENEROUS_S)
    assert journal.last_seq() == 1
    gate.raises = None
    writer.resume()
    for future in [writer.submit(one), writer.submit(two)]:
        future.result(GENEROUS_S)
    assert [event.event_id for event in journal.events()] == ["e1", "e2"]


def test_a_fenced_writer_says_so_to_everyone(journal: Journal, writer: GroupCommitWriter) -> None:
    journal.take_over(now=2.0, pid=2)
    with pytest.raises(Fenced):
        writer.submit(entries(1, 1)[0]).result(GENEROUS_S)
    with pytest.raises(Fenced):
        writer.submit(entries(1, 1)[0])


def test_a_bad_body_is_its_submitters_alone(journal: Journal, writer: GroupCommitWriter) -> None:
    [one, two] = entries(1, 2)
    with pytest.raises(StoreError, match="not plain JSON"):
        writer.submit(replace(one, body={"x": float("nan")}))
    for future in [writer.submit(one), writer.submit(two)]:
        future.result(GENEROUS_S)
    assert journal.last_seq() == 2


def test_a_cancelled_await_does_not_withdraw_an_entry(
    store: Store, journal: Journal, writer: GroupCommitWriter
) -> None:
    gate = Gate(store)
    [one, two] = entries(1, 2)

    async def give_up() -> None:
        waiting = asyncio.wrap_future(writer.submit(one))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(give_up())
    gate.open.set()
    writer.submit(two).result(GENEROUS_S)
    assert journal.last_seq() == 2


def test_a_full_queue_is_an_answer_not_a_hang(store: Store, journal: Journal, epoch: int) -> None:
    gate = Gate(store)
    with GroupCommitWriter(journal, epoch, queue_limit=2, max_batch=2) as writer:
        batch = entries(1, 4)
        first = writer.submit(batch[0])
        assert gate.reached.wait(GENEROUS_S)
        queued = [writer.submit(entry) for entry in batch[1:3]]
        with pytest.raises(StoreError, match="2 entries of job j1 wait"):
            writer.submit(batch[3], timeout_s=0)
        gate.open.set()
        for future in (first, *queued, writer.submit(batch[3])):
            future.result(GENEROUS_S)
    assert journal.last_seq() == 4


def test_close_commits_what_is_queued_and_then_refuses(journal: Journal, writer: GroupCommitWriter) -> None:
    futures = [writer.submit(entry) for entry in entries(1, 50)]
    writer.close()
    assert all(future.done() and future.exception() is None for future in futures)
    assert journal.last_seq() == 50
    with pytest.raises(StoreError, match="closed"):
        writer.submit(entries(51, 1)[0])


def test_close_gives_up_on_a_stuck_disk_and_says_so(store: Store, journal: Journal, epoch: int) -> None:
    gate = Gate(store)
    writer = GroupCommitWriter(journal, epoch)
    [one, two] = entries(1, 2)
    stuck = writer.submit(one)
    assert gate.reached.wait(GENEROUS_S)
    waiting = writer.submit(two)
    writer.close(timeout_s=0.05)
    with pytest.raises(StoreError, match="closed with 1 entries queued"):
        waiting.result(GENEROUS_S)
    assert not stuck.done()
    gate.open.set()
    assert stuck.result(GENEROUS_S) is None
