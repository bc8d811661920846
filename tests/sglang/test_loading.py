"""Weights come into the real SGLang by Gyre's loader, on two tensor-parallel ranks, while it generates.

The engine's own checksums of its memory are the judge: they are those of the same folder read by SGLang itself. At the
end the engine is killed, by what `gyre.engines.limits` keeps from it.
"""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from gyre.engines.dialect import FinishKind, GenerateRequest
from gyre.engines.errors import EngineError, RequestUnsafe
from gyre.engines.http_client import EngineClient
from gyre.engines.process import EngineProcess
from gyre.engines.weight_loading import EngineLoader, LoadReport
from gyre.testing.contracts.engine_calls import PAUSES, Heard
from gyre.weights.version.manifest import WeightMismatch
from gyre.weights.version.model_folder import list_model_folder
from tests.engines.conformance import LONG, listen, listening, prompt, request
from tests.engines.tiny_model import VOCAB, write_tiny_model
from tests.rollouts.plane import until
from tests.sglang_cpu import sglang_on_cpu

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Bench:
    process: EngineProcess
    client: EngineClient
    loader: EngineLoader
    first: Path
    second: Path

    async def load_under(
        self, asked: Sequence[GenerateRequest], *, keep: bool = True
    ) -> tuple[list[Heard], dict[str, int], LoadReport]:
        """Load the second version over the first while these run. Returns what was heard of each, how many tokens of
        each the first version made, and what the loader says. Tried again where one had ended before the pause: on a
        busy machine whoever loads may be held up for as long as that takes."""
        for _ in range(PAUSES):
            await self.loader.load("1", self.first)
            counts: list[Any] = []
            # Each id once: SGLang aborts whatever has an id of which a stream ended two seconds before.
            again = [replace(each, rid=uuid.uuid4().hex) for each in asked]
            async with listening(self.client, again) as running:
                report = await self.loader.load("2", self.second, keep=keep, changed=counts.append)
                heard = await running.end()
            if all({span.version for span in one.spans} == {"1", "2"} for one in heard):
                return heard, counts[0], report
        raise AssertionError(f"one had ended before the pause, {PAUSES} times")

    async def held(self) -> list[dict[str, str]]:
        """SGLang's checksum of each tensor in its memory, by rank."""
        return [rank["checksums"] for rank in await self.client.weights_checksum()]

    async def read_from_disk(self, folder: Path) -> list[dict[str, str]]:
        await self.client.update_weights_from_disk(folder, "disk", flush_cache=True)
        return await self.held()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory, sglang_python: str) -> AsyncIterator[Bench]:
    folder = tmp_path_factory.mktemp("loading")
    for name, seed in (("first", 1), ("second", 2)):
        list_model_folder(write_tiny_model(folder / name, seed=seed), version=seed)
    command = sglang_on_cpu(
        folder / "first",
        python=sglang_python,
        weight_version="1",
        extra=("--tp-size", "2", "--log-level", "debug"),
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|1"},
    )
    async with (
        EngineProcess(command, ready_within_s=280, stop_within_s=1) as process,
        process.client() as client,
    ):
        loader = EngineLoader(client, folder / "first", key=process.loader_key)
        assert await loader.arm(), loader.why_not
        yield Bench(process, client, loader, folder / "first", folder / "second")


async def test_every_rank_holds_what_sglang_reads_from_the_same_folder(bench: Bench) -> None:
    began = await bench.held()
    report = await bench.loader.load("2", bench.second)
    assert (report.how, report.why_disk) == ("loader", "")
    loaded = await bench.held()
    assert (await bench.client.info()).weight_version == "2"
    assert len(loaded) == 2
    assert loaded == await bench.read_from_disk(bench.second)
    assert loaded[0] != loaded[1], "each rank has its part"
    assert loaded != began
    assert (await bench.loader.load("1", bench.first)).how == "loader"
    assert await bench.held() == began


async def test_its_processes_spare_their_garbage_collectors_when_they_are_asked_to(bench: Bench) -> None:
    assert await bench.client.freeze_gc()
    for name in ("Tokenizer Manager", "Scheduler"):  # told at its level of debugging
        await until(lambda name=name: f"Freezing GC in {name} process" in bench.process.tail)


async def test_it_generates_until_the_pause_and_goes_on_after_it(bench: Bench) -> None:
    await bench.loader.load("1", bench.first)
    before = await listen(bench.client, request(prompt(71), LONG, temperature=0.0))
    asked = replace(request(prompt(71), LONG, temperature=0.0), cache_key=bench.loader.cache_key)
    [heard], _, report = await bench.load_under([asked])
    assert report.how == "loader"
    assert len(heard.tokens) == LONG
    old, new = heard.spans
    assert (old.version, new.version, new.end) == ("1", "2", LONG)
    assert 0 < old.end == new.start < LONG
    assert heard.tokens[: old.end] == before.tokens[: old.end]
    assert heard.tokens[old.end :] != before.tokens[old.end :]


