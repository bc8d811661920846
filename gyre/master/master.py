"""The master: one control loop for one job.

The master opens the journal, raises the epoch, takes over what lives and starts what is missing; from then on it turns
observations into events, events into decisions and decisions into calls. It holds nothing that is not in the journal:
if it is killed at any moment, its successor continues from the journal, and the data plane waits for neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from gyre.clock import Clock
from gyre.config import JOIN_SCOPE, JobSpec, parse_job
from gyre.config.secrets import secret_values
from gyre.config.sections.model import source_of
from gyre.errors import ConfigError, Conflict, Fenced, GyreError, NotFound, StoreFull, Unreachable
from gyre.failover import FailoverCoordinator, JobPhase, JobState
from gyre.failover.events import (
    DiskFilled,
    DiskHasRoom,
    DrainRequested,
    Event,
    JobSubmitted,
    JoinTokenCreated,
    JoinTokenRevoked,
    MasterStarted,
    PauseRequested,
    ResumeRequested,
    ScaleRequested,
    StopRequested,
    UndrainRequested,
)
from gyre.graph import as_dict, compile_job
from gyre.logs.output import look_at_log
from gyre.logs.reading import LogQuery
from gyre.master.cluster import Cluster
from gyre.master.diagnosis_manager import DiagnosisManager
from gyre.master.executor import Executor
from gyre.master.job_context import Issued, JobContext
from gyre.master.job_manager import JobManager
from gyre.master.logs import logs_page
from gyre.master.master_api import View, nodes_of, spec_of, tokens_of, view_of
from gyre.master.metrics import prometheus_text
from gyre.master.moment_view import moment_of
from gyre.master.recorder import HistoryRecorder
from gyre.master.room import RoomQueue
from gyre.master.sink_processes import SinkProcesses, sinks_of
from gyre.master.store_notes import read_mark
from gyre.master.store_watch import StoreWatch, store_at
from gyre.master.vertex_scheduler import Scheduler
from gyre.observe.history import JobHistory
from gyre.observe.run_labels import label, labels_of
from gyre.observe.run_summary import keep_summary, summed_up
from gyre.observe.samples.files import SampleFiles
from gyre.observe.samples.names import folder_of
from gyre.observe.series import read_series
from gyre.observe.timeline import read_timeline
from gyre.redaction import KNOWN
from gyre.rollouts.plane.stored_account import stored_account
from gyre.store import JobFields, Store
from gyre.workloads.vertex.disk_room import DiskLook

Taken = TypeVar("Taken")

RECONCILE_S = 1.0
LOOK_S = 0.25
"""Pause between diagnosis passes: a fraction of the shortest sensible deadline."""

SAY_QUEUED_S = 15.0
"""How often a job says that it is in the queue: four times as often as it has to (`gyre.store.directory`)."""

ROW_WRITTEN_WITHIN_S = 30.0
"""How long a write of the job's row may hold the control loop up: beyond what SQLite waits for its lock."""

LINGER_S = 3.0
"""How long the master of an ended job still answers, so that its clients see the end."""

FAULT_EXIT = 70
CRASH_PAUSE_S = 1.0
"""Pause before a failed master ends its process and is started again: a lasting fault must not restart it in a tight
loop."""


