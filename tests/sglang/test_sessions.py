"""Trained rows are, to the token, what the engine saw.

A real SGLang behind a recorder, a real agent and rollout manager, and sessions of the package `openai`, with calls of
tools. The model has random weights, but for what makes it end its answers, and call. The judges are the recorder, which
stands at the engine's HTTP boundary, and the forward pass of transformers over the weights of each version.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from openai import AsyncOpenAI
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer

from gyre.chat.packaged import PackagedRenderer
from gyre.engines.process import EngineCommand
from gyre.engines.weight_loading import LOADER_TURNS
from gyre.rollouts.agent.agent import Agent, AgentSettings
from gyre.rollouts.protocol.endpoint import FixedEndpoint
from gyre.rollouts.samples import Group, Sample
from gyre.weights.version.model_folder import list_model_folder
from tests.chat.tokenizers import small
from tests.engines.tiny_model import write_tiny_model
from tests.rollouts.plane import TOKEN, ScriptedTrainer, until
from tests.sessions.session_plane import SessionPlane, session_plane
from tests.sglang_cpu import sglang_on_cpu

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

RECORDER = Path(__file__).with_name("recording_engine.py")
CALL = '\n{"name": "calculator", "arguments": {"a": 2}}\n'
"""One token of the tests' tokenizer: what stands in a call."""
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "calculator",
            "description": "Computes.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
        },
    }
]
START_S = 400.0
"""For SGLang to start on a machine that is busy with others."""
CLOSE = 2e-3
"""Between the engine's log-probs and those of transformers, both in float32; of weights of another version they differ
by some 2."""
LONG = 1500
"""Tokens of a turn in which something happens: some twelve seconds."""


# -- the model ---------------------------------------------------------------------------------------


def write_tokenizer(folder: Path) -> Path:
    made = Tokenizer.from_file(str(small("qwen3", folder) / "tokenizer.json"))
    made.add_tokens([AddedToken(CALL, special=False, normalized=False)])
    made.save(str(folder / "tokenizer.json"))
    return folder


def write_model(folder: Path, tokenizer: Path, version: int) -> Path:
    """Random weights, of which some are set: every token may be followed by the end or by a call's beginning, at some
    3 % each, and a call's tokens by each other. Four dimensions of the residual stream are kept for that."""
    ids = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    size = ids.get_vocab_size(with_added_tokens=True)
    end, *chain = (
        int(ids.token_to_id(one)) for one in ("<|im_end|>", "<tool_call>", CALL, "</tool_call>", "<|im_end|>")
    )
    path = write_tiny_model(folder, seed=version + 1) / "model.safetensors"
    tensors = load_file(path)
    for name, one in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            one[:4] = 0.0
    embedding, head = tensors["model.embed_tokens.weight"], tensors["lm_head.weight"]
    embedding[:, :4], head[:, :4] = 0.0, 0.0
    embedding[:, 0] = 4.0
    head[end, 0], head[chain[0], 0], head[size:, 0] = 2.3, 2.3, -9.0
    for at, (before, after) in enumerate(pairwise(chain), start=1):
        embedding[before, at], head[after, at] = 16.0, 4.0
    save_file(tensors, path, metadata={"format": "pt"})
    list_model_folder(folder, version=version)
    return folder


# -- what the engine saw -----------------------------------------------------------------------------


@dataclass
class Drawn:
    """A request, as it went over the engine's HTTP boundary. `end` is "" where the engine died before its end."""

    rid: str
    input_ids: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    end: str = ""

    @property
    def whole(self) -> list[int]:
        return self.input_ids + self.ids