async def test_it_counts_to_the_token_what_older_weights_made(bench: Bench) -> None:
    """The engine's own spans, and the labels of its chunks, may be a token or a message early."""
    await bench.loader.load("1", bench.first)
    asked = [request(prompt(80 + number), LONG, temperature=0.0) for number in range(3)]
    before = [await listen(bench.client, each) for each in asked]
    heard, made, _ = await bench.load_under(asked)
    for one, alone in zip(heard, before, strict=True):
        count = made[one.rid]
        assert 0 < count < LONG
        assert one.tokens[:count] == alone.tokens[:count]
        assert one.logprobs[:count] == pytest.approx(alone.logprobs[:count], abs=1e-3)
        assert abs(one.logprobs[count] - alone.logprobs[count]) > 1e-2, "that one is of the new weights"


async def test_a_prompt_that_was_cached_by_older_weights_is_computed_anew(bench: Bench) -> None:
    """SGLang has it cached and keeps it over the load; what a request carries keeps them apart."""

    async def asks(key: str) -> tuple[list[int], list[float]]:
        heard = await listen(
            bench.client, replace(request(prompt(72, 200), 24, temperature=0.0), cache_key=key)
        )
        return heard.tokens, heard.logprobs

    await bench.loader.load("1", bench.first)
    await asks(bench.loader.cache_key)
    await bench.loader.load("2", bench.second)
    new = await asks(bench.loader.cache_key)
    await bench.client.flush_cache()
    tokens, logprobs = await asks(bench.loader.cache_key)
    assert new[0] == tokens
    assert new[1] == pytest.approx(logprobs, abs=1e-3)


async def test_what_is_put_back_is_computed_anew_with_nothing_cached(bench: Bench) -> None:
    await bench.loader.load("1", bench.first)
    asked = replace(request(prompt(73, 200), LONG, temperature=0.0), cache_key=bench.loader.cache_key)
    [heard], _, report = await bench.load_under([asked], keep=False)
    assert report.how == "loader"
    old, new = heard.spans
    assert (old.version, new.version) == ("1", "2")
    prefix = [*prompt(73, 200), *heard.tokens[: old.end]]
    fresh = await listen(bench.client, request(prefix, LONG - old.end, temperature=0.0))
    assert heard.tokens[new.start :] == fresh.tokens


async def test_a_load_that_is_rejected_leaves_the_version_of_before(bench: Bench, tmp_path: Path) -> None:
    await bench.loader.load("1", bench.first)
    held = await bench.held()
    broken = shutil.copytree(bench.second, tmp_path / "broken")
    content = bytearray((broken / "model.safetensors").read_bytes())
    content[-1] ^= 4
    (broken / "model.safetensors").write_bytes(content)
    async with listening(bench.client, [request(prompt(74), LONG)]) as running:
        with pytest.raises(WeightMismatch, match="holds other bytes"):
            await bench.loader.load("3", broken)
        (heard,) = await running.end()
    assert heard.finish.kind is FinishKind.LENGTH
    assert {span.version for span in heard.spans} == {"1"}
    assert await bench.held() == held


async def test_a_load_that_breaks_in_the_engine_is_made_whole_from_disk(bench: Bench) -> None:
    """The pause comes, and nothing was prepared: nothing leaves the loader that would end SGLang."""
    ask = bench.loader._ask

    async def forgetful(what: dict[str, Any], within_s: float) -> list[dict[str, Any]]:
        answers = await ask(what, within_s)
        if what["op"] == "prepare":
            await ask({"op": "forget"}, 10.0)
        return answers

    bench.loader._ask = forgetful  # type: ignore[method-assign]
    report = await bench.loader.load("2", bench.second)
    bench.loader._ask = ask  # type: ignore[method-assign]
    assert (report.how, report.why_disk) == ("disk", "no version was prepared")
    assert (await bench.client.info()).weight_version == "2"
    assert await bench.held() == await bench.read_from_disk(bench.second)


async def test_sglang_dies_of_min_p_where_seeds_count(bench: Bench) -> None:
    """Last: it ends the engine. That is why `gyre.engines.limits` keeps it from it.

    A token that the model does not have ends an engine of one rank (`test_conformance.py`). One of several takes it
    for a token without a meaning, which is no better.
    """
    strange, deadly = request([1, VOCAB + 5], 4), request(prompt(75), 4, min_p=0.1)
    for refused in (strange, deadly):
        with pytest.raises(RequestUnsafe):
            await listen(bench.client, refused)
    assert len((await listen(bench.client, request(prompt(75), 4))).tokens) == 4
    async with EngineClient(bench.process.url, api_key=bench.process.api_key) as unguarded:
        assert len((await listen(unguarded, strange)).tokens) == 4
        with pytest.raises(EngineError):
            await listen(unguarded, deadly)
    await asyncio.wait_for(bench.process.died(), 120)
