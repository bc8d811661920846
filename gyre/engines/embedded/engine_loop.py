"""The thread that steps the core.

Invariants:
- *one thread*: nobody else touches the core; others send it functions, which run between two steps;
- *nobody waits for ever*: when the loop ends, by `close` or by an error, every request gets its ending and every
  function that was sent its answer or LoopEnded.

This module must not know about HTTP.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from gyre.engines.dialect import FinishKind
from gyre.engines.embedded.core import EngineCore
from gyre.engines.embedded.engine_requests import Ending, RequestUpdate
from gyre.engines.embedded.errors import LoopEnded

T = TypeVar("T")

_log = logging.getLogger(__name__)
_RATE_WINDOW_S = 1.0

SHUTTING_DOWN = Ending(FinishKind.ABORT, message="The engine is shutting down.")


class EngineLoop:
    """`build` makes the core, in the loop's thread; `post` is called there with the progress of each step."""

    def __init__(
        self,
        build: Callable[[], EngineCore],
        post: Callable[[list[RequestUpdate]], None],
        *,
        threads: int = 1,
    ) -> None:
        self._build = build
        self._post = post
        self._threads = threads
        self._wake = threading.Condition()
        self._asked: deque[tuple[Callable[[EngineCore], Any], Future[Any]]] = deque()
        self._closing = False
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="engine-loop", daemon=True)
        self._rate_since_s = time.monotonic()
        self._rate_tokens = 0
        self.tokens_per_s = 0.0

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._ended

    def start(self) -> None:
        """Start it and wait until the core is built. Raises what building it raised."""
        self._thread.start()
        self.ask(lambda _: None).result()

    def ask(self, function: Callable[[EngineCore], T]) -> Future[T]:
        """Have the loop call `function` between two steps."""
        future: Future[T] = Future()
        with self._wake:
            if self._ended:
                future.set_exception(_ended())
            else:
                self._asked.append((function, future))
                self._wake.notify()
        return future

    def close(self, within_s: float = 10.0) -> None:
        """End every request and the thread."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread.ident is not None:
            self._thread.join(within_s)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        core: EngineCore | None = None
        error: Exception | None = None
        try:
            with torch.inference_mode():
                core = self._build()
                self._serve(core)
        except Exception as raised:
            error = raised
            _log.exception("The engine's loop ended by an error.")
        finally:
            self._end(core, error)

    def _serve(self, core: EngineCore) -> None:
        while True:
            with self._wake:
                while not (self._asked or self._closing or core.can_step):
                    self.tokens_per_s = 0.0
                    self._wake.wait()
                asked, self._asked = self._asked, deque()
                if self._closing:
                    self._asked = asked
                    return
            for function, future in asked:
                _answer(function, core, future)
            core.step()
            self._send(core)

    def _send(self, core: EngineCore) -> None:
        updates = core.take_updates()
        if updates:
            self._post(updates)
            self._rate_tokens += sum(len(update.tokens) for update in updates)
        now_s = time.monotonic()
        if now_s - self._rate_since_s >= _RATE_WINDOW_S:
            self.tokens_per_s = self._rate_tokens / (now_s - self._rate_since_s)
            self._rate_since_s, self._rate_tokens = now_s, 0

    def _end(self, core: EngineCore | None, error: Exception | None) -> None:
        with self._wake:
            self._ended = True
            asked, self._asked = self._asked, deque()
        for _, future in asked:
            future.set_exception(error if core is None and error is not None else _ended())
        if core is not None:
            ending = SHUTTING_DOWN
            if error is not None:
                ending = Ending(
                    FinishKind.ABORT,
                    message=f"The engine failed: {type(error).__name__}: {error}",
                    status_code=500,
                )
            core.abort_all(ending)
            self._send(core)


def _answer(function: Callable[[EngineCore], T], core: EngineCore, future: Future[T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function(core))
    except Exception as error:
        future.set_exception(error)


def _ended() -> LoopEnded:
    return LoopEnded("The engine's loop has ended.", hint="Start the engine again; its log says why.")
