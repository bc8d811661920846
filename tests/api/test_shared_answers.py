"""Who asks the same at the same time gets one answer, which is never older than the question."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from gyre.api.rest import create_app
from gyre.api.rest.shared_answers import SharedAnswers
from tests.doubles.standing_job import StandingJob

VIEWERS = 20


class Server:
    """Answers with how often it was asked, once it may."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_answer = asyncio.Event()
        self.answers = SharedAnswers()

    async def make(self) -> Response:
        self.begun += 1
        number = self.begun
        await self.may_answer.wait()
        return Response(str(number))

    def ask(self, question: str = "view") -> asyncio.Task[Response]:
        return asyncio.create_task(self.answers.answer(question, self.make))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def in_loop(test: Callable[[Server], Awaitable[None]]) -> None:
    async def run() -> None:
        await test(Server())

    asyncio.run(run())


def test_who_asks_while_an_answer_is_made_shares_the_next_one() -> None:
    async def test(server: Server) -> None:
        first = server.ask()
        await settled()
        later = [server.ask() for _ in range(VIEWERS)]
        await settled()
        assert server.begun == 1
        server.may_answer.set()
        assert (await first).body == b"1"
        assert {(await one).body for one in later} == {b"2"}
        assert (await server.ask()).body == b"3"

    in_loop(test)


def test_other_questions_are_not_waited_for() -> None:
    async def test(server: Server) -> None:
        asked = [server.ask("view"), server.ask("now")]
        await settled()
        assert server.begun == 2
        server.may_answer.set()
        assert {(await one).body for one in asked} == {b"1", b"2"}

    in_loop(test)


def test_who_goes_takes_nobody_along() -> None:
    async def test(server: Server) -> None:
        first = server.ask()
        await settled()
        leaves, stays = server.ask(), server.ask()
        await settled()
        first.cancel()
        leaves.cancel()
        server.may_answer.set()
        assert (await stays).body == b"2"

    in_loop(test)


def test_a_failure_is_everybody_s_and_the_next_answer_is_made_anew() -> None:
    async def test(server: Server) -> None:
        async def fail() -> Response:
            server.begun += 1
            await settled()
            raise ValueError("no view")

        asked = [asyncio.create_task(server.answers.answer("view", fail)) for _ in range(4)]
        for one in asked:
            with pytest.raises(ValueError, match="no view"):
                await one
        assert server.begun == 2
        server.may_answer.set()
        assert (await server.ask()).body == b"3"

    in_loop(test)


def test_twenty_viewers_cost_a_master_two_views(monkeypatch: pytest.MonkeyPatch) -> None:
    with StandingJob() as job:
        seen = 0
        view = job.master.view

        def counted() -> Any:
            nonlocal seen
            seen += 1
            return view()

        async def look() -> list[httpx.Response]:
            transport = httpx.ASGITransport(create_app(job.master, token=None))
            async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
                await http.get("/api/v1/jobs/small")  # asks for the job's name as well
                monkeypatch.setattr(job.master, "view", counted)
                return await asyncio.gather(*(http.get("/api/v1/jobs/small") for _ in range(VIEWERS)))

        found = asyncio.run(look())
        assert {one.status_code for one in found} == {200}
        assert len({one.content for one in found}) == 1
        assert seen == 2
