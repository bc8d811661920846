"""Where the calls between a DLRover job's workers are made: in the trainer.

Invariants:
- *never in the caller's way*: `call` returns at once, whatever it is that is called;
- *never in another's way*: a call that waits for long, for another call even, holds up none but those of its own gang;
- *one order in a gang*: a call to all of an elastic role is a gang's call, all of it or none.

This module must not import Ray or torch.
"""

from __future__ import annotations

import pickle
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from gyre.errors import ConfigError, GyreError, UserCodeError, nearest
from gyre.workloads.handles import RoleHandle, error_of
from gyre.workloads.vertex.messages import Failure, failure_of
from gyre_dlrover.api.runtime.queue import QUEUE_OWNER, REGISTER_QUEUE
from gyre_dlrover.description import JobDescription, RoleDescription
from gyre_dlrover.open_calls import Place
from gyre_dlrover.raised import Missing, Mistake, packed, unpacked, with_cause
from gyre_dlrover.station import Invocation, Station, hand_on


class Switchboard:
    """`hosted` is the station of the trainer's own worker, set where there is one. `hand` has a call handed to a
    worker, and returns the future of its result, pickled."""

    def __init__(
        self,
        description: JobDescription,
        handles: Mapping[str, RoleHandle],
        hand: Callable[[Place, str, Any], Future[bytes]],
    ) -> None:
        self.hosted: Future[Station] = Future()
        self._description = description
        self._handles = handles
        self._hand = hand
        self._beside: dict[str, set[str]] = defaultdict(set)
        self._queues = _Owners()
        self._pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="dlrover-call")
        """Threads in which scattered calls of gangs wait, and what a rank raised is asked for."""

    def close(self) -> None:
        """No call is made any more. Those that wait end with the trainer's process."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def runs_beside(self, role: str, method: str) -> None:
        """A worker of the role has told that its method is a coroutine."""
        self._beside[role].add(method)

    def call(self, invocation: Invocation) -> Future[Any]:
        """The result, as `Invocation` says it. Raises Mistake for a role that is none."""
        if not invocation.role:
            return self._queues.answer(invocation)
        role = self._description.role(invocation.role)
        if role is None:
            known = [one.name for one in self._description.roles]
            raise Mistake(f"No actors found for role {invocation.role!r}; {nearest(invocation.role, known)}")
        if role.hosted:
            return self._each(invocation, [partial(self._call_hosted, role)])
        if role.gang and invocation.method not in self._beside[role.name]:
            return self._call_gang(role, invocation)
        ranks = range(role.workload.total) if invocation.rank is None else [invocation.rank]
        return self._each(invocation, [partial(self._call_worker, role, rank) for rank in ranks])

    def _each(self, invocation: Invocation, calls: list[Callable[[str, Any], Future[Any]]]) -> Future[Any]:
        """One call or, of a whole role, all of them; each with its set of arguments, or all with the same."""
        arguments = invocation.arguments
        if len(arguments) not in (1, len(calls)):
            raise Mistake(
                f"{invocation.role}.{invocation.method}: {len(arguments)} sets of arguments for {len(calls)} workers.",
                hint="Give one set for all of them, or one for each.",
            )
        given = arguments if len(arguments) == len(calls) else arguments * len(calls)
        made = [call(invocation.method, one) for call, one in zip(calls, given, strict=True)]
        return made[0] if invocation.rank is not None else _all_of(made)

    def _call_gang(self, role: RoleDescription, invocation: Invocation) -> Future[Any]:
        handle, method, arguments = self._handles[role.gyre], invocation.method, invocation.arguments
        if invocation.rank is not None:
            handle = handle[invocation.rank]
        if len(arguments) > 1:
            made = self._pool.submit(handle.rpc_each.scatter, arguments, method)
        else:
            made = handle.rpc.submit(method, arguments[0]).future
        answered: Future[Any] = Future()

        def answer(done: Future[Any]) -> None:
            error = done.exception()
            if isinstance(error, UserCodeError):
                packs = isinstance(arguments[0], bytes)
                self._pool.submit(self._answer_with_cause, error, packs, answered)
            else:
                hand_on(done, answered)

        made.add_done_callback(answer)
        return answered

    def _answer_with_cause(self, error: UserCodeError, packs: bool, answered: Future[Any]) -> None:
        """End the call with what the rank raised, or, where the rank is gone meanwhile, with its text."""
        told: BaseException = error
        try:
            role, _, rank = str(error.details["vertex"]).rpartition("-")
            told = with_cause(error, self._handles[role][int(rank)].control.raised())
            told = told if packs else unpacked(told)
        finally:
            answered.set_exception(told)

    def _call_worker(self, role: RoleDescription, rank: int, method: str, arguments: Any) -> Future[Any]:
        handed = self._hand((role.gyre, rank), method, arguments)
        if isinstance(arguments, bytes):
            return handed
        read: Future[Any] = Future()

        def pass_on(done: Future[bytes]) -> None:
            error = done.exception()
            if error is not None:
                read.set_exception(unpacked(error))
                return
            try:
                read.set_result(pickle.loads(done.result()))
            except Exception as unreadable:  # whatever the user's objects raise
                read.set_exception(unreadable)

        handed.add_done_callback(pass_on)
        return read

    def _call_hosted(self, role: RoleDescription, method: str, arguments: Any) -> Future[Any]:
        """In this process, once the trainer's own worker has begun."""
        answered: Future[Any] = Future()
        packs = isinstance(arguments, bytes)

        def begin(hosted: Future[Station]) -> None:
            begun = hosted.result().begin(method, lambda: pickle.loads(arguments) if packs else arguments)
            begun.add_done_callback(answer)

        def answer(done: Future[Any]) -> None:
            error = done.exception()
            try:
                if error is None:
                    answered.set_result(pickle.dumps(done.result()) if packs else done.result())
                    return
            except Exception as unsendable:  # whatever the user's objects raise
                error = UserCodeError(
                    f"the result of {method} cannot be sent: {type(unsendable).__name__}: {unsendable}"
                )
            failure = failure_of(error, module=type(error).__module__, method=method)
            told = error_told(failure, packed(error), role.worker_name(0), method)
            answered.set_exception(told if packs else unpacked(told))

        self.hosted.add_done_callback(begin)
        return answered


