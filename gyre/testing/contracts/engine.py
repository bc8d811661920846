"""The contract of engines, as clauses that run against an engine over HTTP.

It needs two model folders of one architecture with different weights, small and in float32, so that neither the batch
nor the way in which a prefix was computed changes the tokens. `check_engine` starts the engine's process over the first
folder and runs all clauses. Under pytest, parametrize over `CLAUSES` and give each clause a live `EngineUnderTest`, so
that a clause is a test.

Clauses share the engine and leave it resumed and idle, with any weights: each begins by loading the first ones, as
version "1".
"""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from gyre.engines.dialect import FinishKind, GenerateRequest, PauseMode, VersionSpan
from gyre.engines.errors import EngineRefused
from gyre.engines.http_client import Deadlines, EngineClient
from gyre.engines.limits import RequestLimits
from gyre.engines.process import EngineCommand, EngineProcess
from gyre.testing.contracts.broken import ContractBroken, broken
from gyre.testing.contracts.engine_calls import (
    LONG,
    PAUSES,
    NotKept,
    ended_by,
    listen,
    listening,
    prompt_of,
    request,
    until_busy_with,
)

HOLD_S = 0.5
"""How long a paused engine is watched for a token that it must not draw."""


@dataclass(frozen=True)
class EngineUnderTest:
    """A live engine at `url`, started over the model in `first` as version "1"; `second` holds other weights of the
    same model. `limits` and `api_key` are those that Gyre starts it with."""

    url: str
    first: Path
    second: Path
    limits: RequestLimits | None = None
    api_key: str | None = None

    @property
    def vocab(self) -> int:
        return int(self._config["vocab_size"])

    @property
    def context(self) -> int:
        return int(self._config["max_position_embeddings"])

    @property
    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = json.loads((self.first / "config.json").read_text())
        return config

    def prompt(self, seed: int, length: int = 16) -> list[int]:
        return prompt_of(seed, self.vocab, length)

    @asynccontextmanager
    async def client(self) -> AsyncIterator[EngineClient]:
        """A client of the engine, which serves the first weights as version "1" and is left resumed and idle."""
        deadlines = Deadlines(answer_s=20.0, update_s=60.0, stall_s=60.0)
        async with EngineClient(
            self.url, api_key=self.api_key, deadlines=deadlines, limits=self.limits
        ) as client:
            if (await client.info()).weight_version != "1":
                await client.update_weights_from_disk(self.first, "1", flush_cache=True)
            try:
                yield client
            finally:  # also where a clause was not kept, or every later one would fail of that
                await client.resume()
                await client.abort_all()


Clause = Callable[[EngineClient, EngineUnderTest], Awaitable[None]]

CLAUSES: dict[str, Clause] = {}
"""The clauses by name, in the order in which they run."""


def expect(kept: bool, came: object) -> None:
    if not kept:
        raise NotKept(came if isinstance(came, str) else repr(came))