@dataclass
class Rig:
    plane: SessionPlane
    trainer: ScriptedTrainer
    folder: Path
    group: int = 0

    def seen(self) -> list[Drawn]:
        """All requests, in order."""
        found: list[Drawn] = []
        for log in sorted((self.folder / "logs").glob("*.log"), key=lambda one: int(one.stem)):
            running: dict[str, Drawn] = {}
            for line in log.read_text().splitlines():
                what, *told = json.loads(line)
                if what == "asked":
                    running[told[0]] = Drawn(told[0], told[1])
                    found.append(running[told[0]])
                elif what == "drew":
                    running[told[0]].ids += told[1]
                    running[told[0]].logprobs += told[2]
                elif what == "ended":
                    running[told[0]].end = told[1]
        return found

    async def begin(self, n: int = 1) -> list[dict[str, Any]]:
        """The sessions of another group, which are handed out."""
        self.group += 1
        await self.trainer.ask([self.group], n=n, limit=LONG)
        sessions: list[dict[str, Any]] = []
        while len(sessions) < n:
            sessions += await self.plane.claim()
        return sessions

    def client(self, session: dict[str, Any], **more: Any) -> AsyncOpenAI:
        return AsyncOpenAI(base_url=f"{self.plane.url}{session['path']}/v1", api_key=TOKEN, **more)

    async def end(self, sessions: Sequence[dict[str, Any]], seen_before: int) -> Group:
        """The group, of whose rows everything holds; `seen_before` requests were another's."""
        for session in sessions:
            status, told = await self.plane.end(session)
            assert status == 200, told
        group = (await self.trainer.groups(1))[self.group]
        check_seen(group, self.seen()[seen_before:])
        check_logprobs(group, self.folder)
        self.plane.exact()
        return group


def full(group: Group, row: Sample) -> list[int]:
    ids: list[int] = group.prompt_ids.tolist() + row.token_ids.tolist()
    return ids


def check_seen(group: Group, seen: Sequence[Drawn]) -> None:
    """Each row is what its last turn was asked with and drew; each masked-in token was drawn there, by one request,
    with its log-prob, and is in one row; each other was in an input; and nothing that was drawn is missing."""
    start = len(group.prompt_ids)
    used: Counter[tuple[int, int]] = Counter()
    for row in group.samples:
        ids, mask = full(group, row), row.mask
        assert mask is not None
        assert any(one.whole == ids and one.end in ("stop", "length") for one in seen), "no turn saw this row"
        ways = [
            (at, one) for at, one in enumerate(seen) if one.input_ids == ids[: len(one.input_ids)] and one.ids
        ]
        for place in range(len(ids)):
            if place < start or not mask[place - start]:
                assert any(len(one.input_ids) > place for _, one in ways), f"nobody was told token {place}"
                continue
            # A turn that went on elsewhere was asked for again with what it had: the last one drew the token.
            at, one = max(
                (way for way in ways if len(way[1].input_ids) <= place), key=lambda way: len(way[1].input_ids)
            )
            number = place - len(one.input_ids)
            assert one.whole[: place + 1] == ids[: place + 1], f"token {place} is not what was drawn"
            assert np.float32(one.logprobs[number]) == row.logprobs[place - start]
            used[at, number] += 1
    assert set(used.values()) == {1}, "a token is trained twice"
    for at, one in enumerate(seen):
        lost = [number for number in range(len(one.ids)) if (at, number) not in used]
        assert not lost or (not one.end and lost[0] > 0 and lost == list(range(lost[0], len(one.ids)))), (
            f"what was drawn for {one.rid} is in no row"
        )


_models: dict[Path, Any] = {}


