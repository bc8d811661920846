"""Engines without Gyre's plane: a step's samples, asked of an engine by its client."""

from __future__ import annotations

import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
from job_plane.case import TRITON, Case, Row, best_by_hand, reward_of

from gyre.engines.dialect import GenerateRequest, SamplingParams
from gyre.engines.process import EngineCommand, EngineProcess
from gyre.rollouts.samples import Group, Sample, VersionRun

READY_WITHIN_S = 400.0
"""A first start on a fresh machine compiles kernels for two to three minutes."""


CHUNK_TOKENS = 32
GROUPS_TOGETHER = 2
"""Of a request, whose samples come in chunks of `CHUNK_TOKENS`: SGLang's HTTP process is the bottleneck with smaller
chunks, and with requests of fewer samples."""


def engine_command(
    case: Case, folder: Path, gpu: int, settings: Sequence[str], python: str = ""
) -> EngineCommand:
    from gyre.engines.sglang.command import sglang_command
    from gyre.rollouts.agent.join import EngineCommands

    if case.dry:
        return EngineCommands("embedded", max_running=64, kv_tokens=1 << 16).command(folder, "0")
    environment = {"CUDA_VISIBLE_DEVICES": str(gpu), "HF_HUB_OFFLINE": "1"}
    return sglang_command(
        folder,
        python=python or sys.executable,
        weight_version="0",
        extra=[*TRITON, *settings],
        env=environment,
    )


class Asking:
    """Groups asked of one engine, and when each of its tokens came."""

    def __init__(self, case: Case, client: Any) -> None:
        self._case, self._client = case, client
        self._prompts = case.prompts()
        self._asked = 0
        self.cache_key = ""
        self.came: list[tuple[float, int]] = []
        """(time, tokens) of each chunk."""

    async def group(self, index: int, version: int = 0) -> Group:
        """Prompt `index` with its samples."""
        return (await self.some([index], version))[0]

    async def some(self, indexes: Sequence[int], version: int = 0) -> list[Group]:
        """These prompts with their samples, by one request."""
        case, groups = self._case, [self._prompts.prompt(index) for index in indexes]
        requests = []
        for group in groups:
            self._asked += 1
            sampling = SamplingParams(
                temperature=1.0,
                max_new_tokens=group.token_limit(case.new_tokens),
                stop_token_ids=self._prompts.stop_token_ids,
            )
            requests += [
                GenerateRequest(
                    f"{self._asked:012d}{one:08d}",
                    group.prompt_ids,
                    sampling,
                    self.cache_key,
                    0 if case.dry else CHUNK_TOKENS,
                )
                for one in range(case.samples)
            ]
        ids: list[list[Any]] = [[] for _ in requests]
        logprobs: list[list[Any]] = [[] for _ in requests]
        async with aclosing(self._client.generate_many(requests)) as chunks:
            async for at, chunk in chunks:
                self.came.append((time.monotonic(), len(chunk.token_ids)))
                ids[at].append(chunk.token_ids)
                logprobs[at].append(chunk.logprobs)
        for one in range(len(requests)):
            tokens = np.concatenate(ids[one])
            runs = (VersionRun(version, 0, len(tokens)),)
            groups[one // case.samples].samples.append(
                Sample(tokens, np.concatenate(logprobs[one]), runs, "stop", reward_of(tokens))
            )
        return groups

    async def round(self, first: int, groups: int) -> float:
        """Tokens/s of so many groups, all asked at once, until the last has ended."""
        began = time.monotonic()
        together = [range(at, min(at + GROUPS_TOGETHER, groups)) for at in range(0, groups, GROUPS_TOGETHER)]
        made = await asyncio.gather(*(self.some([first + at for at in some]) for some in together))
        tokens = sum(group.token_count for groups_made in made for group in groups_made)
        return tokens / (time.monotonic() - began)

    async def flow(self, first: int, steps: int) -> float:
        """Tokens/s where as many groups as two steps have are always asked for, as by a job that is one step stale:
        from the first step's worth of groups that ended to the last group that was asked."""
        groups, self.came = self._case.groups, []
        room = asyncio.Semaphore(2 * groups)
        ended: list[float] = []
        last_asked = 0.0

        async def one(at: int) -> None:
            try:
                await self.group(first + at)
            finally:
                ended.append(time.monotonic())
                room.release()

        tasks = []
        for at in range(groups * steps):
            await room.acquire()
            last_asked = time.monotonic()
            tasks.append(asyncio.create_task(one(at)))
        await asyncio.gather(*tasks)
        since = sorted(ended)[groups - 1]
        tokens = sum(count for at, count in self.came if since < at <= last_asked)
        return tokens / (last_asked - since)


async def engine_alone(case: Case, gpu: int = 0, python: str = "") -> Row:
    """By each setting of `best_by_hand`: rounds of a step's samples, and a flow of steps. `tokens_s` is the best flow
    or round of all. `python` is the one that SGLang is installed in, "" for this one."""
    folder = case.model()
    rounds, steps = (1, 4) if case.lengths == "lognormal" else (2, 6)  # its rounds end with one long sample
    found: Row = {"settings": {}}
    for name, settings in best_by_hand(case).items():
        began = time.monotonic()
        command = engine_command(case, folder, gpu, settings, python)
        async with EngineProcess(command, ready_within_s=READY_WITHIN_S) as engine:
            row: Row = {"ready_s": round(time.monotonic() - began, 1), "command": " ".join(settings)}
            client = engine.client()
            try:
                await client.freeze_gc()
                asking = Asking(case, client)
                await asking.round(0, case.groups)  # kernels are compiled, graphs touched
                row["rounds_tokens_s"] = [
                    await asking.round(10_000 * (1 + at), case.groups) for at in range(rounds)
                ]
                row["flow_tokens_s"] = await asking.flow(30_000, steps)
            finally:
                await client.close()
        row["tokens_s"] = max(row["flow_tokens_s"], statistics.median(row["rounds_tokens_s"]))
        found["settings"][name] = row
    best = max(found["settings"], key=lambda name: float(found["settings"][name]["tokens_s"]))
    return found | {"best": best, "tokens_s": found["settings"][best]["tokens_s"]}
