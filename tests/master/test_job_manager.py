"""What carries out the commands, apart from the master around it."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from gyre.failover.commands import FinishJob
from gyre.master.job_context import Issued
from gyre.master.job_manager import JobManager


class Stage:
    """Says what was begun, and what was told as finished."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.places = self

    async def release_all(self) -> None:
        self.begun.append("release")

    def finish(self) -> None:
        """The job has ended."""

    def finished(self, command: str) -> None:
        self.begun.append(command)


async def test_once_closed_it_begins_nothing() -> None:
    """A commit may be told to a loop that is being stopped: a task of it would never run."""
    stage: Any = Stage()
    manager = JobManager(stage, stage, stage, clock=time, owner=stage)
    manager.run([Issued("c1", FinishJob("succeeded"))])
    await asyncio.sleep(0)
    assert stage.begun == ["release", "c1"]
    await manager.close()
    manager.run([Issued("c2", FinishJob("succeeded"))])
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert stage.begun == ["release", "c1"]
