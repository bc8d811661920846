"""Workloads of the kill tests: the real ones, slowed down so that there is something to interrupt."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gyre.agents.calculator import Calculator
from gyre.agents.environments import Messages
from gyre.agents.reward import SessionReward
from gyre.rollouts import Group
from gyre.workloads import operator
from gyre.workloads.rewards import ExactMatchReward
from gyre.workloads.torch import TorchActor
from tests.kill.gate import LOOK_S, wait_at_gate


class PacedReward(ExactMatchReward):
    """Scores as ever, takes at least `config["pace_s"]` for it, and waits at the gate: whatever dies, the job is still
    there when it is back, and does not end before the test is done with it."""

    @operator
    def score(self, groups: list[Group], *, step: int) -> list[Group]:  # type: ignore[override]
        time.sleep(self.config["pace_s"])
        wait_at_gate(self, step)
        return super().score(groups)


class PacedSessions(SessionReward):
    """Keeps the rewards of sessions, at the same pace."""

    @operator
    def score(self, groups: list[Group], *, step: int) -> list[Group]:  # type: ignore[override]
        time.sleep(self.config["pace_s"])
        wait_at_gate(self, step)
        return super().score(groups)


class HeldCalculator(Calculator):
    """Answers no second call of a session while the folder has a file `held`, and says that it waits by a file `waits`.
    It has snapshots, without which it knows no answer: after `restore` nobody resets it."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self._folder = Path(folder)
        self._calls = 0

    async def step(self, message: Mapping[str, Any]) -> tuple[Messages, float, bool]:
        self._calls += 1
        while self._calls > 1 and (self._folder / "held").exists():
            (self._folder / "waits").touch()
            await asyncio.sleep(LOOK_S)
        return await super().step(message)

    def snapshot(self) -> bytes:
        return f"{self._calls} {self._answer}".encode()

    def restore(self, data: bytes) -> None:
        calls, self._answer = data.decode().split()
        self._calls = int(calls)


class HungryActor(TorchActor):
    """From step 2 on a micro-batch fits into its memory once it is computed in two passes."""

    @operator
    def accumulate(self, groups: list[Group], *, step: int, index: int) -> dict[str, Any]:
        if step >= 2 and self.passes < 2:
            raise MemoryError("a pass does not fit")
        return super().accumulate(groups, step=step, index=index)


class TokenSum(PacedReward):
    """Differs between samples of a model that has learned nothing, so that it is trained."""

    @operator
    def score(self, groups: list[Group], *, step: int) -> list[Group]:  # type: ignore[override]
        groups = super().score(groups, step=step)
        for group in groups:
            for sample in group.samples:
                sample.reward = float(sample.token_ids.sum() % 5) / 4
        return groups


class SwitchedReward(ExactMatchReward):
    """Takes long while the file `slow` is in the job's directory: then nobody waits for the rollouts.

    Long by the machine's speed: several times as long as it waited for its groups itself. Where everything takes long,
    rollouts that one waits for a tenth of a step are not idle.
    """

    AT_LEAST_S = 1.5
    AT_MOST_S = 10.0

    def setup(self) -> None:
        super().setup()
        self._done_at = time.monotonic()

    @operator
    def score(self, groups: list[Group]) -> list[Group]:
        if (self.context.directory / "slow").exists():
            waited_s = time.monotonic() - self._done_at
            time.sleep(min(max(self.AT_LEAST_S, 4.0 * waited_s), self.AT_MOST_S))
        scored = super().score(groups)
        self._done_at = time.monotonic()
        return scored


class PrintingReward(PacedReward):
    """Prints of every group, as users' rewards do."""

    @operator
    def score(self, groups: list[Group], *, step: int) -> list[Group]:  # type: ignore[override]
        for group in groups:
            print(f"step {step}: {group!r}"[:2000], flush=True)
        return super().score(groups, step=step)
