"""An asyncio loop on a thread of its own, for vertices that talk beside their host's calls.

This module must not know what runs in the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import traceback
from collections.abc import Callable, Coroutine
from typing import Any

CLOSE_TIMEOUT_S = 5.0
"""How long sockets may take to close after their handlers have ended: no time, unless the machine is busy."""

STOP_TIMEOUT_S = 20.0
"""How long an engine may take to end by itself: SGLang takes ten seconds."""


class LoopThread:
    """An asyncio loop on its own thread, and the first error that ended something in it."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.error: BaseException | None = None
        self._main: asyncio.Task[None] | None = None
        self.closing: Callable[[], Coroutine[Any, Any, None]] | None = None
        """Closes the loop's sockets, however it ended, because in tests several vertices share a process."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            with contextlib.suppress(SystemExit):  # a test killed the vertex: its tasks end with it
                self.loop.run_forever()
            main = [self._main] if self._main is not None else []
            for tasks in (
                main,
                asyncio.all_tasks(self.loop),
            ):  # the main one first, which ends others in order
                for task in tasks:
                    task.cancel()
                    with contextlib.suppress(BaseException):  # the error was reported, or is a test's kill
                        self.loop.run_until_complete(task)
            if self.closing is not None:
                self.loop.run_until_complete(asyncio.wait_for(self.closing(), CLOSE_TIMEOUT_S))
        finally:
            self.loop.close()

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Start the loop's main task, which runs until it ends by itself or by `stop`."""

        async def guarded() -> None:
            try:
                await work
            except (asyncio.CancelledError, SystemExit):
                raise
            except BaseException as error:
                self.fail(error)

        async def start() -> None:
            self._main = asyncio.create_task(guarded())

        self.call(start(), 5.0)

    def wait(self, timeout_s: float) -> None:
        """Wait until the main task has ended, at most `timeout_s`."""
        if self._main is not None:
            self.call(asyncio.wait([self._main], timeout=timeout_s), timeout_s + 1.0)

    def call(self, work: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        """Run `work` in the loop, and wait for what it returns. Raises TimeoutError, and RuntimeError if the loop has
        ended."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self.loop).result(timeout_s)
        finally:
            if self.loop.is_closed() or not self._thread.is_alive():
                work.close()  # the loop may have ended before it began this

    def fail(self, error: BaseException) -> None:
        if self.error is None:
            self.error = error
            traceback.print_exception(error)

    def stop(self) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended already
            self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=STOP_TIMEOUT_S)
