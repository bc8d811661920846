"""When the ledger is written."""

from __future__ import annotations

import asyncio

from gyre.rollouts.commits import Commits


async def test_it_can_be_ended_at_the_moment_at_which_somebody_wants_a_commit() -> None:
    """A manager that stops waits for this task: if it forgot that it was cancelled, it would wait for ever."""
    commits: Commits[None] = Commits(
        lambda: None, lambda batch: None, lambda batch: None, interval_s=60.0, urgent_s=0.0
    )
    running = asyncio.create_task(commits.run())
    commits.soon()
    for _ in range(5):
        await asyncio.sleep(0)  # it waits for the interval to pass
    commits.now()
    await asyncio.sleep(0)
    running.cancel()
    ended, _ = await asyncio.wait([running], timeout=5.0)
    running.cancel()
    commits.close()
    assert ended
    assert running.cancelled()
