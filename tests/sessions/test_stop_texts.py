"""Texts that end a turn: the answer has what stands before one, and the row each token up to the one that ended it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from gyre.chat.packaged import PackagedRenderer
from gyre.chat.plain import PlainRenderer
from gyre.rollouts.plane.text_stops import TextStops
from gyre.rollouts.plane.token_table import TokenTable
from gyre.rollouts.protocol.columns import ReportColumns
from gyre.rollouts.protocol.frames import Cancel
from gyre.workloads.tasks.arithmetic import CharTokenizer
from tests.chat.tokenizers import small
from tests.rollouts.plane import ScriptedAgent
from tests.sessions.session_plane import SessionPlane, session_plane

TOKENIZER = CharTokenizer("0123456789+-*=[]:")
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "1="}]


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[SessionPlane]:
    async with session_plane(tmp_path, renderer=PlainRenderer(TOKENIZER)) as plane:
        yield plane
        plane.exact()


def ids(text: str) -> list[int]:
    return [int(one) for one in TOKENIZER.encode(text)]


async def begun(plane: SessionPlane) -> tuple[Any, ScriptedAgent, dict[str, Any]]:
    trainer = await plane.asked([0])
    agent = await plane.working("a")
    (session,) = await plane.claim()
    return trainer, agent, session


@pytest.mark.parametrize("chunks", [["12=+=99"], ["1", "2", "=", "+", "=", "99"], ["12=", "+=99"], ["12=+="]])
async def test_a_turn_ends_with_the_token_that_completes_the_text(
    plane: SessionPlane, chunks: list[str]
) -> None:
    """However its tokens come; the engine is told to stop, and what it drew after that is in no row."""
    trainer, agent, session = await begun(plane)
    first = plane.chatting(session, ASKED, stop=["+="], logprobs=True, return_token_ids=True)
    (sample,) = await agent.work(1)
    for chunk in chunks:
        await agent.say(sample.work.row, ids(chunk), "")
    status, told = await first
    assert status == 200, told
    (choice,) = told["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("12=", "stop")
    assert choice["token_ids"] == ids("12=+=")
    assert told["usage"]["completion_tokens"] == 5
    cancel = await agent.wire.expect(Cancel)
    assert cancel.rows == [(sample.work.row, sample.work.lease)]
    talk = [*ASKED, choice["message"], {"role": "user", "content": "3"}]
    second = plane.chatting(session, talk)
    (sample,) = await agent.work(1)
    await agent.say(sample.work.row, [*ids("7"), TOKENIZER.eos_id])
    assert (await second)[1]["choices"][0]["message"]["content"] == "7"
    assert not plane.front.status()["sessions"]["branches"]
    await plane.end(session)
    (row,) = (await trainer.groups(1))[0].samples
    assert row.mask is not None
    assert row.token_ids[row.mask].tolist() == [*ids("12=+="), *ids("7"), TOKENIZER.eos_id]
    account = plane.manager.groups.account
    late = account.discarded["after_stop"] + account.discarded["superseded"]
    assert late == sum(map(len, chunks)) - 5
    assert account.generated == account.discarded.total() + 7


async def test_the_next_manager_has_the_same_end(plane: SessionPlane) -> None:
    """Of a turn that had ended, and of one whose text is half there."""
    _, agent, session = await begun(plane)
    body: dict[str, Any] = {"stop": "+=", "metadata": {"a": "b"}}
    first = plane.chatting(session, ASKED, **body)
    (sample,) = await agent.work(1)
    await agent.say(sample.work.row, ids("2+=9"), "")
    told = (await first)[1]
    talk = [*ASKED, told["choices"][0]["message"], {"role": "user", "content": "3"}]
    second = plane.chatting(session, talk, **body)
    (sample,) = await agent.work(1)
    await agent.say(sample.work.row, ids("4+"), "")
    await plane.settled()
    await plane.kill()
    assert (await second)[0] == 503
    await plane.start()
    await agent.back()
    assert (await plane.chatting(session, ASKED, **body))[1] == told
    again = plane.chatting(session, talk, **body)
    (row,) = agent.samples
    await agent.say(row, ids("=5"), "")
    status, answer = await again
    assert (status, answer["choices"][0]["message"]["content"]) == (200, "4"), answer
    turns = plane.ledger.sessions[session["id"]].turns
    assert [turn.sample.tokens()[0].tolist() for turn in turns] == [ids("2+="), ids("4+=")]


async def test_whoever_goes_on_with_the_sample_completes_the_text(plane: SessionPlane) -> None:
    _, agent, session = await begun(plane)
    turn = plane.chatting(session, ASKED, stop=["+="])
    (sample,) = await agent.work(1)
    await agent.say(sample.work.row, ids("4+"), "")
    await plane.settled()
    await agent.wire.socket.close()
    other = await plane.working("b")
    (sample,) = await other.work(1)
    assert sample.tokens == ids("4+")
    await other.say(sample.work.row, ids("=5"), "")
    assert (await turn)[1]["choices"][0]["message"]["content"] == "4"


@pytest.mark.parametrize(
    ("drawn", "content"),
    [
        ("12", "12"),  # it ends by itself
        ("1=", "1="),  # half of the text is no text
    ],
)
async def test_a_turn_without_the_text_is_whole(plane: SessionPlane, drawn: str, content: str) -> None:
    _, agent, session = await begun(plane)
    turn = plane.chatting(session, ASKED, stop=["=+", "9"])
    (sample,) = await agent.work(1)
    await agent.say(sample.work.row, [*ids(drawn), TOKENIZER.eos_id])
    assert (await turn)[1]["choices"][0]["message"]["content"] == content
    assert not plane.manager.groups.account.discarded


async def test_other_samples_of_the_same_report_go_on(plane: SessionPlane) -> None:
    """Samples of other requests, some of which a text may end and some not, in one report."""
    await plane.asked([0], n=3)
    agent = await plane.working("a")
    sessions = await plane.claim()
    fifth, ninth = PlainRenderer(TOKENIZER).written([5, 9])
    turns = [
        plane.chatting(sessions[0], ASKED, stop=[fifth]),
        plane.chatting(sessions[1], ASKED, stop=[ninth]),
        plane.chatting(sessions[2], ASKED),
    ]
    rows = [one.work.row for one in await agent.work(3)]
    await agent.report(dict.fromkeys(rows, 7))  # tokens 1 to 7 for each
    await agent.report({rows[2]: 3}, {rows[2]: "stop"})
    await turns[2]
    lengths = {one.index: one.turns[0].sample.length for one in plane.ledger.sessions.values()}
    assert lengths == {0: 5, 1: 7, 2: 10}
    assert (await turns[0])[0] == 200
    turns[1].cancel()


@pytest.mark.parametrize(
    "stop", ["", [""], ["x" * 257], ["1"] * 17, [7], "\ufffd", {"a": 1}, ["a\ufffdb"], True]
)
async def test_what_is_no_text_is_refused(plane: SessionPlane, stop: Any) -> None:
    _, _, session = await begun(plane)
    status, told = await plane.chatting(session, ASKED, stop=stop)
    assert (status, told["error"]["code"], told["error"]["param"]) == (422, "invalid", "stop")


async def test_token_ids_without_a_chat_format_have_no_text(tmp_path: Path) -> None:
    async with session_plane(tmp_path) as plane:
        _, _, session = await begun(plane)
        status, told = await plane.turn(session, [7, 8], params={"stop": ["a"]})
        assert (status, told["error"]["code"]) == (422, "no_renderer")


async def test_anthropics_clients_hear_which_text_it_was(plane: SessionPlane) -> None:
    _, agent, session = await begun(plane)
    body = {"model": "policy", "max_tokens": 9, "messages": ASKED, "stop_sequences": ["=9", "8"]}
    for stream in (False, True):
        talk = {**body, "stream": stream}
        url = f"{plane.url}{session['path']}/v1/messages"
        request = plane.session().post(url, json=talk, headers={"x-api-key": "secret"})
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(_text(request))
            (sample,) = await agent.work(1)
            await agent.say(sample.work.row, ids("5=9"), "")
        if stream:
            assert '"stop_reason":"stop_sequence","stop_sequence":"=9"' in answer.result()
        else:
            told = json.loads(answer.result())
            assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", "=9")
            assert told["content"] == [{"type": "text", "text": "5"}]


async def _text(request: Any) -> str:
    async with request as reply:
        text: str = await reply.text()
        return text


class LongAnswer:
    """A sample of which tokens come, and how many of the tokens before them were read."""

    def __init__(self, texts: list[str]) -> None:
        self.table, self.read = TokenTable(1), 0
        asked = SimpleNamespace(sampling={"stop": texts})
        self.stops = TextStops(PlainRenderer(TOKENIZER))
        self.stops.watch(cast(Any, SimpleNamespace(row=0, request=asked)))

    def ids(self, row: int, since: int = 0) -> Any:
        found = self.table.ids(row, since)
        self.read += len(found)
        return found

    @property
    def lengths(self) -> Any:
        return self.table.lengths

    def come(self, tokens: list[int]) -> int | None:
        """How many of them the answer has, None for all."""
        one, zero = np.ones(1, np.uint32), np.zeros(1, np.uint32)
        new, logprobs = np.array(tokens, np.int32), np.zeros(len(tokens), np.float32)
        count, version = one * len(tokens), np.zeros(1, np.int32)
        columns = ReportColumns(
            zero, one.astype(np.uint64), self.lengths.copy(), count, version, new, logprobs
        )
        found = self.stops.found(columns, cast(TokenTable, self))
        self.table.append(zero, count, version, new, logprobs)
        return found.get(0)


def test_a_text_is_found_however_long_ago_it_began() -> None:
    """Tokens that are no text stand within it: more than are looked at at first."""
    answer = LongAnswer(["12+3"])
    assert answer.come(ids("9" * 500 + "12")) is None
    for _ in range(300):
        assert answer.come([TOKENIZER.eos_id]) is None
    assert answer.come(ids("+345")) == 2


def test_of_a_long_answer_the_end_is_looked_at() -> None:
    answer = LongAnswer(["12+3"])
    for _ in range(1000):
        answer.come(ids("45678901"))
    before = answer.read
    answer.come(ids("45678901"))
    assert answer.read - before < 100


CALL = '<tool_call>\n{"name": "calculator", "arguments": {"sum":"12*3"}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"sum": {}}}}}


@pytest.mark.parametrize(
    ("drawn", "stop", "content", "reasoning", "called"),
    [
        ("It is 36.\nObservation: 日本", "Observation:", "It is 36.", "", False),
        ("It is 日本語.", "本", "It is 日", "", False),
        ("<think>\nI see. Stop now</think>", "Stop", "", "I see.", False),
        (f"{CALL} and on", " and", "", "", True),
        (CALL, "</tool_call>", None, "", False),  # a call that is cut is text
    ],
)
async def test_the_text_may_be_anywhere_in_a_models_frame(
    tmp_path: Path, drawn: str, stop: str, content: str | None, reasoning: str, called: bool
) -> None:
    renderer = PackagedRenderer(small("qwen3", tmp_path / "model"), {"name": "qwen3"})
    async with session_plane(tmp_path, renderer=renderer) as plane:
        _, agent, session = await begun(plane)
        turn = plane.chatting(session, ASKED, [TOOL], stop=stop)
        (sample,) = await agent.work(1)
        write = renderer._tokenizer.encode
        for one in write(drawn):
            await agent.say(sample.work.row, [one], "")
        status, told = await turn
        assert status == 200, told
        message = told["choices"][0]["message"]
        assert stop not in json.dumps(message, ensure_ascii=False)
        assert bool(message.get("tool_calls")) == called
        assert (message.get("reasoning_content") or "").strip() == reasoning
        if content is not None:
            assert (message["content"] or "").strip() == content
        (only,) = plane.ledger.sessions[session["id"]].turns
        kept = renderer.text(only.sample.tokens()[0].tolist())
        assert stop in kept
        assert drawn.startswith(kept)
        plane.exact()
