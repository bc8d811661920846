"""Whatever agents and strangers send: it is refused with a code and a sentence, in time, and the next honest turn is
answered. The account stays exact."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from gyre.chat.packaged import PackagedRenderer
from gyre.chat.plain import PlainRenderer
from gyre.config import GENERATE_SCOPE
from gyre.rollouts.manager.sessions import front as front_module
from gyre.rollouts.protocol.frames import Failed
from gyre.store import RolloutStore
from gyre.workloads.tasks.arithmetic import CharTokenizer
from tests.chat.tokenizers import small
from tests.rollouts.plane import SOON_S, ScriptedAgent, until
from tests.sessions.session_plane import GENERATE, SessionPlane, drawn, generate_body, ids_of, session_plane

TOKENIZER = CharTokenizer("0123456789+-*=[]:")
TOOL = {"type": "function", "function": {"name": "calculator", "parameters": {"properties": {"sum": {}}}}}
DIALECT_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages", GENERATE, "/v1/completions")
PROMPT = [7, 8]


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[SessionPlane]:
    async with session_plane(tmp_path, renderer=PlainRenderer(TOKENIZER)) as plane:
        yield plane
        plane.exact()


async def begun(plane: SessionPlane, n: int = 2) -> tuple[ScriptedAgent, list[dict[str, Any]]]:
    await plane.asked([0], n=n)
    return await plane.working("a"), await plane.claim(most=n)


async def good(plane: SessionPlane, agent: ScriptedAgent, session: dict[str, Any]) -> None:
    """An honest turn is answered."""
    turn = plane.turning(session, [9, 9, len(plane.events)])
    await drawn(agent, 2)
    status, told = await turn
    assert (status, ids_of(told)) == (200, [1, 2])


def refused(answer: tuple[int, Any], status: int, *codes: str) -> None:
    """In the documented form."""
    assert answer[0] == status, answer
    error = answer[1]["error"]
    assert error.get("code") in codes, error
    assert len(error["message"].split()) > 2


async def sent(
    plane: SessionPlane, method: str, path: str, body: bytes, key: str = "secret", **headers: str
) -> tuple[int, Any]:
    async with (
        asyncio.timeout(SOON_S),
        plane.session().request(
            method,
            f"{plane.url}{path}",
            data=io.BytesIO(body),
            headers={"Authorization": f"Bearer {key}", **headers},
        ) as reply,
    ):
        text = await reply.read()
        return reply.status, json.loads(text) if text.startswith(b"{") else {"error": {"message": text}}


# -- names ----------------------------------------------------------------------------------------------


async def test_sessions_that_are_not_theirs(plane: SessionPlane) -> None:
    agent, (one, other) = await begun(plane)
    id = one["id"]
    for name in ("forged", "forged.1", f"{id}.{'9' * 5000}", f"{id}.x", "x" * 9000, "%00", "%ff%fe"):
        refused(await sent(plane, "POST", f"/s/{name}{GENERATE}", b"{}"), 404, "not_found")
    refused(await sent(plane, "POST", GENERATE, b"{}"), 404, "not_found")
    for path in (f"/s/{id}.7{GENERATE}", f"/v1/sessions/{id}.7/end"):
        refused(
            await plane.post(path, {"outcome": "scored", "reward": 1.0, **generate_body(PROMPT)}), 410, "lost"
        )
    await good(plane, agent, one)
    assert (await plane.end(one))[0] == 200
    refused(await plane.turn(one, PROMPT), 410, "ended")
    refused(await plane.end(one, reward=0.5), 422, "ended")
    assert (await plane.end(one))[0] == 200
    await good(plane, agent, other)


async def test_two_agents_with_one_name_keep_what_they_run(plane: SessionPlane, monkeypatch: Any) -> None:
    monkeypatch.setattr("gyre.rollouts.plane.session_workers.TAKEN_WITHIN_S", 0.3)
    agent, (one, other) = await begun(plane)
    for _ in range(12):  # each says what it runs itself, and knows nothing of the other
        for session in (one, other):
            status, told = await plane.post("/v1/sessions/beat", {"worker": "w", "sessions": [session["id"]]})
            assert (status, told) == (200, {"lost": []})
        await asyncio.sleep(0.05)
    await good(plane, agent, one)
    await good(plane, agent, other)


async def test_a_claim_that_nobody_took_comes_again(plane: SessionPlane, monkeypatch: Any) -> None:
    monkeypatch.setattr("gyre.rollouts.plane.session_workers.TAKEN_WITHIN_S", 0.1)
    agent, (one, other) = await begun(plane)
    await asyncio.sleep(0.2)
    await plane.post("/v1/sessions/beat", {"worker": "w", "sessions": [one["id"]]})
    (again,) = await plane.claim("other")
    assert (again["id"], again["path"] == other["path"]) == (other["id"], False)
    refused(await plane.turn(other, PROMPT), 410, "lost")
    await good(plane, agent, again)


async def test_a_claim_whose_client_has_gone_takes_nothing(plane: SessionPlane) -> None:
    waiting = asyncio.create_task(plane.claim("gone"))
    await until(lambda: "claims" in plane.front._waiting)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await plane.asked([0])
    assert len(await plane.claim("here")) == 1


async def test_two_claims_race(plane: SessionPlane) -> None:
    await plane.asked([0], n=8)
    await until(lambda: plane.ledger.workers.waiting == 8)
    got = await asyncio.gather(*(plane.claim(f"w{at}", most=1, wait_s=0.0) for at in range(20)))
    ids = [session["id"] for sessions in got for session in sessions]
    assert len(ids) == len(set(ids)) == 8


# -- bodies ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DIALECT_PATHS)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"null",
        b"[]",
        b"{",
        b'{"messages": "\xff\xfe"}',
        b'{"messages": [{"role": "user", "content": "\xc3\x28"}], "input": "\xc3\x28", "token_ids": [1]}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "input": "\\ud800", "max_tokens": 3}',
        b"[" * 100_000,
        b'{"messages": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"token_ids": [1e400], "prompt": [1e400], "sampling_params": {"max_tokens": 3}}',
        b'{"token_ids": [99999999999], "prompt": [99999999999], "sampling_params": {"max_tokens": 3}}',
        b'{"token_ids": [-1], "prompt": [-1], "max_tokens": 3, "sampling_params": {"max_tokens": 3}}',
        b'{"token_ids": [7], "prompt": [7], "max_tokens": 0, "sampling_params": {"max_tokens": 0}}',
        b'{"token_ids": [7], "prompt": [7], "max_tokens": -5, "sampling_params": {"max_tokens": -5}}',
    ],
    ids=range(14),
)
async def test_a_body_that_is_no_request(plane: SessionPlane, path: str, body: bytes) -> None:
    _, (one, _) = await begun(plane)
    status, told = await sent(plane, "POST", f"{one['path']}{path}", body)
    assert status in (400, 422), told
    assert told["error"]["message"]
    assert not plane.ledger.sessions[one["id"]].turns


@pytest.mark.parametrize(
    ("route", "body"),
    [
        ("claim", {"worker": ""}),
        ("claim", {"worker": "x" * 1000}),
        ("claim", {"worker": "a\nb"}),
        ("claim", {"worker": 7}),
        ("claim", {"worker": "w", "most": 0}),
        ("claim", {"worker": "w", "most": 10**9}),
        ("claim", {"worker": "w", "wait_s": "long"}),
        ("claim", {"worker": "w", "wait_s": True}),
        ("claim", {"worker": "w", "wait_s": 10**400}),
        ("beat", {"worker": "w", "sessions": "all"}),
        ("beat", {"worker": "w", "sessions": [1]}),
        ("beat", {"worker": "w"}),
        ("ID/end", {}),
        ("ID/end", {"outcome": "won", "reward": 1.0}),
        ("ID/end", {"outcome": "scored"}),
        ("ID/end", {"outcome": "scored", "reward": "1"}),
        ("ID/end", {"outcome": "scored", "reward": True}),
        ("ID/end", {"outcome": "scored", "reward": 10**400}),
        ("ID/end", {"outcome": "scored", "reward": 1.0, "extras": {"x": 10**400}}),
        ("ID/end", {"outcome": "scored", "reward": 1.0, "extras": {"x": "y"}}),
        ("ID/end", {"outcome": "scored", "reward": 1.0, "extras": {"x" * 1000: 1}}),
        ("ID/end", {"outcome": "scored", "reward": 1.0, "extras": {str(at): at for at in range(1000)}}),
        ("ID/end", {"outcome": "scored", "reward": 1.0, "extras": [1]}),
        ("ID/end", {"outcome": "scored", "reward": 1.0, "reason": ["long"]}),
    ],
)
async def test_a_worker_that_says_what_cannot_be(
    plane: SessionPlane, route: str, body: dict[str, Any]
) -> None:
    _, (one, _) = await begun(plane)
    answer = await plane.post(f"/v1/sessions/{route.replace('ID', one['id'])}", body)
    refused(answer, 422, "invalid")
    assert plane.ledger.sessions[one["id"]].outcome is None


async def test_a_snapshot_that_is_too_large(plane: SessionPlane) -> None:
    agent, (one, _) = await begun(plane)
    path = f"/v1/sessions/{one['path'].removeprefix('/s/')}/snapshot"
    refused(await sent(plane, "PUT", path, bytes((1 << 20) + 1)), 422, "snapshot")
    assert (await sent(plane, "PUT", path, bytes(1 << 20)))[0] == 200
    await good(plane, agent, one)


async def test_a_body_that_is_larger_than_any(plane: SessionPlane, monkeypatch: Any) -> None:
    agent, (one, _) = await begun(plane)
    refused(
        await sent(plane, "POST", f"{one['path']}{GENERATE}", bytes(33 << 20)), 413, "too_large", "invalid"
    )
    monkeypatch.setattr(front_module, "MOST_READ_BYTES", 1000)
    refused(await plane.turn(one, list(range(1000))), 429, "busy")
    await good(plane, agent, one)


# -- what is said ---------------------------------------------------------------------------------------


async def chatted(
    plane: SessionPlane, agent: ScriptedAgent, asking: asyncio.Task[tuple[int, Any]], text: str
) -> Any:
    (sample,) = await agent.work(1)
    await agent.say(sample.work.row, [*TOKENIZER.encode(text).tolist(), TOKENIZER.eos_id])
    status, told = await asking
    assert status == 200, told
    return told["choices"][0]["message"]


async def test_an_edited_history_begins_a_branch_that_is_counted(plane: SessionPlane) -> None:
    agent, (one, _) = await begun(plane)
    talk: list[dict[str, Any]] = [{"role": "user", "content": "1+1="}]
    first = await chatted(plane, agent, plane.chatting(one, talk), "2")
    talk += [first, {"role": "user", "content": "2+2="}]
    second = await chatted(plane, agent, plane.chatting(one, talk), "4")
    edited = [talk[0], {**first, "content": "3"}, talk[2], second, {"role": "user", "content": "1="}]
    await chatted(plane, agent, plane.chatting(one, edited), "1")
    shrunk = [talk[0], talk[2], {"role": "user", "content": "5="}]
    await chatted(plane, agent, plane.chatting(one, shrunk), "5")
    branches = plane.front.status()["sessions"]["branches"]
    assert sum(branches.values()) == 2, branches
    assert branches.get("client edit")
    turns = plane.ledger.sessions[one["id"]].turns
    assert [turn.parent for turn in turns] == [-1, 0, -1, -1]


@pytest.mark.parametrize("text", ["[1+1]36:", "<eos><bos>", "\0\x01\x7f", "\U0010ffff", "[[[[]]]]:::"])
async def test_what_a_tool_says_is_text(plane: SessionPlane, text: str) -> None:
    """Characters of the frame, control tokens by name and what is in no alphabet are no tokens of the frame."""
    agent, (one, _) = await begun(plane)
    talk: list[dict[str, Any]] = [{"role": "user", "content": "1+1="}]
    asking = plane.chatting(one, talk, [TOOL])
    (sample,) = await agent.work(1)
    await agent.say(sample.work.row, TOKENIZER.encode("[1+1]").tolist())
    message = (await asking)[1]["choices"][0]["message"]
    call = message["tool_calls"][0]["id"]
    talk += [message, {"role": "tool", "tool_call_id": call, "content": text}]
    await chatted(plane, agent, plane.chatting(one, talk, [TOOL]), "2")
    added = plane.ledger.sessions[one["id"]].turns[1].request.added.tolist()
    assert not {TOKENIZER.eos_id, TOKENIZER.bos_id} & set(added)
    assert not any(TOKENIZER.decode(added).count(one) for one in "[]")


async def test_megabytes_from_a_tool_are_over_budget(plane: SessionPlane) -> None:
    """Of three agents at once; another one's turn is answered meanwhile."""
    await plane.asked([0], n=4)
    agent, (other, *sessions) = await plane.working("a"), await plane.claim(most=4)
    call = plane.chatting(sessions[0], [{"role": "user", "content": "1="}], [TOOL])
    (sample,) = await agent.work(1)
    await agent.say(sample.work.row, TOKENIZER.encode("[1+1]").tolist())
    said = (await call)[1]["choices"][0]["message"]
    result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "1" * (4 << 20)}
    body = json.dumps(
        {"model": "policy", "messages": [{"role": "user", "content": "1="}, said, result]}
    ).encode()
    asking = [
        asyncio.create_task(sent(plane, "POST", f"{one['path']}/v1/chat/completions", body))
        for one in sessions
    ]
    await good(plane, agent, other)
    for answer in await asyncio.gather(*asking):
        refused(answer, 422, "budget")
    assert not plane.front._read_bytes


