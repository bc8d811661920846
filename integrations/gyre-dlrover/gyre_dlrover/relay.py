"""The calls that a worker wants made, and what else it has to tell, until the job's trainer asks for it.

A vertex of Gyre's calls nobody. So what the user's code in a worker calls waits here, the trainer fetches it by a call
that is always pending, makes the call, and brings the answer.

Invariants:
- *kept until acknowledged*: news that the trainer has not acknowledged is told again. A successor of the trainer hears
  of what lasts, too: calls without an answer, and how the main ended;
- *pickled once*: arguments and results pass the trainer as bytes, which it does not read.

This module must not import Ray or torch.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from gyre.errors import ConfigError
from gyre.workloads.vertex.messages import Failure
from gyre_dlrover.raised import unpacked
from gyre_dlrover.station import Invocation

MOST_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class News:
    """What a worker tells: a `call` (number, Invocation), the `result` of one (CallNumber, Result), an `export` (name,
    whether it runs beside), that its main has `ended`, or has `failed` (Failure)."""

    seq: int
    kind: str
    body: Any


@dataclass(frozen=True, slots=True)
class Result:
    """How a call ended: `value` is pickled; or `failure`, with the exception as bytes, if it can be sent."""

    value: bytes = b""
    failure: Failure | None = None
    error: bytes | None = None


ENDS = ("ended", "failed")


class Relay:
    """A worker's. Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._news: list[News] = []
        self._seqs = itertools.count(1)
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[Any]] = {}
        self._lasting: dict[int | str, News] = {}
        """What a trainer must know of for as long as it is so: the calls that wait for an answer, by number, and how
        the main ended."""

    # -- the worker's side --------------------------------------------------------------------------

    def call(self, invocation: Invocation) -> Future[Any]:
        """Raises ConfigError for arguments that cannot be pickled."""
        try:
            packed = [pickle.dumps(one) for one in invocation.arguments]
        except Exception as error:  # whatever the user's objects raise
            raise ConfigError(
                f"The arguments of {invocation.method} cannot be sent: {type(error).__name__}: {error}",
                hint="Only the trainer's own calls may carry functions that are defined inside others.",
            ) from error
        future: Future[Any] = Future()
        with self._condition:
            number = next(self._numbers)
            self._pending[number] = future
            self._lasting[number] = self._tell("call", (number, replace(invocation, arguments=packed)))
        return future

    def tell(self, kind: str, body: Any) -> None:
        with self._condition:
            news = self._tell(kind, body)
            if kind in ENDS:
                self._lasting[kind] = news

    def _tell(self, kind: str, body: Any) -> News:
        news = News(next(self._seqs), kind, body)
        self._news.append(news)
        self._condition.notify_all()
        return news

    # -- the trainer's side -------------------------------------------------------------------------

    def attend(self, acknowledged: int, timeout_s: float) -> list[News]:
        """What there is to tell beyond `acknowledged`, as soon as there is any; nothing after `timeout_s`."""
        with self._condition:
            if not acknowledged:  # it may be the trainer's successor, which knows of nothing
                known = {one.seq: one for one in (*self._lasting.values(), *self._news)}
                self._news = [known[seq] for seq in sorted(known)]
            self._news = [one for one in self._news if one.seq > acknowledged]
            if not self._news:
                self._condition.wait(timeout_s)
            return self._news[:MOST_AT_ONCE]

    def answer(self, number: int, value: Any, error: Exception | None) -> None:
        """End a call. One that has ended, or is another incarnation's, is left alone."""
        with self._condition:
            future = self._pending.pop(number, None)
            self._lasting.pop(number, None)
        if future is None:
            return
        if error is not None:
            future.set_exception(unpacked(error))
            return
        try:
            future.set_result(_read(value))
        except Exception as unreadable:  # whatever the user's objects raise
            future.set_exception(unreadable)


def _read(value: Any) -> Any:
    if isinstance(value, list):
        return [_read(one) for one in value]
    return pickle.loads(value) if isinstance(value, bytes) else value
