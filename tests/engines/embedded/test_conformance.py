"""The embedded engine keeps every engine's contract, and an engine that breaks a promise is told which."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from gyre.engines.dialect import EngineInfo, EngineLoad, GenerateRequest, PauseMode, StreamChunk
from gyre.engines.errors import EngineRefused
from gyre.engines.http_client import EngineClient
from gyre.rollouts.agent.join import EngineCommands
from gyre.testing.contracts import ContractBroken, check_engine
from gyre.testing.contracts.engine import CLAUSES
from tests.engines.conformance import EngineConformance, EngineUnderTest
from tests.engines.tiny_model import write_tiny_model
from tests.ports import free_port
from tests.waits import GENEROUS_S

pytestmark = pytest.mark.landing


@contextlib.asynccontextmanager
async def serving(model: Path, *flags: str) -> AsyncIterator[str]:
    """The URL of an engine in a process of its own, which ends with the block."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "gyre.engines.embedded"),
        *("--model-path", str(model), "--port", str(port), "--weight-version", "1", *flags),
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with asyncio.timeout(60), aiohttp.ClientSession() as session:
            while True:
                assert process.returncode is None, "the engine did not start"
                with contextlib.suppress(aiohttp.ClientError):
                    async with session.get(f"{url}/ready") as response:
                        if response.status == 200:
                            break
                await asyncio.sleep(0.05)
        yield url
        process.terminate()
        assert await asyncio.wait_for(process.wait(), GENEROUS_S) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineUnderTest]:
    folder = tmp_path_factory.mktemp("models")
    first = write_tiny_model(folder / "first", seed=1)
    second = write_tiny_model(folder / "second", seed=2)
    async with serving(first) as url:
        yield EngineUnderTest(url, first, second)


class TestEmbeddedEngine(EngineConformance):
    """Nothing that the embedded engine does otherwise."""


# -- engines that break a promise -------------------------------------------------------------------


class LosesTokens(EngineClient):
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamChunk, None]:
        async for chunk in super().generate(request):
            yield replace(chunk, token_ids=chunk.token_ids[:-1]) if chunk.finish else chunk


class IgnoresSeeds(EngineClient):
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamChunk, None]:
        asked = replace(request, sampling=replace(request.sampling, sampling_seed=None))
        async for chunk in super().generate(asked):
            yield chunk


class IgnoresTemperature(EngineClient):
    """In what it tells, not in what it draws."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamChunk, None]:
        async for chunk in super().generate(request):
            yield replace(chunk, logprobs=chunk.logprobs * max(request.sampling.temperature, 0.1))


class KeepsStopTokens(EngineClient):
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamChunk, None]:
        async for chunk in super().generate(
            replace(request, sampling=replace(request.sampling, stop_token_ids=(), ignore_eos=True))
        ):
            yield chunk


class IgnoresAborts(EngineClient):
    async def abort(self, rid: str) -> None:
        pass


class AbortsEverybody(EngineClient):
    async def abort(self, rid: str) -> None:
        await self.abort_all()


class NeverLeaves(EngineClient):
    """It draws a request to its end, whoever has left."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamChunk, None]:
        heard: asyncio.Queue[StreamChunk] = asyncio.Queue()

        async def read() -> None:
            async for chunk in super(NeverLeaves, self).generate(request):
                heard.put_nowait(chunk)

        reading = asyncio.create_task(read())
        self.tasks = [*getattr(self, "tasks", []), reading]
        while True:
            chunk = await heard.get()
            yield chunk
            if chunk.finish:
                return


class DoesNotPause(EngineClient):
    async def pause(self, mode: PauseMode) -> None:
        pass


class IsReadyWhilePaused(EngineClient):
    async def is_ready(self) -> bool:
        return True


class LoadsNothing(EngineClient):
    async def update_weights_from_disk(self, path: Path | str, version: str, *, flush_cache: bool) -> None:
        await self.name_weights(version)