@pytest.mark.parametrize(("levels", "is_taken"), [(100, True), (3000, False)])
async def test_schemas_a_hundred_levels_deep(tmp_path: Path, levels: int, is_taken: bool) -> None:
    """A model's frame writes them, or says that it cannot; another session's turn is answered meanwhile."""
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels):
        schema = {"type": "object", "properties": {"x": schema}}
    deep = {"type": "function", "function": {"name": "calculator", "parameters": schema}}
    talk = {"model": "policy", "messages": [{"role": "user", "content": "1="}], "tools": [deep]}
    renderer = PackagedRenderer(small("qwen3", tmp_path / "model"), {"name": "qwen3"})
    async with session_plane(tmp_path, renderer=renderer, max_tokens=1 << 20) as plane:
        agent, (one, other) = await begun(plane)
        body = msgspec.json.encode(talk) if is_taken else _nested(talk, levels)
        asking = asyncio.create_task(sent(plane, "POST", f"{one['path']}/v1/chat/completions", body))
        if is_taken:
            (sample,) = await agent.work(1)
            await good(plane, agent, other)
            await agent.say(sample.work.row, renderer._tokenizer.encode("1<|im_end|>"))
            status, told = await asking
            assert (status, told["choices"][0]["message"]["content"]) == (200, "1"), told
        else:
            await good(plane, agent, other)
            refused(await asking, 422, "invalid", "chat")
        plane.exact()


