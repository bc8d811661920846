"""OpenAI's own client at the door, over real sockets: what it gets has the types of its package, and every error is one
of its exceptions."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI
from openai.types import Completion, Model
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from gyre.data import TextTokenizer
from gyre.rollouts.manager.door.door import BODY_BYTES
from tests.fleet.fleet_plane import PROMPT, FleetPlane, finish, fleet_plane
from tests.rollouts.plane import ScriptedAgent, until

PIECES = (
    "▁a",
    "<0xC3>",
    "<0xA9>",
    "b",
    "<0xE6>",
    "<0x97>",
    "<0xA5>",
    "<0xF0>",
    "<0x9F>",
    "<0x98>",
    "<0x80>",
    "c",
    "</s>",
)
"""What the tokens 1, 2, 3 … say, which the agents generate: one falls back to bytes."""
TEXT = "aéb日😀c"
STOP = len(PIECES)


def _folder(folder: Path) -> Path:
    rest = [one for one in (f"<0x{byte:02X}>" for byte in range(256)) if one not in PIECES]
    vocabulary = {one: at for at, one in enumerate(["<unk>", *PIECES, *rest])}
    built = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    built.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    built.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    # The end token is not special, as in some models' folders.
    built.add_tokens([AddedToken("</s>", special=False, normalized=False)])
    folder.mkdir()
    built.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    return folder


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[FleetPlane]:
    words = TextTokenizer(_folder(tmp_path / "words"))
    async with fleet_plane(tmp_path, tokenizer=words, most_open=2) as plane:
        yield plane
        plane.exact()


@pytest.fixture
async def agent(plane: FleetPlane) -> ScriptedAgent:
    (agent,) = await plane.serving("a")
    return agent


@pytest.fixture
async def client(plane: FleetPlane) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        api_key="lab-key", base_url=f"{plane.url}/v1", max_retries=0, timeout=60
    ) as client:
        yield client


def ask(client: AsyncOpenAI, **asked: Any) -> asyncio.Task[Any]:
    told = {
        "model": "fleet",
        "prompt": PROMPT,
        "max_tokens": 50,
        "extra_body": {"stop_token_ids": [STOP]},
    } | asked
    return asyncio.ensure_future(client.completions.create(**told))


def tokens_of(events: list[Completion]) -> list[int]:
    return [token for one in events for choice in one.choices for token in choice.token_ids]  # type: ignore[attr-defined]


async def test_a_whole_answer_has_openais_types(client: AsyncOpenAI, agent: ScriptedAgent) -> None:
    asking = ask(client, logprobs=1, n=2)
    await finish(agent, STOP, count=2)
    raw = await asking
    told = Completion.model_validate(raw.model_dump(), strict=True)
    assert told.usage is not None
    assert told.usage.model_dump(exclude_none=True) == {
        "prompt_tokens": 2,
        "completion_tokens": 2 * STOP,
        "total_tokens": 2 + 2 * STOP,
    }
    for choice in told.choices:
        assert (choice.text, choice.finish_reason) == (TEXT, "stop")
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.tokens is not None
        assert logprobs.token_logprobs == [-float(token) for token in range(1, STOP + 1)]
        assert logprobs.tokens[-2:] == ["c", "</s>"]
        assert logprobs.top_logprobs == [
            {text: one} for text, one in zip(logprobs.tokens, logprobs.token_logprobs, strict=True)
        ]
        assert logprobs.text_offset == [0, 1, 1, 2, *[3] * 7, 5, 6]


@pytest.mark.parametrize("cuts", [(STOP,), (1,) * STOP, (2, 4, 3, 3, 1), (12, 1)])
async def test_a_stream_is_the_answer_in_parts(
    client: AsyncOpenAI, agent: ScriptedAgent, cuts: tuple[int, ...]
) -> None:
    """Whatever the ledger has at once: no part is sent again or taken back, also where the stop token's end comes
    after it."""
    asking = await ask(client, stream=True, logprobs=1, stream_options={"include_usage": True})
    events: list[Completion] = []

    async def hear() -> None:
        async for event in asking:
            events.append(event)

    hearing = asyncio.create_task(hear())
    (sample,) = await agent.work(1)
    for told, cut in enumerate(cuts):
        await agent.report({sample.work.row: cut})
        heard = sum(cuts[: told + 1])
        await until(lambda heard=heard: len(tokens_of(events)) == heard)
    await agent.report({}, {sample.work.row: "stop"})
    await hearing
    *parts, last = events
    assert "".join(one.choices[0].text for one in parts) == TEXT
    assert [one.usage for one in parts] == [None] * len(parts)
    assert (last.choices, last.usage and last.usage.completion_tokens) == ([], STOP)
    assert [one.choices[0].finish_reason for one in parts][-1] == "stop"
    for one in parts:  # the type of a choice leaves out that it goes on while it does
        known = one.model_dump()
        known["choices"][0]["finish_reason"] = "stop"
        Completion.model_validate(known, strict=True)
    joined = [one.choices[0].logprobs for one in parts]
    assert [at for one in joined if one for at in one.text_offset or ()] == [0, 1, 1, 2, *[3] * 7, 5, 6]
    again = await ask(client, extra_body={"stop_token_ids": [STOP], "rid": parts[0].id})
    assert again.choices[0].text == TEXT


async def test_sglangs_stream_takes_nothing_back(plane: FleetPlane, agent: ScriptedAgent) -> None:
    params = {"stop_token_ids": [STOP]}
    stream = plane.stream("/generate", {"input_ids": PROMPT, "sampling_params": params, "stream": True})
    texts: list[str] = []

    async def hear() -> None:
        async for event in stream:
            if event != "[DONE]":
                texts.append(event["text"])

    hearing = asyncio.create_task(hear())
    (sample,) = await agent.work(1)
    for count in range(STOP):
        await agent.report({sample.work.row: 1})
        await until(lambda count=count: len(texts) > count)
    await agent.report({}, {sample.work.row: "stop"})
    await hearing
    assert texts[-1] == TEXT
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))


async def test_sglangs_log_probs_have_texts_where_they_are_asked_for(
    plane: FleetPlane, agent: ScriptedAgent
) -> None:
    asking = plane.asking("one", return_logprob=True, return_text_in_logprobs=True)
    await finish(agent, 4)
    _, told = await asking
    assert [row[2] for row in told["meta_info"]["output_token_logprobs"]] == ["a", "\ufffd", "\ufffd", "b"]


async def test_the_model_is_listed_and_found(client: AsyncOpenAI, agent: ScriptedAgent) -> None:
    (listed,) = (await client.models.list()).data
    found = await client.models.retrieve("fleet")
    assert listed == found == Model.model_validate(found.model_dump(), strict=True)


def says(error: openai.APIStatusError, code: str, *words: str) -> None:
    """It is in OpenAI's form, and says what to do."""
    assert error.code == code
    assert error.type in ("invalid_request_error", "rate_limit_error")
    assert isinstance(error.body, dict)
    assert {*error.body} == {"message", "type", "code", "param"}
    for word in words:
        assert word in error.body["message"]


