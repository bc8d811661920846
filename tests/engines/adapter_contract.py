"""What engines of others do with adapters, as Gyre's agents load and name them: beside each other, each request under
its own.

The tests of an engine derive from `AdapterContract`, beside a fixture `served` of its module.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from gyre.engines.dialect import GenerateRequest, SamplingParams
from gyre.engines.errors import EngineRefused
from gyre.engines.http_client import EngineClient
from gyre.engines.process import EngineCommand, EngineProcess
from tests.engines.embedded.drawn_adapters import adapted, write_adapter
from tests.engines.tiny_model import VOCAB, write_tiny_model

PROMPT = [5, 9, 23, 41, 8, 77, 3, 12]
NAMES = ("1", "2")
LONG = (200, 3000)
"""Tokens of the request that another comes beside: the second where a fast engine had drawn all of the first before."""


@dataclass(frozen=True)
class Served:
    client: EngineClient
    folders: dict[str, Path]
    models: dict[str, nn.Module]
    """By the adapter's name, what the trainer computes with."""

    async def said(self, name: str, rid: str, count: int = 12) -> tuple[list[int], list[float]]:
        sampling = SamplingParams(count, temperature=1.0, ignore_eos=True, sampling_seed=7)
        request = GenerateRequest(
            rid.rjust(20, "0"), torch.tensor(PROMPT).int().numpy(), sampling, adapter=name
        )
        tokens: list[int] = []
        logprobs: list[float] = []
        async for chunk in self.client.generate(request):
            tokens += chunk.token_ids.tolist()
            logprobs += chunk.logprobs.tolist()
        return tokens, logprobs

    def difference(self, name: str, tokens: list[int], logprobs: list[float]) -> float:
        """The largest one to what the trainer's model says of the tokens."""
        with torch.no_grad():
            logits = self.models[name](input_ids=torch.tensor([PROMPT + tokens])).logits[0].float()
        rows = logits.log_softmax(-1)[len(PROMPT) - 1 : -1]
        wanted = rows.gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return float((wanted - torch.tensor(logprobs)).abs().max())


@asynccontextmanager
async def serving(root: Path, start: Callable[[Path], EngineCommand]) -> AsyncIterator[Served]:
    """An engine that `start` gives the command of, over a model below `root`, and adapters beside it."""
    base = write_tiny_model(root / "model", seed=1)
    made = {name: adapted(base, int(name)) for name in NAMES}
    folders = {name: write_adapter(root / name, base, named) for name, (_, named) in made.items()}
    async with EngineProcess(start(base), ready_within_s=240, stop_within_s=1) as engine:
        client = engine.client()
        try:
            yield Served(client, folders, {name: causal for name, (causal, _) in made.items()})
        finally:
            await client.close()


@pytest.mark.asyncio(loop_scope="module")
class AdapterContract:
    """Derive from it beside a fixture `served` of the module's scope."""

    async def test_requests_beside_each_other_have_each_their_own(self, served: Served) -> None:
        with pytest.raises(EngineRefused):
            await served.said("1", "unknown")
        for name in NAMES:
            await served.client.load_adapter(name, served.folders[name])
        said = dict(
            zip(NAMES, await asyncio.gather(*(served.said(name, f"r{name}") for name in NAMES)), strict=True)
        )
        for name, other in (NAMES, NAMES[::-1]):
            tokens, logprobs = said[name]
            assert max(tokens) < VOCAB
            assert served.difference(name, tokens, logprobs) < 0.1
            assert served.difference(other, tokens, logprobs) > 0.2, "it serves another adapter"

    async def test_one_is_loaded_and_unloaded_while_others_generate(self, served: Served) -> None:
        for count in LONG:
            long = asyncio.create_task(served.said("1", f"long {count}", count))
            await served.client.load_adapter("3", served.folders["2"])
            tokens, logprobs = await served.said("3", f"third {count}")
            went_on = not long.done()
            assert served.difference("2", tokens, logprobs) < 0.1
            await served.client.unload_adapter("3")  # SGLang 0.5.23 would load it again for whoever names it
            tokens, logprobs = await long
            assert len(tokens) == count
            assert served.difference("1", tokens, logprobs) < 0.1
            if went_on:
                return
        raise AssertionError("it paused, or was over before")
