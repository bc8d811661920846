"""A pool of processes that run a reward function, with a time limit for each sample.

Invariants:
- *a failure is never a reward*: a sample whose function raised, hung or crashed its process ends in an error, never in
  a number. The exception is `stuck_score`, the job's reward for samples that hang or crash each time; they are counted
  and logged;
- *retried before told*: a sample that hung or crashed is tried again in a new process, up to `attempts` times; an
  exception is the function's answer, and is raised at once;
- *nobody is left behind*: the processes end with the pool, and see the end of its process.

This module must not know of groups, samples or tokens.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import subprocess
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from gyre.config.sections import RewardSettings
from gyre.errors import UserCodeError
from gyre.workloads.rewards.worker import receive, send

Texts = tuple[str, str, Mapping[str, Any]]
"""A prompt, its completion, and the group's meta."""

_SHOWN = 400
"""Characters of a text that an error quotes."""


@dataclass(slots=True)
class _Process:
    process: subprocess.Popen[bytes]
    deadline: float
    ready: bool = False
    job: int | None = None
    selector_key: IO[bytes] = field(init=False)

    def __post_init__(self) -> None:
        assert self.process.stdout is not None
        self.selector_key = self.process.stdout

    def ask(self, content: Any) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # the process has died: its stdout shows it
            send(self.process.stdin, content)

    def end(self) -> None:
        self.process.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        self.process.wait()


def _end_all(processes: list[_Process]) -> None:
    for process in processes:
        process.end()
    processes.clear()


class RewardPool:
    """Processes are started when there is work for them, and kept until `close`. Not thread-safe."""

    def __init__(self, settings: RewardSettings, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._processes: list[_Process] = []
        self.stuck = 0
        """Samples that got `stuck_score`."""
        # The processes end even if nobody calls `close`.
        weakref.finalize(self, _end_all, self._processes)

    def score(self, work: Sequence[Texts], *, on_scored: Callable[[], None] = lambda: None) -> list[float]:
        """The rewards of these samples, in order. `on_scored` is called after each.

        Raises UserCodeError if the function raised or did not return a finite number, or, without a `stuck_score`,
        if a sample hung or crashed in all its attempts.
        """
        rewards: list[float | None] = [None] * len(work)

        def failed(job: int | None, what: str) -> None:
            worth = self._failed(work, job, tries, waiting, what)
            if job is not None and worth is not None:
                rewards[job] = worth
                on_scored()

        waiting = deque(range(len(work)))
        tries = [0] * len(work)
        try:
            while any(reward is None for reward in rewards):
                self._hand_out(work, waiting)
                for process in self._heard():
                    job, process.job = process.job, None
                    try:
                        answer = receive(process.selector_key)
                    except EOFError:
                        self._drop(process)
                        code = process.process.returncode
                        if job is not None or not process.ready:  # an idle process may end
                            failed(job, f"its process ended with status {code}")
                        continue
                    if not process.ready:
                        self._began(process, answer)
                        continue
                    assert job is not None
                    process.deadline = math.inf  # it is idle
                    rewards[job] = self._number(work[job], answer)
                    on_scored()
                for process in [one for one in self._processes if self._clock() >= one.deadline]:
                    job = process.job
                    self._drop(process)
                    limit = self._settings.timeout_s if process.ready else self._settings.start_timeout_s
                    failed(job, f"it took longer than {limit:g} s")
        except BaseException:
            for process in [one for one in self._processes if one.job is not None or not one.ready]:
                self._drop(process)  # nobody wants its result any more
            raise
        return [reward for reward in rewards if reward is not None]

    def close(self) -> None:
        for process in list(self._processes):
            self._drop(process)
        self._selector.close()

    # -- processes ----------------------------------------------------------------------------------

    def _hand_out(self, work: Sequence[Texts], waiting: deque[int]) -> None:
        idle = [one for one in self._processes if one.ready and one.job is None]
        for process in idle[: len(waiting)]:
            process.job = waiting.popleft()
            process.deadline = self._clock() + self._settings.timeout_s
            process.ask(list(work[process.job]))
        starting = sum(not one.ready for one in self._processes)
        room = self._settings.processes - len(self._processes)
        for _ in range(min(room, len(waiting) - starting)):
            self._start()

    def _start(self) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", "from gyre.workloads.rewards.worker import main; main()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )
        one = _Process(process, self._clock() + self._settings.start_timeout_s)
        self._processes.append(one)
        self._selector.register(one.selector_key, selectors.EVENT_READ, one)
        one.ask([self._settings.function, sys.path])

    def _heard(self) -> list[_Process]:
        """Wait until a process answers or the next deadline comes; returns the processes that have answered."""
        busy = [one.deadline for one in self._processes if one.job is not None or not one.ready]
        timeout_s = max(0.0, min(busy) - self._clock()) if busy else 0.0
        return [key.data for key, _ in self._selector.select(timeout_s)]

    def _began(self, process: _Process, answer: list[Any]) -> None:
        status, told = answer
        if status != "ready":
            self._drop(process)
            raise UserCodeError(
                f"the reward function {self._settings.function!r} cannot be loaded.",
                details={"traceback": told},
            )
        process.ready, process.deadline = True, math.inf

    def _drop(self, process: _Process) -> None:
        self._processes.remove(process)
        self._selector.unregister(process.selector_key)
        process.end()

    # -- results ------------------------------------------------------------------------------------

    def _number(self, texts: Texts, answer: list[Any]) -> float:
        status, told = answer
        if status == "error":
            raise self._error(texts, "it raised", told)
        if not math.isfinite(told):
            raise self._error(texts, f"it returned {told}, which is no reward")
        return float(told)

    def _failed(
        self, work: Sequence[Texts], job: int | None, tries: list[int], waiting: deque[int], what: str
    ) -> float | None:
        """The sample's `stuck_score`, or None if it waits for another attempt. Raises UserCodeError."""
        if job is None:
            raise UserCodeError(
                f"a process of the reward function {self._settings.function!r} did not begin: {what}.",
                hint="Import the function by hand; its output is in the reward vertex's log.",
            )
        tries[job] += 1
        if tries[job] < self._settings.attempts:
            waiting.appendleft(job)
            return None
        error = self._error(work[job], f"{what}, {tries[job]} times in a row")
        worth = self._settings.stuck_score
        if worth is None:
            raise error
        self.stuck += 1
        print(f"{error} It earns {worth:g}. {error.details['traceback']}", file=sys.stderr, flush=True)
        return worth

    def _error(self, texts: Texts, what: str, traceback: str = "") -> UserCodeError:
        prompt, completion, _ = texts
        told = f"The sample: {prompt[-_SHOWN:]!r} → {completion[-_SHOWN:]!r}\n{traceback}".rstrip()
        return UserCodeError(
            f"the reward function {self._settings.function!r} failed on a sample: {what}.",
            hint="A sample without a reward is not trained on: the function must return a number for any text.",
            details={"traceback": told},
        )
