"""`previous_response_id`: a request of `/v1/responses` that goes on from an earlier answer of its session by its id."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gyre.chat.plain import PlainRenderer
from tests.rollouts.plane import ScriptedAgent
from tests.sessions.session_plane import SessionPlane, session_plane
from tests.sessions.test_chats import TOKENIZER, drew

CALCULATOR = {"type": "function", "name": "calculator", "parameters": {"properties": {"sum": {}}}}


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[SessionPlane]:
    async with session_plane(tmp_path, renderer=PlainRenderer(TOKENIZER)) as plane:
        yield plane
        plane.exact()


async def begun(plane: SessionPlane, n: int = 1) -> tuple[Any, ScriptedAgent, list[dict[str, Any]]]:
    trainer = await plane.asked([0], n=n)
    return trainer, await plane.working("a"), await plane.claim()


async def asked(plane: SessionPlane, session: dict[str, Any], input: Any, **body: Any) -> tuple[int, Any]:
    return await plane.post(f"{session['path']}/v1/responses", {"model": "policy", "input": input, **body})


async def answered(
    plane: SessionPlane, agent: ScriptedAgent, session: dict[str, Any], input: Any, draws: str, **body: Any
) -> Any:
    asking = asyncio.create_task(asked(plane, session, input, **body))
    await drew(agent, draws, ends=not draws.endswith("]"))
    status, told = await asking
    assert status == 200, told
    assert told["previous_response_id"] == body.get("previous_response_id")
    return told


def written(plane: SessionPlane, session: dict[str, Any]) -> list[str]:
    turns = plane.ledger.sessions[session["id"]].turns
    return [PlainRenderer(TOKENIZER).text(turn.path().tolist()) for turn in turns]


async def test_it_goes_on_from_the_answer_of_a_tools_call(plane: SessionPlane) -> None:
    """Over a death of the manager, and all in one row."""
    _, agent, (session,) = await begun(plane)
    first = await answered(plane, agent, session, "12*3=", "[12*3]", tools=[CALCULATOR])
    call = first["output"][0]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "36"}
    await plane.kill()
    await plane.start()
    await agent.back()
    again = {"previous_response_id": first["id"], "tools": [CALCULATOR]}
    second = await answered(plane, agent, session, [result], "36", **again)
    assert second["output"][0]["content"][0]["text"] == "36"
    third = await answered(plane, agent, session, "1=", "1", previous_response_id=second["id"])
    assert third["output"][0]["content"][0]["text"] == "1"
    assert written(plane, session)[2] == "12*3=[12*3]:36:36:1=:1"
    await plane.end(session)
    trainer = await plane.trainer(term=2)
    await trainer.ask([0])
    (row,) = (await trainer.groups(1))[0].samples
    assert row.mask is not None
    assert PlainRenderer(TOKENIZER).text(row.token_ids[row.mask].tolist()) == "[12*3]361"


async def test_two_requests_after_one_answer_are_branches(plane: SessionPlane) -> None:
    """Of that answer, and not of another one that says the same."""
    _, agent, (session,) = await begun(plane)
    same = [await answered(plane, agent, session, "1=", "1", metadata={"a": str(at)}) for at in range(2)]
    for text in "23":
        await answered(plane, agent, session, f"{text}=", text, previous_response_id=same[0]["id"])
    turns = plane.ledger.sessions[session["id"]].turns
    assert [turn.parent for turn in turns] == [-1, -1, 0, 0]
    assert plane.front.status()["sessions"]["branches"] == {"branch": 2}  # roots, too


async def test_instructions_are_of_their_request_alone(plane: SessionPlane) -> None:
    """The same ones again go on from the answer's tokens; others, or none, begin a branch without the old ones."""
    _, agent, (session,) = await begun(plane)
    first = await answered(plane, agent, session, "1=", "1", instructions="7")
    told = {"previous_response_id": first["id"]}
    await answered(plane, agent, session, "2=", "2", instructions="7", **told)
    await answered(plane, agent, session, "3=", "3", instructions="8", **told)
    await answered(plane, agent, session, "4=", "4", **told)
    assert written(plane, session) == ["71=1", "71=1:2=:2", "81=1:3=:3", "1=1:4=:4"]
    assert [turn.parent for turn in plane.ledger.sessions[session["id"]].turns] == [-1, 0, -1, -1]


async def test_an_answer_that_is_not_known_is_told_as_openai_tells_it(plane: SessionPlane) -> None:
    _, agent, sessions = await begun(plane, n=2)
    session = next(one for one in sessions if one["index"] == 0)
    other = next(one for one in sessions if one["index"] == 1)
    unstored = await answered(plane, agent, session, "1=", "1", store=False)
    assert unstored["store"] is False
    theirs = await answered(plane, agent, other, "1=", "1")
    for name in (unstored["id"], theirs["id"], "resp_forged", f"{session['id']}-7", "x" * 9000):
        status, told = await asked(plane, session, "2=", previous_response_id=name)
        error = told["error"]
        assert (status, error["code"], error["param"], error["type"]) == (
            400,
            "previous_response_not_found",
            "previous_response_id",
            "invalid_request_error",
        )
    assert len(plane.ledger.sessions[session["id"]].turns) == 1


async def test_an_answer_of_token_ids_has_no_messages_to_go_on_from(plane: SessionPlane) -> None:
    _, agent, (session,) = await begun(plane)
    turn = plane.turning(session, [5, 6])
    await drew(agent, "1")
    await turn
    status, told = await asked(plane, session, "2=", previous_response_id=f"{session['id']}-0")
    assert (status, told["error"]["code"]) == (400, "previous_response_not_found")
