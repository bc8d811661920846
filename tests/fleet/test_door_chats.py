"""Chats at a fleet's door: with a session and without, asked again, and over a manager's death."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gyre.chat.plain import PlainRenderer
from tests.fleet.fleet_plane import FleetPlane, fleet_plane
from tests.rollouts.plane import until
from tests.sessions.test_chats import CALCULATOR, TOKENIZER, drew

CHAT = "/v1/chat/completions"


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[FleetPlane]:
    async with fleet_plane(tmp_path, renderer=PlainRenderer(TOKENIZER)) as plane:
        yield plane
        plane.exact()


def chatting(
    plane: FleetPlane, *messages: dict[str, Any], path: str = CHAT, retry: int = 0, **body: Any
) -> asyncio.Task[tuple[int, Any]]:
    async def ask() -> tuple[int, Any]:
        told = {"model": "m", "messages": list(messages), "max_tokens": 20, **body}
        headers = {"Authorization": "Bearer lab-key", "x-stainless-retry-count": str(retry)}
        async with plane.session().post(
            f"{plane.url}{path}", data=json.dumps(told), headers=headers
        ) as reply:
            return reply.status, await reply.json()

    return asyncio.create_task(ask())


USER = {"role": "user", "content": "1+2="}


async def test_a_chat_without_a_session(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    asking = chatting(plane, USER)
    await drew(agent, "3")
    status, told = await asking
    assert status == 200, told
    assert told["choices"][0]["message"]["content"] == "3"
    assert told["usage"]["completion_tokens"] == 2


async def test_equal_chats_at_once_are_several(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    both = [chatting(plane, USER), chatting(plane, USER)]
    for sample, text in zip(await agent.work(2), "34", strict=True):
        await agent.say(sample.work.row, [*TOKENIZER.encode(text).tolist(), TOKENIZER.eos_id])
    answers = [(await one)[1] for one in both]
    assert {one["choices"][0]["message"]["content"] for one in answers} == {"3", "4"}


async def test_a_retry_gets_the_same_answer_also_of_another_manager(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    first = chatting(plane, USER)
    await drew(agent, "3")
    before = await first
    assert await chatting(plane, USER, retry=1) == before
    await plane.kill()
    await plane.start()
    assert await chatting(plane, USER, retry=1) == before
    assert plane.manager.groups.account.generated == 2


async def test_a_session_goes_on_from_its_last_turn(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    path = f"/s/mine{CHAT}"
    first = chatting(plane, USER, path=path, tools=[CALCULATOR])
    (sample,) = await agent.work(1)
    await agent.say(sample.work.row, TOKENIZER.encode("[1+2]").tolist())
    call = (await first)[1]["choices"][0]["message"]
    await plane.kill()
    await plane.start()
    await agent.back()
    result = {"role": "tool", "tool_call_id": call["tool_calls"][0]["id"], "content": "3"}
    second = chatting(plane, USER, call, result, path=path, tools=[CALCULATOR])
    await drew(agent, "3")
    status, told = await second
    assert status == 200, told
    newest = list(plane.door.ledger.requests().values())[-1]
    assert TOKENIZER.decode(newest.request.group.prompt_ids) == "1+2=[1+2]:3:"
    assert newest.parent >= 0


async def test_a_text_ends_a_chat_also_of_another_manager(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    first = chatting(plane, USER, stop="+=")
    (sample,) = await agent.work(1)
    await agent.say(sample.work.row, TOKENIZER.encode("3+").tolist(), "")
    await plane.settled()
    first.cancel()
    await plane.kill()
    await plane.start()
    await agent.back()
    again = chatting(plane, USER, stop="+=", retry=1)
    (row,) = agent.samples
    await agent.say(row, TOKENIZER.encode("=9").tolist(), "")
    status, told = await again
    assert status == 200, told
    assert (told["choices"][0]["message"]["content"], told["usage"]["completion_tokens"]) == ("3", 3)


async def test_a_retry_is_of_the_oldest_request_whose_answer_nobody_has(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    both = [chatting(plane, USER), chatting(plane, USER)]
    samples = sorted(await agent.work(2), key=lambda sample: sample.work.request_id)
    again = chatting(plane, USER, retry=1)
    (door,) = plane.manager.fronts
    await until(lambda: door.status()["door"]["waiting"] == 3)
    for sample, text in zip(samples, "34", strict=True):
        await agent.say(sample.work.row, [*TOKENIZER.encode(text).tolist(), TOKENIZER.eos_id])
    assert (await again)[1]["choices"][0]["message"]["content"] == "3"
    assert {(await one)[1]["choices"][0]["message"]["content"] for one in both} == {"3", "4"}


async def _heard(asking: asyncio.Task[tuple[int, Any]]) -> str:
    status, told = await asking
    assert status == 200, told
    content: str = told["choices"][0]["message"]["content"]
    return content


async def _cut(plane: FleetPlane, asking: asyncio.Task[tuple[int, Any]]) -> None:
    """The client's connection is cut, and the door has seen that."""
    asking.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asking
    asks = plane.door._chats._asking
    await until(lambda: not any(is_there() for one in asks.values() for is_there in one))