async def test_errors_are_openais(plane: FleetPlane, client: AsyncOpenAI, agent: ScriptedAgent) -> None:
    with pytest.raises(openai.AuthenticationError) as unknown:
        await client.with_options(api_key="nobody").models.list()
    says(unknown.value, "unauthorised")
    with pytest.raises(openai.NotFoundError) as other:
        await ask(client, model="gpt-4")
    says(other.value, "model_not_found", "'fleet'")
    assert other.value.param == "model"
    with pytest.raises(openai.NotFoundError) as retrieved:
        await client.models.retrieve("gpt-4")
    says(retrieved.value, "model_not_found", "'fleet'")
    with pytest.raises(openai.UnprocessableEntityError) as seed:
        await ask(client, seed=0)
    says(seed.value, "unsupported", "seed: 0")
    assert seed.value.param == "seed"
    with pytest.raises(openai.UnprocessableEntityError) as several:
        await ask(client, prompt=["a", "b"])
    says(several.value, "unsupported", "a request for each")
    with pytest.raises(openai.APIStatusError) as large:
        await ask(client, prompt="a" * (BODY_BYTES + 1))
    assert large.value.status_code == 413
    says(large.value, "invalid", str(BODY_BYTES))


async def test_what_the_door_has_not_is_refused_with_what_to_do(
    client: AsyncOpenAI, agent: ScriptedAgent
) -> None:
    messages: Any = [{"role": "user", "content": "hi"}]
    for chatting in (
        client.chat.completions.create(model="fleet", messages=messages),
        client.chat.completions.create(model="fleet", messages=messages, stream=True),
        client.responses.create(model="fleet", input="hi"),
    ):
        with pytest.raises(openai.UnprocessableEntityError) as chat:
            await chatting
        says(chat.value, "no_renderer", "token ids", "config.chat")
    with pytest.raises(openai.NotFoundError) as gone:
        await client.embeddings.create(model="fleet", input="hi")
    says(gone.value, "not_found")
    with pytest.raises(openai.APIStatusError) as method:
        await client.get("/completions", cast_to=object)
    assert method.value.status_code == 405
    says(method.value, "method_not_allowed", "POST")


async def test_too_many_at_once_are_a_rate_limit(client: AsyncOpenAI, agent: ScriptedAgent) -> None:
    asking = [ask(client), ask(client)]
    samples = await agent.work(2)
    with pytest.raises(openai.RateLimitError) as more:
        await ask(client)
    says(more.value, "too_many_open", "rollouts.door.most_open")
    assert more.value.type == "rate_limit_error"
    rows = [sample.work.row for sample in samples]
    await agent.report(dict.fromkeys(rows, 1), dict.fromkeys(rows, "length"))
    assert [one.choices[0].finish_reason for one in await asyncio.gather(*asking)] == ["length", "length"]
