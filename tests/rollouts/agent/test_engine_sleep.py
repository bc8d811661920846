"""What a local instance asks of its engine between windows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from gyre.engines.errors import EngineError
from gyre.engines.http_client import EngineClient
from gyre.rollouts.agent.engine_sleep import fall_asleep, wake_up
from gyre.testing.clock import VirtualClock


class Engine:
    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.status = 200
        self.busy = 0
        """So many flushes are refused yet."""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.json()))
        if request.path == "/flush_cache" and self.busy:
            self.busy -= 1
            return web.Response(status=400, text="pending requests")
        return web.Response(status=self.status)


class Hurried(VirtualClock):
    """A second passes with each look at it."""

    def monotonic(self) -> float:
        self.advance(1.0)
        return super().monotonic()


@pytest.fixture
async def engine() -> AsyncIterator[tuple[Engine, EngineClient]]:
    engine = Engine()
    application = web.Application()
    application.router.add_post("/{path:.*}", engine.answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    async with EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}") as client:
        yield engine, client
    await runner.cleanup()


async def test_it_gives_its_kv_memory_back_and_takes_it_again(engine: tuple[Engine, EngineClient]) -> None:
    fake, client = engine
    assert (await fall_asleep(client)).error == ""
    await wake_up(client)
    assert fake.asked == [
        ("/flush_cache", {}),
        ("/release_memory_occupation", {"tags": ["kv_cache"]}),
        ("/resume_memory_occupation", {"tags": ["kv_cache"]}),
    ]


async def test_memory_is_asked_of_an_idle_engine_only(engine: tuple[Engine, EngineClient]) -> None:
    """SGLang's scheduler dies of it otherwise."""
    fake, client = engine
    fake.busy = 3
    assert (await fall_asleep(client)).error == ""
    assert [path for path, _ in fake.asked] == ["/flush_cache"] * 4 + ["/release_memory_occupation"]

    fake.asked.clear()
    fake.busy = 10**9
    said = await fall_asleep(client, Hurried())
    assert "pending requests" in said.error
    assert "/release_memory_occupation" not in [path for path, _ in fake.asked]


async def test_an_engine_that_cannot_says_so_and_nobody_waits_for_it(
    engine: tuple[Engine, EngineClient],
) -> None:
    fake, client = engine
    fake.status = 404
    assert "404" in (await fall_asleep(client)).error
    with pytest.raises(EngineError):  # of no use any more: the agent starts another
        await wake_up(client)


async def test_without_an_engine_there_is_nothing_to_give_back() -> None:
    assert (await fall_asleep(None)).error == "there is no engine"
    await wake_up(None)