def clause(*cases: Any) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., Awaitable[None]]]:
    """Adds a function to `CLAUSES`, once for each of `cases`, if any, as its third argument. Its docstring says what an
    engine must do."""

    def add(function: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
        def named(name: str, *case: Any) -> None:
            async def run(client: EngineClient, engine: EngineUnderTest) -> None:
                try:
                    await function(client, engine, *case)
                except (NotKept, TimeoutError) as error:
                    promised = " ".join((function.__doc__ or "").split()).rstrip(".")
                    came = str(error) or "nothing came in time"
                    raise broken(f"An engine ({name})", promised[:1].lower() + promised[1:], came) from error

            CLAUSES[name] = run

        for case in cases:
            named(f"{function.__name__}[{case}]", case)
        if not cases:
            named(function.__name__)
        return function

    return add


async def check_clause(name: str, engine: EngineUnderTest) -> None:
    """Run one clause. Raises ContractBroken, and the engine's error if it fails in another way."""
    async with engine.client() as client:
        await CLAUSES[name](client, engine)


def check_engine(
    command: EngineCommand,
    *,
    first: Path,
    second: Path,
    but: Sequence[str] = (),
    ready_within_s: float = 240.0,
) -> None:
    """Start an engine by `command`, which serves the model in `first` as version "1", and run all clauses except those
    named in `but`. `second` has the same model with other weights. Raises ContractBroken at the first clause that the
    engine does not keep, and the engine's error if it does not start."""

    async def run() -> None:
        async with EngineProcess(command, ready_within_s=ready_within_s, stop_within_s=5) as process:
            engine = EngineUnderTest(process.url, first, second, command.limits, process.api_key)
            for name in CLAUSES:
                if name in but:
                    continue
                try:
                    await check_clause(name, engine)
                except ContractBroken:
                    raise
                except Exception as error:  # the engine died, or refused what it must take
                    told = f"{type(error).__name__}: {error}"
                    raise broken(f"An engine ({name})", "get through this clause", told) from error

    asyncio.run(run())


# -- tokens -----------------------------------------------------------------------------------------


@clause()
async def tokens_come_in_order_with_their_log_probs(client: EngineClient, engine: EngineUnderTest) -> None:
    """Stream as many tokens as were asked for, each with its log-prob, and end with `length`."""
    heard = await listen(client, request(engine.prompt(1), 40))
    expect(len(heard.tokens) == len(heard.logprobs) == 40, f"{len(heard.tokens)} tokens came of 40")
    expect(all(0 <= token < engine.vocab for token in heard.tokens), heard.tokens)
    expect(all(-50 < logprob < 0.001 for logprob in heard.logprobs), heard.logprobs)
    expect(len(heard.chunks) > 1, "all came in one chunk")
    expect(heard.finish.kind is FinishKind.LENGTH, heard.finish)
    expect({chunk.weight_version for chunk in heard.chunks} == {"1"}, heard.chunks[0].weight_version)
    expect(heard.spans in ((), (VersionSpan("1", 0, 40),)), heard.spans)


@clause()
async def a_chunk_has_as_many_tokens_as_the_request_asks_for(
    client: EngineClient, engine: EngineUnderTest
) -> None:
    """Give a request's tokens in chunks of `stream_interval`, but for the first chunk and the last."""
    asked = replace(request(engine.prompt(8), 40), chunk_tokens=8)
    async with aclosing(client.generate(asked)) as stream:
        sizes = [len(chunk.token_ids) async for chunk in stream]
    expect(sum(sizes) == 40, f"{sum(sizes)} tokens came of 40")
    expect(len(sizes) <= 7, f"they came in chunks of {sizes}")


@clause()
async def one_token_may_be_all(client: EngineClient, engine: EngineUnderTest) -> None:
    """Answer a request for one token with one token."""
    heard = await listen(client, request(engine.prompt(2), 1))
    expect(len(heard.tokens) == 1, heard.tokens)
    expect(heard.finish.kind is FinishKind.LENGTH, heard.finish)


@clause()
async def a_stop_token_ends_the_sample_and_belongs_to_it(
    client: EngineClient, engine: EngineUnderTest
) -> None:
    """End a sample at a stop token, with `stop`, and give that token too."""
    free = await listen(client, request(engine.prompt(3), 24, temperature=0.0))
    stop = free.tokens[10]
    asked = request(engine.prompt(3), 24, temperature=0.0, stop_token_ids=(stop,), ignore_eos=False)
    heard = await listen(client, asked)
    expect(heard.tokens == free.tokens[: free.tokens.index(stop) + 1], heard.tokens)
    expect(heard.finish.kind is FinishKind.STOP, heard.finish)
    expect(heard.finish.matched in (stop, None), heard.finish)


@clause()
async def a_stop_token_that_is_the_last_allowed_stops(client: EngineClient, engine: EngineUnderTest) -> None:
    """End a sample with `stop` also where its stop token is the last token that the request allows."""
    free = await listen(client, request(engine.prompt(3), 24, temperature=0.0))
    stop = free.tokens[10]
    length = free.tokens.index(stop) + 1
    for allowed in (length, length + 1):
        asked = request(engine.prompt(3), allowed, temperature=0.0, stop_token_ids=(stop,), ignore_eos=False)
        heard = await listen(client, asked)
        expect(heard.tokens == free.tokens[:length], heard.tokens)
        expect(heard.finish.kind is FinishKind.STOP, heard.finish)


@clause()
async def ignore_eos_ignores_stop_tokens_too(client: EngineClient, engine: EngineUnderTest) -> None:
    """Go on beyond stop tokens where `ignore_eos` is set, which is SGLang's meaning of the flag."""
    free = await listen(client, request(engine.prompt(3), 24, temperature=0.0))
    asked = request(engine.prompt(3), 24, temperature=0.0, stop_token_ids=(free.tokens[10],), ignore_eos=True)
    heard = await listen(client, asked)
    expect(heard.tokens == free.tokens, heard.tokens)


@clause()
async def greedy_goes_on_from_a_prefix(client: EngineClient, engine: EngineUnderTest) -> None:
    """Give the same greedy tokens and log-probs from a prefix as without interruption."""
    whole = await listen(client, request(engine.prompt(4), 32, temperature=0.0))
    rest = await listen(client, request(engine.prompt(4) + whole.tokens[:13], 19, temperature=0.0))
    expect(whole.tokens[13:] == rest.tokens, rest.tokens)
    expect(np.allclose(whole.logprobs[13:], rest.logprobs, atol=1e-3), rest.logprobs)


@clause()
async def log_probs_are_of_the_distribution_that_was_drawn_from(
    client: EngineClient, engine: EngineUnderTest
) -> None:
    """Tell log-probs at the sampling temperature T: those of two tokens differ by their logits' difference over T."""

    async def drawn(temperature: float) -> dict[int, float]:
        asked = [
            request(engine.prompt(5), 1, temperature=temperature, sampling_seed=seed) for seed in range(64)
        ]
        heard = await asyncio.gather(*(listen(client, each) for each in asked))
        return {each.tokens[0]: each.logprobs[0] for each in heard}

    cold, warm = await drawn(0.5), await drawn(1.0)
    both = sorted(cold.keys() & warm.keys(), key=warm.__getitem__)
    expect(len(both) > 1, f"{len(both)} tokens were drawn at both temperatures")
    rare, likely = both[0], both[-1]
    difference, doubled = warm[likely] - warm[rare], cold[likely] - cold[rare]
    expect(difference > 0.1, f"a difference of {difference:g} at temperature 1")
    expect(abs(doubled - 2 * difference) < 1e-3, f"{doubled:g} at 0.5, {difference:g} at 1")


@clause()
async def many_at_once_are_as_each_alone(client: EngineClient, engine: EngineUnderTest) -> None:
    """Give a request the same greedy tokens among 31 others as alone."""
    asked = [request(engine.prompt(100 + i, 4 + i), 8 + i % 7, temperature=0.0) for i in range(32)]
    together = await asyncio.gather(*(listen(client, each) for each in asked))
    lengths = [len(heard.tokens) for heard in together]
    expect(lengths == [8 + i % 7 for i in range(32)], lengths)
    for i in (0, 13, 31):
        alone = await listen(client, replace(asked[i], rid=uuid.uuid4().hex))
        expect(alone.tokens == together[i].tokens, together[i].tokens)


# -- seeds ------------------------------------------------------------------------------------------


@clause()
async def a_seed_draws_the_same_again(client: EngineClient, engine: EngineUnderTest) -> None:
    """Draw the same tokens by the same seed, and others by another."""
    once, again, other = [
        await listen(client, request(engine.prompt(6), 32, sampling_seed=seed)) for seed in (7, 7, 8)
    ]
    expect(once.tokens == again.tokens, again.tokens)
    expect(once.tokens != other.tokens, "another seed drew the same")


@clause()
async def a_seed_draws_the_same_in_a_crowd(client: EngineClient, engine: EngineUnderTest) -> None:
    """Draw by a seed the same tokens among others as alone."""
    alone = await listen(client, request(engine.prompt(6), 32, sampling_seed=7))
    crowd = [request(engine.prompt(6), 32, sampling_seed=seed) for seed in range(12)]
    together = await asyncio.gather(*(listen(client, each) for each in crowd))
    expect(together[7].tokens == alone.tokens, together[7].tokens)
    distinct = len({tuple(heard.tokens) for heard in together})
    expect(distinct == 12, f"{distinct} different samples of 12 seeds")


@clause()
async def a_sample_goes_on_with_its_seed_as_if_it_had_not_moved(
    client: EngineClient, engine: EngineUnderTest
) -> None:
    """Draw the token at position p by (seed, p) alone, so that a sample goes on elsewhere as if it had not moved."""
    whole = await listen(client, request(engine.prompt(9), 48, sampling_seed=11))
    for k in (1, 17, 40):
        rest = await listen(client, request(engine.prompt(9) + whole.tokens[:k], 48 - k, sampling_seed=11))
        expect(rest.tokens == whole.tokens[k:], f"from token {k} on: {rest.tokens}")


# -- aborts -----------------------------------------------------------------------------------------


@clause()
async def abort_ends_one_request_with_what_it_has(client: EngineClient, engine: EngineUnderTest) -> None:
    """The aborted request ends with the tokens it has and the finish `abort`. No other request ends."""
    asked = [request(engine.prompt(20 + i), LONG) for i in range(2)]
    async with listening(client, asked) as running:
        await client.abort(asked[0].rid)
        ended = await asyncio.wait_for(running.tasks[0], 20)
        expect(ended.finish.kind is FinishKind.ABORT, ended.finish)
        expect(0 < len(ended.tokens) < LONG, f"{len(ended.tokens)} tokens came")
        expect(not running.tasks[1].done(), "the other one ended as well")
        await client.abort(asked[1].rid)
        await running.end()


@clause()
async def abort_all_ends_every_request(client: EngineClient, engine: EngineUnderTest) -> None:
    """End every request with what it has."""

    async def abort(asked: Sequence[GenerateRequest]) -> None:
        await client.abort_all()

    for heard in await ended_by(abort, client, [engine.prompt(30 + i) for i in range(4)]):
        expect(heard.finish.kind is FinishKind.ABORT, heard.finish)
        expect(0 < len(heard.tokens) < LONG, f"{len(heard.tokens)} tokens came")


@clause()
async def aborting_an_unknown_request_is_no_error(client: EngineClient, engine: EngineUnderTest) -> None:
    """Take an abort of a request that it does not know."""
    await client.abort(uuid.uuid4().hex)
    expect(await client.is_ready(), "it was not ready afterwards")


@clause()
async def a_client_that_leaves_ends_its_request(client: EngineClient, engine: EngineUnderTest) -> None:
    """End a request whose stream was closed, although most of its tokens are not drawn."""
    tokens = min(engine.context - 32, 3000)
    async with listening(client, [request(engine.prompt(40), tokens - 64)]) as beside:
        async with aclosing(client.generate(request(engine.prompt(41), tokens))) as chunks:
            async for _ in chunks:
                break
        # Were it drawn to its end, the other one, which began before and is shorter, would end first.
        await until_busy_with(1, client)
        await asyncio.wait(beside.tasks, timeout=HOLD_S)
        expect(not beside.tasks[0].done(), "it ran on")
    await until_busy_with(0, client)


# -- pauses -----------------------------------------------------------------------------------------


@clause(PauseMode.IN_PLACE, PauseMode.RETRACT)
async def a_pause_holds_requests_which_then_go_on(
    client: EngineClient, engine: EngineUnderTest, mode: PauseMode
) -> None:
    """Draw nothing while it is paused, say that it is not ready, and go on afterwards as if nothing was."""
    for _ in range(PAUSES):
        asked = [request(engine.prompt(50 + i), LONG, temperature=0.0) for i in range(3)]
        async with listening(client, asked) as running:
            await client.pause(mode)
            counts = await running.still()
            if max(counts) == LONG:  # whoever asks was held up for as long as they took
                await client.resume()
                continue
            late = asyncio.create_task(listen(client, request(engine.prompt(53), 4)))
            await asyncio.sleep(HOLD_S)
            expect(not late.done(), "a new request was answered during the pause")
            now = [len(heard.tokens) for heard in running.heard]
            expect(now == counts, f"{counts} tokens became {now}")
            expect(not await client.is_ready(), "it was ready")
            await client.resume()
            expect(await client.is_ready(), "it was not ready after resume")
            ended = await running.end()
            expect(len((await late).tokens) == 4, "the new request has other than its 4 tokens")
            break
    else:
        raise NotKept(f"all had ended before the pause, {PAUSES} times")
    for heard in ended:
        expect(heard.finish.kind is FinishKind.LENGTH, heard.finish)
        expect(len(heard.tokens) == LONG, f"{len(heard.tokens)} tokens came of {LONG}")
    undisturbed = await listen(client, replace(asked[0], rid=uuid.uuid4().hex))
    expect(ended[0].tokens == undisturbed.tokens, "other tokens than without a pause")


@clause()
async def a_pause_by_abort_ends_requests_and_holds_new_ones(
    client: EngineClient, engine: EngineUnderTest
) -> None:
    """End what runs when it is paused by `abort`, and hold new requests until it is resumed."""

    async def pause(asked: Sequence[GenerateRequest]) -> None:
        await client.pause(PauseMode.ABORT)

    prompts = [engine.prompt(60 + i) for i in range(3)]
    for heard in await ended_by(pause, client, prompts, undo=client.resume):
        expect(heard.finish.kind is FinishKind.ABORT, heard.finish)
        expect(0 < len(heard.tokens) < LONG, f"{len(heard.tokens)} tokens came")
    late = asyncio.create_task(listen(client, request(engine.prompt(63), 4)))
    await asyncio.sleep(HOLD_S)
    expect(not late.done(), "a new request was answered during the pause")
    await client.resume()
    expect(len((await asyncio.wait_for(late, 20)).tokens) == 4, "it has other than its 4 tokens")


@clause(PauseMode.IN_PLACE, PauseMode.RETRACT)
async def abort_during_a_pause_loses_and_repeats_no_token(
    client: EngineClient, engine: EngineUnderTest, mode: PauseMode
) -> None:
    """Tell of a request that is aborted during a pause every token that it drew, once."""

    async def abort(asked: Sequence[GenerateRequest]) -> None:
        await client.pause(mode)
        await client.abort(asked[0].rid)
        await client.resume()

    (heard,) = await ended_by(abort, client, [engine.prompt(65)], temperature=0.0)
    expect(heard.finish.kind is FinishKind.ABORT, heard.finish)
    undisturbed = await listen(client, request(engine.prompt(65), len(heard.tokens), temperature=0.0))
    expect(heard.tokens == undisturbed.tokens, heard.tokens)


# -- weights ----------------------------------------------------------------------------------------


@clause()
async def new_weights_give_other_tokens_and_the_old_ones_the_old(
    client: EngineClient, engine: EngineUnderTest
) -> None:
    """Draw by the weights that were loaded last, and name their version with each chunk."""
    old = await listen(client, request(engine.prompt(70), 16, temperature=0.0))
    await client.update_weights_from_disk(engine.second, "2", flush_cache=True)
    new = await listen(client, request(engine.prompt(70), 16, temperature=0.0))
    await client.update_weights_from_disk(engine.first, "1", flush_cache=True)
    back = await listen(client, request(engine.prompt(70), 16, temperature=0.0))
    expect(old.tokens == back.tokens, "the first weights gave other tokens than before")
    expect(new.tokens != old.tokens, "the second weights gave the tokens of the first")
    versions = [heard.chunks[-1].weight_version for heard in (old, new, back)]
    expect(versions == ["1", "2", "1"], versions)


@clause()
async def weights_change_under_a_running_sample(client: EngineClient, engine: EngineUnderTest) -> None:
    """Load under a request that is held in place, and tell which version drew which of its tokens."""
    before = await listen(client, request(engine.prompt(71), LONG, temperature=0.0))
    for _ in range(PAUSES):
        async with listening(client, [request(engine.prompt(71), LONG, temperature=0.0)]) as running:
            await client.pause(PauseMode.IN_PLACE)
            (count,) = await running.still()
            if count == LONG:  # whoever asks was held up for as long as it took
                await client.resume()
                continue
            await client.update_weights_from_disk(engine.second, "2", flush_cache=False)
            version = (await client.info()).weight_version
            expect(version == "2", f"it says version {version}")
            await client.resume()
            (heard,) = await running.end()
            break
    else:
        raise NotKept(f"it had ended before the pause, {PAUSES} times")
    expect(len(heard.tokens) == LONG, f"{len(heard.tokens)} tokens came of {LONG}")
    expect(len(heard.spans) == 2, heard.spans)
    first, second = heard.spans
    expect((first.version, first.start) == ("1", 0), heard.spans)
    expect((second.version, second.end) == ("2", LONG), heard.spans)
    expect(0 < first.end == second.start < LONG, heard.spans)
    expect(heard.tokens[: first.end] == before.tokens[: first.end], "other tokens before the load")
    expect(heard.tokens[first.end :] != before.tokens[first.end :], "the old weights' tokens after the load")


@clause()
async def weights_that_are_not_there_are_refused_and_the_old_ones_stay(
    client: EngineClient, engine: EngineUnderTest
) -> None:
    """Refuse weights that it cannot load, and serve the old ones on."""
    old = await listen(client, request(engine.prompt(72), 8, temperature=0.0))
    await _refuses(client.update_weights_from_disk(engine.second / "nothing", "3", flush_cache=True))
    version = (await client.info()).weight_version
    expect(version == "1", f"it says version {version}")
    again = await listen(client, request(engine.prompt(72), 8, temperature=0.0))
    expect(again.tokens == old.tokens, again.tokens)


@clause()
async def the_cache_can_be_flushed(client: EngineClient, engine: EngineUnderTest) -> None:
    """Hold no tokens after its cache was flushed."""
    await until_busy_with(0, client)
    await client.flush_cache()
    used = (await client.load()).used_tokens
    expect(used == 0, f"{used} tokens are held")


# -- questions --------------------------------------------------------------------------------------


@clause()
async def an_engine_says_who_it_is(client: EngineClient, engine: EngineUnderTest) -> None:
    """Say its model's folder, its version, and how long a context may be."""
    info = await client.info()
    expect(info.weight_version == "1", info)
    expect(Path(info.model_path) == engine.first, info)
    expect(info.context_length is None or 0 < info.context_length <= engine.context, info)
    expect(bool(info.engine_version), info)


@clause()
async def an_engine_says_how_full_it_is(client: EngineClient, engine: EngineUnderTest) -> None:
    """Say how many requests it has, and how many it can have."""
    for _ in range(PAUSES):
        await until_busy_with(0, client)
        async with listening(client, [request(engine.prompt(80 + i), LONG) for i in range(3)]) as running:
            busy = asyncio.create_task(until_busy_with(3, client))
            await asyncio.wait([busy, *running.tasks], return_when=asyncio.FIRST_COMPLETED)
            if busy.done():
                load = await busy
                await client.abort_all()
                await running.end()
                break
            busy.cancel()  # whoever asks was held up for as long as one took
            await running.end()
    else:
        raise NotKept(f"one had ended before it was asked, {PAUSES} times")
    expect(load.max_running > 0, load)
    expect(load.max_tokens > 0, load)
    await until_busy_with(0, client)


@clause()
async def an_engine_that_serves_is_ready(client: EngineClient, engine: EngineUnderTest) -> None:
    """Say at once that it is ready, without generating anything."""
    expect(await client.is_ready(), "it said no")


# -- refusals ---------------------------------------------------------------------------------------


@clause({"temperature": -1.0}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -7}, {"max_new_tokens": -1})
async def impossible_sampling_is_refused(
    client: EngineClient, engine: EngineUnderTest, sampling: dict[str, Any]
) -> None:
    """Refuse sampling parameters that mean nothing, and be ready for the next request."""
    await _refuses(listen(client, request(engine.prompt(90), **({"max_new_tokens": 4} | sampling))))
    expect(await client.is_ready(), "it was not ready afterwards")


