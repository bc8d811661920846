"""A synchronous colocated loop: all GPUs generate, then all train. The baseline of the loop that overlaps the two.

Nothing of Gyre's rollout plane is in it: its engines are asked directly by this process, each for an even share of a
step's samples, all of them in flight at once and a group's on one engine. A step is

    wake        the engines take their KV memory again
    load        the weights of the step before, from shared memory, by Gyre's loader: nothing runs meanwhile
    generate    every sample of the step
    sleep       the engines give their KV memory back; their weights and graphs stay, so that waking is short
    train       data parallel over all GPUs, micro-batches as in the loop
    publish     the weights into shared memory

each ended before the next begins, as in veRL's hybrid engine with its sleep level 1. What it does not do is left out of
its time, too: no ledger, no log-probs' bookkeeping, no failure that it could survive.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from gpu_plane.engine_command import API_KEY
from training_loop.actors.actor import Row, now
from training_loop.actors.gang import dealt
from training_loop.trainer import Shape, inputs, reward_of

PHASES = ("wake", "load", "generate", "sleep", "train", "publish")


class ColocatedFailed(Exception):
    """It cannot go on."""


@dataclass
class Engine:
    """One that runs. `serves` is the folder of the weights that it has, `key` its loader's, "" without one."""

    url: str
    serves: Path
    key: str
    client: Any = None
    loader: Any = None
    asleep: bool = False
    releases: bool = True
    """Whether it can give memory back."""
    why_not: str = ""


