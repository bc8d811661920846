"""When the ledger is written."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gyre.errors import StoreFull
from gyre.rollouts.token_log import group_commit
from gyre.rollouts.token_log.group_commit import GroupCommit
from tests.waits import GENEROUS_S


async def test_it_can_be_ended_at_the_moment_at_which_somebody_wants_a_commit() -> None:
    """A manager that stops waits for this task: if it forgot that it was cancelled, it would wait for ever."""
    commits: GroupCommit[None] = GroupCommit(
        lambda: None, lambda batch: None, lambda batch: None, interval_s=60.0, urgent_s=0.0
    )
    running = asyncio.create_task(commits.run())
    commits.soon()
    for _ in range(5):
        await asyncio.sleep(0)  # it waits for the interval to pass
    commits.now()
    await asyncio.sleep(0)
    running.cancel()
    ended, _ = await asyncio.wait([running], timeout=GENEROUS_S)
    running.cancel()
    commits.close()
    assert ended
    assert running.cancelled()


@pytest.mark.parametrize("waits_for_the_interval", [False, True])
async def test_what_nothing_else_goes_with_is_written_without_waiting(waits_for_the_interval: bool) -> None:
    """By intervals that would never end."""
    written = asyncio.Event()
    commits: GroupCommit[int] = GroupCommit(
        lambda: 1, lambda batch: None, lambda batch: written.set(), interval_s=3600.0, urgent_s=3600.0
    )
    running = asyncio.create_task(commits.run())
    if waits_for_the_interval:
        commits.soon()
    else:
        commits.now()
    for _ in range(5):
        await asyncio.sleep(0)
    commits.at_once()
    async with asyncio.timeout(GENEROUS_S):
        await written.wait()
    written.clear()
    commits.now()  # the next one waits for others again
    for _ in range(50):
        await asyncio.sleep(0)
    assert not written.is_set()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    commits.close()


async def test_a_batch_that_finds_no_room_is_kept_and_written_when_there_is_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(group_commit, "FULL_PAUSE_S", 0.0)
    batches = iter([1, 2])
    attempts: list[int] = []
    committed: list[int] = []
    done = asyncio.Event()

    def write(batch: int) -> None:
        attempts.append(batch)
        if len(attempts) < 4:
            raise StoreFull("No space left for the store.")

    def commit(batch: int) -> None:
        committed.append(batch)
        done.set()

    commits: GroupCommit[int] = GroupCommit(
        lambda: next(batches, None), write, commit, interval_s=0.0, urgent_s=0.0
    )
    running = asyncio.create_task(commits.run())
    commits.now()
    async with asyncio.timeout(GENEROUS_S):
        await done.wait()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    commits.close()
    assert attempts == [1, 1, 1, 1]
    assert committed == [1]


async def test_what_is_due_within_a_time_is_written_then_or_with_what_is_urgent() -> None:
    """By an interval that would never end."""
    commits: GroupCommit[int] = GroupCommit(
        lambda: 1, lambda batch: None, lambda batch: written.set(), interval_s=3600.0, urgent_s=0.0
    )
    written = asyncio.Event()
    loop = asyncio.get_running_loop()
    running = asyncio.create_task(commits.run())
    began = loop.time()
    commits.within(0.05)
    commits.within(3600.0)  # the first of them says when
    async with asyncio.timeout(GENEROUS_S):
        await written.wait()
    assert loop.time() - began >= 0.05
    written.clear()
    commits.within(3600.0)
    commits.now()
    async with asyncio.timeout(GENEROUS_S):
        await written.wait()
    written.clear()
    commits.within(0.0)  # and what was due with the last one delays nothing
    async with asyncio.timeout(GENEROUS_S):
        await written.wait()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    commits.close()
