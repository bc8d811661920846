"""A whole job's data plane in one process, without Ray: for tests of workloads, of trainers and of their recovery.

    job = InProcessJob(spec, tmp_path)
    job.on("actor.apply", 3, lambda: job.kill("actor-1"), when="after")
    job.on("rollout.generate", 5, lambda: job.restart("rollout-0"))
    with job:
        result = job.result(timeout_s=30)
    assert job.account().trained_twice == ()

The hosts, the membership, the runtime, the trainer and the sample ledger are the real ones; what is played is the
master (which starts vertices and says who runs) and death. Every vertex has one thread for its calls, as it has
one process elsewhere; control calls come beside it. Arguments and results are pickled and unpickled, so nothing
is shared by accident, and arrays arrive read-only, as they do from Ray's object store.

Invariants:
- *dead is dead*: no result of a killed vertex is ever delivered, none of its reports is read, and code that still
  runs in it ends at its next `report_progress`;
- *deaths land where they are put*: an action of `on` runs in the thread of the call that it was put at, before
  that call begins or after it has ended and before anybody has heard of it; or in the thread of the caller, when the
  call is on its way.

What one process cannot show: `env` and `sys.path` are shared by all vertices (and put back by `close`), and
collectives over Gloo or NCCL need processes; `collective_of` is a stand-in for workloads that can use it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import pickle
import queue
import sys
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gyre.config import ROLLOUT_MANAGER, TRAINER, JobSpec, parse_job
from gyre.errors import JobFailed, UserCodeError, VertexLost
from gyre.graph import compile_job, elastic_of, local_roles
from gyre.rollouts.trainer.sample_ledger import PromptAccount, account_of
from gyre.store import open_store
from gyre.workloads.base import Progress, WorkloadContext
from gyre.workloads.runtime import TrainerRuntime
from gyre.workloads.vertex.host import VertexHost
from gyre.workloads.vertex.messages import Binding, Failure, failure_of, thread_stacks
from gyre.workloads.vertex.transport import Transport

When = Literal["sent", "before", "after"]
Outcome = tuple[str, Any]
Packed = tuple[bytes, tuple[bytes, ...]]
"""A pickle and the buffers that it refers to."""

EPOCH = 1
"""There is one master here, and it does not change."""

WATCH_S = 0.1
CLOSE_S = 5.0
_FOREVER = 2**62
_NO_RENDEZVOUS = "in-process"


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

    def _fit(self) -> None:
        with contextlib.suppress(Killed):
            super()._fit()


class InProcessHost(VertexHost):
    """A `VertexHost` that can be killed, with moments at its calls and reports."""

    def __init__(
        self,
        vertex: str,
        incarnation: int,
        *,
        moments: Moments | None = None,
        transport: Transport | None = None,
    ) -> None:
        super().__init__(vertex, incarnation, EPOCH)
        self.mortal = MortalProgress()
        self.progress = self.mortal
        self._moments = moments or Moments()
        self._transport = transport

    def call(self, term: int, method: str, *args: Any, **kwargs: Any) -> Outcome:
        try:
            self._pass(method, "before")
        except Exception as error:  # an action that raises stands for an operator that does
            return "error", failure_of(error, module=type(self._workload).__module__)
        outcome = super().call(term, method, *args, **kwargs)
        self._pass(method, "after")
        return outcome

    def report(self, kind: str, body: dict[str, Any]) -> None:
        self._pass(kind, "before")
        super().report(kind, body)
        self._pass(kind, "after")

    def end_fit(self) -> None:
        """Let whatever the killed trainer's thread waits for come to an end: it then meets a dead transport."""
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
            self._runtime = InProcessRuntime(
                binding, workload, context, report=self.report, transport=self._transport
            )

    def _pass(self, name: str, when: When) -> None:
        self.mortal.check()
        self._moments.reached(self.vertex, name, when)
        self.mortal.check()


