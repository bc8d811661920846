"""An engine that is asked directly, as the baseline of what goes through the plane."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from contextlib import aclosing

from gpu_plane.engine_command import API_KEY
from gpu_plane.follow import PartFailed, Row, now
from gpu_plane.scale import Ask


async def drive(url: str, asks: Sequence[Ask], n: int, in_flight: int, within_s: float) -> Row:
    """`n` samples of each, so many at once, by Gyre's engine client."""
    from gyre.engines.dialect import GenerateRequest, SamplingParams
    from gyre.engines.http_client import EngineClient

    work = iter([(number, one) for number, one in enumerate(one for one in asks for _ in range(n))])
    base = time.time_ns() % 10**12
    first_s: list[float] = []
    totals = {"tokens": 0, "chunks": 0, "samples": 0}

    async def worker(client: EngineClient) -> None:
        for number, one in work:
            sampling = SamplingParams(max_new_tokens=one.length, ignore_eos=True, sampling_seed=number)
            request = GenerateRequest(f"{base:013d}{number:07d}", one.prompt, sampling)
            asked, made = now(), 0
            async with aclosing(client.generate(request)) as chunks:
                async for chunk in chunks:
                    if not made:
                        first_s.append(now() - asked)
                    made += len(chunk.token_ids)
                    totals["chunks"] += 1
            if made != one.length:
                raise PartFailed(f"the engine gave {made} of {one.length} tokens")
            totals["tokens"] += made
            totals["samples"] += 1

    async with asyncio.timeout(within_s), EngineClient(url, api_key=API_KEY) as client:
        began = now()
        async with asyncio.TaskGroup() as group:
            for _ in range(in_flight):
                group.create_task(worker(client))
        seconds = now() - began
    return {
        **totals,
        "in_flight": in_flight,
        "seconds": round(seconds, 3),
        "tokens_s": round(totals["tokens"] / seconds, 1),
        "first_token_p50_s": round(statistics.median(first_s), 4),
    }