@dataclass
class ColocatedLoop:
    """`train(groups, step, until)` trains on the micro-batches of a step and says how long it took, `publish(step)`
    writes the weights after it and returns their folder. Both block."""

    shape: Shape
    engines: list[Engine]
    train: Callable[[list[list[Any]], int, float], Row]
    publish: Callable[[int], Path]
    step: int = 0
    rows: list[Row] = field(default_factory=list)
    _next: int = 500_000_000
    """Groups of its own; their lengths are those of the loop's, in the same turn."""

    def run(self, steps: int, until: float) -> list[Row]:
        """Raises ColocatedFailed, or what the engines or the actor raised; the steps that were done are in `rows`."""
        asyncio.run(self._run(steps, until))
        return self.rows

    async def _run(self, steps: int, until: float) -> None:
        from gyre.engines.http_client import EngineClient
        from gyre.engines.weight_loading import EngineLoader

        async with contextlib.AsyncExitStack() as stack:
            for engine in self.engines:
                engine.client = await stack.enter_async_context(EngineClient(engine.url, api_key=API_KEY))
                engine.loader = EngineLoader(engine.client, engine.serves, key=engine.key)
                async with asyncio.timeout(max(1.0, until - now())):
                    if not await engine.loader.arm():
                        engine.why_not = engine.loader.why_not
            folder: Path | None = None
            for _ in range(steps):
                async with asyncio.timeout(max(1.0, until - now())):
                    folder = await self._step(folder, until)

    async def _step(self, folder: Path | None, until: float) -> Path:
        step, times = self.step + 1, dict.fromkeys(PHASES, 0.0)
        began = now()

        @contextlib.contextmanager
        def timed(phase: str) -> Any:
            at = now()
            try:
                yield
            finally:
                times[phase] = now() - at

        with timed("wake"):
            await self._each(self._wake)
        if folder is not None:
            with timed("load"):
                reports = await self._each(lambda engine: engine.loader.load(str(self.step), folder))
        ids = list(range(self._next, self._next + self.shape.groups))
        self._next += self.shape.groups
        with timed("generate"):
            groups = await self._generate(ids)
        with timed("sleep"):
            await self._each(self._sleep)
        micro = [groups[at : at + self.shape.micro] for at in range(0, len(groups), self.shape.micro)]
        with timed("train"):
            told = await asyncio.to_thread(self.train, micro, step, until)
        with timed("publish"):
            published = await asyncio.to_thread(self.publish, step)
        self.step = step
        self.rows.append(
            {
                "step": step,
                "began_at": began,
                "seconds": now() - began,
                **{f"{phase}_s": round(times[phase], 4) for phase in PHASES},
                "loads": [report.row() for report in reports] if folder is not None else [],
                "actor_s": told["seconds"],
                "loss": told.get("loss"),
                "grad_norm": told.get("grad_norm"),
                "input_tokens": inputs(groups),
                "response_tokens": sum(group.token_count for group in groups),
            }
        )
        return published

    async def _each(self, work: Callable[[Engine], Any]) -> list[Any]:
        return await asyncio.gather(*(work(engine) for engine in self.engines))

    async def _wake(self, engine: Engine) -> None:
        if engine.asleep:
            await engine.client.resume_memory()
            engine.asleep = False

    async def _sleep(self, engine: Engine) -> None:
        from gyre.rollouts.agent.engine_sleep import fall_asleep

        if not engine.releases:
            return
        said = await fall_asleep(engine.client)
        engine.asleep = not said.error
        if said.error:  # it keeps its memory, and that is recorded
            engine.releases, engine.why_not = False, said.error[:500]

    async def _generate(self, ids: Sequence[int]) -> list[Any]:
        """Every group of `ids`, whole. Raises ColocatedFailed where a sample came back short."""
        from gyre.rollouts.samples import Group

        empty = [Group(one, self.shape.prompt_of(one)) for one in ids]
        weights = {group.id: self.shape.prompt + self.shape.length(group.id) for group in empty}
        shares = dealt(empty, len(self.engines), tokens=lambda group: weights[group.id])
        made = await asyncio.gather(
            *(
                self._group(engine, group)
                for engine, share in zip(self.engines, shares, strict=True)
                for group in share
            )
        )
        return sorted(made, key=lambda group: group.id)

    async def _group(self, engine: Engine, group: Any) -> Any:
        from gyre.engines.dialect import GenerateRequest, SamplingParams
        from gyre.rollouts.samples import Sample, VersionRun

        length = self.shape.length(group.id)
        base = time.time_ns() % 10**12
        requests = [
            GenerateRequest(
                f"{base:013d}{group.id:09d}{one:02d}",
                group.prompt_ids,
                SamplingParams(max_new_tokens=length, ignore_eos=True, sampling_seed=one),
                engine.loader.cache_key,
            )
            for one in range(self.shape.n)
        ]
        tokens: list[list[Any]] = [[] for _ in requests]
        logprobs: list[list[Any]] = [[] for _ in requests]
        async with contextlib.aclosing(engine.client.generate_many(requests)) as chunks:
            async for at, chunk in chunks:
                tokens[at].append(chunk.token_ids)
                logprobs[at].append(chunk.logprobs)
        for one in range(self.shape.n):
            ids = np.concatenate(tokens[one])
            if len(ids) != length:
                raise ColocatedFailed(f"a sample of group {group.id} has {len(ids)} of {length} tokens")
            group.samples.append(
                Sample(
                    ids,
                    np.concatenate(logprobs[one]),
                    (VersionRun(self.step, 0, length),),
                    "length",
                    reward_of(ids),
                )
            )
        return group


def phases(rows: Sequence[Row], since: int = 2) -> Row:
    """Means over the steps from `since` on, and tokens/s of the whole loop."""
    kept = list(rows)[since:]
    if not kept:
        return {}
    tokens = sum(row["input_tokens"] for row in kept)
    wall = kept[-1]["began_at"] + kept[-1]["seconds"] - kept[0]["began_at"]
    return {
        "steps": len(kept),
        "step_s": round(wall / len(kept), 4),
        "median_step_s": round(statistics.median(row["seconds"] for row in kept), 4),
        **{f"{phase}_s": round(sum(row[f"{phase}_s"] for row in kept) / len(kept), 4) for phase in PHASES},
        "input_tokens_a_step": tokens // len(kept),
        "loop_tokens_s": round(tokens / wall, 1),
        "response_tokens_s": round(sum(row["response_tokens"] for row in kept) / wall, 1),
        "train_tokens_s": round(tokens / sum(row["actor_s"] for row in kept), 1),
    }
