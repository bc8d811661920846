"""Threads for the user's plain functions: one for each call, which nobody waits for when the process ends.

Python cannot end a thread. One that hangs goes on after its session has ended, and is counted (`running`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class DaemonThreads(Executor):
    """A thread for each call. Unlike those of a ThreadPoolExecutor they do not hold up the end of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.running = 0

    def submit(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            try:
                if future.set_running_or_notify_cancel():
                    try:
                        future.set_result(function(*args, **kwargs))
                    except BaseException as error:  # also SystemExit: it ends the call, and not the process
                        future.set_exception(error)
            finally:
                with self._lock:
                    self.running -= 1

        with self._lock:
            self.running += 1
        threading.Thread(target=run, name="gyre-agent-call", daemon=True).start()
        return future
