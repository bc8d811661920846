"""Calls from a trainer to vertices in the same process: what is sent is pickled, and the dead answer nothing."""

from __future__ import annotations

import contextlib
import pickle
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from gyre.testing.in_process.host import InProcessHost, Killed, Moments, Outcome
from gyre.testing.in_process.vertex import InProcessVertex, lost
from gyre.workloads.vertex.call_info import NOTHING_OFFERED, CallInfo
from gyre.workloads.vertex.messages import Failure
from gyre.workloads.vertex.transport import NO_KEYWORDS


@dataclass(frozen=True, slots=True)
class Shared:
    """A value that was pickled once, for many calls."""

    packed: Packed


class InProcessTransport:
    """Calls the living vertices that `find` knows. `term` is the trainer's incarnation, as in Ray's transport."""

    def __init__(
        self,
        find: Callable[[str, int], InProcessVertex | None],
        term: int,
        *,
        moments: Moments | None = None,
    ) -> None:
        self._find = find
        self._term = term
        self._moments = moments or Moments()
        self._lock = threading.Lock()
        self._closed = False
        self._open: set[Future[Outcome]] = set()

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
    ) -> Future[Outcome]:
        """See `gyre.workloads.vertex.transport.VertexTransport`. Raises Killed once closed, and what makes arguments
        unpicklable."""
        packed = pack((tuple(args), dict(kwargs), info))

        def call(host: InProcessHost) -> Outcome:
            given, named, about = unpack(packed)
            if control:
                return host.control_call(self._term, method, about, *given, **named)
            if bundle is not None:
                return host.call_with_weights(
                    self._term, unpack(bundle.packed), method, about, *given, **named
                )
            return host.call(self._term, method, about, *given, **named)

        out = self._send(vertex, incarnation, call, beside=control)
        self._moments.reached(vertex, method, "sent")
        return out

    def settle(self, vertex: str, incarnation: int) -> Future[Outcome]:
        return self._send(vertex, incarnation, lambda host: host.settle(self._term))

    def call_position(self, vertex: str, incarnation: int) -> Future[Outcome]:
        """Answered in the caller's thread, for the vertex's own may be inside of a call; also while it hangs."""
        return self._send(vertex, incarnation, lambda host: host.call_position(self._term), at_once=True)

    def _send(
        self,
        vertex: str,
        incarnation: int,
        call: Callable[[InProcessHost], Outcome],
        *,
        at_once: bool = False,
        beside: bool = False,
    ) -> Future[Outcome]:
        """`at_once`: in this thread. `beside`: on a thread of the call's own."""
        out: Future[Outcome] = Future()
        with self._lock:
            if self._closed:
                raise Killed
            self._open.add(out)
        found = self._find(vertex, incarnation)
        if found is None or (at_once and found.dead):
            self._end(out, error=lost(vertex, incarnation))
            return out
        if at_once:
            self._end(out, value=unpack(_sendable(call(found.host))))
            return out

        def finish(inner: Future[Any]) -> None:
            error = inner.exception()
            if error is not None:
                self._end(out, error=error)
            else:
                self._end(out, value=_read(inner.result()))

        run = found.control if beside else found.submit
        run(lambda: _sendable(call(found.host))).add_done_callback(finish)
        return out

    def share(self, value: Any) -> Shared:
        return Shared(pack(value))

    def close(self) -> None:
        """The caller is dead: what it waits for ends with Killed, and so does each further call."""
        with self._lock:
            self._closed = True
            waiting, self._open = self._open, set()
        for future in waiting:
            with contextlib.suppress(Killed):  # from callbacks that look at the outcome at once
                future.set_exception(Killed())

    def _end(self, future: Future[Outcome], *, value: Any = None, error: BaseException | None = None) -> None:
        with self._lock:
            known = future in self._open
            self._open.discard(future)
        if not known:
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(value)


def _read(packed: Packed) -> Outcome:
    try:
        outcome: Outcome = unpack(packed)
        return outcome
    except Exception as error:  # whatever an object's own unpickling raises, as in Ray's transport
        text = f"what it returned cannot be read: {type(error).__name__}: {error}"
        return "error", Failure(error=text, traceback="", user_code=True)


def _sendable(outcome: Outcome) -> Packed:
    try:
        return pack(outcome)
    except Exception as error:  # whatever an object's own pickling raises
        failure = Failure(
            error=f"what it returned cannot be sent: {type(error).__name__}: {error}",
            traceback="",
            user_code=True,
        )
        return pack(("error", failure))


Packed = tuple[bytes, tuple[bytes, ...]]
"""A pickle and the buffers that it refers to."""


def pack(value: Any) -> Packed:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return data, tuple(bytes(buffer.raw()) for buffer in buffers)


def unpack(packed: Packed) -> Any:
    """Arrays are backed by immutable bytes, and so read-only."""
    return pickle.loads(packed[0], buffers=packed[1])