def error_told(failure: Failure, pickled: bytes | None, worker: str, method: str) -> GyreError:
    """The exception for what a worker raised in a call."""
    if failure.code == Missing.code:
        return Missing(failure.error.removeprefix(f"{Missing.__name__}: "))
    told = error_of(failure, worker, method)
    if isinstance(told, ConfigError):
        return Mistake(told.message, details=told.details)
    return with_cause(told, pickled)


def _all_of(futures: list[Future[Any]]) -> Future[list[Any]]:
    """All results, in order; or the first exception, as soon as there is one."""
    whole: Future[list[Any]] = Future()
    lock = threading.Lock()
    left = len(futures)

    def count(done: Future[Any]) -> None:
        nonlocal left
        error = done.exception()
        with lock:
            left -= 1
            if whole.done() or (left and error is None):
                return
            if error is not None:
                whole.set_exception(error)
                return
        whole.set_result([future.result() for future in futures])

    for future in futures:
        future.add_done_callback(count)
    return whole


class _Owners:
    """Who owns which queue. Whoever asks before it is known waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner: dict[str, Future[Any]] = defaultdict(Future)

    def answer(self, invocation: Invocation) -> Future[Any]:
        [arguments] = invocation.arguments
        (name, *owner), _ = pickle.loads(arguments) if isinstance(arguments, bytes) else arguments
        with self._lock:
            if invocation.method == REGISTER_QUEUE and self._owner[name].done():
                del self._owner[name]  # its owner was replaced
            known = self._owner[name]
        if invocation.method == QUEUE_OWNER:
            return known
        known.set_result(owner[0])
        return known