class TellsNoSpans(EngineClient):
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamChunk, None]:
        async for chunk in super().generate(request):
            yield replace(chunk, spans=())


class NamesNoModel(EngineClient):
    async def info(self) -> EngineInfo:
        return replace(await super().info(), model_path="somewhere")


class NeverBusy(EngineClient):
    async def load(self) -> EngineLoad:
        return replace(await super().load(), running=0, waiting=0)


class TakesAnything(EngineClient):
    async def generate(self, request: GenerateRequest) -> AsyncGenerator[StreamChunk, None]:
        with contextlib.suppress(EngineRefused):
            async for chunk in super().generate(request):
                yield chunk


@pytest.mark.many_cases(quick=6)
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(
    ("doctored", "clause"),
    [
        (LosesTokens, "tokens_come_in_order_with_their_log_probs"),
        (LosesTokens, "one_token_may_be_all"),
        (LosesTokens, "many_at_once_are_as_each_alone"),
        (KeepsStopTokens, "a_stop_token_ends_the_sample_and_belongs_to_it"),
        (IgnoresTemperature, "log_probs_are_of_the_distribution_that_was_drawn_from"),
        (IgnoresSeeds, "a_seed_draws_the_same_again"),
        (IgnoresSeeds, "a_seed_draws_the_same_in_a_crowd"),
        (IgnoresSeeds, "a_sample_goes_on_with_its_seed_as_if_it_had_not_moved"),
        (AbortsEverybody, "abort_ends_one_request_with_what_it_has"),
        (NeverLeaves, "a_client_that_leaves_ends_its_request"),
        (DoesNotPause, "a_pause_holds_requests_which_then_go_on[in_place]"),
        (IsReadyWhilePaused, "a_pause_holds_requests_which_then_go_on[in_place]"),
        (DoesNotPause, "a_pause_by_abort_ends_requests_and_holds_new_ones"),
        (IgnoresAborts, "abort_during_a_pause_loses_and_repeats_no_token[in_place]"),
        (LoadsNothing, "new_weights_give_other_tokens_and_the_old_ones_the_old"),
        (TellsNoSpans, "weights_change_under_a_running_sample"),
        (LoadsNothing, "weights_that_are_not_there_are_refused_and_the_old_ones_stay"),
        (NamesNoModel, "an_engine_says_who_it_is"),
        (NeverBusy, "an_engine_says_how_full_it_is"),
        (TakesAnything, "impossible_sampling_is_refused[{'top_p': 0.0}]"),
        (TakesAnything, "an_impossible_prompt_is_refused[empty]"),
        (TakesAnything, "a_token_that_the_model_does_not_have_is_refused"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else value,
)
async def test_an_engine_that_breaks_a_promise_is_told_which(
    engine: EngineUnderTest, doctored: type[EngineClient], clause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine is sound; what is wrong with it is put between it and the clause."""
    monkeypatch.setattr("gyre.testing.contracts.engine_calls.LOAD_WITHIN_S", 1.0)
    async with engine.client(), doctored(engine.url) as client:
        with pytest.raises(ContractBroken) as caught:
            await CLAUSES[clause](client, engine)
        assert caught.value.details["call"] == f"An engine ({clause})"
        await EngineClient.abort_all(client)
        await asyncio.gather(*getattr(client, "tasks", []), return_exceptions=True)


@pytest.mark.slow
def test_check_engine_goes_through_all_clauses(tmp_path: Path) -> None:
    first = write_tiny_model(tmp_path / "first", seed=1)
    second = write_tiny_model(tmp_path / "second", seed=2)
    command = EngineCommands("embedded", max_running=32, kv_tokens=16384).command(first, "1")
    check_engine(command, first=first, second=second)
    with pytest.raises(ContractBroken, match=r"other tokens|second weights gave the tokens of the first"):
        check_engine(command, first=first, second=first)