class JobMaster:
    """The master of one job. Runs on one event loop; the methods of MasterApi may be called from any thread."""

    def __init__(
        self,
        *,
        job_id: str,
        store_url: str,
        directory: Path,
        cluster: Cluster,
        serve: Callable[[JobMaster, int], str] | None = None,
        clock: Clock = time,
        exit_process: Callable[[int], None] = os._exit,
        places: Sequence[Path] = (),
        store_lost_timeout_s: float = 300.0,
    ) -> None:
        """`places` are folders on the disks that are watched: none are where this is empty."""
        self.job_id = job_id
        self._store_url = store_url
        self._directory = directory
        self._samples = SampleFiles(folder_of(directory))
        self._cluster = cluster
        self._serve = serve
        self._clock = clock
        self._exit = exit_process
        self._store_lost_timeout_s = store_lost_timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._finished = asyncio.Event()
        self._news = asyncio.Event()
        self._opened = contextlib.ExitStack()
        self._row: dict[str, Any] = {}
        self._waited_for_room = False
        self._disks = DiskLook(places)
        self.ready = threading.Event()
        self._store: Store
        self._spec: JobSpec
        self._ray_address: str | None
        self._context: JobContext
        self._scheduler: Scheduler
        self._manager: JobManager
        self._diagnosis: DiagnosisManager
        self._watch: StoreWatch | None = None
        self._history: JobHistory
        self._recorder: HistoryRecorder
        self._sinks: SinkProcesses

    # -- the loop -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Control the job, from the take-over to its end."""
        self._loop = asyncio.get_running_loop()
        self._finished, self._news = asyncio.Event(), asyncio.Event()
        if self._disks.places:
            self._disks.begin()
            self._opened.callback(self._disks.end)
        found = await self._with_room(self._find_store)
        if found is None:
            await self.give_up("the store was not there")
            return
        self._store = self._opened.enter_context(found)
        row = self._store.job(self.job_id)
        self._spec = parse_job(row.spec)
        KNOWN.learn(secret_values(row.spec, os.environ))
        self._ray_address = row.ray_address
        self._build(row.name)
        self._opened.callback(self._context.close)
        undone = await self._with_room(self._take_over)
        first = not self._context.state.vertices
        if self._context.state.job.phase.ended:
            # The earlier master died after the job's last event and before carrying out its commands.
            await self._scheduler.places.release_all()
            await self._update_row()
            await self._cluster.end()
            return
        url = ""
        if self._serve is not None:
            url = await asyncio.to_thread(self._serve, self, _port_of(row.url))
        if first:
            roles = {role: spec.total for role, spec in self._spec.roles.items()}
            submitted = JobSubmitted(self.job_id, row.name, roles, source_of(self._spec.config))
            self._context.submit(submitted, actor="user")
        await self._context.submit(MasterStarted(self._context.epoch, os.getpid(), _hostname(), url))
        if not first:
            await self._scheduler.places.release_unwanted()
        if self._waited_for_room:  # what died meanwhile is not the vertices' fault
            self._context.submit(DiskFilled(str(self._directory), 0, 0), actor="diagnosis")
            self._context.submit(DiskHasRoom(str(self._directory), 0), actor="diagnosis")
        self._manager.run(self._still_meant(undone))
        self.ready.set()
        self._watch = StoreWatch(
            self._store,
            self._context,
            timeout_s=self._store_lost_timeout_s,
            clock=self._clock,
            owner=self,
            directory=self._directory,
        )
        watching = asyncio.get_running_loop().create_task(self._watch.run())
        watching.add_done_callback(self._watch_ended)
        self._opened.callback(watching.cancel)
        self._recorder.start()
        self._sinks.start()
        self._opened.callback(self._sinks.cancel)
        self._opened.callback(self._recorder.cancel)
        try:
            await self._control()
        except (
            asyncio.CancelledError
        ):  # the loop is stopped, and what is committed now must begin nothing in it
            await self._manager.close()
            raise

    async def _find_store(self) -> Store | None:
        return await store_at(
            self._store_url,
            timeout_s=self._store_lost_timeout_s,
            clock=self._clock,
            mark=read_mark(self._directory),
        )

    async def _take_over(self) -> list[Issued]:
        return self._context.open(pid=os.getpid())

    async def _with_room(self, take: Callable[[], Awaitable[Taken]]) -> Taken:
        """Do what writes to the store before this master controls the job, as soon as the disk has room for it. There
        is no deadline: a master that gives up is started again, and finds the same disk."""
        while True:
            try:
                return await take()
            except StoreFull as error:
                if not self._waited_for_room:
                    print(f"{error} This master waits for room.", file=sys.stderr, flush=True)
                self._waited_for_room = True
                await asyncio.sleep(RECONCILE_S)

    async def give_up(self, why: str) -> None:
        """End this master for good. Its vertices end by themselves, for no master comes back."""
        print(
            f"{why} for {self._store_lost_timeout_s:g} s: the job is given up. "
            "Bring the store back, then `gyre resume`.",
            file=sys.stderr,
            flush=True,
        )
        await self._cluster.end()

    def _watch_ended(self, watching: asyncio.Task[None]) -> None:
        if not watching.cancelled() and (error := watching.exception()) is not None:
            self.fault(error)

    def _build(self, name: str) -> None:
        graph = compile_job(self._spec)
        coordinator = FailoverCoordinator(graph.spec, graph.graph.region_or_alone)
        self._spec = graph.spec
        KNOWN.learn(secret_values(graph.spec.model_dump(mode="json"), os.environ))
        self._context = JobContext(
            self._store.journal(self.job_id),
            coordinator,
            clock=self._clock,
            owner=self,
        )
        self._scheduler = Scheduler(
            graph.spec,
            self._cluster,
            job_id=self.job_id,
            directory=self._directory,
            store_url=self._store_url,
            job=self._context,
            clock=self._clock,
            queue=RoomQueue(self.job_id, self._store, self._ray_address, self._clock),
        )
        executor = Executor(self._cluster, self._context)
        self._manager = JobManager(
            self._context,
            self._scheduler,
            executor,
            clock=self._clock,
            owner=self,
        )
        self._diagnosis = DiagnosisManager(
            graph.spec,
            self._context,
            self._cluster,
            self._scheduler,
            directory=self._directory,
            clock=self._clock,
            owner=self,
            disks=self._disks,
        )
        self._history = JobHistory(self._store, self.job_id)
        self._recorder = HistoryRecorder(
            self._store.series(self.job_id),
            self._history,
            self._context,
            self._diagnosis,
            clock=self._clock,
            owner=self,
        )

        self._sinks = SinkProcesses(
            sinks_of(self._spec, job_id=self.job_id, store_url=self._store_url, directory=self._directory),
            logs=self._directory / "logs",
            clock=self._clock,
        )

    @property
    def store_is_lost(self) -> bool:
        return self._watch is not None and bool(self._watch.lost)

    def _still_meant(self, undone: list[Issued]) -> list[Issued]:
        """The commands of an earlier master that are still due. The reconciliation makes good for the others."""
        return [issued for issued in undone if type(issued.command).__name__ in _RESUMED]

    async def _control(self) -> None:
        next_reconcile = 0.0
        while not self._finished.is_set():
            self._diagnosis.follow(self._context.committed)
            await self._diagnosis.look()
            look_at_log()
            now = self._clock.monotonic()
            if now >= next_reconcile:
                next_reconcile = now + RECONCILE_S
                self._manager.reconcile()
            await self._update_row()
            # A vertex is watched as soon as it has started; a silence is noticed within one pass.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await self._news.wait()
            self._news.clear()
        await self._end()

    def carry_out(self, issued: list[Issued]) -> None:
        self._manager.run(issued)

    def committed(self) -> None:
        self._news.set()

    def finish(self) -> None:
        self._finished.set()
        self._news.set()

    async def _update_row(self) -> None:
        """Keep the job's row in the directory of jobs equal to what is committed."""
        job = self._context.committed.job
        fields: JobFields = {
            "phase": job.phase.value,
            "reason": job.reason.value,
            "message": job.message[:500],
            "url": job.master_url,
            "ended_at": job.ended_at,
            "queued_since": since
            if (since := self._scheduler.places.queued_since) and not job.phase.ended
            else None,
            "queued_at": None,
        }
        if fields["queued_since"] is not None:  # said again now and then
            fields["queued_at"] = self._clock.time() // SAY_QUEUED_S * SAY_QUEUED_S
        if job.job_id and dict(fields) != self._row and not self.store_is_lost:
            try:
                fenced: JobFields = {**fields, "epoch": self._context.epoch}
                async with asyncio.timeout(
                    ROW_WRITTEN_WITHIN_S
                ):  # a file system may hang; its thread is left to it
                    await asyncio.to_thread(lambda: self._store.update_job(self.job_id, **fenced))
                self._row = dict(fields)
            except Fenced as error:
                self.fenced(error)
            except TimeoutError:
                self._context.error = self._context.error or "the store does not answer"
            except GyreError as error:
                # The journal's own retry reports the reason; this row is written again after it succeeds.
                self._context.error = self._context.error or str(error)

    async def _sum_up(self) -> None:
        """Keep what a list shows of the job. Where it cannot be done, the first list does it."""
        state, seq = self._context.committed, self._context.seq
        if not state.job.phase.ended or self.store_is_lost:
            return
        with contextlib.suppress(GyreError, TimeoutError):
            async with asyncio.timeout(ROW_WRITTEN_WITHIN_S):
                await asyncio.to_thread(
                    lambda: keep_summary(
                        self._store, self.job_id, self._store.job(self.job_id).spec, state, seq=seq
                    )
                )

    async def _end(self) -> None:
        await self._diagnosis.close()
        await self._manager.close()
        await self._update_row()
        await self._sum_up()
        await self._recorder.finish()
        await self._sinks.finish()
        await asyncio.sleep(LINGER_S)
        self.close()
        await self._cluster.end()

    def close(self) -> None:
        """Let go of the journal and the store; by itself where the loop is stopped before the job has ended."""
        self._opened.close()

    def fenced(self, error: BaseException) -> None:
        print(f"this master was replaced: {error}", file=sys.stderr, flush=True)
        self._exit(0)

    def fault(self, error: BaseException) -> None:
        """End this master after a defect in the control loop: a fresh master from the journal is better than half of
        this one."""
        if isinstance(error, Fenced):
            self.fenced(error)
            return
        traceback.print_exception(error)
        sys.stderr.flush()
        time.sleep(CRASH_PAUSE_S)
        self._exit(FAULT_EXIT)

    # -- MasterApi ---------------------------------------------------------------------------------

    def view(self) -> View:
        return view_of(
            self._context.committed,
            seq=self._context.seq,
            telemetry=self._diagnosis.telemetry,
            progress=self._diagnosis.progress,
            store_error=self._context.error,
            decided=self._context.state,
            asked=None if self._spec.counts_own_steps else self._spec.run.steps,
        )

    def tokens(self) -> list[dict[str, Any]]:
        return tokens_of(self._context.coordinator.join_tokens(self._context.committed))

    def spec(self) -> dict[str, Any]:
        return spec_of(self._spec)

    def graph(self, *, placement: bool = True) -> dict[str, Any]:
        return as_dict(self._scheduler.plans.graph(), placement=placement)

    def events(self, *, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        return [row.as_view() for row in self._context.journal.events(after=after, limit=limit)]

    def steps(self, *, after: int = 0, limit: int = 1000) -> list[dict[str, Any]]:
        return self._store.ledger(self.job_id).metrics(after=after, limit=limit)

    def listed(self) -> dict[str, Any]:
        row = self._store.job(self.job_id)
        summary = summed_up(self._store, self.job_id, row.spec, self._context.committed)
        return summary | labels_of(self._store.listing.labels(self.job_id))

    def label(
        self, *, add: Sequence[str] = (), remove: Sequence[str] = (), notes: str | None = None
    ) -> dict[str, Any]:
        return label(self._store, self.job_id, add=add, remove=remove, notes=notes)

    def audit(self) -> dict[str, Any]:
        return asdict(self._store.ledger(self.job_id).audit())

    def plane_account(self) -> dict[str, Any] | None:
        return stored_account(self._store.rollouts(self.job_id).load())

    def series(
        self,
        *,
        prefix: str = "",
        since: float | None = None,
        until: float | None = None,
        points: int = 300,
        names: Sequence[str] = (),
    ) -> dict[str, Any]:
        rows = self._store.series(self.job_id)
        return read_series(
            rows, prefix=prefix, since=since, until=until, points=points, names=names
        ).as_dict()

    def at(self, *, seq: int | None = None, time: float | None = None) -> dict[str, Any]:
        return moment_of(self._history.at(seq, time=time))

    def timeline(self, *, since: float | None = None, until: float | None = None) -> dict[str, Any]:
        return read_timeline(self._store, self._history, since=since, until=until).as_dict()

    def decisions(self, *, around: int) -> dict[str, int | None]:
        previous, following = self._history.decisions(around)
        return {"previous": previous, "next": following}

    def wait_for(self, holds: Callable[[JobState], bool], *, timeout_s: float) -> JobState | None:
        """Returns the committed state as soon as this holds of it, or None if it does not in time. For any thread."""
        with self._context.news:
            held = self._context.news.wait_for(lambda: holds(self._context.committed), timeout_s)
            return self._context.committed if held else None

    def wait_for_events(self, *, after: int, timeout_s: float) -> bool:
        with self._context.news:
            return self._context.news.wait_for(lambda: self._context.seq > after, timeout_s)

    def command(self, verb: str, body: Mapping[str, Any], *, by: str, timeout_s: float = 10.0) -> int:
        loop = self._loop
        if loop is None:
            raise Unreachable("the master is still starting.", hint="Try again in a moment.")
        future: Future[int] = asyncio.run_coroutine_threadsafe(self._command(verb, body, by), loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise Unreachable(
                f"{verb} was not in the journal within {timeout_s:g} s.",
                hint=self._context.error or "The master is busy; look at `gyre show`.",
            ) from None

    async def _command(self, verb: str, body: Mapping[str, Any], by: str) -> int:
        state = self._context.state
        if state.job.phase.ended:
            raise Conflict(f"job {state.job.name} has ended ({state.job.phase}).")
        event: Event
        if verb == "scale":
            role, count = str(body["role"]), int(body["count"])
            self._context.coordinator.check_scale(state, role, count)
            self._scheduler.plans.check_numbers({**state.job.roles, role: count})
            event = ScaleRequested(role, count, by)
        elif verb == "stop":
            event = StopRequested(
                str(body.get("reason") or "asked for"), by, at_once=body.get("at_once") is True
            )
        elif verb in ("drain", "undrain"):
            event = await self._drain_event(
                state, verb, str(body["target"]), str(body.get("reason") or ""), by
            )
        elif verb in ("pause", "resume"):
            if state.job.phase is JobPhase.STOPPING:
                raise Conflict(f"job {state.job.name} is stopping.")
            event = PauseRequested(by) if verb == "pause" else ResumeRequested(by)
        elif verb in ("create_token", "revoke_token"):
            event = _token_event(verb, body, by)
            self._context.coordinator.check_token(state, event, self._clock.time())
        else:
            raise ConfigError(
                f"{verb!r} is not a command; known: scale, drain, undrain, pause, resume, stop, create_token, "
                "revoke_token."
            )
        return await self._context.submit(event, actor=by)

    async def _drain_event(self, state: JobState, verb: str, target: str, reason: str, by: str) -> Event:
        """The event of `drain` or `undrain` for a vertex, or for the machine with this address or beginning of an id.
        Raises NotFound, or Conflict for what cannot move."""
        if target not in state.vertices and (node := await self._machine(state, target)):
            if verb == "drain":
                return DrainRequested(node=node, reason=reason, by=by)
            return UndrainRequested(node=node, by=by)
        if verb == "drain":
            self._context.coordinator.check_drain(state, target)
            return DrainRequested(vertex=target, reason=reason, by=by)
        if target not in state.vertices:
            raise NotFound(f"there is no vertex or machine {target!r} in job {state.job.name}.")
        return UndrainRequested(vertex=target, by=by)

    async def _machine(self, state: JobState, target: str) -> str:
        """The one machine that is meant, by its id; "" for none. Raises ConfigError if it may be one of several."""
        there = {node.node_id: node.ip for node in await self._cluster.nodes()}
        known = {*there, *state.machines} if target else ()
        found = [name for name in known if name.startswith(target) or there.get(name) == target]
        if len(found) > 1:
            raise ConfigError(
                f"{target!r} may be any of {len(found)} machines.", hint="`gyre nodes` lists their ids."
            )
        return found[0] if found else ""

    def nodes(self, *, timeout_s: float = 10.0) -> list[dict[str, Any]]:
        loop = self._loop
        if loop is None:
            raise Unreachable("the master is still starting.", hint="Try again in a moment.")
        future = asyncio.run_coroutine_threadsafe(self._cluster.nodes(), loop)
        try:
            there = future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise Unreachable(f"the cluster did not tell its machines within {timeout_s:g} s.") from None
        return nodes_of(self._context.committed, there, now=self._clock.time())

    def logs(
        self, query: LogQuery, *, after: Mapping[str, int], tail: int | None, limit_bytes: int
    ) -> dict[str, Any]:
        return logs_page(
            self._directory / "logs",
            lambda: self.view()["vertices"],
            query,
            after=after,
            tail=tail,
            limit_bytes=limit_bytes,
        )

    def samples(self) -> SampleFiles:
        return self._samples

    def metrics(self) -> bytes:
        return prometheus_text(self.view(), now=self._clock.time())


_RESUMED = ("SetTimer", "FinishJob", "StartRegion", "StopVertex", "StopTrainer")


def _port_of(url: str | None) -> int:
    """The port of an earlier master, whose address clients may still hold; 0 if there was none."""
    if not url:
        return 0
    tail = url.rstrip("/").rpartition(":")[2]
    return int(tail) if tail.isdigit() else 0


def _token_event(verb: str, body: Mapping[str, Any], by: str) -> JoinTokenCreated | JoinTokenRevoked:
    if verb == "revoke_token":
        return JoinTokenRevoked(str(body["name"]), by)
    expires_at = body.get("expires_at")
    return JoinTokenCreated(
        str(body["name"]),
        str(body["digest"]),
        None if expires_at is None else float(expires_at),
        by,
        tuple(map(str, body.get("scopes") or (JOIN_SCOPE,))),
    )


def _hostname() -> str:
    import socket

    return socket.gethostname()
