"""A vertex in this process: a host, the thread on which its calls run, and threads for control calls."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from gyre.errors import VertexDied
from gyre.testing.in_process.host import InProcessHost, Killed


class InProcessVertex:
    """A host and the one thread on which its calls run, in the order in which they came."""

    def __init__(self, host: InProcessHost) -> None:
        self.host = host
        self.is_cut_off = False
        """Whether the master can no longer reach it."""
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._controls: set[Future[Any]] = set()
        """The pending ones that are control calls."""
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
        """The future ends with what `call` returns or raises, or with VertexDied."""
        future = self._expect()
        self._calls.put((future, call))
        return future

    def control(self, call: Callable[[], Any]) -> Future[Any]:
        """As `submit`, at once and on a thread of its own, also while the vertex hangs."""
        future = self._expect(is_control=True)
        if not future.done():
            name = f"{self._thread.name}.control"
            threading.Thread(target=self._run, args=(future, call), name=name, daemon=True).start()
        return future

    def _expect(self, *, is_control: bool = False) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_running_or_notify_cancel()  # who no longer waits for it does not withdraw it
        with self._lock:
            if not (self.dead or (is_control and self.is_cut_off)):
                self._pending.add(future)
                if is_control:
                    self._controls.add(future)
                return future
        future.set_exception(lost(self.host.vertex, self.host.incarnation))
        return future

    def hang(self) -> None:
        """From now on nothing begins, returns or reports progress; control calls go on."""
        self._awake.clear()

    def wake(self) -> None:
        self._awake.set()

    def cut_off(self) -> None:
        """Let it live on where the master cannot reach it: pending and later control calls end with VertexDied."""
        with self._lock:
            self.is_cut_off = True
            lost_calls, self._controls = self._controls, set()
            self._pending -= lost_calls
        for future in lost_calls:
            future.set_exception(lost(self.host.vertex, self.host.incarnation))

    def kill(self) -> None:
        """Its pending and later calls end with VertexDied. Safe to repeat, and to call from its own thread."""
        with self._lock:
            if self.dead:
                return
            self.host.mortal.dead.set()
            pending, self._pending = self._pending, set()
        self._awake.set()
        self._calls.put(None)
        for future in pending:
            future.set_exception(lost(self.host.vertex, self.host.incarnation))
        self.host.die()

    def join(self, timeout_s: float) -> bool:
        """Wait for its threads of calls and of `fit()`. Whether they have ended."""
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive() and self.host.join_fit(timeout_s)

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            self._awake.wait()
            if self.dead:
                return
            self._run(*entry)

    def _run(self, future: Future[Any], call: Callable[[], Any]) -> None:
        try:
            value, error = call(), None
        except Killed:
            return
        except BaseException as raised:
            value, error = None, raised
        if threading.current_thread() is self._thread:
            self._awake.wait()
        with self._lock:
            known = future in self._pending
            self._pending.discard(future)
            self._controls.discard(future)
        if known and error is not None:
            future.set_exception(error)
        elif known:
            future.set_result(value)


def lost(vertex: str, incarnation: int) -> VertexDied:
    return VertexDied(
        f"{vertex} (incarnation {incarnation}) was lost during a call: it was killed.",
        details={"vertex": vertex, "incarnation": incarnation},
    )
