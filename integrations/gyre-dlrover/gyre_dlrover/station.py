"""A worker's place in its job, as the user's code asks for it: who it is, what it exports, and whom it calls through.

Invariants:
- *one each*: a process has one station, that of its worker; a job in one process (`gyre.testing`) has one for each
  worker's threads;
- *exports are the station's*: what a worker exports is called in that worker alone.

This module must not import Ray or torch.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from gyre.errors import GyreError
from gyre.workloads.base import WorkloadContext
from gyre_dlrover.common.enums import ACCELERATOR_TYPE
from gyre_dlrover.common.workload_desc import AnyWorkloadDesc
from gyre_dlrover.description import JobDescription, RoleDescription
from gyre_dlrover.raised import Missing, Mistake

QUEUE_PREFIX = "DataQueue."
"""What the names of a queue's methods begin with."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""Positional arguments, and those by name."""


@dataclass(frozen=True, slots=True)
class Invocation:
    """A call of an exported method: of one rank of a role, or of all of it."""

    role: str
    """DLRover's name; empty for what the job itself answers (`Switchboard`)."""
    rank: int | None
    """None for every worker, whose results come as a list in rank order."""
    method: str
    arguments: list[Any]
    """`Arguments`: one for all that are called, or one for each rank. Pickled (bytes) where a worker calls, and then
    the result is too."""


class Caller(Protocol):
    """What carries calls from a station to others."""

    def call(self, invocation: Invocation) -> Future[Any]: ...


@dataclass(frozen=True)
class JobInfo:
    """What workers know of their job."""

    name: str
    job_id: str
    user_config: Any
    """What the builder's `config` got: an OmegaConf mapping where OmegaConf is installed, else a `UserConfig`."""
    accelerator_type: ACCELERATOR_TYPE


@dataclass(frozen=True)
class ActorInfo:
    """What workers know of themselves and of others."""

    name: str
    role: str
    spec: AnyWorkloadDesc
    sub_master: str | None = None
    """Always None: the master of a gang is the job's."""
    rank: int = 0
    node_rank: int = 0
    """Of the group that the worker is in, among those of its role."""
    local_rank: int = 0
    """In that group."""


