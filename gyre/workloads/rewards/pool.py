"""A pool of processes that run the reward functions of a job, with a time limit for each sample.

Each process has all functions; a call is of one of them. What a sample earns is their weighted sum (`combined`).

A function of one sample gets them one by one, in all processes. A function of a batch gets all samples of a call at
once, in one process, and has the time of all of them; a batch whose process hung or died is tried again sample by
sample.

Invariants:
- *a failure is never a reward*: a sample whose function raised, hung or crashed its process ends in an error, never in
  a number. The exception is `stuck_score`, the job's reward for samples that hang or crash each time; they are counted
  and logged;
- *an answer is its sample's*: it carries the number of the request and the id of the process that was asked. Where
  either is another, the process is ended and the sample tried again;
- *retried before told*: a sample that hung or crashed is tried again in a new process, up to `attempts` times; an
  exception is the function's answer, and is raised at once;
- *nobody is left behind*: whatever was started for a sample ends with the process that ran it; see
  `gyre.workloads.rewards.process`. A process that earlier samples left more than `MOST_LEFT` others under is replaced.

The second and the last are why this is none of the pools that there are: pebble's, for one, leaves what a late worker
started, and takes the result of a child that the function forked for the sample's.

This module must not know of groups, samples or tokens.
"""

from __future__ import annotations

import math
import selectors
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from gyre.clock import Clock
from gyre.config.sections import RewardSettings
from gyre.errors import ConfigError, UserCodeError
from gyre.workloads.rewards.calls import Texts
from gyre.workloads.rewards.forms import Form
from gyre.workloads.rewards.frames import StrangeFrame
from gyre.workloads.rewards.process import RewardProcess
from gyre.workloads.rewards.results import Scored, combined
from gyre.workloads.rewards.worker import READY

MOST_LEFT = 32
"""Processes that a function may leave running after its samples: one that it keeps for the next is no leak."""

_SHOWN = 400
"""Characters of a text that an error quotes."""
_LOOK_S = 1.0
"""Longest wait between two calls of `on_wait`."""


@dataclass(slots=True)
class _Work:
    """Samples for one call of a function, by their places. `part` is the function's place in the job's list."""

    places: list[int]
    part: int = 0
    number: int = 0


def _end_all(processes: list[RewardProcess]) -> None:
    for process in processes:
        process.end()
    processes.clear()


