"""A job in one process: its vertices, and the part of a master that they need. See `gyre.testing.in_process`."""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gyre.config import ROLLOUT_MANAGER, TRAINER, JobSpec, parse_job
from gyre.errors import JobFailed, UserCodeError
from gyre.graph import compile_job, elastic_of, local_roles
from gyre.rollouts.trainer.sample_ledger import PromptAccount, account_of
from gyre.store import open_store
from gyre.testing.in_process.collective import close_collective, open_collective
from gyre.testing.in_process.host import EPOCH, InProcessHost, Moments, Outcome, When
from gyre.testing.in_process.transport import InProcessTransport
from gyre.testing.in_process.vertex import InProcessVertex
from gyre.workloads.vertex.messages import Binding, thread_stacks
from gyre.workloads.vertex.transport import Transport

WATCH_S = 0.1
CLOSE_S = 5.0
_NO_RENDEZVOUS = "in-process"


@dataclass(frozen=True, slots=True)
class Reported:
    """A trainer's report to the master: `kind` names a class of `gyre.failover.events`, `body` has its fields."""

    kind: str
    body: dict[str, Any]


class InProcessJob:
    """A job, its vertices and the part of a master that they need. A context manager: starts, then closes.

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
        """The trainers' reports that were read before they died, in order."""
        self._lock = threading.RLock()
        self._changed = threading.Condition()
        self._moments = Moments()
        self._vertices: dict[str, InProcessVertex] = {}
        self._incarnations: dict[str, int] = {}
        self._collectives: dict[str, int] = {}
        """The port of each gang's collective."""
        self._transports: dict[int, InProcessTransport] = {}
        self._serial = 0
        self._paused = False
        self._ended: Reported | None = None
        self._everything: list[InProcessVertex] = []
        self._environment = dict(os.environ)
        self._path = list(sys.path)

    # -- life ---------------------------------------------------------------------------------------

    def start(self) -> InProcessJob:
        """Bind every vertex and start the trainer. Raises UserCodeError if a `setup()` raised."""
        with self._lock:
            for role in self.spec.roles:
                if role != TRAINER:
                    self._start_ranks(role, range(self.spec.roles[role].total))
            self._start_trainer()
        return self

    def close(self) -> None:
        """Kill everything that is left and restore the process's environment. Safe to repeat."""
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
        """Run `action` at the `nth` call from now of `call`, `role.method`, which may be any method, also of the
        protocol (`load_weights`, `state`, `begin`, `restore`, `checkpoint`, …). Each rank's call counts; with `vertex`
        only that vertex's calls count. If the action raises before a call, the call fails with that error. With `sent`
        it runs in the trainer's thread while the call is on its way to the vertex: a trainer that is killed there has
        not made its next call, such as the same call to the next rank of a gang."""
        self._moments.add(call, nth, action, when=when, vertex=vertex)

    def on_report(self, kind: str, nth: int, action: Callable[[], object], *, when: When = "after") -> None:
        """As `on`, when the trainer makes its `nth` report of `kind` from now; in the trainer's thread."""
        self._moments.add(f"{TRAINER}.{kind}", nth, action, when=when, vertex=None)

    # -- what happens to vertices -------------------------------------------------------------------

    def kill(self, *vertices: str) -> None:
        """Kill vertices; nobody replaces them until `replace`."""
        with self._lock:
            for vertex in vertices:
                if vertex == f"{TRAINER}-0":
                    self._kill_trainer()
                else:
                    self._kill(self._vertices[vertex])

    def replace(self, *vertices: str) -> None:
        """Start new incarnations, and announce them to the trainer at once. With one rank the whole gang is replaced,
        and its living ranks are killed, as the master does with a region."""
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
        """Kill the trainer at once; a new one with a higher term starts on the same ledger."""
        self.restart(f"{TRAINER}-0")

    def hang(self, vertex: str) -> None:
        """Let a vertex hang: it lives, but its calls neither end nor begin until `wake`, `kill` or `replace`."""
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
        """The result of `fit()`. Raises UserCodeError or JobFailed if it raised, and TimeoutError, with the stack of
        every thread, if it does not return within `timeout_s`."""
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
        """The trainer's last report of its progress."""
        return self._trainer.progress.read()[1]

    @property
    def running(self) -> dict[str, int]:
        """The incarnation of every living vertex except the trainer."""
        with self._lock:
            return {
                name: vertex.host.incarnation
                for name, vertex in self._vertices.items()
                if not vertex.dead and name != f"{TRAINER}-0"
            }

    def vertex(self, vertex: str) -> InProcessVertex:
        """The newest incarnation of a vertex, dead or alive."""
        return self._vertices[vertex]

    # -- the master's part -------------------------------------------------------------------

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
            port, _ = open_collective(total)
            self._collectives[role] = port
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
            close_collective(self._collectives[role])
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
        """Whether an earlier trainer made the same report, as the coordinator decides it."""
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
