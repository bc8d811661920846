"""What stands behind a trainer: the membership, the role handles, pause and stop, and the thread that runs `fit()`."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gyre.config import TRAINER, JobSpec, parse_job
from gyre.errors import Fenced, GyreError, UserCodeError
from gyre.workloads.base import BaseTrainer, WorkloadContext
from gyre.workloads.gang.script import ScriptGang
from gyre.workloads.handles import RoleHandle
from gyre.workloads.plain_data import plain_fields
from gyre.workloads.vertex.membership import Membership
from gyre.workloads.vertex.messages import Binding, failure_of
from gyre.workloads.vertex.returns import named
from gyre.workloads.vertex.transport import RayTransport, VertexTransport


class TrainerRuntime:
    """Bound to a trainer before its `setup()`, as `trainer.runtime`, with the role handles beside it."""

    def __init__(
        self,
        binding: Binding,
        trainer: Any,
        context: WorkloadContext,
        *,
        transport: VertexTransport | None = None,
    ) -> None:
        self.binding = binding
        self.spec: JobSpec = parse_job(binding.spec or {})
        self.term = binding.incarnation
        self.context = context
        self.membership = Membership()
        self.transport = transport or RayTransport(binding.job_id, self.term)
        self.gang_numbers = itertools.count(1)
        """Of the gangs that this trainer uses, growing."""
        self._trainer = trainer
        self._running = threading.Event()
        self._stopping = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiting = 0
        self._waiting_lock = threading.Lock()
        handles = {
            role: RoleHandle(
                role,
                self.membership,
                self.transport,
                timeout_s=self.spec.run.call_timeout_s,
                owner=self,
                gang=self._gang(role) if spec.gang else None,
            )
            for role, spec in self.spec.roles.items()
            if role != TRAINER
        }
        trainer.runtime = self
        if isinstance(trainer, BaseTrainer):
            trainer.handles = handles
        else:
            for role, handle in handles.items():
                setattr(trainer, role, handle)

    def _gang(self, role: str) -> ScriptGang:
        return ScriptGang(role, self.membership, self.transport, numbers=self.gang_numbers, owner=self)

    # -- the master's side (control threads) --------------------------------------------------------

    def announce(self, serial: int, running: dict[str, int], wanted: dict[str, int]) -> None:
        self.membership.announce(serial, running, wanted)

    def start(self, *, paused: bool) -> None:
        """Run `fit()` in a thread. Repeated calls, also at the same time, do nothing more than the first."""
        self.set_paused(paused)
        with self._starting:
            if self._thread is None:
                thread = threading.Thread(target=self._fit, name="gyre-fit", daemon=True)
                thread.start()
                self._thread = thread  # from now on others may join it

    def set_paused(self, paused: bool) -> None:
        if paused:
            self._running.clear()
        else:
            self._running.set()

    def stop(self) -> None:
        """`fit()` should return at the next step's end. A trainer that never asks `should_stop` runs on,
        until the master's drain deadline ends its process."""
        self._stopping.set()
        self._running.set()

    def join(self, timeout_s: float) -> bool:
        """Wait for the thread of `fit()`. Whether it has ended (or never began)."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return self._thread is None or not self._thread.is_alive()

    @property
    def busy(self) -> str:
        """`fit` while the trainer's own code is running; empty while it waits for other vertices or is paused."""
        alive = self._thread is not None and self._thread.is_alive()
        return "fit" if alive and not self._waiting and not self.paused else ""

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """While inside, the trainer stands still through no fault of its own."""
        with self._waiting_lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._waiting_lock:
                self._waiting -= 1
            self.context.progress.tick()

    def wait_while_paused(self) -> None:
        """Return when the job is not paused, or stops."""
        self._running.wait()

    # -- the trainer's side -------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    @property
    def should_stop(self) -> bool:
        return self._stopping.is_set()

    def report(self, kind: str, **body: Any) -> None:
        """An event for the journal; `kind` is the name of a class in `gyre.failover.events`, or one of your own."""
        self.context.report(kind, {"incarnation": self.term, **body})

    def _fit(self) -> None:
        """The thread of `fit()`. However it ends, the master gets a report: it would wait for ever otherwise."""
        try:
            self._fit_and_tell()
        except BaseException as error:
            failure = failure_of(error)  # the user's where what fit() returned or raised cannot be read
            text = f"the end of fit() could not be reported: {failure.error}"
            self.report("TrainerFailed", error=text, traceback=failure.traceback, user_code=failure.user_code)

    def _fit_and_tell(self) -> None:
        try:
            result = self._trainer.fit()
        except Fenced:
            return  # a newer trainer has taken over; this one has nothing more to say
        except UserCodeError as error:
            # The innermost cause is in a vertex, and its traceback is the one worth reading.
            where = {key: str(error.details.get(key, "")) for key in ("place", "method")}
            self.report(
                "TrainerFailed", error=error.message, traceback=error.traceback, user_code=True, **where
            )
            return
        except GyreError as error:
            # Raised by a handle in the user's `fit()`, say: a deadline that passed is not the user's exception.
            told = failure_of(error)
            self.report(
                "TrainerFailed", error=told.error, traceback=told.traceback, user_code=False, code=told.code
            )
            return
        except BaseException as error:
            failure = failure_of(
                error, module=type(self._trainer).__module__, method=named(self._trainer.fit)[0]
            )
            self.report(
                "TrainerFailed",
                error=failure.error,
                traceback=failure.traceback,
                user_code=failure.user_code,
                code=failure.code,
                place=failure.place,
                method=failure.method,
            )
            return
        self.report("TrainerFinished", result=plain_fields(result), stopped=self.should_stop)