class UserConfig(dict[str, Any]):
    """A mapping whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        value = self[name]
        return UserConfig(value) if type(value) is dict else value


def actor_info(role: RoleDescription, rank: int) -> ActorInfo:
    return ActorInfo(
        name=role.worker_name(rank),
        role=role.name,
        spec=role.workload,
        rank=rank,
        node_rank=rank // role.workload.per_group,
        local_rank=rank % role.workload.per_group,
    )


class Station:
    """One worker's. `on_export` is told of each method that is exported, and whether it runs beside others."""

    def __init__(
        self, description: JobDescription, role: RoleDescription, context: WorkloadContext, caller: Caller
    ) -> None:
        self.description = description
        self.job_info = JobInfo(
            name=context.job,
            job_id=context.job_id,
            user_config=_user_config(description.user_config),
            accelerator_type=description.accelerator_type,
        )
        self.actor_info = actor_info(role, context.rank)
        self.caller = caller
        self.on_export: Callable[[str, bool], None] = lambda name, beside: None
        self._context = context
        self._exported: dict[str, Callable[..., Any]] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._is_made = False
        self._loop: asyncio.AbstractEventLoop | None = None

    def report_progress(self, **fields: Any) -> None:
        """Show that work goes on; with `step` the job's step is known to Gyre, its page and its failover."""
        self._context.progress.tick(**fields)

    # -- what is exported ---------------------------------------------------------------------------

    def export(self, name: str, function: Callable[..., Any]) -> None:
        """Raises Mistake where the name is another function's."""
        with self._changed:
            if self._exported.setdefault(name, function) != function:
                raise exported_twice(name)
            self._changed.notify_all()
        self.on_export(name, asyncio.iscoroutinefunction(function))

    def is_made(self) -> None:
        """The entrypoint is there, with what it exports at once."""
        with self._changed:
            self._is_made = True
            self._changed.notify_all()

    def beside(self) -> list[str]:
        """The exported methods that run beside others, for they are coroutines."""
        with self._lock:
            exported = list(self._exported.items())
        return [name for name, function in exported if asyncio.iscoroutinefunction(function)]

    def begin(self, method: str, arguments: Callable[[], Arguments]) -> Future[Any]:
        """Call an exported method beside whatever else runs, on a thread of its own or, if it is a coroutine, on the
        station's loop. The call waits until the entrypoint is made; one of a queue, until the queue is."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                self._wait_for(method)
                future.set_result(self.invoke(method, arguments()))
            except BaseException as error:  # also what ends a thread: the caller waits for this future
                future.set_exception(error)

        def run_coroutine(function: Callable[..., Any]) -> None:
            try:
                args, kwargs = arguments()
                with self.entered():
                    running = asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self.loop())
            except BaseException as error:  # as above
                future.set_exception(error)
            else:
                running.add_done_callback(lambda done: hand_on(done, future))

        known = self._exported.get(method)
        if known is not None and asyncio.iscoroutinefunction(known):
            run_coroutine(known)
        else:
            threading.Thread(target=run, name=f"dlrover-{method}", daemon=True).start()
        return future

    def _wait_for(self, method: str) -> None:
        owned = method.startswith(QUEUE_PREFIX)  # the worker is known to own it: it is being replaced
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    method in self._exported or (self._is_made and not owned)
                )  # no deadline, as in DLRover
            )

    def invoke(self, method: str, arguments: Arguments) -> Any:
        """Call an exported method on this thread, or, if it is a coroutine, on the station's loop. Raises Missing, and
        what the method raises."""
        function = self._exported.get(method) or _exported_early.get(method)
        if function is None:
            raise Missing(
                f"{self.actor_info.name} exports no RPC method {method!r}.",
                hint=f"It has {', '.join(sorted(self._exported)) or 'none'}. Is it marked with @rpc()?",
            )
        args, kwargs = arguments
        with self.entered():
            if asyncio.iscoroutinefunction(function):
                return asyncio.run_coroutine_threadsafe(function(*args, **kwargs), self.loop()).result()
            return function(*args, **kwargs)

    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop that the worker's coroutines run on, in a thread of its own."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                threading.Thread(target=_run, args=(self._loop,), name="dlrover-loop", daemon=True).start()
            return self._loop

    def close(self) -> None:
        """Cancel the coroutines that run, and end their loop."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)

    # -- who is here --------------------------------------------------------------------------------

    @contextmanager
    def entered(self) -> Iterator[None]:
        """While inside, this thread works for this station; so do threads of the user's that know no better."""
        global _process
        _process = self
        token = _here.set(self)
        try:
            yield
        finally:
            _here.reset(token)


_here: ContextVar[Station | None] = ContextVar("dlrover_station", default=None)
_process: Station | None = None
_exported_early: dict[str, Callable[..., Any]] = {}
"""What was exported where no station was, while a module was imported."""


def here_or_none() -> Station | None:
    return _here.get() or _process


def here() -> Station:
    """The station that this thread works for. Raises GyreError outside of a job's workers."""
    found = here_or_none()
    if found is None:
        raise GyreError(
            "There is no worker here: this process is not part of a job.",
            hint="The runtime's functions are for code that a job's entrypoints call.",
        )
    return found


def export(name: str, function: Callable[..., Any]) -> None:
    """Export a method in this worker; before there is one, in whichever worker this process becomes."""
    station = here_or_none()
    if station is not None:
        station.export(name, function)
    elif _exported_early.setdefault(name, function) != function:
        raise exported_twice(name)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    """The thread of a station's loop."""
    try:
        loop.run_forever()
        loop.run_until_complete(_cancel(asyncio.all_tasks(loop)))
    finally:
        loop.close()


async def _cancel(tasks: set[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def exported_twice(name: str) -> Mistake:
    return Mistake(f"RPC method {name!r} is exported twice.", hint="Give one of them another name.")


def hand_on(done: Future[Any], future: Future[Any]) -> None:
    """End a future as another one has."""
    error = CancelledError() if done.cancelled() else done.exception()
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(done.result())


def _user_config(config: dict[str, Any]) -> Any:
    try:
        from omegaconf import OmegaConf
    except ImportError:
        return UserConfig(config)
    return OmegaConf.create(config)