class InProcessVertex:
    """A host and the one thread on which its calls run, in the order in which they came."""

    def __init__(self, host: InProcessHost) -> None:
        self.host = host
        self._lock = threading.Lock()
        self._pending: set[Future[Any]] = set()
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._awake = host.mortal.awake
        self._thread = threading.Thread(
            target=self._work, name=f"{host.vertex}.{host.incarnation}", daemon=True
        )
        self._thread.start()

    @property
    def dead(self) -> bool:
        return self.host.mortal.dead.is_set()

    def submit(self, call: Callable[[], Any]) -> Future[Any]:
        """The future ends with what `call` returns or raises, or with VertexLost."""
        future: Future[Any] = Future()
        with self._lock:
            if not self.dead:
                self._pending.add(future)
                self._calls.put((future, call))
                return future
        future.set_exception(lost(self.host.vertex, self.host.incarnation))
        return future

    def hang(self) -> None:
        """From now on nothing begins, returns or reports progress; control calls go on."""
        self._awake.clear()

    def wake(self) -> None:
        self._awake.set()

    def kill(self) -> None:
        """Its pending and later calls end with VertexLost. Safe to repeat, and to call from its own thread."""
        with self._lock:
            if self.dead:
                return
            self.host.mortal.dead.set()
            pending, self._pending = self._pending, set()
        self._awake.set()
        self._calls.put(None)
        for future in pending:
            future.set_exception(lost(self.host.vertex, self.host.incarnation))

    def join(self, timeout_s: float) -> bool:
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (entry := self._calls.get()) is not None:
            future, call = entry
            self._awake.wait()
            if self.dead:
                return
            try:
                value = call()
            except Killed:
                return
            except BaseException as error:
                self._awake.wait()
                if self._settles(future):
                    future.set_exception(error)
            else:
                self._awake.wait()
                if self._settles(future):
                    future.set_result(value)

    def _settles(self, future: Future[Any]) -> bool:
        with self._lock:
            known = future in self._pending
            self._pending.discard(future)
        return known


def lost(vertex: str, incarnation: int) -> VertexLost:
    return VertexLost(
        f"{vertex} (incarnation {incarnation}) was lost during a call: it was killed.",
        details={"vertex": vertex, "incarnation": incarnation},
    )


# -- calls ------------------------------------------------------------------------------------------


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
        *args: Any,
        bundle: Any = None,
        control: bool = False,
        **kwargs: Any,
    ) -> Future[Outcome]:
        """See `gyre.workloads.vertex.transport.Transport`. Raises Killed once closed, and what makes arguments
        unpicklable."""
        packed = _pack((args, kwargs))

        def call(host: InProcessHost) -> Outcome:
            given, named = _unpack(packed)
            if control:
                return host.control_call(self._term, method, *given, **named)
            if bundle is not None:
                return host.call_with_weights(self._term, _unpack(bundle.packed), method, *given, **named)
            return host.call(self._term, method, *given, **named)

        out = self._send(vertex, incarnation, call)
        self._moments.reached(vertex, method, "sent")
        return out

    def settle(self, vertex: str, incarnation: int) -> Future[Outcome]:
        return self._send(vertex, incarnation, lambda host: host.settle(self._term))

    def standing(self, vertex: str, incarnation: int) -> Future[Outcome]:
        """Answered in the caller's thread, for the vertex's own may be inside of a call; also while it hangs."""
        return self._send(vertex, incarnation, lambda host: host.standing(self._term), beside=True)

    def _send(
        self,
        vertex: str,
        incarnation: int,
        call: Callable[[InProcessHost], Outcome],
        *,
        beside: bool = False,
    ) -> Future[Outcome]:
        out: Future[Outcome] = Future()
        with self._lock:
            if self._closed:
                raise Killed
            self._open.add(out)
        found = self._find(vertex, incarnation)
        if found is None or (beside and found.dead):
            self._end(out, error=lost(vertex, incarnation))
            return out
        if beside:
            self._end(out, value=_unpack(_sendable(call(found.host))))
            return out

        def finish(inner: Future[Any]) -> None:
            error = inner.exception()
            if error is not None:
                self._end(out, error=error)
            else:
                self._end(out, value=_unpack(inner.result()))

        found.submit(lambda: _sendable(call(found.host))).add_done_callback(finish)
        return out

    def share(self, value: Any) -> Shared:
        return Shared(_pack(value))

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


