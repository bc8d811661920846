"""The trainer of a DLRover job: it begins the workers, carries the calls between them, and ends when their mains have.

The job's own trainer, if it may, runs here (`description.hosted`): its `run()` is what Gyre calls `fit()`.

Each worker has one `attend` call pending, by which it tells of what it wants called, and how its main ended.

Invariants:
- *as often as it dies*: whoever replaces a worker is told to begin as that one was, and its main runs again unless it
  had ended;
- *one word for the master*: a failure is told once, as what its scope says: an exception that is to restart the job is
  no exception of the trainer's, and the master's budget for the job pays for it.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from gyre.errors import ConfigError, Fenced, GyreError, UserCodeError
from gyre.workloads.base import BaseTrainer
from gyre.workloads.gang.gang import SETTLE_S, operator_failed
from gyre.workloads.handles import error_of
from gyre.workloads.vertex.membership import Member
from gyre.workloads.vertex.messages import Failure, failure_of
from gyre_dlrover.description import JobDescription, RoleDescription
from gyre_dlrover.entry import Entry
from gyre_dlrover.open_calls import CallNumber, OpenCall, OpenCalls, Place
from gyre_dlrover.relay import News, Result
from gyre_dlrover.station import Station
from gyre_dlrover.switchboard import Switchboard, error_told

ATTEND_S = 10.0
"""How long an `attend` call is pending where there is nothing to tell."""

LOOK_S = 0.5
"""Between two looks at whether the job is to stop."""


class Conductor(BaseTrainer):
    runtime: Any
    """Gyre's, set before `setup`."""

    def setup(self) -> None:
        self._description = JobDescription.of(self.config)
        self._switchboard = Switchboard(self._description, self.handles, self._hand)
        self._open = OpenCalls(self.context.incarnation)
        self._told: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._attended: dict[Place, int] = {}
        """The incarnation that is attended, by worker."""
        self._held: set[Place] = set()
        """Workers that have calls to be handed when the job is resumed."""
        self._drives: set[Place] = set()
        """Workers whose mains the job waits for."""
        self._ended: set[Place] = set()
        self._station: Station | None = None
        """The trainer's own worker's, which serves calls until the job ends."""
        self._over = False
        """Whether `fit` has ended, and nobody is begun any more."""
        self._changed = threading.Condition()
        remote = [role for role in self._description.roles if not role.hosted]
        self._drives = {
            (role.gyre, rank)
            for role in remote
            if role.workload.is_driver
            for rank in range(role.workload.total)
        }
        self._remote = remote
        self._pool = ThreadPoolExecutor(
            max_workers=1 + sum(1 if role.gang else role.workload.total for role in remote),
            thread_name_prefix="dlrover-conductor",
        )

    def fit(self) -> Any:
        """What the hosted trainer's main returns. Raises what it raises, or `scope` says that it be told as."""
        self._pool.submit(self._listen)
        try:
            for role in self._remote:
                self._begin(role)
            hosted = self._description.hosted
            result = None if hosted is None else self._run_hosted(hosted)
            self._wait_for_drivers()
            return result
        finally:
            self._told.put(None)
            with self._changed:
                self._over = True
            self._switchboard.close()
            if self._station is not None:
                self._station.close()
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _run_hosted(self, role: RoleDescription) -> Any:
        station = self._station = Station(self._description, role, self.context, self._switchboard)
        try:
            with station.entered():
                entry = Entry(role.workload)
                station.is_made()
                self._switchboard.hosted.set_result(station)
                return entry.run()
        except ConfigError:
            raise  # a mistake that repeats surely: the job ends at once
        except BaseException as error:
            is_users = isinstance(error, UserCodeError) or not isinstance(error, GyreError)
            if is_users and self._is_for_the_job():
                raise _begin_anew(failure_of(error, module=role.workload.entry_point)) from error
            raise

    def _wait_for_drivers(self) -> None:
        with self.runtime.waiting(), self._changed:
            while not self._drives <= self._ended and not self.runtime.should_stop:
                self._changed.wait(LOOK_S)
                self.context.progress.tick()

    # -- beginning ----------------------------------------------------------------------------------

    def _begin(self, role: RoleDescription, rank: int | None = None) -> None:
        """Begin a gang as a whole; of any other role one rank, or each."""
        acts: list[Callable[[], None]] = [partial(self._begin_gang, role)]
        if not role.gang:
            ranks = range(role.workload.total) if rank is None else [rank]
            acts = [partial(self._begin_one, role, one) for one in ranks]
        with self._changed:
            if not self._over:
                for act in acts:
                    self._pool.submit(act)

    def _begin_gang(self, role: RoleDescription) -> None:
        places = [(role.gyre, rank) for rank in range(role.workload.total)]
        run = not self._ended.issuperset(places)
        self._ended.difference_update(places if run else [])
        self._await_and_attend(role, None)
        self._attempt(lambda: self._has_begun(role, self.handles[role.gyre].begin(run)))

    def _begin_one(self, role: RoleDescription, rank: int) -> None:
        run = (role.gyre, rank) not in self._ended
        self._await_and_attend(role, rank)
        self._attempt(lambda: self._has_begun(role, [self.handles[role.gyre][rank].begin(run)]))

    def _await_and_attend(self, role: RoleDescription, rank: int | None) -> None:
        """Attend before they begin: a constructor may call others. Where they do not come, beginning them says so."""
        deadline = time.monotonic() + self.runtime.spec.run.call_timeout_s
        for vertex, incarnation in self.runtime.membership.wait_for(role.gyre, rank, deadline) or []:
            place = role.gyre, int(vertex.rpartition("-")[2])
            self._told.put(partial(self._attend, role, place, incarnation))

    def _attempt(self, begin: Callable[[], None]) -> None:
        try:
            begin()
        except Fenced:
            return  # a newer trainer has taken over
        except GyreError as error:
            failure = failure_of(error)
            self._tell_failure(failure, user_code=isinstance(error, UserCodeError))

    def _has_begun(self, role: RoleDescription, told: list[list[str]]) -> None:
        for method in itertools.chain.from_iterable(told):
            self._switchboard.runs_beside(role.name, method)

    # -- attending, all on one thread ---------------------------------------------------------------

    def _listen(self) -> None:
        """A mistake here ends the trainer: nobody would be heard any more."""
        try:
            while (act := self._next_act()) is not None:
                act()
                if self._held and not self.runtime.paused:
                    held, self._held = self._held, set()
                    for place in held:
                        self._hand_open(place)
        except BaseException as error:
            self._open.break_off()
            if not isinstance(error, Exception):
                raise  # the process ends
            self._tell_failure(failure_of(error), user_code=False)

    def _next_act(self) -> Callable[[], None] | None:
        """Waits. While calls are held back, a resumption is looked for, too: it tells nobody."""
        while True:
            try:
                return self._told.get(timeout=LOOK_S if self._held else None)
            except queue.Empty:
                if not self.runtime.paused:
                    return lambda: None

    def _attend(self, role: RoleDescription, place: Place, incarnation: int) -> None:
        if self._attended.get(place, 0) < incarnation:
            self._attended[place] = incarnation
            self._ask(role, place, 0)
            self._hand_open(place)

    def _ask(self, role: RoleDescription, place: Place, acknowledged: int) -> None:
        incarnation = self._attended[place]
        future = self._send(place, incarnation, "attend", acknowledged, ATTEND_S)

        def hear(done: Future[Any]) -> None:
            self._told.put(lambda: self._heard(role, place, incarnation, acknowledged, done))

        future.add_done_callback(hear)

    def _heard(
        self, role: RoleDescription, place: Place, incarnation: int, acknowledged: int, done: Future[Any]
    ) -> None:
        if self._attended.get(place) != incarnation:
            return
        lost = done.exception()
        if lost is not None:
            self._lost(role, place, incarnation)
            return
        status, news = done.result()
        if status == "error":
            if not news.fenced:
                self._tell_failure(news, user_code=False)
            return
        for one in news:
            self._take(role, place, incarnation, one)
        self._ask(role, place, news[-1].seq if news else acknowledged)

    def _lost(self, role: RoleDescription, place: Place, incarnation: int) -> None:
        """Begin whoever replaces the worker: of a gang all ranks, and once."""
        self.context.progress.tick()
        self.runtime.membership.doubt(*_member(place, incarnation))
        ranks = range(role.workload.total) if role.gang else [place[1]]
        for rank in ranks:
            self._attended.pop((role.gyre, rank), None)
        self._begin(role, place[1])

    def _take(self, role: RoleDescription, place: Place, incarnation: int, news: News) -> None:
        if news.kind == "call":
            self._make_call(place, incarnation, *news.body)
        elif news.kind == "result":
            self._end_call(place, *news.body)
        elif news.kind == "export":
            name, beside = news.body
            if beside:
                self._switchboard.runs_beside(role.name, name)
        elif news.kind == "ended":
            with self._changed:
                self._ended.add(place)
                self._changed.notify_all()
        else:
            self._main_failed(place, incarnation, news.body)

    def _make_call(self, place: Place, incarnation: int, number: int, invocation: Any) -> None:
        def answer(value: Any, error: BaseException | None) -> None:
            told = error if isinstance(error, Exception) or error is None else GyreError(str(error))
            self._answer(place, incarnation, number, value, told)

        try:
            future = self._switchboard.call(invocation)
        except Exception as error:  # the caller's, not this thread's
            answer(None, error)
            return
        future.add_done_callback(
            lambda done: answer(None, done.exception()) if done.exception() else answer(done.result(), None)
        )

    def _answer(
        self, place: Place, incarnation: int, number: int, value: Any, error: Exception | None
    ) -> None:
        """A caller that is gone asks again. One that cannot be sent its answer is told why."""

        def look(done: Future[Any]) -> None:
            if done.exception() is None and done.result()[0] == "error" and not done.result()[1].fenced:
                why = GyreError(f"the answer of the call cannot be sent: {done.result()[1].error}")
                self._send(place, incarnation, "answer", number, None, why)

        self._send(place, incarnation, "answer", number, value, error).add_done_callback(look)

    # -- calls of simple roles ----------------------------------------------------------------------

    def _hand(self, place: Place, method: str, arguments: Any) -> Future[bytes]:
        call = self._open.add(place, method, arguments)
        self._told.put(partial(self._hand_open, place))
        return call.future

    def _hand_open(self, place: Place) -> None:
        """Hand a worker what it has not been handed. One that is not attended yet is handed it when it is, and nobody
        is while the job is paused."""
        incarnation = self._attended.get(place)
        if incarnation is None:
            return
        if self.runtime.paused:
            self._held.add(place)
            return
        for call in self._open.to_hand(place, incarnation):
            sent = self._send(place, incarnation, "take", call.number, call.method, call.arguments)
            sent.add_done_callback(partial(self._has_taken, call))

    def _has_taken(self, call: OpenCall, done: Future[Any]) -> None:
        """Where the worker is gone, the next one gets the call; where the call could not be sent, it has failed."""
        if done.exception() is None and done.result()[0] == "error" and not done.result()[1].fenced:
            self._told.put(lambda: self._end_call(call.place, call.number, Result(failure=done.result()[1])))

    def _end_call(self, place: Place, number: CallNumber, result: Result) -> None:
        call = self._open.end(place, number)
        if call is None:
            return
        if result.failure is None:
            call.future.set_result(result.value)
        else:
            worker = _member(place, 0)[0]
            call.future.set_exception(error_told(result.failure, result.error, worker, call.method))

    def _send(self, place: Place, incarnation: int, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = self.runtime.transport.submit(
            *_member(place, incarnation), method, args, control=True
        )
        return future

    # -- failures -----------------------------------------------------------------------------------

    def _main_failed(self, place: Place, incarnation: int, failure: Failure) -> None:
        """A worker's main raised. If its peer died it is no news: the master has heard of the death, or will."""
        if failure.collective:
            judge = threading.Timer(SETTLE_S, self._judge, (place, incarnation, failure))
            judge.daemon = True
            judge.start()
        else:
            self._judge(place, incarnation, failure)

    def _judge(self, place: Place, incarnation: int, failure: Failure) -> None:
        member = _member(place, incarnation)
        if member not in self.runtime.membership.members(place[0]):
            return
        if self._description.scope == "role":
            self.runtime.report("OperatorFailed", **operator_failed(member, f"{place[0]}.run", failure))
            return
        error = error_of(failure, member[0], "run")
        self._tell_failure(failure_of(error), user_code=failure.user_code)

    def _tell_failure(self, failure: Failure, *, user_code: bool) -> None:
        """End this trainer by a failure elsewhere, whatever `fit` is doing."""
        for_the_job = user_code and self._is_for_the_job()
        self.runtime.report(
            "TrainerFailed",
            error=failure.error,
            traceback=failure.traceback,
            user_code=user_code and not for_the_job,
            code=failure.code,
            place=failure.place,
            method=failure.method,
        )

    def _is_for_the_job(self) -> bool:
        """Whether an exception of the user's restarts the job: as often as it may, and then the job has failed."""
        description = self._description
        return description.scope == "job" and self.context.incarnation <= description.restarts


def _begin_anew(failure: Failure) -> GyreError:
    return GyreError(
        f"{failure.error} ({failure.place or 'the trainer'}); the job begins anew.",
        details={"traceback": failure.traceback},
    )


def _member(place: Place, incarnation: int) -> Member:
    return f"{place[0]}-{place[1]}", incarnation