@clause("empty", "too long")
async def an_impossible_prompt_is_refused(client: EngineClient, engine: EngineUnderTest, which: str) -> None:
    """Refuse a prompt that is empty or longer than its context, and answer the next request."""
    tokens = [] if which == "empty" else [1] * (engine.context + 1)
    await _refuses(listen(client, request(tokens, 4)))
    after = await listen(client, request(engine.prompt(91), 4))
    expect(len(after.tokens) == 4, after.tokens)


@clause()
async def a_token_that_the_model_does_not_have_is_refused(
    client: EngineClient, engine: EngineUnderTest
) -> None:
    """Refuse a prompt with a token beyond its vocabulary, and answer the next request."""
    await _refuses(listen(client, request([1, engine.vocab + 5], 4)))
    after = await listen(client, request(engine.prompt(92), 4))
    expect(len(after.tokens) == 4, after.tokens)


@clause()
async def an_unknown_sampling_key_is_refused(client: EngineClient, engine: EngineUnderTest) -> None:
    """Refuse a sampling parameter that it does not know, with status 400 and the key's name."""
    body = {
        "input_ids": engine.prompt(92),
        "sampling_params": {"max_new_tokens": 4, "temprature": 1.0},
        "stream": True,
    }
    headers = {"Authorization": f"Bearer {engine.api_key}"} if engine.api_key else {}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{engine.url}/generate", json=body, headers=headers) as response,
    ):
        text = await response.text()
        expect(response.status == 400, f"status {response.status}")
        expect("temprature" in text, text)


async def _refuses(call: Awaitable[Any]) -> None:
    try:
        await call
    except EngineRefused:
        return
    expect(False, "it was accepted")