def _pack(value: Any) -> Packed:
    buffers: list[pickle.PickleBuffer] = []
    data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return data, tuple(bytes(buffer.raw()) for buffer in buffers)


def _unpack(packed: Packed) -> Any:
    """Arrays are backed by immutable bytes, and so read-only."""
    return pickle.loads(packed[0], buffers=packed[1])


def _sendable(outcome: Outcome) -> Packed:
    try:
        return _pack(outcome)
    except Exception as error:  # whatever an object's own pickling raises
        failure = Failure(
            error=f"what it returned cannot be sent: {type(error).__name__}: {error}",
            traceback="",
            user_code=True,
        )
        return _pack(("error", failure))


# -- collectives ------------------------------------------------------------------------------------


class InProcessCollective:
    """The ranks of one generation of a gang. Every rank makes the same calls in the same order."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._condition = threading.Condition()
        self._values: dict[int, Any] = {}
        self._gathered: list[Any] = []
        self._round = 0
        self._broken = False

    def exchange(self, rank: int, value: Any, *, timeout_s: float = 30.0) -> list[Any]:
        """Every rank's value in rank order. Raises ConnectionError where a peer was killed or did not come, as
        Gloo does; the collective is of no use after that."""
        with self._condition:
            entered = self._round
            self._values[rank] = value
            if len(self._values) == self.world_size and not self._broken:
                self._gathered = [self._values[peer] for peer in range(self.world_size)]
                self._values = {}
                self._round += 1
                self._condition.notify_all()
            else:
                self._condition.wait_for(lambda: self._broken or self._round > entered, timeout_s)
            if self._round == entered:
                self.break_off()
                raise ConnectionError("Connection closed by peer")
            return self._gathered

    def break_off(self) -> None:
        """A rank is dead: everybody who waits, and everybody who comes later, is told."""
        with self._condition:
            self._broken = True
            self._condition.notify_all()


_COLLECTIVES: dict[int, InProcessCollective] = {}
_RENDEZVOUS = itertools.count(1)


def collective_of(context: WorkloadContext) -> InProcessCollective:
    """The collective of a workload that runs in an InProcessJob; one of its own where its gang has one rank."""
    if context.world_size == 1 or context.master_port is None:
        return InProcessCollective(context.world_size)
    return _COLLECTIVES[context.master_port]


# -- the job ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reported:
    """What a trainer told the master: `kind` names a class of `gyre.failover.events`, `body` has its fields."""

    kind: str
    body: dict[str, Any]


class InProcessJob:
    """A job, its vertices and the little of a master that they need. A context manager: starts, then closes.

    `directory` holds its checkpoints and, unless `store_url` says otherwise, its store. A vertex's id is its
    role and rank, `rollout-0`; the trainer's is `trainer-0`. All methods may be called from actions of `on`.
    """

    def __init__(
        self,
        spec: JobSpec | Mapping[str, Any],
        directory: Path,
        *,
        store_url: str | None = None,
        job_id: str = "in-process-1",
    ) -> None:
        given = spec if isinstance(spec, JobSpec) else parse_job(spec)
        self.spec = compile_job(given).spec
        self.job_id = job_id
        self.directory = directory
        self.store_url = store_url or f"sqlite:///{directory / 'gyre.db'}"
        self.reports: list[Reported] = []
        """Everything that trainers reported and that was read before they died, in order."""
        self._lock = threading.RLock()
        self._changed = threading.Condition()
        self._moments = Moments()
        self._vertices: dict[str, InProcessVertex] = {}
        self._incarnations: dict[str, int] = {}
        self._collectives: dict[str, tuple[int, InProcessCollective]] = {}
        self._transports: dict[int, InProcessTransport] = {}
        self._serial = 0
        self._paused = False
        self._ended: Reported | None = None
        self._everything: list[InProcessVertex] = []
        self._environment = dict(os.environ)
        self._path = list(sys.path)

    # -- life ---------------------------------------------------------------------------------------

    def start(self) -> InProcessJob:
        """Bind every vertex and start the trainer. Raises UserCodeError where a `setup()` raised."""
        with self._lock:
            for role in self.spec.roles:
                if role != TRAINER:
                    self._start_ranks(role, range(self.spec.roles[role].total))
            self._start_trainer()
        return self

    def close(self) -> None:
        """Kill everything that is left and put the process's environment back. Safe to repeat."""
        with self._lock:
            for transport in self._transports.values():
                transport.close()
            for vertex in self._everything:
                self._kill(vertex)
        for vertex in self._everything:
            vertex.join(CLOSE_S)
            vertex.host.join_fit(CLOSE_S)
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        sys.path[:] = self._path

    def __enter__(self) -> InProcessJob:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # -- chosen moments -----------------------------------------------------------------------------

    def on(
        self,
        call: str,
        nth: int,
        action: Callable[[], object],
        *,
        when: When = "before",
        vertex: str | None = None,
    ) -> None:
        """Run `action` at the `nth` call from now of `call`, `role.method`: any method, those of the protocol
        included (`load_weights`, `state`, `begin`, `restore`, `checkpoint`, …). Each rank's call counts; `vertex`
        counts that vertex's alone. An action that raises before a call makes the call fail with that. With `sent` it
        runs in the trainer's thread when the call is on its way to the vertex: a trainer that is killed there has not
        sent what it would send next, the same call to the next rank of a gang above all."""
        self._moments.add(call, nth, action, when=when, vertex=vertex)

    def on_report(self, kind: str, nth: int, action: Callable[[], object], *, when: When = "after") -> None:
        """As `on`, when the trainer makes its `nth` report of `kind` from now; in the trainer's thread."""
        self._moments.add(f"{TRAINER}.{kind}", nth, action, when=when, vertex=None)

    # -- what happens to vertices -------------------------------------------------------------------

    def kill(self, *vertices: str) -> None:
        """They die; nobody replaces them until `replace`."""
        with self._lock:
            for vertex in vertices:
                if vertex == f"{TRAINER}-0":
                    self._kill_trainer()
                else:
                    self._kill(self._vertices[vertex])

    def replace(self, *vertices: str) -> None:
        """New incarnations, announced to the trainer at once. With one rank of a gang goes the whole gang: what
        still lives of it is killed, as the master does with a region."""
        with self._lock:
            roles: dict[str, set[int]] = {}
            for vertex in vertices:
                role, _, rank = vertex.rpartition("-")
                roles.setdefault(role, set()).add(int(rank))
            trainer = roles.pop(TRAINER, None) is not None
            for role, ranks in roles.items():
                gang = self.spec.roles[role].gang
                self._start_ranks(role, range(self.spec.roles[role].total) if gang else sorted(ranks))
            if trainer:
                self._kill_trainer()
                self._start_trainer()
            elif roles:
                self._announce()

    def restart(self, *vertices: str) -> None:
        """`kill`, then `replace`."""
        with self._lock:
            self.kill(*vertices)
            self.replace(*vertices)

    def kill_trainer(self) -> None:
        """The trainer dies where it stands; a new one with a higher term starts on the same ledger."""
        self.restart(f"{TRAINER}-0")

    def hang(self, vertex: str) -> None:
        """It lives, but nothing that it works on ends, and nothing begins, until `wake`, `kill` or `replace`."""
        self._vertices[vertex].hang()

    def wake(self, vertex: str) -> None:
        self._vertices[vertex].wake()

    # -- commands -----------------------------------------------------------------------------------

    def pause(self) -> None:
        with self._lock:
            self._paused = True
            self._trainer.set_paused(EPOCH, True)

    def resume(self) -> None:
        with self._lock:
            self._paused = False
            self._trainer.set_paused(EPOCH, False)

    def stop(self) -> None:
        """Ask `fit()` to return; `result` then has `stopped` runs' results too."""
        with self._lock:
            self._trainer.stop_fit(EPOCH)

    # -- what came of it ----------------------------------------------------------------------------

    def result(self, *, timeout_s: float) -> dict[str, Any]:
        """What `fit()` returned. Raises UserCodeError or JobFailed where it raised, and TimeoutError, which says
        what every thread is doing, where it does not return within `timeout_s`."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._ended is not None, timeout_s):
                raise TimeoutError(
                    f"the job did not end within {timeout_s:g} s; its trainer's progress is "
                    f"{self.progress}; its threads:\n{thread_stacks()}"
                )
            ended = self._ended
        assert ended is not None
        if ended.kind == "TrainerFinished":
            result: dict[str, Any] = ended.body["result"]
            return result
        kind = UserCodeError if ended.body["user_code"] else JobFailed
        raise kind(ended.body["error"], details={"traceback": ended.body["traceback"]})

    def wait_for_report(self, kind: str, *, nth: int = 1, timeout_s: float) -> Reported:
        """The `nth` report of `kind`. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.reports_of(kind)) >= nth, timeout_s):
                raise TimeoutError(f"there was no {kind} number {nth} within {timeout_s:g} s")
            return self.reports_of(kind)[nth - 1]

    def reports_of(self, kind: str) -> list[Reported]:
        return [report for report in self.reports if report.kind == kind]

    def account(self) -> PromptAccount:
        """The account of every prompt, by SQL over the ledger."""
        with open_store(self.store_url) as store:
            return account_of(store.ledger(self.job_id))

    @property
    def progress(self) -> dict[str, Any]:
        """What the trainer last said of how far it is."""
        return self._trainer.progress.read()[1]

    @property
    def running(self) -> dict[str, int]:
        """The incarnation of every vertex that lives, the trainer left out."""
        with self._lock:
            return {
                name: vertex.host.incarnation
                for name, vertex in self._vertices.items()
                if not vertex.dead and name != f"{TRAINER}-0"
            }

    def vertex(self, vertex: str) -> InProcessVertex:
        """The newest incarnation of a vertex, dead or alive."""
        return self._vertices[vertex]

    # -- the master that is played ------------------------------------------------------------------

    @property
    def _trainer(self) -> InProcessHost:
        return self._vertices[f"{TRAINER}-0"].host

    @property
    def _wanted(self) -> dict[str, int]:
        return {name: role.total for name, role in self.spec.roles.items() if name != TRAINER}

    def _start_ranks(self, role: str, ranks: Any) -> None:
        total = self.spec.roles[role].total
        for rank in ranks:
            if f"{role}-{rank}" in self._vertices:
                self._kill(self._vertices[f"{role}-{rank}"])
        port = None
        if self.spec.roles[role].gang and total > 1:
            port = next(_RENDEZVOUS)
            _COLLECTIVES[port] = InProcessCollective(total)
            self._collectives[role] = (port, _COLLECTIVES[port])
        made = [self._make(f"{role}-{rank}") for rank in ranks]
        bound = [
            vertex.submit(functools.partial(vertex.host.bind, EPOCH, self._binding(vertex.host, port)))
            for vertex in made
        ]
        for vertex, future in zip(made, bound, strict=True):
            _check_bound(vertex.host.vertex, future.result(self.spec.roles[role].setup_timeout_s))

    def _start_trainer(self) -> None:
        transport_term = self._incarnations.get(f"{TRAINER}-0", 0) + 1
        transport = InProcessTransport(self._living, transport_term, moments=self._moments)
        self._transports[transport_term] = transport
        vertex = self._make(f"{TRAINER}-0", transport)
        binding = self._binding(vertex.host, None)
        future = vertex.submit(lambda: vertex.host.bind(EPOCH, binding))
        _check_bound(vertex.host.vertex, future.result(self.spec.roles[TRAINER].setup_timeout_s))
        self._serial += 1
        vertex.host.start_fit(EPOCH, self._serial, self.running, self._wanted, self._paused)
        threading.Thread(target=self._watch, args=(vertex,), name="in-process-master", daemon=True).start()

    def _make(self, name: str, transport: Transport | None = None) -> InProcessVertex:
        incarnation = self._incarnations.get(name, 0) + 1
        self._incarnations[name] = incarnation
        vertex = InProcessVertex(InProcessHost(name, incarnation, moments=self._moments, transport=transport))
        self._vertices[name] = vertex
        self._everything.append(vertex)
        return vertex

    def _binding(self, host: InProcessHost, port: int | None) -> Binding:
        role, _, rank = host.vertex.rpartition("-")
        spec = self.spec.roles[role]
        if spec.entrypoint is None:
            raise ValueError(f"role {role!r} has no class")
        return Binding(
            job_id=self.job_id,
            job_name=self.spec.name,
            role=role,
            rank=int(rank),
            world_size=spec.total,
            local_rank=int(rank),
            incarnation=host.incarnation,
            module=spec.entrypoint.module,
            name=spec.entrypoint.name,
            file=spec.entrypoint.file,
            config=self.spec.config,
            env={**self.spec.env, **spec.env},
            python_path=self.spec.python_path,
            directory=str(self.directory),
            log_path="",
            orphan_timeout_s=math.inf,
            master_addr=_NO_RENDEZVOUS if port is not None else None,
            master_port=port,
            spec=self.spec.model_dump(mode="json") if role == TRAINER else None,
            store_url=self.store_url if role in (TRAINER, ROLLOUT_MANAGER) else "",
            rollouts=self.spec.rollouts.model_dump(mode="json"),
            weights=self.spec.weights.model_dump(mode="json"),
            elastic=elastic_of(self.spec) if role == ROLLOUT_MANAGER else None,
            local=role in local_roles(self.spec),
        )

    def _living(self, vertex: str, incarnation: int) -> InProcessVertex | None:
        found = self._vertices.get(vertex)
        return found if found is not None and found.host.incarnation == incarnation else None

    def _kill(self, vertex: InProcessVertex) -> None:
        role = vertex.host.vertex.rpartition("-")[0]
        vertex.kill()
        if role in self._collectives:
            port, collective = self._collectives[role]
            collective.break_off()
            _COLLECTIVES.pop(port, None)
        if role == TRAINER:
            vertex.host.end_fit()

    def _kill_trainer(self) -> None:
        vertex = self._vertices[f"{TRAINER}-0"]
        self._transports[vertex.host.incarnation].close()
        self._kill(vertex)

    def _announce(self) -> None:
        self._serial += 1
        trainer = self._vertices.get(f"{TRAINER}-0")
        if trainer is not None and not trainer.dead:
            trainer.host.announce(EPOCH, self._serial, self.running, self._wanted)

    def _watch(self, vertex: InProcessVertex) -> None:
        acknowledged = 0
        while not vertex.dead:
            report = vertex.host.watch(EPOCH, acknowledged, WATCH_S)
            with self._changed:
                for number, kind, body in report.outbox:
                    if vertex.dead:
                        return
                    acknowledged = number
                    if self._is_known(kind, body):
                        continue
                    told = Reported(kind, body)
                    self.reports.append(told)
                    if kind in ("TrainerFinished", "TrainerFailed"):
                        self._ended = told
                self._changed.notify_all()

    def _is_known(self, kind: str, body: dict[str, Any]) -> bool:
        """Whether an earlier trainer was heard with what this one tells again, as the coordinator decides it."""
        if kind == "GangRestored":
            known = [one.body["number"] for one in self.reports_of(kind) if one.body["role"] == body["role"]]
            return bool(body["number"] <= max(known, default=0))
        return bool(body.get("again")) and any(
            body["step"] <= one.body["step"] for one in self.reports_of(kind)
        )


def _check_bound(vertex: str, outcome: Outcome) -> None:
    status, value = outcome
    if status == "ok":
        return
    kind = UserCodeError if value.user_code else JobFailed
    raise kind(f"{vertex} did not start: {value.error}", details={"traceback": value.traceback})
