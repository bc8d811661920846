"""What every engine must do: tests of the dialect, over HTTP, against whatever serves it.

To test an engine, derive from `EngineConformance` in a `test_*.py`, beside a fixture `engine` that gives an
`EngineUnderTest`:

    @pytest_asyncio.fixture(scope="module", loop_scope="module")
    async def engine(tmp_path_factory): ...

    class TestMyEngine(EngineConformance):
        pass

Where an engine does not promise something, override that test with an `xfail` that says so. Tests share the engine
and leave it resumed, idle, and with any weights: each starts from the first weights, called version "1".

The models are those of `tests.engines.tiny_model`, in float32: then neither the batch nor whether a prefix was
computed at once or token by token changes what is drawn.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from gyre.engines.dialect import (
    EngineLoad,
    Finish,
    FinishKind,
    GenerateRequest,
    PauseMode,
    SamplingParams,
    StreamChunk,
    VersionSpan,
)
from gyre.engines.errors import EngineRefused
from gyre.engines.http_client import Deadlines, EngineClient
from gyre.engines.limits import RequestLimits
from tests.engines.tiny_model import CONTEXT, VOCAB

SGLANG_PLAIN = json.loads((Path(__file__).parent / "recorded" / "stream_plain.json").read_text())

LONG = 600
"""More tokens than an engine makes while a test looks at it running."""


@dataclass(frozen=True)
class EngineUnderTest:
    """A live engine at `url` over the tiny model of seed 1 in `first`; `second` holds that of seed 2. `limits` are
    those that Gyre starts it with, `api_key` what it wants to be shown."""

    url: str
    first: Path
    second: Path
    limits: RequestLimits | None = None
    api_key: str | None = None


@dataclass
class Heard:
    """What came of one request so far."""

    rid: str
    chunks: list[StreamChunk] = field(default_factory=list)
    grew: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def tokens(self) -> list[int]:
        return [int(token) for chunk in self.chunks for token in chunk.token_ids]

    @property
    def logprobs(self) -> list[float]:
        return [float(logprob) for chunk in self.chunks for logprob in chunk.logprobs]

    @property
    def finish(self) -> Finish:
        finish = self.chunks[-1].finish
        assert finish is not None
        return finish

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        return self.chunks[-1].spans


def prompt(seed: int, length: int = 16) -> list[int]:
    """A prompt of its own: no test meets another's cached prefix."""
    return [int(token) for token in np.random.default_rng(seed).integers(0, VOCAB - 2, length)]


def request(
    tokens: Sequence[int], max_new_tokens: int, *, ignore_eos: bool = True, **sampling: Any
) -> GenerateRequest:
    return GenerateRequest(
        rid=uuid.uuid4().hex,
        input_ids=np.array(tokens, dtype=np.int32),
        sampling=SamplingParams(max_new_tokens, ignore_eos=ignore_eos, **sampling),
    )


async def listen(client: EngineClient, asked: GenerateRequest, heard: Heard | None = None) -> Heard:
    """Hear one request to its end."""
    heard = heard or Heard(asked.rid)
    async with aclosing(client.generate(asked)) as chunks:
        async for chunk in chunks:
            heard.chunks.append(chunk)
            heard.grew.set()
    return heard


@asynccontextmanager
async def listening(client: EngineClient, asked: Sequence[GenerateRequest]) -> AsyncIterator[Running]:
    """Requests that run meanwhile; each has its first token at the start of the block."""
    running = Running([Heard(each.rid) for each in asked])
    running.tasks = [
        asyncio.create_task(listen(client, each, heard))
        for each, heard in zip(asked, running.heard, strict=True)
    ]
    try:
        async with asyncio.timeout(60):
            await asyncio.gather(*(heard.grew.wait() for heard in running.heard))
        yield running
    finally:
        for task in running.tasks:
            task.cancel()
        await asyncio.gather(*running.tasks, return_exceptions=True)


