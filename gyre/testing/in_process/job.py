"""A job in one process, under the real master. See `gyre.testing.in_process`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from gyre.config import TRAINER, JobSpec, parse_job
from gyre.errors import JobFailed, UserCodeError
from gyre.failover import JobPhase, JobRecord, Reason
from gyre.graph import compile_job
from gyre.master.master import JobMaster
from gyre.rollouts.trainer.sample_ledger import PromptAccount, account_of
from gyre.store import EventRow, Labels, LedgerStore, Store, open_store
from gyre.testing.in_process.cluster import InProcessCluster
from gyre.testing.in_process.host import InProcessHost, InProcessRuntime, Moments, When
from gyre.testing.in_process.vertex import InProcessVertex
from gyre.workloads.vertex.messages import thread_stacks

CLOSE_S = 5.0
TOLD_S = 30.0
"""From a command in the journal to the trainer's obedience; milliseconds, but on a machine that does much else."""
LOOK_S = 1.0
"""How long a master that has broken goes unnoticed."""


class InProcessJob:
    """A job, its vertices and its master. A context manager: starts, then closes.

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
        self.killed: list[str] = []
        """The vertices that `kill` killed, in order."""
        self._moments = Moments()
        self._cluster = InProcessCluster(self.spec, self._moments)
        self.master = JobMaster(
            job_id=job_id,
            store_url=self.store_url,
            directory=directory,
            cluster=self._cluster,
            exit_process=sys.exit,
        )
        self._store: Store | None = None
        self._events: list[EventRow] = []
        self._broken: BaseException | None = None
        """What ended the master before its job."""
        self._stop_master: Callable[[], object] = lambda: None
        self._master_thread = threading.Thread(target=self._run_master, name="in-process-master", daemon=True)
        self._environment = dict(os.environ)
        self._path = list(sys.path)

    # -- life ---------------------------------------------------------------------------------------

    def start(self) -> InProcessJob:
        """Bind every vertex and start the trainer. Raises UserCodeError or JobFailed where one does not start."""
        self._store = open_store(self.store_url)
        spec = self.spec.model_dump(mode="json")
        labels = Labels(tuple(self.spec.tags), self.spec.notes)
        self._store.create_job(
            job_id=self.job_id, name=self.spec.name, spec=spec, now=time.time(), labels=labels
        )
        self._master_thread.start()
        while not self.master.ready.wait(LOOK_S):
            self._check_master()
        patience_s = max(role.setup_timeout_s for role in self.spec.roles.values())
        self._wait(lambda job: job.trainer_started or job.phase.ended, patience_s, "it did not start")
        self._wait_for_trainer(lambda fit: fit.has_begun)
        return self

    def close(self) -> None:
        """Kill the master and everything that is left, and restore the process's environment. Safe to repeat."""
        if self._master_thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._stop_master()
            self._master_thread.join(CLOSE_S)
        for vertex in self._cluster.everything:
            vertex.kill()
        for vertex in self._cluster.everything:
            vertex.join(CLOSE_S)
        if self._store is not None:
            self._events = self.events
            self._store.close()
            self._store = None
        if dict(os.environ) != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        sys.path[:] = self._path

    def __enter__(self) -> InProcessJob:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

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

    def kill(self, *vertices: str, no_room: bool = False) -> None:
        """Kill vertices. The master replaces them, with all of their region, while its budgets pay for that; with
        `no_room` the cluster has no room for replacements until `make_room`."""
        if no_room:
            self._cluster.leave_no_room(*vertices)
        for vertex in vertices:
            self.killed.append(vertex)
            self._cluster.vertices[vertex].kill()

    def kill_trainer(self) -> None:
        """Kill the trainer at once; a new one with a higher term starts on the same ledger."""
        self.kill(f"{TRAINER}-0")

    def make_room(self, *vertices: str) -> None:
        self._cluster.make_room(*vertices)

    def cut_off(self, *vertices: str) -> None:
        """Cut vertices off from the master: it takes them for dead, and they live on."""
        for vertex in vertices:
            self._cluster.vertices[vertex].cut_off()

    def hang(self, vertex: str) -> None:
        """Let a vertex hang: it lives, but its calls neither end nor begin until `wake` or `kill`."""
        self._cluster.vertices[vertex].hang()

    def wake(self, vertex: str) -> None:
        self._cluster.vertices[vertex].wake()

    # -- commands -----------------------------------------------------------------------------------

    def pause(self) -> None:
        """Returns when the trainer has been told, as does `resume`."""
        self.master.command("pause", {}, by="user")
        self._wait_for_trainer(lambda fit: fit.paused)

    def resume(self) -> None:
        self.master.command("resume", {}, by="user")
        self._wait_for_trainer(lambda fit: not fit.paused)

    def stop(self) -> None:
        """Ask `fit()` to return; `result` then has `stopped` runs' results too."""
        self.master.command("stop", {}, by="user")

    # -- what came of it ----------------------------------------------------------------------------

    def result(self, *, timeout_s: float) -> dict[str, Any]:
        """The result of `fit()`, when the job has ended. Raises UserCodeError or JobFailed if it failed, and
        TimeoutError, with the stack of every thread, if it does not end within `timeout_s`."""
        try:
            job = self._wait(lambda job: job.phase.ended, timeout_s, "it did not end")
        except TimeoutError as error:
            raise TimeoutError(
                f"{error}; its trainer's progress is {self.progress}; its threads:\n{thread_stacks()}"
            ) from None
        return job.result

    def wait_for_report(self, kind: str, *, nth: int = 1, timeout_s: float) -> EventRow:
        """The `nth` event of `kind`. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        while len(found := self.reports_of(kind)) < nth:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"there was no {kind} number {nth} within {timeout_s:g} s")
            if not self.master.wait_for_events(after=len(self._events), timeout_s=min(left_s, LOOK_S)):
                self._check_master()
        return found[nth - 1]

    @property
    def events(self) -> list[EventRow]:
        """The journal: what vertices reported, what the master saw and what was commanded."""
        if self._store is not None:
            known = self._events
            self._events = [*known, *self._store.journal(self.job_id).events(after=len(known))]
        return self._events

    def reports_of(self, kind: str) -> list[EventRow]:
        """The events of `kind`, a class of `gyre.failover.events`; `body` has its fields."""
        return [event for event in self.events if event.kind == kind]

    def account(self) -> PromptAccount:
        """The account of every prompt, by SQL over the ledger."""
        with self.ledger() as ledger:
            return account_of(ledger)

    @contextlib.contextmanager
    def ledger(self) -> Iterator[LedgerStore]:
        """The job's ledger, also when the job is closed."""
        if self._store is not None:
            yield self._store.ledger(self.job_id)
        else:
            with open_store(self.store_url) as store:
                yield store.ledger(self.job_id)

    @property
    def progress(self) -> dict[str, Any]:
        """The trainer's last report of its progress."""
        return self._trainer.progress.read()[1]

    @property
    def running(self) -> dict[str, int]:
        """The incarnation of every living vertex except the trainer."""
        return {
            name: vertex.host.incarnation
            for name, vertex in sorted(self._cluster.vertices.items())
            if not vertex.dead and name != f"{TRAINER}-0"
        }

    def vertex(self, vertex: str) -> InProcessVertex:
        """The newest incarnation of a vertex, dead or alive."""
        return self._cluster.vertices[vertex]

    # -- inside -------------------------------------------------------------------------------------

    @property
    def _trainer(self) -> InProcessHost:
        return self._cluster.vertices[f"{TRAINER}-0"].host

    def _run_master(self) -> None:
        try:
            with asyncio.Runner() as runner:
                loop = runner.get_loop()
                control = loop.create_task(self.master.run())
                self._stop_master = lambda: loop.call_soon_threadsafe(control.cancel)
                loop.run_until_complete(control)
        except asyncio.CancelledError:
            pass  # the job was closed
        except BaseException as error:  # its own exit included: whoever waits for it is told
            self._broken = error
        finally:
            self.master.close()

    def _check_master(self) -> None:
        if self._broken is not None:
            raise RuntimeError(f"the master broke: {self._broken!r}") from self._broken

    def _wait_for_trainer(self, is_told: Callable[[InProcessRuntime], bool]) -> None:
        def look() -> bool:
            fit = self._trainer.runtime
            return fit is not None and is_told(fit)

        with self._cluster.answered:
            if not self._cluster.answered.wait_for(look, TOLD_S):
                raise TimeoutError(
                    f"the trainer was not told within {TOLD_S:g} s; threads:\n{thread_stacks()}"
                )

    def _wait(self, is_so: Callable[[JobRecord], bool], timeout_s: float, otherwise: str) -> JobRecord:
        """The job in the journal when `is_so` of it. Raises TimeoutError, and UserCodeError or JobFailed where it has
        failed."""
        deadline = time.monotonic() + timeout_s
        while (left_s := deadline - time.monotonic()) > 0:
            state = self.master.wait_for(lambda state: is_so(state.job), timeout_s=min(left_s, LOOK_S))
            if state is None:
                self._check_master()
            elif state.job.phase is JobPhase.FAILED:
                kind = UserCodeError if state.job.reason is Reason.USER_CODE else JobFailed
                raise kind(state.job.message, details={"traceback": state.job.error})
            else:
                return state.job
        raise TimeoutError(f"{otherwise} within {timeout_s:g} s")
