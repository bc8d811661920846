"""Where the calls between a DLRover job's workers are made: in the trainer, through Gyre's role handles.

Invariants:
- *never in the caller's way*: `call` returns at once, whatever it is that is called;
- *one order in a gang*: a call to all of an elastic role is a gang's call, all of it or none.

This module must not import Ray or torch.
"""

from __future__ import annotations

import pickle
import threading
from collections import defaultdict
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from gyre.compat.dlrover.api.runtime.queue import QUEUE_OWNER, REGISTER_QUEUE
from gyre.compat.dlrover.description import JobDescription, RoleDescription
from gyre.compat.dlrover.station import Invocation, Station
from gyre.errors import NotFound, nearest
from gyre.workloads.handles import RoleHandle, error_of
from gyre.workloads.vertex.messages import failure_of


class Switchboard:
    """`hosted` is the station of the trainer's own worker, set where there is one."""

    def __init__(self, description: JobDescription, handles: Mapping[str, RoleHandle]) -> None:
        self.hosted: Station | None = None
        self._description = description
        self._handles = handles
        self._beside: dict[str, set[str]] = defaultdict(set)
        self._queues = _Owners()
        self._pool = ThreadPoolExecutor(max_workers=64, thread_name_prefix="dlrover-call")

    def runs_beside(self, role: str, method: str) -> None:
        """A worker of the role has told that its method is a coroutine."""
        self._beside[role].add(method)

    def call(self, invocation: Invocation) -> Future[Any]:
        """The result, as `Invocation` says it. Raises NotFound for a role that is none."""
        if not invocation.role:
            return self._queues.answer(invocation)
        role = self._description.role(invocation.role)
        if role is None:
            known = [one.name for one in self._description.roles]
            raise NotFound(f"No actors found for role {invocation.role!r}; {nearest(invocation.role, known)}")
        if role.hosted:
            return self._pool.submit(self._call_hosted, role, invocation)
        handle, method, arguments = self._handles[role.gyre], invocation.method, invocation.arguments
        if invocation.rank is not None:
            handle = handle[invocation.rank]
        beside = method in self._beside[role.name]
        if len(arguments) > 1:
            return self._pool.submit(handle.rpc_each.scatter, arguments, method)
        if beside:
            return handle.control.rpc_beside.submit(method, arguments[0]).future
        return handle.rpc.submit(method, arguments[0]).future

    def _call_hosted(self, role: RoleDescription, invocation: Invocation) -> Any:
        station, [arguments] = self.hosted, invocation.arguments
        if station is None:
            raise NotFound(f"{role.name} has not begun, so it exports no {invocation.method!r} yet.")
        packed = isinstance(arguments, bytes)
        try:
            value = station.invoke(invocation.method, pickle.loads(arguments) if packed else arguments)
        except NotFound:
            raise
        except Exception as error:  # the caller's, as one of any other worker
            failure = failure_of(error, module=type(error).__module__, method=invocation.method)
            raise error_of(failure, role.worker_name(0), invocation.method) from error
        value = pickle.dumps(value) if packed else value
        return [value] if invocation.rank is None else value


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
