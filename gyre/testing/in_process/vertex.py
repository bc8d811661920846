"""A vertex in this process: a host, and the one thread on which its calls run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from gyre.errors import VertexLost
from gyre.testing.in_process.host import InProcessHost, Killed


class InProcessVertex:
    """A host and the one thread on which its calls run, in the order in which they came."""

    def __init__(self, host: InProcessHost) -> None:
        self.host = host
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._awake = host.mortal.awake
        self._thread = threading.Thread(
            target=self._work, name=f"{host.vertex}.{host.incarnation}", daemon=True
        )
        self._thread.start()

    @property
    def dead(self) -> bool:
        return self.host.mortal.dead.is_set()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """The future ends with what `call` returns or raises, or with VertexLost."""
        future: Future[Any] = Future()
        with self._lock:
            if not self.dead:
                self._pending.add(future)
                self._calls.put((future, call))
                return future
        future.set_exception(lost(self.host.vertex, self.host.incarnation))
        return future

    def hang(self) -> None:
        """From now on nothing begins, returns or reports progress; control calls go on."""
        self._awake.clear()

    def wake(self) -> None:
        self._awake.set()

    def kill(self) -> None:
        """Its pending and later calls end with VertexLost. Safe to repeat, and to call from its own thread."""
        with self._lock:
            if self.dead:
                return
            self.host.mortal.dead.set()
            pending, self._pending = self._pending, set()
        self._awake.set()
        self._calls.put(None)
        for future in pending:
            future.set_exception(lost(self.host.vertex, self.host.incarnation))

    def join(self, timeout_s: float) -> bool:
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, call = entry
            self._awake.wait()
            if self.dead:
                return
            try:
                value = call()
            except Killed:
                return
            except BaseException as error:
                self._awake.wait()
                if self._settles(future):
                    future.set_exception(error)
            else:
                self._awake.wait()
                if self._settles(future):
                    future.set_result(value)

    def _settles(self, future: Future[Any]) -> bool:
        with self._lock:
            known = future in self._pending
            self._pending.discard(future)
        return known


def lost(vertex: str, incarnation: int) -> VertexLost:
    return VertexLost(
        f"{vertex} (incarnation {incarnation}) was lost during a call: it was killed.",
        details={"vertex": vertex, "incarnation": incarnation},
    )
