"""A vertex's host that can be killed, and the moments at which a test does something to a job."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from gyre.testing.in_process.collective import break_off, new_port
from gyre.workloads.base import Progress, WorkloadContext
from gyre.workloads.runtime import TrainerRuntime
from gyre.workloads.vertex.call_info import NOTHING_OFFERED, CallInfo
from gyre.workloads.vertex.host import VertexHost
from gyre.workloads.vertex.messages import Binding, failure_of

if TYPE_CHECKING:
    from gyre.testing.in_process.transport import InProcessTransport

When = Literal["sent", "before", "after"]
Outcome = tuple[str, Any]

EPOCH = 1
"""A job's only master has this one."""

_FOREVER = 2**62


class Killed(SystemExit):
    """Raised in code that still runs in a vertex that was killed. Threads end with it without a word."""


class MortalProgress(Progress):
    """Progress that holds up the code which reports it while its vertex hangs, and ends it once that is dead."""

    def __init__(self) -> None:
        super().__init__()
        self.dead = threading.Event()
        self.awake = threading.Event()
        self.awake.set()

    def check(self) -> None:
        self.awake.wait()
        if self.dead.is_set():
            raise Killed

    def tick(self, **fields: Any) -> None:
        self.check()
        super().tick(**fields)


# -- chosen moments ---------------------------------------------------------------------------------


@dataclass(slots=True)
class _Moment:
    role: str
    name: str
    nth: int
    action: Callable[[], object]
    when: When
    vertex: str | None
    seen: int = 0


class Moments:
    """When what is called for the how-manieth time, do what. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._moments: list[_Moment] = []

    def add(
        self, ref: str, nth: int, action: Callable[[], object], *, when: When, vertex: str | None
    ) -> None:
        role, _, name = ref.rpartition(".")
        with self._lock:
            self._moments.append(_Moment(role, name, nth, action, when, vertex))

    def reached(self, vertex: str, name: str, when: When) -> None:
        """Run, in this thread, what was put at this moment."""
        due = []
        role = vertex.rpartition("-")[0]
        with self._lock:
            for moment in self._moments:
                if (moment.role, moment.name, moment.when) != (role, name, when):
                    continue
                if moment.vertex not in (None, vertex):
                    continue
                moment.seen += 1
                if moment.seen == moment.nth:
                    due.append(moment.action)
        for action in due:
            action()


# -- one vertex -------------------------------------------------------------------------------------


class InProcessRuntime(TrainerRuntime):
    """A `TrainerRuntime` whose thread ends without a word when its process is dead."""

    @property
    def has_begun(self) -> bool:
        return self._thread is not None

    def _fit(self) -> None:
        with contextlib.suppress(Killed):
            super()._fit()


class InProcessHost(VertexHost):
    """A `VertexHost` that can be killed, with moments at its calls and reports."""

    def __init__(
        self,
        vertex: str,
        incarnation: int,
        epoch: int = EPOCH,
        *,
        moments: Moments | None = None,
        transport: InProcessTransport | None = None,
    ) -> None:
        super().__init__(vertex, incarnation, epoch)
        self.mortal = MortalProgress()
        self.progress = self.mortal
        self._moments = moments or Moments()
        self._transport = transport
        self._port: int | None = None

    @property
    def runtime(self) -> InProcessRuntime | None:
        """The trainer's, once it is bound."""
        found: InProcessRuntime | None = self._runtime
        return found

    def address(self, epoch: int) -> tuple[str, int]:
        """The rendezvous of an `InProcessCollective`, which has no address."""
        self._address = self._address or ("in-process", new_port())
        return super().address(epoch)

    def bind(self, epoch: int, binding: Binding) -> Outcome:
        """Without what needs a process of its own: a log file, devices, and an end for want of a master."""
        self._port = binding.master_port
        env = {name: value for name, value in binding.env.items() if name != "GYRE_DEVICES"}
        return super().bind(epoch, replace(binding, env=env, log_path="", orphan_timeout_s=math.inf))

    def call(
        self, term: int, method: str, info: CallInfo = NOTHING_OFFERED, /, *args: Any, **kwargs: Any
    ) -> Outcome:
        try:
            self._pass(method, "before")
        except Exception as error:  # an action that raises stands for an operator that does
            return "error", failure_of(error, module=type(self._workload).__module__)
        outcome = super().call(term, method, info, *args, **kwargs)
        self._pass(method, "after")
        return outcome

    def control_call(
        self, term: int, method: str, info: CallInfo = NOTHING_OFFERED, /, *args: Any, **kwargs: Any
    ) -> Outcome:
        if method not in self._control_methods:
            return super().control_call(term, method, info, *args, **kwargs)
        self._pass(method, "before")
        outcome = super().control_call(term, method, info, *args, **kwargs)
        self._pass(method, "after")
        return outcome

    def report(self, kind: str, body: dict[str, Any]) -> None:
        self._pass(kind, "before")
        super().report(kind, body)
        self._pass(kind, "after")

    def die(self) -> None:
        """Tell whoever waits for the killed vertex, and let whatever its own threads wait for come to an end."""
        if self._port is not None:
            break_off(self._port, self.vertex.rpartition("-")[0])
        with self._condition:
            self._condition.notify_all()  # a watch call
        if self._transport is not None:
            self._transport.close()
        if self._runtime is not None:
            everybody = {
                f"{role}-{rank}": _FOREVER for role in self._runtime.spec.roles for rank in range(64)
            }
            self._runtime.announce(_FOREVER, everybody, {})
            self._runtime.set_paused(False)

    def join_fit(self, timeout_s: float) -> bool:
        return self._runtime is None or bool(self._runtime.join(timeout_s))

    def _bind_runtime(self, binding: Binding, workload: Any, context: WorkloadContext) -> None:
        if binding.spec is not None:
            self._runtime = InProcessRuntime(binding, workload, context, transport=self._transport)

    def _pass(self, name: str, when: When) -> None:
        self.mortal.check()
        self._moments.reached(self.vertex, name, when)
        self.mortal.check()
