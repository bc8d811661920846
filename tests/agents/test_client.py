"""The client and the relay over real sockets: a manager that dies and comes back elsewhere, and what SDKs see of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import openai
import pytest

from gyre.agents import BudgetSpent, Outcome, Session, SessionLost
from gyre.agents.client import Claimed, SessionClient
from gyre.agents.outcomes import SessionRefused, outcome_of_error
from gyre.agents.relay import Relay
from gyre.errors import Unauthorized
from gyre.rollouts.protocol.endpoint import read_endpoint, read_trust, write_endpoint
from tests.agents.manager import SECRET, Manager, answered, refused, served
from tests.waits import GENEROUS_S


@asynccontextmanager
async def client_of(directory: Any, worker: str = "agent-0") -> AsyncIterator[SessionClient]:
    client = SessionClient(lambda: read_endpoint(directory), worker=worker, tls=lambda: read_trust(directory))
    try:
        yield client
    finally:
        await client.close()


async def test_a_session_from_its_claim_to_its_end(tmp_path: Any) -> None:
    manager = Manager()
    (one,) = manager.add(task={"answer": "4"})
    async with served(manager) as url, client_of(tmp_path) as client:
        write_endpoint(tmp_path, {"url": url, "secret": SECRET, "token": "t"})
        (claimed,) = await client.claim(4, 1.0)
        assert (claimed.id, dict(claimed.task), claimed.name) == (one.id, {"answer": "4"}, f"{one.id}.1")
        assert await client.claim(4, 0.0) == []
        assert await client.beat([claimed.id]) == set()
        session = Session(claimed, client)
        assert (await session.chat([{"role": "user", "content": "2+2"}])).message["content"] == "yes"
        turn = await session.generate([1, 2, 3])
        assert (turn.token_ids, turn.logprobs, turn.finish_reason) == ([6, 2], [-0.5, -0.5], "stop")
        assert session.turns_left == 14
        await client.snapshot(claimed, b"state")
        assert one.snapshot == b"state"
        await client.end(claimed, Outcome("scored", 1.0))
        await client.end(claimed, Outcome("scored", 1.0))  # the same again is answered the same
        with pytest.raises(SessionRefused, match="ended"):
            await client.end(claimed, Outcome("scored", 0.0))
        with pytest.raises(SessionLost):
            await session.chat([{"role": "user", "content": "more"}])


async def test_requests_go_on_with_the_next_manager_at_another_port(tmp_path: Any) -> None:
    manager = Manager()
    (one,) = manager.add()
    async with client_of(tmp_path) as client:
        waiting = asyncio.create_task(client.claim(1, 10.0))
        await asyncio.sleep(0.05)  # there is no file yet
        async with served(manager) as url:
            write_endpoint(tmp_path, {"url": url, "secret": SECRET, "token": "t"})
            (claimed,) = await asyncio.wait_for(waiting, GENEROUS_S)
        session = Session(claimed, client)
        asking = asyncio.create_task(session.chat([{"role": "user", "content": "hello"}]))
        await asyncio.sleep(0.3)
        assert not asking.done()
        assert client.away_since is not None
        async with served(manager) as url:
            write_endpoint(tmp_path, {"url": url, "secret": SECRET, "token": "t"})
            assert (await asyncio.wait_for(asking, GENEROUS_S)).content == "yes"
        assert (one.drawn, client.away_since) == (1, None)


@pytest.mark.parametrize("status", [409, 429, 500, 503])
async def test_what_helps_by_asking_again_is_asked_again_as_a_repetition(tmp_path: Any, status: int) -> None:
    manager = Manager()
    manager.add()
    heard: list[str] = []
    handle = manager.handle

    async def flaky(method: str, path: str, headers: Any, body: bytes) -> Any:
        if path.startswith("/s/"):
            heard.append(headers.get("x-stainless-retry-count", "0"))
            if len(heard) < 3:
                return refused(status, "busy")
        return await handle(method, path, headers, body)

    manager.handle = flaky  # type: ignore[method-assign]
    async with served(manager) as url, client_of(tmp_path) as client:
        write_endpoint(tmp_path, {"url": url, "secret": SECRET, "token": "t"})
        (claimed,) = await client.claim(1, 1.0)
        await Session(claimed, client).chat([{"role": "user", "content": "hello"}])
    assert heard == ["0", "1", "2"]


async def test_a_wrong_secret_is_final(tmp_path: Any) -> None:
    async with served(Manager()) as url, client_of(tmp_path) as client:
        write_endpoint(tmp_path, {"url": url, "secret": "another", "token": "t"})
        with pytest.raises(Unauthorized, match="unauthorized"):
            await client.claim(1, 0.0)


async def test_what_is_no_session_is_told(tmp_path: Any) -> None:
    manager = Manager()

    async def strange(method: str, path: str, headers: Any, body: bytes) -> Any:
        return answered({"sessions": [{"id": "x"}]})

    manager.handle = strange  # type: ignore[method-assign]
    async with served(manager) as url, client_of(tmp_path) as client:
        write_endpoint(tmp_path, {"url": url, "secret": SECRET, "token": "t"})
        with pytest.raises(ValueError, match="handed out what is no session"):
            await client.claim(1, 0.0)


# -- SDKs --------------------------------------------------------------------------------------------


@asynccontextmanager
async def guest(tmp_path: Any, manager: Manager) -> AsyncIterator[tuple[Session, Relay]]:
    """A session whose SDKs ask at a relay."""
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(served(manager))
        write_endpoint(tmp_path, {"url": url, "secret": SECRET, "token": "t"})
        client = await stack.enter_async_context(client_of(tmp_path))
        relay = Relay()
        await relay.start()
        stack.push_async_callback(relay.close)
        (claimed,) = await client.claim(1, 1.0)
        session = Session(claimed, client)
        relay.admit(session)
        yield session, relay


async def ask(session: Session, headers: dict[str, str] | None = None, **keys: Any) -> Any:
    async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key, **keys) as sdk:
        return await sdk.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "hi"}], extra_headers=headers
        )


async def test_an_sdk_asks_through_the_relay_and_never_sees_the_job_s_secret(tmp_path: Any) -> None:
    manager = Manager()
    (one,) = manager.add()
    async with guest(tmp_path, manager) as (session, _):
        assert (await ask(session)).choices[0].message.content == "yes"
        assert SECRET not in session.api_key
        assert (one.drawn, session.turns_left) == (1, 15)


async def test_an_sdk_that_gives_up_after_two_seconds_outlives_a_manager_that_is_away_for_longer(
    tmp_path: Any,
) -> None:
    manager = Manager()
    (one,) = manager.add()
    async with guest(tmp_path, manager) as (session, _):
        write_endpoint(tmp_path, {"url": "http://127.0.0.1:9", "secret": SECRET, "token": "t"})
        asking = asyncio.create_task(ask(session, max_retries=0))
        await asyncio.sleep(1.0)
        assert not asking.done()
        async with served(manager) as url:
            write_endpoint(tmp_path, {"url": url, "secret": SECRET, "token": "t"})
            assert (await asyncio.wait_for(asking, GENEROUS_S)).choices[0].message.content == "yes"
    assert one.drawn == 1


async def test_a_relay_counts_equal_requests_that_an_sdk_has_heard(tmp_path: Any) -> None:
    """So that no manager has to know what was heard. What an SDK asks again, or nobody heard, is the same request."""
    manager = Manager()
    manager.add()
    numbers: list[str | None] = []
    handle = manager.handle

    async def heard(method: str, path: str, headers: Any, body: bytes) -> Any:
        if path.endswith("/completions"):
            numbers.append({name.lower(): told for name, told in headers.items()}.get("x-gyre-number"))
        return await handle(method, path, headers, body)

    manager.handle = heard  # type: ignore[method-assign]
    async with guest(tmp_path, manager) as (session, _):
        await ask(session)
        await ask(session)
        await ask(session, {"x-stainless-retry-count": "1"})
        manager.latency_s = 0.5
        with pytest.raises(openai.APITimeoutError):
            await ask(session, timeout=0.1, max_retries=0)
        await ask(session)
        await session.chat([{"role": "user", "content": "another"}])
        await session.chat([{"role": "user", "content": "another"}])
    assert numbers == ["0", "1", "1", "2", "2", "0", "1"]


async def test_an_sdk_s_refusals_are_known_for_what_they_mean(tmp_path: Any) -> None:
    manager = Manager()
    (one,) = manager.add(max_turns=1)
    async with guest(tmp_path, manager) as (session, relay):
        await ask(session)
        with pytest.raises(openai.UnprocessableEntityError) as spent:
            await ask(session)
        outcome = outcome_of_error(spent.value, 0.25)
        assert (outcome.kind, outcome.reward) == ("truncated", 0.25)
        session.turns_made = 0
        one.claims += 1  # another worker has it
        with pytest.raises(openai.APIStatusError) as lost:
            await ask(session)
        with pytest.raises(SessionLost):
            outcome_of_error(lost.value)
        relay.dismiss(session)
        with pytest.raises(openai.APIStatusError) as over:
            await ask(session)
        assert over.value.status_code == 410


async def test_a_relay_asks_for_the_session_s_own_key(tmp_path: Any) -> None:
    manager = Manager()
    manager.add()
    async with guest(tmp_path, manager) as (session, _), aiohttp.ClientSession() as http:
        for headers in ({}, {"Authorization": "Bearer x"}, {"x-api-key": SECRET}):
            async with http.post(f"{session.base_url}/chat/completions", json={}, headers=headers) as told:
                assert told.status == 401
        own = {"x-api-key": session.api_key}
        body = {"messages": [{"role": "user", "content": "x"}]}
        async with http.post(f"{session.base_url}/chat/completions", json=body, headers=own) as told:
            assert told.status == 200


def test_a_session_s_dice_are_its_own_and_the_same_again() -> None:
    async def dice(name: str, group: int) -> tuple[float, int]:
        claimed = Claimed(name, "train", group, 0, 0, f"/s/{name}.1", {}, [], {}, 0, None, 60.0, 16, 100)
        session = Session(claimed, SessionClient(lambda: None, worker="w"))
        return session.rng.random(), session.seed

    first, again, other = (asyncio.run(dice(name, 7)) for name in ("a-7-0", "a-7-0", "a-7-1"))
    assert first == again
    assert first[0] != other[0]
    assert first[1] == other[1], "members of a group begin with the same environment"
    assert asyncio.run(dice("a-8-0", 8))[1] != first[1]


def test_budgets_are_known_in_a_chain_of_causes() -> None:
    error = RuntimeError("the agent's loop")
    error.__cause__ = BudgetSpent("turns")
    assert outcome_of_error(error, 0.5) == Outcome("truncated", 0.5, "turns")


async def test_a_relay_tells_an_sdk_what_is_final_once(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = Manager()
    (one,) = manager.add()
    monkeypatch.setattr("gyre.agents.client.MOST_ANSWER_BYTES", 1000)
    async with guest(tmp_path, manager) as (session, _):
        manager.policy = lambda messages: "yes" * 1000
        with pytest.raises(openai.UnprocessableEntityError, match="more than 1000 bytes"):
            await ask(session)
        assert len(one.turns) == 1
        session.over = True
        with pytest.raises(openai.APIStatusError) as caught:
            await ask(session)
        assert caught.value.status_code == 410
        with pytest.raises(SessionLost):
            outcome_of_error(caught.value)
