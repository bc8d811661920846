"""The part that asks whether an engine's deterministic inference keeps a sample's tokens, and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import numpy as np
from gpu_plane.bench import Bench
from gpu_plane.drive import drive
from gpu_plane.engine_command import API_KEY, engine_command
from gpu_plane.follow import Row, now
from gpu_plane.scale import Ask, workload


class Seeded(Bench):
    """Part `seeded`."""

    def seeded(self, out: Row, until: float) -> None:
        asyncio.run(self._seeded(out, until))

    async def _seeded(self, out: Row, until: float) -> None:
        from gyre.engines.dialect import GenerateRequest, SamplingParams
        from gyre.engines.http_client import EngineClient
        from gyre.engines.process import EngineProcess

        scale = self.scale
        options = {
            "engine": scale.engine,
            "running": scale.running,
            "kv_tokens": scale.kv_tokens,
            "memory": 0.6,
            "gpu": 0,
        }
        command = engine_command(options, self.models[0], "0", deterministic=True)
        began = now()
        engine = EngineProcess(command, ready_within_s=max(5.0, until - now() - 15.0))
        try:
            url = await engine.start()
            out["start_s"] = round(now() - began, 2)
            asks = workload(scale, 500, 4)

            async def sample(
                client: EngineClient, one: Ask, seed: int, prior: Sequence[int], number: int
            ) -> list[int]:
                ids = np.concatenate([one.prompt, np.array(prior, np.int32)])
                sampling = SamplingParams(one.length - len(prior), ignore_eos=True, sampling_seed=seed)
                found: list[int] = []
                async with aclosing(
                    client.generate(GenerateRequest(f"{number:020d}", ids, sampling))
                ) as chunks:
                    async for chunk in chunks:
                        found += chunk.token_ids.tolist()
                return [*prior, *found]

            async with asyncio.timeout(max(1.0, until - now())), EngineClient(url, api_key=API_KEY) as client:
                alone = [await sample(client, one, 7, (), number) for number, one in enumerate(asks)]
                crowd = [(one, 7 + copy) for one in asks for copy in range(scale.running // len(asks))]
                many = await asyncio.gather(
                    *(sample(client, one, seed, (), 100 + at) for at, (one, seed) in enumerate(crowd))
                )
                same = many[:: scale.running // len(asks)]
                cut = scale.new // 3
                on = await asyncio.gather(
                    *(sample(client, one, 7, alone[at][:cut], 9000 + at) for at, one in enumerate(asks))
                )
            out["alike_alone_and_in_a_full_batch"] = [_alike(*two) for two in zip(alone, same, strict=True)]
            out["alike_whole_and_continued"] = [_alike(*two) for two in zip(alone, on, strict=True)]
            out["different_seeds_differ"] = many[0] != many[1]
            within = max(1.0, until - now())
            out["throughput"] = await drive(
                url, workload(scale, 501, scale.groups), scale.n, scale.running, within
            )
        except BaseException:
            out["engine_tail"] = engine.tail[-6000:]
            raise
        finally:
            await engine.stop()


def _alike(first: list[int], second: list[int]) -> int:
    """How many tokens agree from the start; the length where all do."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(second)))
