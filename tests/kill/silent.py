"""User code after which a process is silent: calls into C that keep the interpreter's lock, so that no other thread of
it runs. Some end, one never does."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path
from typing import Any

from gyre.observe.sinks.sink import SinkJob
from gyre.rollouts import Group
from gyre.workloads import operator
from gyre.workloads.torch import TorchActor
from tests.kill.workloads import PacedReward
from tests.observe.own_sinks import Told

HELD_S = 40
"""Several times as long as a vertex may be silent, and more than Ray's and the gang's own heartbeats wait."""

LOADED_BYTES = 3 << 30

C = ctypes.PyDLL(None)
"""Unlike CDLL it keeps the interpreter's lock in calls."""


def hold() -> None:
    C.sleep(HELD_S)


def first_time(place: Path, what: str) -> bool:
    try:
        (place / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


class LockedActor(TorchActor):
    """Rank 0 keeps the lock in its setup, rank 1 in a call."""

    def setup(self) -> None:
        super().setup()
        if self.context.rank == 0:
            hold()

    @operator
    def accumulate(self, groups: list[Group], *, step: int, index: int) -> dict[str, Any]:
        if self.context.rank == 1 and step == 2 and first_time(self.context.directory, "actor-held"):
            hold()
        return super().accumulate(groups, step=step, index=index)


class LockedReward(PacedReward):
    """Rank 1 keeps the lock in its first call, and rank 0 while it loads gigabytes, which it does when there is a file
    `load` in the job's directory."""

    @operator
    def score(self, groups: list[Group], *, step: int) -> list[Group]:  # type: ignore[override]
        place, rank = self.context.directory, self.context.rank
        if rank == 1 and first_time(place, "reward-held"):
            hold()
        if rank == 0 and (place / "load").exists() and first_time(place, "loaded"):
            with mmap.mmap(-1, LOADED_BYTES) as memory:
                C.memset(ctypes.byref(ctypes.c_char.from_buffer(memory)), 1, ctypes.c_size_t(LOADED_BYTES))
        return super().score(groups, step=step)


class LockedSink(Told):
    """Keeps the lock when it is told of step 1."""

    def __init__(self, job: SinkJob) -> None:
        super().__init__(job)
        self._place = Path(job.to).parent

    def step(self, step: int, at: float, numbers: dict[str, float]) -> None:
        if step == 1 and first_time(self._place, "sink-held"):
            hold()
        super().step(step, at, numbers)


class StuckReward(PacedReward):
    """Waits in its first call for a mutex that it has itself, and keeps the interpreter's lock."""

    @operator
    def score(self, groups: list[Group], *, step: int) -> list[Group]:  # type: ignore[override]
        if step == 3 and first_time(self.context.directory, "stuck"):
            mutex = ctypes.create_string_buffer(64)  # all zero is PTHREAD_MUTEX_INITIALIZER
            for _ in range(2):
                C.pthread_mutex_lock(mutex)
        return super().score(groups, step=step)
