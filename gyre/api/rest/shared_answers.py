"""One answer for all who ask the same at the same time.

Every page that shows a job hears of an event at once, and asks the same questions in the same moment. Each answer costs
the process of the control loop some milliseconds of its interpreter, which the loop then waits for.

Invariants:
- *never older than the question*: an answer is shared only by those who had asked before its making began;
- *one at a time*: of a question one answer is made at a time, however many ask.

This module must not know what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any

from fastapi.routing import APIRoute
from starlette.requests import Request
from starlette.responses import Response

Make = Callable[[], Awaitable[Response]]


class SharedAnswers:
    """The answers of an app that are being made. Used on the loop that the app runs on."""

    def __init__(self) -> None:
        self._making: dict[str, list[asyncio.Task[Response]]] = {}
        """Of each question the answer that is being made, and the one after it, which nobody has begun."""

    async def answer(self, question: str, make: Make) -> Response:
        """What `make` returns, called by now or by somebody who asks the same after this. Raises what it raises."""
        making = self._making.setdefault(question, [])
        if len(making) < 2:
            making.append(asyncio.create_task(self._make(question, make, [*making])))
        return await asyncio.shield(making[-1])  # others wait for it who do not end with this one

    async def _make(self, question: str, make: Make, before: list[asyncio.Task[Response]]) -> Response:
        if before:
            await asyncio.wait(before)
        try:
            return await make()
        finally:
            making = self._making[question]
            making.pop(0)
            if not making:
                del self._making[question]


class SharedRoute(APIRoute):
    """A route whose answer depends on path and query alone, and is whole: no stream."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def shared(request: Request) -> Response:
            answers: SharedAnswers = request.app.state.answers
            return await answers.answer(f"{request.url.path}?{request.url.query}", partial(handler, request))

        return shared
