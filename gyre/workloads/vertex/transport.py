"""How the trainer's calls reach the other vertices. One small interface; Ray's is the one in use.

`submit` never blocks for the call and never raises for its outcome: the future's result is the `("ok", value)`
or `("error", Failure)` of the vertex's host, and its only exception is VertexDied.

Invariant *dead is what Ray says is dead*: a call ends as VertexDied only where the actor is gone or away. Whatever else
is raised on the way, while an answer is unpickled say, is a failure of that call, and is told at once.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any, Protocol

from gyre.errors import VertexDied
from gyre.workloads.vertex.call_info import NOTHING_OFFERED, CallInfo
from gyre.workloads.vertex.messages import Failure

NAMESPACE = "gyre"

NO_KEYWORDS: Mapping[str, Any] = MappingProxyType({})


def actor_name(job_id: str, vertex: str, incarnation: int) -> str:
    """The Ray name of one incarnation of a vertex. A replacement has another name: no call reaches the wrong one."""
    return f"{job_id}/{vertex}/{incarnation}"


class VertexTransport(Protocol):
    def submit(
        self,
        vertex: str,
        incarnation: int,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = NO_KEYWORDS,
        *,
        info: CallInfo = NOTHING_OFFERED,
        bundle: Any = None,
        control: bool = False,
    ) -> Future[tuple[str, Any]]:
        """Call a method of the vertex's workload. With a `bundle` made by `share`, the vertex first does
        `load_weights(*bundle)`. With `control` an operator that is marked so runs beside whatever else the vertex
        does."""
        ...

    def settle(self, vertex: str, incarnation: int) -> Future[tuple[str, Any]]:
        """The vertex's `CallPosition`, once every call that was sent to it before has ended."""
        ...

    def call_position(self, vertex: str, incarnation: int) -> Future[tuple[str, Any]]:
        """The vertex's `CallPosition`, answered at once, whatever the vertex does."""
        ...

    def share(self, value: Any) -> Any:
        """Something that stands for `value` and is cheap to pass to many."""
        ...


class RayTransport:
    """Calls VertexHost actors by name. `term` is the trainer's incarnation, which fences its predecessors."""

    def __init__(self, job_id: str, term: int) -> None:
        self._job_id = job_id
        self._term = term
        self._lock = threading.Lock()
        self._handles: dict[tuple[str, int], Any] = {}

    def submit(
        self,
        vertex: str,
        incarnation: int,
        method: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = NO_KEYWORDS,
        *,
        info: CallInfo = NOTHING_OFFERED,
        bundle: Any = None,
        control: bool = False,
    ) -> Future[tuple[str, Any]]:
        def call(handle: Any) -> Any:
            if control:
                beside = handle.control_call.options(concurrency_group="operators")
                return beside.remote(self._term, method, info, *args, **kwargs)
            if bundle is not None:
                return handle.call_with_weights.remote(self._term, bundle, method, info, *args, **kwargs)
            return handle.call.remote(self._term, method, info, *args, **kwargs)

        return self._send(vertex, incarnation, call)

    def settle(self, vertex: str, incarnation: int) -> Future[tuple[str, Any]]:
        return self._send(vertex, incarnation, lambda handle: handle.settle.remote(self._term))

    def call_position(self, vertex: str, incarnation: int) -> Future[tuple[str, Any]]:
        def ask(handle: Any) -> Any:
            return handle.call_position.options(concurrency_group="control").remote(self._term)

        return self._send(vertex, incarnation, ask)

    def share(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def _send(self, vertex: str, incarnation: int, call: Any) -> Future[tuple[str, Any]]:
        from ray.exceptions import (
            NodeDiedError,
            OutOfMemoryError,
            RayActorError,
            RayError,
            WorkerCrashedError,
        )

        out: Future[tuple[str, Any]] = Future()
        try:
            reference = call(self._handle(vertex, incarnation))
        except (ValueError, RayError) as error:
            # ValueError: no actor of that name, for it is dead and its name is free.
            out.set_exception(_lost(vertex, incarnation, error))
            return out

        def finish(inner: Future[Any]) -> None:
            error = inner.exception()
            if error is None:
                out.set_result(inner.result())
            elif isinstance(error, RayActorError | WorkerCrashedError | NodeDiedError | OutOfMemoryError):
                out.set_exception(_lost(vertex, incarnation, error))
            else:
                out.set_result(("error", _not_sent(error)))

        reference.future().add_done_callback(finish)
        return out

    def _handle(self, vertex: str, incarnation: int) -> Any:
        import ray

        key = (vertex, incarnation)
        with self._lock:
            if key not in self._handles:
                name = actor_name(self._job_id, vertex, incarnation)
                self._handles[key] = ray.get_actor(name, namespace=NAMESPACE)
                for old in [known for known in self._handles if known[0] == vertex and known != key]:
                    del self._handles[old]
            return self._handles[key]


def _not_sent(error: BaseException) -> Failure:
    """Of a call whose actor lives. The host reports every exception of the workload as an outcome, so what is left is a
    value that does not pickle there, or does not unpickle here; or a fault of Ray's, such as an object that is gone."""
    from ray.exceptions import RayError, RaySystemError, RayTaskError

    if isinstance(error, RayTaskError):
        text = str(error.cause or error)
        if isinstance(error.cause, RayError):  # its arguments did not arrive
            return Failure(f"{type(error.cause).__name__}: {text}"[:2000], str(error), user_code=False)
        return Failure(f"what it returned cannot be sent: {text}", str(error), user_code=True)
    # Ray puts what unpickling raised into a RaySystemError; its own such errors hold a text.
    if isinstance(error, RaySystemError) and isinstance(error.client_exc, BaseException):
        inner = error.client_exc
        text = f"what it returned cannot be read: {type(inner).__name__}: {inner}"
        return Failure(text, str(error.traceback_str or error), user_code=True)
    if isinstance(error, RayError):
        return Failure(f"{type(error).__name__}: {error}"[:2000], str(error), user_code=False)
    return Failure(f"what it returned cannot be read: {type(error).__name__}: {error}", "", user_code=True)


def _lost(vertex: str, incarnation: int, error: BaseException) -> VertexDied:
    return VertexDied(
        f"{vertex} (incarnation {incarnation}) was lost during a call: {type(error).__name__}.",
        details={"vertex": vertex, "incarnation": incarnation, "cause": str(error)[:500]},
    )
