"""A synchronous colocated loop that is run, without Gyre's control plane: on all GPUs, generate, then train, in turn.

On each GPU there is an engine with the best settings by hand and a rank of the trainer, data parallel; both stay in
memory, so that nothing has to be put to sleep or woken. A step is

    generate    every sample of the step, an even share of the groups on each engine, all in flight at once
    train       the job's own actor, the micro-batches of the job, dealt to the ranks
    publish     the weights into shared memory
    load        into each engine, by Gyre's loader, while nothing runs

each ended before the next begins. It has no ledger, no reward's processes, and survives nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from job_plane.actor_process import start_rank
from job_plane.case import Case, Row, best_by_hand
from job_plane.generation import GROUPS_TOGETHER, READY_WITHIN_S, Asking, engine_command
from job_plane.trainer_alone import own_step

PHASES = ("generate", "train", "publish", "load")
WARM = 2

ENGINE_SHARE = "0.45"
"""Of a GPU's memory, for the engine: the rest is the trainer's."""


async def colocated(case: Case, gpus: int, steps: int = 6) -> Row:
    from job_plane.gang import ActorGang

    folder = case.model()
    with tempfile.TemporaryDirectory(prefix="job_gpu_", dir="/dev/shm") as place:
        path = Path(place)
        ranks = list(range(gpus))
        gang = ActorGang(lambda rank: start_rank(case, folder, path, gpus=ranks, rank=rank), gpus)
        try:
            async with contextlib.AsyncExitStack() as stack:
                began = time.monotonic()
                ready = asyncio.create_task(asyncio.to_thread(gang.call, "setup", 300.0))
                loop = Loop(case, gang, path, await _engines(case, folder, gpus, stack))
                await ready
                found: Row = {"gpus": gpus, "ready_s": round(time.monotonic() - began, 1), "steps": loop.rows}
                await asyncio.to_thread(gang.call, "deterministic", 60.0, on=True)
                for _ in range(steps):
                    await loop.step()
        finally:
            gang.close()
    kept = loop.rows[WARM:]
    wall = sum(row["seconds"] for row in kept)
    found["settings"] = loop.settings
    found["tokens_s"] = sum(row["tokens"] for row in kept) / wall
    found["step_s"] = wall / len(kept)
    return found | {f"{name}_s": sum(row[f"{name}_s"] for row in kept) / len(kept) for name in PHASES}


async def _engines(case: Case, folder: Path, gpus: int, stack: contextlib.AsyncExitStack) -> list[Any]:
    from gyre.engines.process import EngineProcess
    from gyre.engines.weight_loading import EngineLoader

    settings = [*list(best_by_hand(case).values())[-1], "--mem-fraction-static", ENGINE_SHARE]
    engines = [
        EngineProcess(engine_command(case, folder, gpu, settings), ready_within_s=READY_WITHIN_S)
        for gpu in range(gpus)
    ]
    for engine in engines:
        stack.push_async_callback(engine.stop)
    await asyncio.gather(*(engine.start() for engine in engines))
    found = []
    for engine in engines:
        client = await stack.enter_async_context(engine.client())
        loader = EngineLoader(client, folder, key=engine.loader_key)
        await loader.arm()
        await client.freeze_gc()
        found.append((Asking(case, client), loader))
    return found


class Loop:
    def __init__(self, case: Case, gang: Any, place: Path, engines: list[Any]) -> None:
        self._case, self._gang, self._place, self._engines = case, gang, place, engines
        self._step = 0
        self.rows: list[Row] = []
        self.settings = {
            "engine's memory": ENGINE_SHARE,
            "loaders": [loader.why_not for _, loader in engines],
        }

    async def step(self) -> None:
        from job_plane.gang import dealt

        case, step, row = self._case, self._step + 1, {}
        began = at = time.monotonic()

        def lap(phase: str) -> None:
            nonlocal at
            row[f"{phase}_s"] = time.monotonic() - at
            at = time.monotonic()

        prompts = case.prompts()
        empty = [prompts.prompt(self._step * case.groups + one) for one in range(case.groups)]
        limits = {group.id: group.token_limit(case.new_tokens) for group in empty}
        shares = dealt(empty, len(self._engines), tokens=lambda group: limits[group.id])
        made = await asyncio.gather(
            *(
                asking.some([group.id for group in share[at : at + GROUPS_TOGETHER]], self._step)
                for (asking, _), share in zip(self._engines, shares, strict=True)
                for at in range(0, len(share), GROUPS_TOGETHER)
            )
        )
        lap("generate")
        groups = sorted((group for some in made for group in some), key=lambda group: group.id)
        told = await asyncio.to_thread(own_step, self._gang, case.micro_batches(groups), step)
        lap("train")
        publish = partial(
            self._gang.call,
            "publish",
            120.0,
            line="publish",
            version=step,
            folder=str(self._place),
        )
        published = await asyncio.to_thread(publish)
        lap("publish")
        await asyncio.gather(
            *(self._load(*engine, str(step), Path(published["path"])) for engine in self._engines)
        )
        lap("load")
        tokens = sum(group.token_count for group in groups)
        self.rows.append(row | told | {"step": step, "tokens": tokens, "seconds": time.monotonic() - began})
        self._step = step

    @staticmethod
    async def _load(asking: Asking, loader: Any, version: str, path: Path) -> None:
        await loader.load(version, path)
        asking.cache_key = loader.cache_key