@dataclass
class Running:
    heard: list[Heard]
    tasks: list[asyncio.Task[Heard]] = field(default_factory=list)

    async def end(self) -> list[Heard]:
        async with asyncio.timeout(60):
            return await asyncio.gather(*self.tasks)

    async def still(self) -> list[int]:
        """How many tokens each has once no more come."""
        counts: list[int] = []
        async with asyncio.timeout(20):
            while True:
                before, counts = counts, [len(heard.tokens) for heard in self.heard]
                if before == counts:
                    return counts
                await asyncio.sleep(0.5)


@pytest.mark.asyncio(loop_scope="module")
class EngineConformance:
    @pytest_asyncio.fixture(loop_scope="module")
    async def client(self, engine: EngineUnderTest) -> AsyncIterator[EngineClient]:
        deadlines = Deadlines(answer_s=20.0, update_s=60.0, stall_s=60.0)
        async with EngineClient(
            engine.url, api_key=engine.api_key, deadlines=deadlines, limits=engine.limits
        ) as client:
            if (await client.info()).weight_version != "1":
                await client.update_weights_from_disk(engine.first, "1", flush_cache=True)
            yield client
            await client.resume()
            await client.abort_all()

    # Tokens

    async def test_tokens_come_in_order_with_their_log_probs(self, client: EngineClient) -> None:
        heard = await listen(client, request(prompt(1), 40))
        assert len(heard.tokens) == len(heard.logprobs) == 40
        assert all(0 <= token < VOCAB for token in heard.tokens)
        assert all(-50 < logprob < 0.001 for logprob in heard.logprobs)
        assert len(heard.chunks) > 1, "nothing was streamed"
        assert heard.finish.kind is FinishKind.LENGTH
        assert {chunk.weight_version for chunk in heard.chunks} == {"1"}
        assert heard.spans in ((), (VersionSpan("1", 0, 40),))

    async def test_greedy_tokens_are_those_that_sglang_gave(self, client: EngineClient) -> None:
        """For the tiny model of seed 1, recorded from SGLang 0.5.23 by `tests.sglang.record`."""
        events = [json.loads(event.removeprefix("data: ")) for event in SGLANG_PLAIN["events"][:-1]]
        asked = SGLANG_PLAIN["request"]["input_ids"]
        heard = await listen(client, request(asked, 14, temperature=0.0))
        assert heard.tokens == SGLANG_PLAIN["expected"]["tokens"]
        pairs = [pair for event in events for pair in event["meta_info"]["output_token_logprobs"]]
        np.testing.assert_allclose(heard.logprobs, [pair[0] for pair in pairs], atol=1e-3)

    async def test_one_token_may_be_all(self, client: EngineClient) -> None:
        heard = await listen(client, request(prompt(2), 1))
        assert len(heard.tokens) == 1
        assert heard.finish.kind is FinishKind.LENGTH

    async def test_a_stop_token_ends_the_sample_and_belongs_to_it(self, client: EngineClient) -> None:
        free = await listen(client, request(prompt(3), 24, temperature=0.0))
        stop = free.tokens[10]
        asked = request(prompt(3), 24, temperature=0.0, stop_token_ids=(stop,), ignore_eos=False)
        heard = await listen(client, asked)
        assert heard.tokens == free.tokens[: free.tokens.index(stop) + 1]
        assert heard.finish.kind is FinishKind.STOP
        assert heard.finish.matched in (stop, None)

    async def test_ignore_eos_ignores_stop_tokens_too(self, client: EngineClient) -> None:
        """SGLang's meaning of the flag, and so everybody's."""
        free = await listen(client, request(prompt(3), 24, temperature=0.0))
        asked = request(prompt(3), 24, temperature=0.0, stop_token_ids=(free.tokens[10],), ignore_eos=True)
        assert (await listen(client, asked)).tokens == free.tokens

    async def test_greedy_goes_on_from_a_prefix(self, client: EngineClient) -> None:
        whole = await listen(client, request(prompt(4), 32, temperature=0.0))
        rest = await listen(client, request(prompt(4) + whole.tokens[:13], 19, temperature=0.0))
        assert whole.tokens[13:] == rest.tokens
        np.testing.assert_allclose(whole.logprobs[13:], rest.logprobs, atol=1e-3)

    async def test_log_probs_are_of_the_distribution_that_was_drawn_from(self, client: EngineClient) -> None:
        """At temperature T the log-probs of two tokens differ by their logits' difference over T."""

        async def drawn(temperature: float) -> dict[int, float]:
            asked = [request(prompt(5), 1, temperature=temperature, sampling_seed=seed) for seed in range(64)]
            heard = await asyncio.gather(*(listen(client, each) for each in asked))
            return {each.tokens[0]: each.logprobs[0] for each in heard}

        cold, warm = await drawn(0.5), await drawn(1.0)
        both = sorted(cold.keys() & warm.keys(), key=warm.__getitem__)
        assert len(both) > 1
        rare, likely = both[0], both[-1]
        difference = warm[likely] - warm[rare]
        assert difference > 0.1
        assert cold[likely] - cold[rare] == pytest.approx(2 * difference, abs=1e-3)

    async def test_32_at_once_are_as_each_alone(self, client: EngineClient) -> None:
        asked = [request(prompt(100 + i, 4 + i), 8 + i % 7, temperature=0.0) for i in range(32)]
        together = await asyncio.gather(*(listen(client, each) for each in asked))
        assert [len(heard.tokens) for heard in together] == [8 + i % 7 for i in range(32)]
        for i in (0, 13, 31):
            alone = await listen(client, replace(asked[i], rid=uuid.uuid4().hex))
            assert alone.tokens == together[i].tokens

    # Seeds

    async def test_a_seed_draws_the_same_again(self, client: EngineClient) -> None:
        once, again, other = [
            await listen(client, request(prompt(6), 32, sampling_seed=seed)) for seed in (7, 7, 8)
        ]
        assert once.tokens == again.tokens
        assert once.tokens != other.tokens

    async def test_a_seed_draws_the_same_in_a_crowd(self, client: EngineClient) -> None:
        alone = await listen(client, request(prompt(6), 32, sampling_seed=7))
        crowd = [request(prompt(6), 32, sampling_seed=seed) for seed in range(12)]
        together = await asyncio.gather(*(listen(client, each) for each in crowd))
        assert together[7].tokens == alone.tokens
        assert len({tuple(heard.tokens) for heard in together}) == 12

    async def test_a_sample_goes_on_with_its_seed_as_if_it_had_not_moved(self, client: EngineClient) -> None:
        """*The seed belongs to the sample*: token p is drawn by (seed, p) alone."""
        whole = await listen(client, request(prompt(9), 48, sampling_seed=11))
        for k in (1, 17, 40):
            rest = await listen(client, request(prompt(9) + whole.tokens[:k], 48 - k, sampling_seed=11))
            assert rest.tokens == whole.tokens[k:]

    # Aborts

    async def test_abort_ends_one_request_with_what_it_has(self, client: EngineClient) -> None:
        asked = [request(prompt(20 + i), LONG) for i in range(2)]
        async with listening(client, asked) as running:
            await client.abort(asked[0].rid)
            ended = await asyncio.wait_for(running.tasks[0], 20)
            assert ended.finish.kind is FinishKind.ABORT
            assert 0 < len(ended.tokens) < LONG
            assert not running.tasks[1].done()
            await client.abort(asked[1].rid)
            await running.end()

    async def test_abort_all_ends_every_request(self, client: EngineClient) -> None:
        async with listening(client, [request(prompt(30 + i), LONG) for i in range(4)]) as running:
            await client.abort_all()
            for heard in await running.end():
                assert heard.finish.kind is FinishKind.ABORT
                assert 0 < len(heard.tokens) < LONG

    async def test_aborting_an_unknown_request_is_no_error(self, client: EngineClient) -> None:
        await client.abort(uuid.uuid4().hex)
        assert await client.is_ready()

    async def test_who_leaves_ends_the_request(self, client: EngineClient) -> None:
        async with aclosing(client.generate(request(prompt(40), 3000))) as chunks:
            async for _ in chunks:
                break
        await self.until_busy_with(0, client)

    # Pauses

    @pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
    async def test_a_pause_holds_requests_which_then_go_on(
        self, client: EngineClient, mode: PauseMode
    ) -> None:
        asked = [request(prompt(50 + i), LONG, temperature=0.0) for i in range(3)]
        async with listening(client, asked) as running:
            await client.pause(mode)
            counts = await running.still()
            assert max(counts) < LONG, "all had ended before the pause"
            late = asyncio.create_task(listen(client, request(prompt(53), 4)))
            await asyncio.sleep(0.5)
            assert not late.done()
            assert [len(heard.tokens) for heard in running.heard] == counts
            assert not await client.is_ready()
            await client.resume()
            assert await client.is_ready()
            ended = await running.end()
            assert len((await late).tokens) == 4
        for heard in ended:
            assert heard.finish.kind is FinishKind.LENGTH
            assert len(heard.tokens) == LONG
        undisturbed = await listen(client, replace(asked[0], rid=uuid.uuid4().hex))
        assert ended[0].tokens == undisturbed.tokens

    async def test_pause_by_abort_ends_requests_and_holds_new_ones(self, client: EngineClient) -> None:
        async with listening(client, [request(prompt(60 + i), LONG) for i in range(3)]) as running:
            await client.pause(PauseMode.ABORT)
            for heard in await running.end():
                assert heard.finish.kind is FinishKind.ABORT
                assert 0 < len(heard.tokens) < LONG
        late = asyncio.create_task(listen(client, request(prompt(63), 4)))
        await asyncio.sleep(0.5)
        assert not late.done()
        await client.resume()
        assert len((await asyncio.wait_for(late, 20)).tokens) == 4

    @pytest.mark.parametrize("mode", [PauseMode.IN_PLACE, PauseMode.RETRACT])
    async def test_abort_during_a_pause_loses_and_repeats_no_token(
        self, client: EngineClient, mode: PauseMode
    ) -> None:
        asked = request(prompt(65), LONG, temperature=0.0)
        async with listening(client, [asked]) as running:
            await client.pause(mode)
            await client.abort(asked.rid)
            await client.resume()
            (heard,) = await running.end()
        assert heard.finish.kind is FinishKind.ABORT
        undisturbed = await listen(client, request(prompt(65), len(heard.tokens), temperature=0.0))
        assert heard.tokens == undisturbed.tokens

    # Weights

    async def test_new_weights_give_other_tokens_and_the_old_ones_the_old(
        self, client: EngineClient, engine: EngineUnderTest
    ) -> None:
        old = await listen(client, request(prompt(70), 16, temperature=0.0))
        await client.update_weights_from_disk(engine.second, "2", flush_cache=True)
        new = await listen(client, request(prompt(70), 16, temperature=0.0))
        await client.update_weights_from_disk(engine.first, "1", flush_cache=True)
        back = await listen(client, request(prompt(70), 16, temperature=0.0))
        assert old.tokens == back.tokens != new.tokens
        assert [heard.chunks[-1].weight_version for heard in (old, new, back)] == ["1", "2", "1"]

    async def test_weights_change_under_a_running_sample(
        self, client: EngineClient, engine: EngineUnderTest
    ) -> None:
        before = await listen(client, request(prompt(71), LONG, temperature=0.0))
        async with listening(client, [request(prompt(71), LONG, temperature=0.0)]) as running:
            await client.pause(PauseMode.IN_PLACE)
            await client.update_weights_from_disk(engine.second, "2", flush_cache=False)
            assert (await client.info()).weight_version == "2"
            await client.resume()
            (heard,) = await running.end()
        assert len(heard.tokens) == LONG
        first, second = heard.spans
        assert (first.version, first.start) == ("1", 0)
        assert (second.version, second.end) == ("2", LONG)
        assert 0 < first.end == second.start < LONG
        assert heard.tokens[: first.end] == before.tokens[: first.end]
        assert heard.tokens[first.end :] != before.tokens[first.end :]

    async def test_weights_that_are_not_there_are_refused_and_the_old_ones_stay(
        self, client: EngineClient, engine: EngineUnderTest
    ) -> None:
        old = await listen(client, request(prompt(72), 8, temperature=0.0))
        with pytest.raises(EngineRefused):
            await client.update_weights_from_disk(engine.second / "nothing", "3", flush_cache=True)
        assert (await client.info()).weight_version == "1"
        assert (await listen(client, request(prompt(72), 8, temperature=0.0))).tokens == old.tokens

    async def test_the_cache_can_be_flushed(self, client: EngineClient) -> None:
        await self.until_busy_with(0, client)
        await client.flush_cache()
        assert (await client.load()).used_tokens == 0

    # Questions

    async def test_an_engine_says_who_it_is(self, client: EngineClient, engine: EngineUnderTest) -> None:
        info = await client.info()
        assert info.weight_version == "1"
        assert Path(info.model_path) == engine.first
        assert info.context_length is None or 0 < info.context_length <= CONTEXT
        assert info.engine_version

    async def test_an_engine_says_how_full_it_is(self, client: EngineClient) -> None:
        await self.until_busy_with(0, client)
        async with listening(client, [request(prompt(80 + i), LONG) for i in range(3)]) as running:
            load = await self.until_busy_with(3, client)
            await client.abort_all()
            await running.end()
        assert load.max_running > 0
        assert load.max_tokens > 0
        await self.until_busy_with(0, client)

    async def test_an_engine_that_serves_is_ready(self, client: EngineClient) -> None:
        asked = time.monotonic()
        assert await client.is_ready()
        assert time.monotonic() - asked < 1.0

    # Refusals

    @pytest.mark.parametrize(
        "sampling",
        [{"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -7}, {"max_new_tokens": -1}],
        ids=str,
    )
    async def test_impossible_sampling_is_refused(
        self, client: EngineClient, sampling: dict[str, Any]
    ) -> None:
        with pytest.raises(EngineRefused):
            await listen(client, request(prompt(90), **({"max_new_tokens": 4} | sampling)))
        assert await client.is_ready()

    @pytest.mark.parametrize("tokens", [[], [1] * (CONTEXT + 1)], ids=["empty", "too long"])
    async def test_an_impossible_prompt_is_refused(self, client: EngineClient, tokens: list[int]) -> None:
        with pytest.raises(EngineRefused):
            await listen(client, request(tokens, 4))
        assert len((await listen(client, request(prompt(91), 4))).tokens) == 4

    async def test_a_token_that_the_model_does_not_have_is_refused(self, client: EngineClient) -> None:
        with pytest.raises(EngineRefused):
            await listen(client, request([1, VOCAB + 5], 4))
        assert len((await listen(client, request(prompt(92), 4))).tokens) == 4

    async def test_an_unknown_sampling_key_is_refused(self, engine: EngineUnderTest) -> None:
        body = {
            "input_ids": prompt(92),
            "sampling_params": {"max_new_tokens": 4, "temprature": 1.0},
            "stream": True,
        }
        async with (
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {engine.api_key}"}) as session,
            session.post(f"{engine.url}/generate", json=body) as response,
        ):
            assert response.status == 400
            assert "temprature" in await response.text()

    async def until_busy_with(self, requests: int, client: EngineClient) -> EngineLoad:
        """An engine may tell its load some steps late."""
        async with asyncio.timeout(20):
            while True:
                load = await client.load()
                if load.running + load.waiting == requests:
                    return load
                await asyncio.sleep(0.1)
