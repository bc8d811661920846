"""Virtual time for tests: a clock that moves only when told to, and an event loop that moves it.

    clock = VirtualClock()
    result = run_virtual(scenario(), clock)      # an hour of `asyncio.sleep` takes no time

`VirtualTimeLoop` jumps to its next timer whenever nothing is left to run. Threads live in real time, so before a jump
the loop waits for threads that work for it: it counts those in executors (`asyncio.to_thread`) by itself, and others
are announced by a probe (`outside`).

Invariants:
- *time never falls*, and stands still while a callback runs or a thread works;
- *first set, first fired*, of timers for the same moment;
- *no jump over news*: a callback that a thread has handed over runs before the next timer;
- *no silent hang*: with nothing to run, no timer and no thread at work the loop raises `Deadlocked`;
- *no further than told*: at `stands_at` time stands still, and the loop waits for callbacks from other threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import math
import selectors
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

EPOCH_START = 1_700_000_000.0
"""The first `VirtualClock.time`: any moment, but the same in every run."""

THREAD_PATIENCE_S = 20.0
"""Real seconds that threads may take before a jump; after that a test should fail rather than hang."""


class Deadlocked(RuntimeError):
    """The loop has nothing to run and nothing to wait for, and its main task is not done."""


class VirtualClock:
    """A wall clock and a monotonic clock that move together, and only through `advance`."""

    def __init__(self, start: float = EPOCH_START) -> None:
        self._start = start
        self._elapsed_s = 0.0

    def time(self) -> float:
        """Seconds since 1970, as `time.time` gives them."""
        return self._start + self._elapsed_s

    def monotonic(self) -> float:
        """Seconds since the clock was made, as `time.monotonic` gives them."""
        return self._elapsed_s

    def advance(self, seconds: float) -> None:
        """Move the clock. Raises ValueError for a negative step."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds:g} s")
        self._elapsed_s += seconds


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose `time()` is the clock's `monotonic()`."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.stands_at = math.inf
        """Moment of `clock.monotonic()` at which time stops."""
        self._in_executors = 0
        self._probes: list[Callable[[], bool]] = []
        self._timers = itertools.count()
        super().__init__(_JumpingSelector(self))
        self._clock_resolution = 1e-6

    def time(self) -> float:
        return self.clock.monotonic()

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: contextvars.Context | None = None,
    ) -> asyncio.TimerHandle:
        timer = _OrderedTimer(when, callback, args, self, context)
        timer.number = next(self._timers)
        heapq.heappush(self._scheduled, timer)  # type: ignore[attr-defined]
        timer._scheduled = True  # type: ignore[attr-defined]
        return timer

    def outside(self, probe: Callable[[], bool]) -> None:
        """Let time stand still while `probe()` is true: a thread works that will call `call_soon_threadsafe`."""
        self._probes.append(probe)

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._in_executors += 1
        future.add_done_callback(self._left_executor)
        return future

    def _left_executor(self, _: object) -> None:
        self._in_executors -= 1

    @property
    def waits_for_threads(self) -> bool:
        return self._in_executors > 0 or any(probe() for probe in self._probes)


class _OrderedTimer(asyncio.TimerHandle):
    """A timer that fires in the order of setting among timers for one moment; a plain heap promises no order."""

    __slots__ = ("number",)
    number: int

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, _OrderedTimer):
            return NotImplemented
        return (self.when(), self.number) < (other.when(), other.number)


class _JumpingSelector(selectors.DefaultSelector):
    """A selector that moves the clock when the loop asks it to wait."""

    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        give_up_at = time.monotonic() + THREAD_PATIENCE_S
        while self._loop.waits_for_threads:
            ready = super().select(0.05)
            if ready:
                return ready
            if time.monotonic() > give_up_at:
                raise Deadlocked(f"a thread was at work for more than {THREAD_PATIENCE_S:g} real seconds")
        room_s = self._loop.stands_at - self._loop.time()
        if math.isfinite(room_s) and (timeout is None or timeout > room_s):
            self._loop.clock.advance(max(0.0, room_s))
            return super().select(None)
        if timeout is None:
            # Last chance: a thread that nobody has announced may be about to call.
            ready = super().select(1.0)
            if not ready:
                raise Deadlocked("nothing to run, no timer, no thread at work")
            return ready
        self._loop.clock.advance(timeout)
        return []


def run_virtual(main: Coroutine[Any, Any, T], clock: VirtualClock | None = None) -> T:
    """Run a coroutine to its end in a `VirtualTimeLoop` of its own."""
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(clock or VirtualClock())) as runner:
        return runner.run(main)