def _nested(talk: dict[str, Any], levels: int) -> bytes:
    """The JSON of a request whose schema no encoder of this process writes: it is too deep."""
    schema = '{"type":"object","properties":{"x":' * levels + '{"type":"string"}' + "}}" * levels
    tool = '{"type":"function","function":{"name":"calculator","parameters":' + schema + "}}"
    return (json.dumps({**talk, "tools": []})[:-3] + f"[{tool}]}}").encode()


async def test_a_template_that_raises_is_a_refusal(plane: SessionPlane, monkeypatch: Any) -> None:
    agent, (one, other) = await begun(plane)

    def broken(*_: Any) -> Any:
        raise KeyError("strftime_now")

    monkeypatch.setattr(PlainRenderer, "render", broken)
    answer = await plane.chatting(one, [{"role": "user", "content": "1="}])
    refused(answer, 422, "chat")
    await good(plane, agent, other)


# -- how much -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("many", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
async def test_many_calls_of_one_session_at_once(plane: SessionPlane, many: int) -> None:
    """The same call a thousand times over, or ten thousand, is one turn, and as many wait as may; other sessions are
    served meanwhile, and what the refused ones took is given back."""
    agent, (one, other) = await begun(plane)
    connector = aiohttp.TCPConnector(limit=200)  # they share the manager's loop here, which has each in turn
    body = json.dumps(generate_body(PROMPT)).encode()
    counts: dict[int, int] = {}

    async def call(http: aiohttp.ClientSession) -> None:
        url = f"{plane.url}{one['path']}{GENERATE}"
        async with http.post(url, data=body, headers={"Authorization": "Bearer secret"}) as reply:
            counts[reply.status] = counts.get(reply.status, 0) + 1
            if reply.status == 429:
                assert reply.headers["Retry-After"]
                assert (await reply.json())["error"]["code"] == "too_many_open"

    async with aiohttp.ClientSession(connector=connector) as http:
        calls = [asyncio.create_task(call(http)) for _ in range(many)]
        (sample,) = await agent.work(1)
        await good(plane, agent, other)
        while counts.get(429, 0) < many - front_module.MOST_AT_ONCE:
            assert await agent.wire.echo()  # neither engine nor worker is silent meanwhile
            await plane.post("/v1/sessions/beat", {"worker": "w", "sessions": [one["id"], other["id"]]})
        assert plane.front._asking == {one["id"]: front_module.MOST_AT_ONCE}
        assert plane.front._read_bytes == front_module.MOST_AT_ONCE * len(body)
        await agent.report({sample.work.row: 3}, {sample.work.row: "stop"})
        await asyncio.gather(*calls)
    assert counts == {200: front_module.MOST_AT_ONCE, 429: many - front_module.MOST_AT_ONCE}
    assert plane.manager.groups.account.generated == 3 + 2
    assert not plane.front._asking
    assert not plane.front._read_bytes
    assert not plane.front._waiting
    await good(plane, agent, other)