class RewardPool:
    """Processes are started when there is work for them, and kept until `close`. Not thread-safe."""

    def __init__(self, settings: RewardSettings, *, clock: Clock = time) -> None:
        self._settings = settings
        self._parts = settings.parts
        self._clock = clock
        self._selector = selectors.DefaultSelector()
        self._processes: list[RewardProcess] = []
        self._requests = 0
        self.forms: tuple[Form, ...] = ()
        """How each function is called. Known after `begin`."""
        self.stuck = 0
        """Samples that got `stuck_score`."""
        # The processes end even if nobody calls `close`.
        weakref.finalize(self, _end_all, self._processes)

    def begin(self) -> None:
        """Start a process and wait until it has loaded the functions. Raises ConfigError if one is not there or cannot
        be called, UserCodeError if its module raises."""
        self._until_known(lambda: None)

    def score(self, work: Sequence[Texts], *, on_scored: Callable[[], None] = lambda: None) -> list[float]:
        """The rewards of these samples, in order; see `scored`."""
        return [reward for reward, _ in self.scored(work, on_scored=on_scored)]

    def scored(
        self,
        work: Sequence[Texts],
        *,
        on_scored: Callable[[], None] = lambda: None,
        on_wait: Callable[[], None] = lambda: None,
    ) -> list[Scored]:
        """The rewards of these samples, in order, each with the further numbers that the functions returned.
        `on_scored` is called after each call's samples, once for each, `on_wait` every second while none comes.

        Raises UserCodeError if a function raised or did not return a finite number, or, without a `stuck_score`,
        if a sample hung or crashed in all its attempts. Raises ConfigError if a function is not there, cannot be
        called, or needs what the data lacks.
        """
        if not work:
            return []
        found: dict[tuple[int, int], Scored] = {}
        """By the function's place and the sample's."""
        tries: dict[tuple[int, int], int] = {}
        stuck: set[int] = set()
        try:
            self._until_known(on_wait)
            waiting = deque(self._calls(len(work)))

            def failed(asked: _Work | None, what: str) -> None:
                for place, worth in self._failed(work, asked, tries, waiting, what):
                    assert asked is not None  # else the pool has not begun, and nothing is scored
                    found[asked.part, place] = (worth, {})
                    self.stuck += place not in stuck
                    stuck.add(place)
                    on_scored()

            while len(found) < len(work) * len(self._parts):
                self._hand_out(work, waiting)
                for process in self._heard(on_wait):
                    asked, answer = process.work, self._answer_of(process, failed)
                    if answer is None:
                        continue
                    for place, one in zip(asked.places, self._read(work, asked, answer), strict=True):
                        found[asked.part, place] = one
                        on_scored()
                self._end_late(failed)
        except BaseException:
            for process in [one for one in self._processes if one.work is not None or not one.ready]:
                self._drop(process)  # nobody wants its result any more
            raise
        parts = range(len(self._parts))
        return [
            self._combined(work, place, [found[part, place] for part in parts]) for place in range(len(work))
        ]

    def close(self) -> None:
        for process in list(self._processes):
            self._drop(process)
        self._selector.close()

    # -- processes ----------------------------------------------------------------------------------

    def _until_known(self, on_wait: Callable[[], None]) -> None:
        """Wait until a process has reported the forms of the functions."""

        def failed(asked: _Work | None, what: str) -> NoReturn:
            self._not_begun(what)

        while not self.forms:
            if not self._processes:
                self._start()
            for process in self._heard(on_wait):
                self._answer_of(process, failed)
            self._end_late(failed)

    def _calls(self, samples: int) -> list[_Work]:
        """What is to be called for so many samples: of each function of a batch one call, which begins first, for it
        takes longest."""
        batches = [_Work(list(range(samples)), part) for part, form in enumerate(self.forms) if form.batch]
        single = [part for part, form in enumerate(self.forms) if not form.batch]
        return batches + [_Work([place], part) for place in range(samples) for part in single]

    def _hand_out(self, work: Sequence[Texts], waiting: deque[_Work]) -> None:
        idle = [one for one in self._processes if one.ready and one.work is None]
        for process in idle[: len(waiting)]:
            asked = process.work = waiting.popleft()
            self._requests += 1
            asked.number = self._requests
            process.deadline = self._clock.monotonic() + self._settings.timeout_s * len(asked.places)
            process.ask([asked.number, asked.part, [list(work[place]) for place in asked.places]])
        starting = sum(not one.ready for one in self._processes)
        room = self._settings.processes - len(self._processes)
        for _ in range(min(room, len(waiting) - starting)):
            self._start()

    def _start(self) -> None:
        process = RewardProcess(self._selector)
        process.deadline = self._clock.monotonic() + self._settings.start_timeout_s
        self._processes.append(process)
        process.ask([[[part.function, part.signature] for part in self._parts], sys.path])

    def _heard(self, on_wait: Callable[[], None]) -> list[RewardProcess]:
        """Wait until a process answers or the next deadline comes; returns the processes that have answered."""
        while True:
            busy = [one.deadline for one in self._processes if one.work is not None or not one.ready]
            left_s = max(0.0, min(busy) - self._clock.monotonic()) if busy else 0.0
            events = self._selector.select(min(left_s, _LOOK_S))
            for key, event in events:
                if event & selectors.EVENT_WRITE:
                    key.data.flush()
            answered = [key.data for key, event in events if event & selectors.EVENT_READ]
            if answered or left_s <= _LOOK_S:
                return answered
            on_wait()

    def _answer_of(
        self, process: RewardProcess, failed: Callable[[_Work | None, str], None]
    ) -> list[Any] | None:
        """The status and content of its answer; None if there is none for what it was asked."""
        asked: _Work | None = process.work
        try:
            frame = process.receive()
            if frame is None:
                return None
            pid, number, status, content, left = frame
            if number != (asked.number if asked is not None else READY) or process.pid not in (None, pid):
                raise StrangeFrame
        except EOFError:
            self._processes.remove(process)
            ending = process.ended()
            if asked is not None or not process.ready:  # an idle process may end
                failed(asked, f"its process {ending}")
            return None
        except (StrangeFrame, TypeError, ValueError):
            self._drop(process)
            failed(asked, "another process answered in its stead")
            return None
        if not process.ready:
            self._began(process, pid, status, content)
            return None
        process.work, process.deadline = None, math.inf  # it is idle
        if left > MOST_LEFT:
            print(
                f"{self._named()} left {left} processes running after its samples; they are ended",
                file=sys.stderr,
                flush=True,
            )
            self._drop(process)
        return [status, content]

    def _began(self, process: RewardProcess, pid: int, status: str, content: Any) -> None:
        if status == "ready":
            process.pid, process.deadline = pid, math.inf
            self.forms = tuple(map(Form.of, content))
            return
        self._drop(process)
        if status == "refused":
            message, hint, traceback, part = content
            raise self._refused(message, hint, part, {"traceback": traceback} if traceback else None)
        sentence, traceback, part = content
        raise UserCodeError(
            f"{self._named(part)} cannot be loaded: {sentence}.",
            details={"traceback": traceback},
        )

    def _end_late(self, failed: Callable[[_Work | None, str], None]) -> None:
        for process in [one for one in self._processes if self._clock.monotonic() >= one.deadline]:
            failed(process.work, self._late(process))

    def _late(self, process: RewardProcess) -> str:
        """End a process whose deadline has passed, and say so."""
        asked: _Work | None = process.work
        self._drop(process)
        limit_s = (
            self._settings.timeout_s * len(asked.places)
            if asked is not None
            else self._settings.start_timeout_s
        )
        return f"it took longer than {limit_s:g} s"

    def _drop(self, process: RewardProcess) -> None:
        self._processes.remove(process)
        process.end()

    # -- results ------------------------------------------------------------------------------------

    def _read(self, work: Sequence[Texts], asked: _Work, answer: list[Any]) -> list[Scored]:
        status, content = answer
        if status == "scored":
            return [(float(reward), more) for reward, more in content]
        if status == "refused":
            message, hint, _ = content
            raise self._refused(message, hint, asked.part)
        if status == "raised":
            sentence, traceback, _ = content
            raise self._error(work, asked.part, asked.places, f"it raised {sentence}", traceback)
        why, _, index = content
        raise self._error(work, asked.part, asked.places if index is None else [asked.places[index]], why)

    def _refused(
        self, message: str, hint: str, part: int, details: dict[str, Any] | None = None
    ) -> ConfigError:
        """What a function's process refused, with the keys that the job has for this function."""
        in_place = self._settings.in_place
        return ConfigError(in_place(part, message), hint=in_place(part, hint), details=details)

    def _combined(self, work: Sequence[Texts], place: int, of_parts: Sequence[Scored]) -> Scored:
        """What a sample earns. Raises UserCodeError where the weighted sum is too large for a number."""
        if not self._settings.functions:
            return of_parts[0]
        reward, more = combined([(part.called, part.weight) for part in self._parts], of_parts)
        if not math.isfinite(reward):
            raise self._error(work, None, [place], "the weighted sum is too large for a number")
        return reward, more

    def _failed(
        self,
        work: Sequence[Texts],
        asked: _Work | None,
        tries: dict[tuple[int, int], int],
        waiting: deque[_Work],
        what: str,
    ) -> list[tuple[int, float]]:
        """The samples that earn `stuck_score` now; those that wait for another attempt are in `waiting`. Raises
        UserCodeError."""
        if asked is None:
            self._not_begun(what)
        if len(asked.places) > 1:  # which of them it was shows when each has a call of its own
            waiting.extendleft(_Work([place], asked.part) for place in reversed(asked.places))
            return []
        (place,) = asked.places
        tried = tries[asked.part, place] = tries.get((asked.part, place), 0) + 1
        if tried < self._settings.attempts:
            waiting.appendleft(asked)
            return []
        error = self._error(work, asked.part, [place], f"{what}, {tried} times in a row")
        worth = self._settings.stuck_score
        if worth is None:
            raise error
        print(f"{error} It earns {worth:g}. {error.details['traceback']}", file=sys.stderr, flush=True)
        return [(place, worth)]

    def _not_begun(self, what: str) -> NoReturn:
        raise UserCodeError(
            f"a process of {self._named()} did not begin: {what}.",
            hint="Import the function by hand; its output is in the reward vertex's log.",
        )

    def _named(self, part: int | None = None) -> str:
        """The function of this place, or all of them."""
        parts = self._parts if part is None else self._parts[part : part + 1]
        names = " and ".join(repr(one.function) for one in parts)
        return f"the reward function{'s' if len(parts) > 1 else ''} {names}"

    def _error(
        self, work: Sequence[Texts], part: int | None, places: list[int], what: str, traceback: str = ""
    ) -> UserCodeError:
        prompt, completion, _ = work[places[0]]
        which = "a sample" if len(places) == 1 else f"a batch of {len(places)} samples"
        first = "The sample" if len(places) == 1 else "The first of them"
        told = f"{first}: {prompt[-_SHOWN:]!r} → {completion[-_SHOWN:]!r}\n{traceback}".rstrip()
        return UserCodeError(
            f"{self._named(part)} failed on {which}: {what}.",
            hint="A sample without a reward is not trained on: the function must return a number for any text.",
            details={"traceback": told},
        )