async def test_equal_chats_find_each_its_own_answer_with_another_manager(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    both = [chatting(plane, USER), chatting(plane, USER)]
    for sample, text in zip(await agent.work(2), "34", strict=True):
        await agent.say(sample.work.row, TOKENIZER.encode(text).tolist(), "")
    await plane.settled()
    for one in both:
        one.cancel()
    await plane.kill()
    await plane.start()
    await agent.back()
    again = [chatting(plane, USER, retry=1), chatting(plane, USER, retry=1)]
    await until(lambda: plane.door.status()["door"]["waiting"] == 2)
    for row in list(agent.samples):
        await agent.say(row, [TOKENIZER.eos_id])
    assert {await _heard(one) for one in again} == {"3", "4"}


async def test_a_retry_with_another_manager_is_of_what_was_not_heard_before(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    first = chatting(plane, USER)
    await drew(agent, "3")
    assert await _heard(first) == "3"
    second = chatting(plane, USER)
    (sample,) = await agent.work(1)
    await _cut(plane, second)
    await agent.say(sample.work.row, [*TOKENIZER.encode("4").tolist(), TOKENIZER.eos_id])
    await plane.settled()
    await plane.kill()
    await plane.start()
    assert await _heard(chatting(plane, USER, retry=1)) == "4"


async def test_an_answer_to_a_client_that_has_gone_was_not_heard(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    path = f"/s/mine{CHAT}"
    first = chatting(plane, USER, path=path)
    (sample,) = await agent.work(1)
    await _cut(plane, first)
    await agent.say(sample.work.row, [*TOKENIZER.encode("3").tolist(), TOKENIZER.eos_id])
    await until(lambda: not plane.door._chats._asking)
    assert await _heard(chatting(plane, USER, path=path)) == "3"
    assert plane.manager.groups.account.generated == 2


async def test_an_answer_leaves_though_its_session_is_unknown_by_then(
    plane: FleetPlane, caplog: pytest.LogCaptureFixture
) -> None:
    """As it is where another session's first request comes before this one is in the ledger."""
    (agent,) = await plane.serving("a")
    asking = chatting(plane, USER, path=f"/s/mine{CHAT}")
    (sample,) = await agent.work(1)
    plane.door._chats._repeats.clear()
    await agent.say(sample.work.row, [*TOKENIZER.encode("3").tolist(), TOKENIZER.eos_id])
    assert await _heard(asking) == "3"
    await until(lambda: not plane.door._chats._asking)
    assert [one for one in caplog.records if one.exc_info] == []
    again = chatting(plane, USER, path=f"/s/mine{CHAT}", retry=1)
    assert await _heard(again) == "3"


async def test_what_a_client_leaves_out_is_not_in_its_prompt_once_it_is_forgotten(plane: FleetPlane) -> None:
    (agent,) = await plane.serving("a")
    path = f"/s/mine{CHAT}"
    told: list[dict[str, Any]] = []
    for text, answer in (("1+2=", "3"), ("4", "5")):
        told.append({"role": "user", "content": text})
        asking = chatting(plane, *told, path=path)
        await drew(agent, answer)
        told.append((await asking)[1]["choices"][0]["message"])
    await plane.delete(next(iter(plane.door.ledger.requests())))
    last = chatting(plane, *told[2:], {"role": "user", "content": "6"}, path=path)
    await drew(agent, "7")
    assert await _heard(last) == "7"
    newest = list(plane.door.ledger.requests().values())[-1]
    assert TOKENIZER.decode(newest.request.group.prompt_ids) == "45"