def logprobs_of(folder: Path, ids: list[int]) -> np.ndarray:
    """float32 `[t - 1]`: of each token after the first, by the weights in `folder`."""
    from transformers import AutoModelForCausalLM

    if folder not in _models:
        _models[folder] = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = _models[folder](torch.tensor([ids])).logits[0]
    told = torch.log_softmax(logits[:-1], -1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    found: np.ndarray = told.numpy()
    return found


def check_logprobs(group: Group, folder: Path) -> None:
    """Each drawn token's log-prob is that of the version it is said to be of, over all the tokens before it. A turn
    during which weights were loaded may go on with what older ones computed: of it the tokens before that."""
    start = len(group.prompt_ids)
    for row in group.samples:
        ids = full(group, row)
        assert row.mask is not None
        turns = np.split(np.flatnonzero(row.mask), np.flatnonzero(np.diff(np.flatnonzero(row.mask)) > 1) + 1)
        version_of = np.empty(len(row.token_ids), np.int64)
        for run in row.versions:
            version_of[run.start : run.end] = run.version
        for turn in turns:
            version = int(version_of[turn[0]])
            of_it = turn[version_of[turn] == version]
            told = logprobs_of(folder / f"v{version}", ids)[of_it + start - 1]
            assert np.abs(told - row.logprobs[of_it]).max() < CLOSE, f"they are not of version {version}"
            if len(of_it) < len(turn):
                later = int(turn[len(of_it)])
                assert version_of[later] > version
                old = logprobs_of(folder / f"v{version}", ids)[later + start - 1]
                assert abs(old - row.logprobs[later]) > CLOSE, "the next one is of the old weights"


# -- the rig -----------------------------------------------------------------------------------------


@dataclass
class Recorded:
    """Engines behind a recorder: `Commands` of an agent. Each has a log of its own."""

    python: str
    logs: Path
    starts: int = 0

    def command(self, folder: Path, version: str) -> EngineCommand:
        self.starts += 1
        inner = sglang_on_cpu(
            folder,
            python=self.python,
            weight_version=version,
            max_tokens=16_384,
            max_running=8,
            env={LOADER_TURNS: "1"},
        )
        argv = [part.replace("{port}", "{inner}") for part in inner.argv]
        log = str(self.logs / f"{self.starts}.log")
        return replace(inner, argv=(sys.executable, str(RECORDER), log, "{host}", "{port}", *argv))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def rig(tmp_path_factory: pytest.TempPathFactory, sglang_python: str) -> AsyncIterator[Rig]:
    folder = tmp_path_factory.mktemp("sessions")
    tokenizer = write_tokenizer(folder / "tokenizer")
    for version in (0, 1):
        write_model(folder / f"v{version}", tokenizer, version)
    (folder / "logs").mkdir()
    renderer = PackagedRenderer(tokenizer, {"name": "qwen3"})
    async with session_plane(folder, renderer=renderer, max_tokens=4000) as plane:
        plane.change(heartbeat_s=START_S)  # its trainer answers no ping while a test waits for something else
        trainer = await plane.trainer()
        await trainer.publish(0)
        settings = AgentSettings("a", 8, 16_384, folder / "cache", engine="sglang", ready_within_s=START_S)
        settings.cache.mkdir()
        agent = Agent(settings, FixedEndpoint(plane.url, TOKEN), Recorded(sglang_python, folder / "logs"))
        running = asyncio.create_task(agent.run())
        try:
            await until(lambda: serves(plane, 0), START_S)
            yield Rig(plane, trainer, folder)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def serves(plane: SessionPlane, version: int) -> bool:
    return any(one["version"] == version for one in plane.manager.status()["instances"])


async def ask(client: AsyncOpenAI, messages: Sequence[Any], **more: Any) -> Any:
    fields: dict[str, Any] = {"max_completion_tokens": 40, "temperature": 1.0} | more
    extra = {"return_token_ids": True, **fields.pop("extra", {})}
    return await client.chat.completions.create(
        model="policy", messages=list(messages), tools=TOOLS, extra_body=extra, **fields
    )


def answered(messages: list[Any], made: Any) -> list[Any]:
    """The conversation after an answer: a tool's result for each call, or what the user says next."""
    message = made.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": one.id, "content": f"{one.function.arguments} is <|im_end|> 4"}
        for one in message.tool_calls or ()
    ]
    return [*messages, message, *(results or [{"role": "user", "content": "Go on."}])]


def asked(what: str) -> list[Any]:
    return [{"role": "system", "content": "Be short."}, {"role": "user", "content": what}]


# -- the tests, in this order ------------------------------------------------------------------------


async def test_rows_of_sessions_with_calls(rig: Rig) -> None:
    """Four sessions at once, of three to six turns; each is one row."""
    before, sessions = len(rig.seen()), await rig.begin(4)
    kinds: Counter[str] = Counter()

    async def run(number: int, session: dict[str, Any]) -> None:
        messages = asked(f"What is {number}+2?")
        async with rig.client(session) as client:
            for _ in range(3 + number):
                made = await ask(client, messages)
                kinds[made.choices[0].finish_reason] += 1
                messages = answered(messages, made)
                told = made.prompt_token_ids + made.choices[0].token_ids
                assert any(one.whole == told for one in rig.seen())

    await asyncio.gather(*(run(number, one) for number, one in enumerate(sessions)))
    group = await rig.end(sessions, before)
    assert len(group.samples) == 4
    assert kinds["tool_calls"] >= 3, "the model is made to call"
    assert kinds["stop"] + kinds["length"] >= 1
    assert len(rig.seen()) - before == sum(kinds.values())
    assert not rig.plane.front.branches