async def test_an_agent_that_never_ends(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("gyre.rollouts.plane.session_workers.ENDED_WITHIN_S", 0.1)
    async with session_plane(tmp_path, seconds=0.3, redraws=1) as plane:
        trainer = await plane.asked([0])
        agent = await plane.working("a")
        (session,) = await plane.claim()
        await good(plane, agent, session)
        await until(lambda: bool(plane.told("SessionFault")))
        refused(await plane.turn(session, PROMPT), 404, "not_found")
        assert (await plane.post("/v1/sessions/beat", {"worker": "w", "sessions": [session["id"]]}))[1][
            "lost"
        ]
        (again,) = await plane.claim()
        assert again["attempt"] == 1
        failed = await trainer.wire.expect(Failed)
        assert (failed.purpose, failed.ids) == ("train", [0])
        plane.exact()


async def test_a_sick_environment_uses_up_no_prompts(tmp_path: Path) -> None:
    async with session_plane(tmp_path, breaker=4, redraws=3) as plane:
        await plane.asked(range(4), n=2)
        sessions = await plane.claim()
        while len(sessions) < 8:
            sessions += await plane.claim()
        for session in sessions:
            assert (await plane.end(session, "infra_fault", reason="no sandbox"))[0] == 200
        await plane.settled()
        assert await plane.claim(wait_s=0.0) == [], "after four in a row nothing is handed out for a while"
        (paused,) = plane.told("SessionsPaused")
        assert (paused["faults"], paused["reason"]) == (4, "no sandbox")
        assert not any(one.failed for one in plane.ledger.by_number.values())
        (probe,) = await plane.claim(most=8)
        assert (await plane.end(probe, "infra_fault", reason="no sandbox"))[0] == 200
        await plane.settled()
        assert plane.ledger.breaker.pause_s == 2.0
        agent = await plane.working("a")
        (probe,) = await plane.claim(most=8)
        await good(plane, agent, probe)
        await plane.end(probe)
        assert plane.told("SessionsResumed")
        assert len(await plane.claim(most=8)) == 7


async def test_a_group_that_failed_is_told_to_each_trainer(tmp_path: Path) -> None:
    async with session_plane(tmp_path, redraws=0) as plane:
        trainer = await plane.asked([0], n=2)
        agent = await plane.working("a")
        one, other = await plane.claim(most=2)
        waiting = plane.turning(other, PROMPT)
        await agent.work(1)
        await plane.end(one, "infra_fault", reason="no disk")
        failed = await trainer.wire.expect(Failed)
        assert "no disk" in failed.message
        refused(await waiting, 410, "ended")
        lost = (await plane.post("/v1/sessions/beat", {"worker": "w", "sessions": [other["id"]]}))[1]
        assert lost == {"lost": [other["id"]]}
        await plane.settled()
        await plane.kill()
        await plane.start()
        trainer = await plane.trainer(term=2)
        await trainer.ask([0], n=2)
        assert "no disk" in (await trainer.wire.expect(Failed)).message
        plane.exact()


# -- strangers ------------------------------------------------------------------------------------------


async def test_a_key_runs_its_own_sessions_and_no_others(plane: SessionPlane, monkeypatch: Any) -> None:
    agent, (ours, _) = await begun(plane)
    rows = {
        name: {
            "digest": hashlib.sha256(name.encode()).hexdigest(),
            "scopes": scopes,
            "expires_at": None,
            "revoked_at": None,
        }
        for name, scopes in (("lab", [GENERATE_SCOPE]), ("other", [GENERATE_SCOPE]), ("spot", ["join"]))
    }
    monkeypatch.setattr(RolloutStore, "snapshot_rows", lambda self, kind: rows)
    await plane.manager.callers.read()
    claim = json.dumps({"worker": "w", "most": 1}).encode()
    status, told = await sent(plane, "POST", "/v1/sessions/claim", claim, "spot")
    assert status == 401, told
    for method, path, body in (
        ("POST", f"{ours['path']}{GENERATE}", json.dumps(generate_body(PROMPT)).encode()),
        ("POST", f"/v1/sessions/{ours['id']}/end", b'{"outcome": "scored", "reward": 1.0}'),
        ("PUT", f"/v1/sessions/{ours['id']}/snapshot", b"x"),
        ("GET", f"/v1/sessions/{ours['id']}", b""),
    ):
        refused(await sent(plane, method, path, body, "lab"), 403, "not_yours")
    beat = json.dumps({"worker": "w", "sessions": [ours["id"]]}).encode()
    assert (await sent(plane, "POST", "/v1/sessions/beat", beat, "lab"))[1] == {"lost": [ours["id"]]}
    await good(plane, agent, ours)
    assert (await plane.end(ours, "infra_fault"))[0] == 200
    await plane.settled()
    status, told = await sent(plane, "POST", "/v1/sessions/claim", claim, "lab")
    (theirs,) = told["sessions"]
    turn = asyncio.create_task(
        sent(plane, "POST", f"{theirs['path']}{GENERATE}", json.dumps(generate_body(PROMPT)).encode(), "lab")
    )
    await drawn(agent, 2)
    assert (await turn)[0] == 200
    end = b'{"outcome": "scored", "reward": 1.0}'
    refused(await sent(plane, "POST", f"/v1/sessions/{theirs['id']}/end", end, "other"), 403, "not_yours")
    for _ in range(2):
        assert (await sent(plane, "POST", f"/v1/sessions/{theirs['id']}/end", end, "lab"))[0] == 200


async def test_two_agents_with_one_key_have_sessions_of_their_own(
    plane: SessionPlane, monkeypatch: Any
) -> None:
    """What one says that it runs keeps nothing of the other's alive; and what one of them loses the other gets, and
    keeps, whatever the first says later."""
    monkeypatch.setattr("gyre.rollouts.plane.session_workers.TAKEN_WITHIN_S", 0.2)
    row = {
        "digest": hashlib.sha256(b"lab").hexdigest(),
        "scopes": [GENERATE_SCOPE],
        "expires_at": None,
        "revoked_at": None,
    }
    monkeypatch.setattr(RolloutStore, "snapshot_rows", lambda self, kind: {"lab": row})
    await plane.manager.callers.read()
    await plane.asked([0], n=2)
    agent = await plane.working("a")

    async def asks(path: str, body: dict[str, Any]) -> tuple[int, Any]:
        return await sent(plane, "POST", path, json.dumps(body).encode(), "lab")

    async def claims(worker: str) -> dict[str, Any]:
        told = (await asks("/v1/sessions/claim", {"worker": worker, "most": 1, "wait_s": 20}))[1]
        session: dict[str, Any] = told["sessions"][0]
        return session

    first, second = await claims("x"), await claims("y")
    assert first["id"] != second["id"]
    for _ in range(5):  # x says that it runs both, and y says nothing
        await asyncio.sleep(0.1)
        told = (await asks("/v1/sessions/beat", {"worker": "x", "sessions": [first["id"], second["id"]]}))[1]
        assert told == {"lost": [second["id"]]}
    await asks("/v1/sessions/beat", {"worker": "y", "sessions": []})
    again = await claims("x")
    assert again["id"] == second["id"]
    body = generate_body(PROMPT)
    refused(await asks(f"{second['path']}{GENERATE}", body), 410, "lost")
    refused(
        await asks(
            f"/v1/sessions/{second['path'].removeprefix('/s/')}/end", {"outcome": "scored", "reward": 1.0}
        ),
        410,
        "lost",
    )
    turn = asyncio.create_task(asks(f"{again['path']}{GENERATE}", body))
    await drawn(agent, 2)
    assert (await turn)[0] == 200


async def test_an_end_without_a_turn_is_told_as_what_it_is(tmp_path: Path) -> None:
    async with session_plane(tmp_path) as plane:
        await plane.asked([0], n=1)
        (session,) = await plane.claim()
        assert (await plane.end(session))[1] == {"id": session["id"], "outcome": "infra_fault"}
        await until(lambda: bool(plane.told("SessionFault")))


async def test_a_key_whose_session_is_somebody_elses_hears_that_and_a_revoked_one_no_answer(
    plane: SessionPlane, monkeypatch: Any
) -> None:
    monkeypatch.setattr("gyre.rollouts.plane.session_workers.TAKEN_WITHIN_S", 0.0)
    rows: dict[str, dict[str, Any]] = {
        name: {
            "digest": hashlib.sha256(name.encode()).hexdigest(),
            "scopes": [GENERATE_SCOPE],
            "expires_at": None,
            "revoked_at": None,
        }
        for name in ("lab", "other")
    }
    monkeypatch.setattr(RolloutStore, "snapshot_rows", lambda self, kind: rows)
    await plane.manager.callers.read()
    await plane.asked([0], n=1)
    agent = await plane.working("a")
    claim = json.dumps({"worker": "w", "most": 1, "wait_s": 20}).encode()
    body, end = json.dumps(generate_body(PROMPT)).encode(), b'{"outcome": "scored", "reward": 1.0}'

    async def is_lost(session: dict[str, Any]) -> None:
        name = session["path"].removeprefix("/s/")
        refused(await sent(plane, "POST", f"{session['path']}{GENERATE}", body, "lab"), 410, "lost")
        refused(await sent(plane, "POST", f"/v1/sessions/{name}/end", end, "lab"), 410, "lost")
        refused(await sent(plane, "PUT", f"/v1/sessions/{name}/snapshot", b"x", "lab"), 410, "lost")

    (first,) = (await sent(plane, "POST", "/v1/sessions/claim", claim, "lab"))[1]["sessions"]
    await sent(plane, "POST", "/v1/sessions/beat", b'{"worker": "w", "sessions": []}', "lab")
    await is_lost(first)
    (theirs,) = (await sent(plane, "POST", "/v1/sessions/claim", claim, "other"))[1]["sessions"]
    await is_lost(first)
    turn = asyncio.create_task(sent(plane, "POST", f"{theirs['path']}{GENERATE}", body, "other"))
    (sample,) = await agent.work(1)
    rows["other"]["revoked_at"] = 1.0
    await plane.manager.callers.read()
    await agent.report({sample.work.row: 2}, {sample.work.row: "stop"})
    assert (await turn)[0] == 401
