"""A user's classes, in a module that every process can import: plain ones and ones that inherit."""

from __future__ import annotations

import asyncio
import mmap
import os
import time
from pathlib import Path
from typing import Any

from gyre.agents import Session
from gyre.agents.calculator import Calculator
from gyre.agents.reward import SessionReward
from gyre.engines.process import EngineCommand
from gyre.rollouts import Group
from gyre.rollouts.session_extras import first_rows
from gyre.workloads import BaseTrainer, BaseWorkload, operator
from tests.kill.gate import wait_at_gate


class MyActor(BaseWorkload):
    def setup(self) -> None:
        print(f"actor {self.rank} of {self.world_size} is up")

    def where(self, word: str) -> dict[str, Any]:
        return {
            "rank": self.rank,
            "world_size": self.world_size,
            "local_rank": self.local_rank,
            "e0": os.environ["e0"],  # noqa: SIM112 - as a user wrote it
            "e1": os.environ["e1"],  # noqa: SIM112
            "c1": self.config["c1"],
            "word": word,
        }


class MyRollout:
    """Inherits nothing."""

    rank: int

    def generate(self, n: int) -> list[int]:
        print(f"generates {n}")
        return [self.rank] * n

    def bound(self) -> tuple[Any, ...]:
        return (self.rank, self.world_size, self.local_rank, self.config, "e1" in os.environ)  # type: ignore[attr-defined]


class Hungry(MyRollout):
    """Takes memory from the kernel with each call, and gives it back."""

    def generate(self, n: int) -> list[int]:
        with mmap.mmap(-1, 1 << 20) as taken:
            taken.write(bytes(1 << 20))
        return [self.rank] * n


class MyReference(BaseWorkload):
    def score(self, items: list[int], factor: int) -> list[int]:
        return [item * factor + self.rank for item in items]


class MyTrainer(BaseTrainer):
    def fit(self) -> dict[str, Any]:
        async def together() -> list[Any]:
            calls = self.rollout.generate.submit(1), self.actor.where.submit("there")
            return [await call for call in calls]

        return {
            "all": self.rollout.generate(5),
            "one": self.rollout[1].generate(2),
            "plain": self.rollout.bound(),
            "where": self.actor.where("here"),
            "scattered": self.reference.score.scatter([1, 2, 3, 4, 5], 10),
            "awaited": asyncio.run(together()),
            "streamed": sorted(self.rollout.generate.stream([1, 2, 3])),
            "config": self.config,
        }


class Endless(BaseTrainer):
    """Goes on until it is told to stop."""

    def fit(self) -> dict[str, Any]:
        rounds = 0
        while not self.runtime.should_stop:
            sizes = len(self.rollout.generate(1))
            rounds += 1
            self.report_progress(step=rounds, vertices=sizes)
        return {"rounds": rounds}


class Deaf(BaseTrainer):
    """Goes on for an hour, whatever is asked."""

    def fit(self) -> dict[str, Any]:
        for step in range(1, 3600):
            self.report_progress(step=step)
            time.sleep(1.0)
        return {}


class Careless(BaseTrainer):
    """Fails, or has others fail, where `config["fail"]` says."""

    def fit(self) -> Any:
        if self.config["fail"] == "fit":
            raise ValueError("the learning rate is nonsense")
        return self.rollout.generate(1)


class CarelessRollout(BaseWorkload):
    def setup(self) -> None:
        if self.config["fail"] == "setup":
            raise RuntimeError("there is no model here")

    def generate(self, n: int) -> int:
        if self.config["fail"] == "rollout":
            return self._look_up(n)
        if self.config["fail"] == "spin" and not (self.context.directory / "spun").exists():
            (self.context.directory / "spun").touch()
            while True:
                pass
        return n

    def _look_up(self, n: int) -> int:
        prices: dict[str, int] = {}
        return prices["missing"] * n


class TokenSum(BaseWorkload):
    """A reward that differs between samples of an untrained model; a gate holds the job while somebody is killed."""

    def score(self, groups: list[Any], *, step: int) -> list[Any]:
        wait_at_gate(self, step)
        for group in groups:
            for sample in group.samples:
                sample.reward = float(sample.token_ids.sum() % 5) / 4
        return groups


def engine_that_cannot_start(folder: Path, *, python: str, **others: Any) -> EngineCommand:
    """An engine without the package that it needs."""
    return EngineCommand((python, "-c", "print('loading')\nimport no_such_engine"))


async def branching(session: Session) -> float:
    """Asks twice for what follows the same tool's call, so that two rows of a session have its tokens in common.
    Rewards differ in any group."""
    calculator = Calculator()
    messages = [{"role": "user", "content": await calculator.reset(session.task, session.seed)}]
    reply = await session.chat(messages, tools=Calculator.tools)
    said = reply.content
    for told in ("0000", "1111") if reply.tool_calls else ():
        results = [{"role": "tool", "tool_call_id": one["id"], "content": told} for one in reply.tool_calls]
        said += (await session.chat([*messages, reply.message, *results], tools=Calculator.tools)).content
    return len(said) % 3 / 2


class CountedRows(SessionReward):
    """Notes how many rows come beyond one of each session, in the file `branches` of the job's directory."""

    @operator
    def score(self, groups: list[Group], *, step: int) -> list[Group]:
        branches = sum(len(group.samples) - len(first_rows(group)) for group in groups)
        with (self.context.directory / "branches").open("a") as file:
            file.write(f"{step} {branches}\n")
        return super().score(groups)