async def test_rows_of_an_edited_conversation(rig: Rig) -> None:
    """Another message after a turn, another question, and messages that are left out: each begins a branch, with its
    reason, and what the branches have in common is trained once."""
    before, (session,) = len(rig.seen()), await rig.begin()
    async with rig.client(session) as client:
        first = asked("What is 2+2?")
        second = answered(first, await ask(client, first))
        third = answered(second, await ask(client, second))
        await ask(client, third)
        other = [*second[:-1], {**second[-1], "content": "Something else."}]
        await ask(client, other)
        edited = [first[0], {"role": "user", "content": "What is 3+3?"}, *third[2:]]
        await ask(client, edited)
        await ask(client, [*first, third[-1]])
    assert dict(rig.plane.front.branches) == {"branch": 1, "client edit": 1, "truncation": 1}
    group = await rig.end([session], before)
    assert len(group.samples) == 4
    assert len({row.rollout for row in group.samples}) == 1


class Breaks(httpx.AsyncHTTPTransport):
    """A connection over which the first answer is whole at the server, and never comes."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[str] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        self.counts.append(request.headers.get("x-stainless-retry-count", ""))
        if len(self.counts) == 1:
            await response.aread()
            await response.aclose()
            raise httpx.ReadError("the connection broke", request=request)
        return response


async def test_a_request_that_is_asked_again_is_drawn_once(rig: Rig) -> None:
    before, (session,) = len(rig.seen()), await rig.begin()
    breaks = Breaks()
    async with rig.client(session, http_client=httpx.AsyncClient(transport=breaks)) as client:
        messages = asked("What is 4+4?")
        made = await ask(client, messages)
        messages = answered(messages, made)
        await ask(client, messages)
    assert breaks.counts == ["0", "1", "0"]
    group = await rig.end([session], before)
    assert len(rig.seen()) - before == 2
    assert len(group.samples) == 1


async def in_a_long_turn(rig: Rig, client: AsyncOpenAI, messages: list[Any]) -> asyncio.Task[Any]:
    """A turn that is being drawn, with some tokens in the ledger. No end ends it: the next turn goes on behind it where
    the last token is one, and else begins a branch."""
    turn = asyncio.create_task(ask(client, messages, max_completion_tokens=LONG, extra={"ignore_eos": True}))

    def is_drawn() -> bool:
        running = [one for one in rig.plane.ledger.sessions.values() if one.outcome is None and one.turns]
        return any(20 < one.turns[-1].sample.length < LONG for one in running)

    await until(is_drawn)
    return turn


async def test_a_version_is_loaded_in_a_turn(rig: Rig) -> None:
    """The turn has tokens of both, and those after it are of the new one over all tokens before them."""
    before, (session,) = len(rig.seen()), await rig.begin()
    async with rig.client(session) as client:
        messages = asked("What is 5+5?")
        messages = answered(messages, await ask(client, messages))
        turn = await in_a_long_turn(rig, client, messages)
        await rig.trainer.publish(1)
        await until(lambda: serves(rig.plane, 1))
        assert not turn.done(), "it ended before the load"
        messages = answered(messages, await turn)
        for _ in range(2):
            messages = answered(messages, await ask(client, messages))
    group = await rig.end([session], before)
    versions = [[run.version for run in row.versions] for row in group.samples]
    assert any({0, 1} <= set(one) for one in versions)
    assert all(one[-1] == 1 for one in versions)


async def test_an_engine_is_killed_in_a_turn(rig: Rig) -> None:
    """What goes on elsewhere is asked for with every token that was kept, and goes on behind them."""
    before, (session,) = len(rig.seen()), await rig.begin()
    async with rig.client(session) as client:
        messages = asked("What is 6+6?")
        messages = answered(messages, await ask(client, messages))
        turn = await in_a_long_turn(rig, client, messages)
        scheduler().kill()
        made = await asyncio.wait_for(turn, START_S)
        messages = answered(messages, made)
        await ask(client, messages)
    _, cut, *_, again, _ = rig.seen()[before:]
    assert not cut.end
    kept = again.input_ids[len(cut.input_ids) :]
    assert kept
    assert kept == cut.ids[: len(kept)]
    assert len(kept) + len(again.ids) == LONG
    assert made.choices[0].token_ids == kept + again.ids
    await rig.end([session], before)


def scheduler() -> psutil.Process:
    """The engine's process that computes."""
    own = psutil.Process().children(recursive=True)
    return next(one for one in own if "scheduler" in " ".join(one.cmdline()).lower())
