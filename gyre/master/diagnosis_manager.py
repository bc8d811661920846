"""Watches every running vertex: submits what it reports as events, and finds vertices that died or are stuck.

One pending watch call per vertex does three things at once: its failure is the detection of a death, its answer
carries progress and reports, and its silence is the detection of a hang.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from gyre.clock import Clock
from gyre.config import TRAINER, JobSpec
from gyre.failover import (
    Cause,
    JobPhase,
    JobState,
    Observation,
    Stall,
    StepWatch,
    Suspicion,
    VertexPhase,
    diagnose,
    forgiven,
    is_left_alone,
    silent_together,
)
from gyre.failover.events import (
    DrainRequested,
    Event,
    JobStalled,
    MachineExamined,
    RolloutsChanged,
    ScaleAdvised,
    StepReported,
    VertexFellSilent,
    VertexHeardAgain,
    VertexLost,
)
from gyre.graph import is_instance
from gyre.master.cluster import Address, Cluster, NotAnswering, ProcessDied
from gyre.master.disk_watch import DiskWatch
from gyre.master.evidence import death_of, last_words_of
from gyre.master.growth_demand import GrowthDemand
from gyre.master.job_context import JobContext
from gyre.master.master_api import LastReport
from gyre.master.owner import HearsFaults
from gyre.master.vertex_reports import EVIDENCE_LIMIT, Unreadable, event_of, read_report, refused
from gyre.master.vertex_scheduler import Scheduler
from gyre.process_activity import Activity, ProcessLife
from gyre.process_identity import ProcessIdentity
from gyre.workloads.plain_data import plain_fields
from gyre.workloads.vertex.disk_room import DiskLook, DiskRoom
from gyre.workloads.vertex.host import VertexHost
from gyre.workloads.vertex.memory_kills import MemoryKills
from gyre.workloads.vertex.messages import VertexReport
from gyre.workloads.vertex.preflight import needs_of

_TRAINER = f"{TRAINER}-0"

WATCH_PATIENCE = 1.5
"""Silence timeouts after which a watch call is given up and made again: by then the silence has been noticed."""


STATUS_EACH_S = 0.25
"""The master's own pulse. One that is late by more than this shows that the master stood still."""

ACTIVITY_OVER_S = 0.5
"""How long a silent process is looked at: many turns of a busy machine's scheduler."""

LOOK_AGAIN_S = 2.0
"""How long a silent process that was found well is left alone before it is looked at again: looking costs CPU too."""

HELD_UP_S = 1.0
"""How long one event waits to be written until it is asked who holds the journal up: a hundred times what it takes."""

EXAMINE_EVERY_S = 1.0
"""Between two looks for machines that are to be examined: one that comes is trusted or not within seconds."""

STEP_EVERY_S = 10.0
"""How often the steps of a script that runs well are written to the journal. When a vertex is lost they are at once."""

MOST_STEPS = 2**53
"""Above any count of steps, and exact in JSON: what a script of the user's own reports may be anything."""

_SENTENCES = {
    ProcessLife.BUSY: "its process works, and its interpreter is not free to report",
    ProcessLife.HUNG: "its process could run, and does nothing",
    ProcessLife.STOPPED: "its process is stopped",
    ProcessLife.DEAD: "its process is dead",
}


def _sentence_of(activity: Activity | None) -> str:
    if activity is None:
        return ""
    return (
        "its process lives, and the machine does not let it run"
        if activity.is_starved
        else _SENTENCES[activity.life]
    )


class DiagnosisManager:
    def __init__(
        self,
        spec: JobSpec,
        context: JobContext,
        cluster: Cluster,
        scheduler: Scheduler,
        *,
        directory: Path,
        clock: Clock,
        owner: HearsFaults,
        disks: DiskLook | None = None,
    ) -> None:
        """`disks` looks at the master's own disks."""
        self._spec = spec
        self._context = context
        self._cluster = cluster
        self._scheduler = scheduler
        self._owner = owner
        self._watches: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._standing: list[asyncio.Task[None]] = []
        """What goes on for as long as this manager does."""
        self._look_again_at: dict[Address, float] = {}
        """When to look again at the silent vertices whose processes are well. That they are silent is in the state."""
        self._observations: dict[str, Observation] = {}
        self._identity = ProcessIdentity.own()
        self._condemned: set[tuple[str, int]] = set()
        self._steps = StepWatch(spec)
        self._growth = GrowthDemand(
            spec,
            cluster,
            scheduler.plans,
            scheduler.places,
            context,
            clock=clock,
        )
        self._directory = directory
        self._disks = DiskWatch(
            spec.failover,
            disks or DiskLook(),
        )
        self._disks_of: dict[str, tuple[str, tuple[DiskRoom, ...]]] = {}
        """The machine of each vertex that is watched, and the disks that it sees."""
        self._clock = clock
        self._examined: set[str] = set()
        """The machines whose pre-flight has begun since they came, or were last left alone."""
        self._examine_at = 0.0
        self._step_due_at = 0.0
        self._examinations: set[asyncio.Task[None]] = set()
        self.telemetry: dict[str, dict[str, Any]] = {}
        """The `LastReport` of each vertex, by id. Readable from any thread."""

    def follow(self, state: JobState) -> None:
        """Watch exactly the vertices that run in this state. The trainer's last report is kept when the trainer ends
        with its job, so that the job's view still shows how far training came."""
        ends = state.job.phase is JobPhase.STOPPING or state.job.phase.ended
        wanted = {
            (vertex.id, vertex.incarnation): vertex
            for vertex in state.vertices.values()
            if vertex.phase is VertexPhase.RUNNING
        }
        if not self._standing:
            loop = asyncio.get_running_loop()
            self._standing = [loop.create_task(self._pulse()), loop.create_task(self._keep_journal_free())]
            for task in self._standing:
                task.add_done_callback(self._ended)
        for key in [key for key in self._watches if key not in wanted]:
            self._watches.pop(key).cancel()
            self._look_again_at.pop(Address(*key), None)
            if self._observations.get(key[0]) and self._observations[key[0]].incarnation == key[1]:
                del self._observations[key[0]]
                self._disks_of.pop(key[0], None)
                if not (ends and key[0] == _TRAINER):
                    self.telemetry.pop(key[0], None)
        for key, vertex in wanted.items():
            if key in self._watches:
                continue
            self._scheduler.remember(vertex.id, vertex.incarnation, vertex.pid, vertex.node)
            now = self._clock.monotonic()
            self._observations[vertex.id] = Observation(
                vertex.id, vertex.role, vertex.incarnation, heard_at=now, progressed_at=now
            )
            task = asyncio.get_running_loop().create_task(self._watch(Address(*key)))
            self._watches[key] = task
            task.add_done_callback(self._ended)

    async def close(self) -> None:
        tasks = [*self._watches.values(), *self._examinations, *self._standing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _pulse(self) -> None:
        """Notice when the master itself was stopped: it heard no vertex then, so that is no silence."""
        while True:
            slept_at = self._clock.monotonic()
            await asyncio.sleep(STATUS_EACH_S)
            now = self._clock.monotonic()
            late_s = now - slept_at - STATUS_EACH_S
            if late_s > STATUS_EACH_S:
                for vertex, seen in self._observations.items():
                    self._observations[vertex] = forgiven(seen, late_s, now)

    async def _keep_journal_free(self) -> None:
        """End a vertex that is silent and holds the lock of the database that this master writes to. That it is lost
        cannot be written before it is ended, and whoever stands still in the middle of a transaction keeps the lock."""
        seen = 0
        while True:
            await asyncio.sleep(HELD_UP_S)
            unwritten = self._context.unwritten
            if unwritten and unwritten == seen:
                holder = await asyncio.to_thread(self._context.journal.held_by)
                for suspicion in (
                    diagnose(self._observations, self._spec, self._clock.monotonic()) if holder else ()
                ):
                    address = Address(suspicion.vertex, suspicion.incarnation)
                    if suspicion.cause is Cause.SILENT and self._scheduler.pid_of(address) == holder:
                        await self._end_holder(address)
            seen = unwritten

    async def _end_holder(self, address: Address) -> None:
        activity = await self._scheduler.activity(address, ACTIVITY_OVER_S)
        if activity is not None and activity.life is not ProcessLife.BUSY:
            print(f"{address.vertex} is silent and holds the journal up: ended", file=sys.stderr, flush=True)
            await self._scheduler.end(address)

    async def look(self) -> None:
        """Make one pass of diagnosis over the observations."""
        await self.look_at_disks()
        found, silent, now = [], [], self._clock.monotonic()
        for suspicion in diagnose(self._observations, self._spec, now):
            key = (suspicion.vertex, suspicion.incarnation)
            if suspicion.cause is Cause.SILENT:
                silent.append(Address(*key))
            if key not in self._condemned and now >= self._look_again_at.get(Address(*key), 0.0):
                self._condemned.add(key)
                found.append(suspicion)
        # Concurrently: the stack of a stopped process takes seconds to get, and a lost node stops many processes at
        # once.
        await asyncio.gather(*(self._judge(suspicion, self._together(silent)) for suspicion in found))
        self._tell_who_is_heard_again(silent)
        await self._look_for_notices()
        await self._examine_machines(now)
        await self._growth.look()
        fields = {vertex: told["fields"] for vertex, told in self.telemetry.items()}
        stall = self._steps.look(self._context.committed, self._observations, fields, self._clock.monotonic())
        if stall is not None:
            await self._tell_stall(stall)

    async def look_at_disks(self) -> None:
        """Submit which disks are full now, or have room again."""
        for event in await self._disks.news(
            self._disks_of, self._context.state.job.full_disks, self._clock.time()
        ):
            self._context.submit(event, actor="diagnosis")

    async def _look_for_notices(self) -> None:
        """Submit the cluster's notices that machines go, and drain again those where somebody came up meanwhile."""
        state = self._context.state
        for node, reason in (await self._cluster.draining()).items():
            machine = state.machines.get(node)
            if machine is None or not machine.draining:
                self._context.submit(DrainRequested(node=node, reason=reason, by="ray"), actor="ray")
        for node in self._context.coordinator.to_drain_again(self._context.state):
            reason = state.machines[node].draining
            self._context.submit(DrainRequested(node=node, reason=reason, by="master"), actor="diagnosis")

    async def _examine_machines(self, now: float) -> None:
        """Begin the pre-flight of machines that came, or are to be trusted again. One machine alone is not examined:
        there is no other, and the master works there."""
        state = self._context.state
        if now < self._examine_at or state.job.phase is JobPhase.STOPPING or state.job.phase.ended:
            return
        self._examine_at = now + EXAMINE_EVERY_S
        nodes = await self._cluster.nodes()
        self._examined &= {node.node_id for node in nodes}
        for node in nodes if len(nodes) > 1 else ():
            known = state.machines.get(node.node_id)
            if known is not None and known.is_closed(self._clock.time()):
                self._examined.discard(node.node_id)
            elif node.node_id not in self._examined:
                self._examined.add(node.node_id)
                gpus = int(node.gpu) if self._spec.device_type == "GPU" else 0
                task = asyncio.get_running_loop().create_task(self._examine(node.node_id, gpus))
                self._examinations.add(task)
                task.add_done_callback(self._examinations.discard)
                task.add_done_callback(self._ended)

    async def _examine(self, node: str, gpus: int) -> None:
        found = await self._cluster.examine(node, needs_of(self._directory, gpus=gpus))
        known = self._context.state.machines.get(node)
        if found is None:  # it did not answer: the next look asks it again
            self._examined.discard(node)
        elif found or (known is not None and known.found):
            self._context.submit(MachineExamined(node, " ".join(found)), actor="diagnosis")

    async def _tell_stall(self, stall: Stall) -> None:
        """Submit the stall. Its evidence is what the trainer waits for, which vertices are in a call, which policy
        versions they serve (-1 for none), and the stacks of the trainer's threads."""
        trainer = self._observations.get(_TRAINER)
        stack = ""
        if trainer is not None:
            stack = await self._scheduler.stacks(Address(_TRAINER, trainer.incarnation))
        versions = {vertex: told["fields"].get("version") for vertex, told in self.telemetry.items()}
        evidence = {
            "waits": self.progress.get("waits", {}),
            "trainer": {key: value for key, value in self.progress.items() if type(value) is int},
            "busy": {one.vertex: one.busy for one in self._observations.values() if one.busy},
            "serving": {vertex: version for vertex, version in versions.items() if type(version) is int},
            "stack": stack,
        }
        await self._context.submit(
            JobStalled(
                stall.step, round(stall.after_s, 3), round(stall.limit_s, 3), stall.stands_still, evidence
            ),
            actor="diagnosis",
        )

    def _together(self, silent: list[Address]) -> dict[str, str]:
        """The sentence about each machine on which several vertices are silent, by node."""
        watched = [self._scheduler.node_of(Address(*key)) for key in self._watches]
        nodes = [self._scheduler.node_of(address) for address in silent]
        return {
            node: silent_together(nodes.count(node), watched.count(node), node) for node in set(nodes) if node
        }

    async def _judge(self, suspicion: Suspicion, together: dict[str, str]) -> None:
        """Accuse the vertex, unless it is silent and its process is well."""
        address = Address(suspicion.vertex, suspicion.incarnation)
        key, evidence = (suspicion.vertex, suspicion.incarnation), {"error": suspicion.detail}
        if suspicion.cause is Cause.SILENT:
            activity = await self._scheduler.activity(address, ACTIVITY_OVER_S)
            seen = self._observations.get(address.vertex)
            if seen is None or self._clock.monotonic() - seen.heard_at < suspicion.after_s:  # it is heard
                self._condemned.discard(key)
                return
            if sentence := together.get(self._scheduler.node_of(address)) or _sentence_of(activity):
                evidence["error"] += f"; {sentence}"
            if activity is not None:
                evidence["life"] = activity.life.value
                if is_left_alone(suspicion, activity.life, self._spec):
                    self._condemned.discard(key)
                    self._leave_alone(address, suspicion, activity.life, evidence["error"])
                    return
        evidence |= {
            "stack": await self._scheduler.stacks(address),
            **await last_words_of(self._directory / "logs", address),
        }
        self._look_again_at.pop(address, None)
        await self._lost(address, suspicion.cause, evidence, after_s=round(suspicion.after_s, 3))

    def _leave_alone(self, address: Address, suspicion: Suspicion, life: ProcessLife, detail: str) -> None:
        self._look_again_at[address] = self._clock.monotonic() + LOOK_AGAIN_S
        record = self._context.state.vertices.get(address.vertex)
        if record is not None and not record.silent:
            self._context.submit(
                VertexFellSilent(
                    address.vertex, address.incarnation, life.value, round(suspicion.after_s, 3), detail
                ),
                actor="diagnosis",
            )

    def _tell_who_is_heard_again(self, silent: list[Address]) -> None:
        """Of the vertices that are silent by the state, whether this master or its predecessor found them so: those
        that have reported to this one."""
        for record in list(self._context.state.vertices.values()):
            address = Address(record.id, record.incarnation)
            if record.silent and address not in silent and record.id in self.telemetry:
                self._look_again_at.pop(address, None)
                silent_s = round(self._clock.time() - record.silent_since, 3)
                event = VertexHeardAgain(record.id, record.incarnation, silent_s)
                self._context.submit(event, actor="diagnosis")

    def _lost(
        self, address: Address, cause: Cause, evidence: dict[str, Any], *, after_s: float | None = None
    ) -> asyncio.Future[int]:
        told = self.telemetry.get(address.vertex, {}).get("fields", {})
        tokens = told.get("tokens") if is_instance(self._spec, address.vertex.rpartition("-")[0]) else None
        event = VertexLost(
            address.vertex,
            address.incarnation,
            cause,
            plain_fields(evidence),
            detected_after_s=after_s,
            node=self._node_of(address.vertex),
            generated=isinstance(tokens, int) and tokens > 0,
        )
        self._submit_step()
        return self._context.submit(event, actor="diagnosis")

    def _node_of(self, vertex: str) -> str:
        record = self._context.committed.vertices.get(vertex)
        return self._scheduler.plans.to_blame(record.node) if record is not None else ""

    async def _watch(self, address: Address) -> None:
        failover = self._spec.failover
        taken = acknowledged = 0
        memory_kills: MemoryKills | None = None
        writing: asyncio.Future[int] | None = None
        timeout_s = failover.silence_timeout_s * WATCH_PATIENCE + failover.report_interval_s
        while True:
            try:
                answer = await self._cluster.call(
                    address,
                    timeout_s,
                    VertexHost.watch,
                    self._context.epoch,
                    acknowledged,
                    failover.report_interval_s,
                    self._identity,
                )
                report = read_report(answer)
            except ProcessDied as error:
                last = plain_fields(self.telemetry.get(address.vertex, {}), limit=EVIDENCE_LIMIT)
                cause, evidence = await death_of(
                    address,
                    error,
                    self._cluster,
                    self._scheduler.node_of(address),
                    memory_kills,
                    self._directory / "logs",
                )
                await self._lost(address, cause, {**evidence, "last_report": last})
                return
            except NotAnswering:
                # `look` measures the silence; this loop only asks again.
                await asyncio.sleep(failover.report_interval_s)
                continue
            except Unreadable as error:
                await self._lost(address, Cause.UNHEALTHY, {"error": str(error)})
                return
            memory_kills = report.memory_kills
            self._observe(address, report)
            taken, newest = await self._take_in(address, report, taken)
            writing = newest or writing
            if writing is not None:
                # A report is acknowledged only once it is in the journal. While the journal cannot be written, the
                # watch goes on: a full disk must not look like a vertex that fell silent.
                await asyncio.wait([writing], timeout=failover.report_interval_s)
                if writing.done():
                    acknowledged, writing = taken, None

    def _observe(self, address: Address, report: VertexReport) -> None:
        now = self._clock.monotonic()
        role = address.vertex.rpartition("-")[0]
        self._disks_of[address.vertex] = (self._scheduler.node_of(address), report.disks)
        self._observations[address.vertex] = Observation(
            address.vertex,
            role,
            address.incarnation,
            heard_at=now,
            busy=report.busy,
            ticks=report.ticks,
            progressed_at=now - report.still_s,
        )
        self.telemetry[address.vertex] = vars(LastReport(report.version, report.busy, report.fields))
        if address.vertex == _TRAINER and (self._context.state.attempts or now >= self._step_due_at):
            self._step_due_at = now + STEP_EVERY_S
            self._submit_step()
        if report.unhealthy and (address.vertex, address.incarnation) not in self._condemned:
            self._condemned.add((address.vertex, address.incarnation))
            self._lost(address, Cause.UNHEALTHY, {"error": "health() raised", "traceback": report.unhealthy})

    def _submit_step(self) -> None:
        """Submit the step that a script's `fit()` has reported, if it is a new one. Progress must be known before the
        next fault is decided: of what makes none, attempts are counted."""
        step = self.progress.get("step")
        if (
            self._spec.counts_own_steps
            and type(step) is int
            and self._context.state.job.step < step < MOST_STEPS
        ):
            self._context.submit(StepReported(step), actor=_TRAINER)

    async def _take_in(
        self, address: Address, report: VertexReport, taken: int
    ) -> tuple[int, asyncio.Future[int] | None]:
        """Submit the reports after number `taken`. Returns the newest report's number and its commit, if any."""
        writing = None
        for number, kind, body in report.outbox:
            if number <= taken:
                continue
            event = event_of(address, number, kind, body)
            if isinstance(event, ScaleAdvised):
                event = await self._with_room(event)
                await self._growth.advised(event)
            elif isinstance(event, RolloutsChanged):
                event = replace(event, node=self._node_of(str(event.details.get("instance", ""))))
            writing = self._submit_report(address, number, event)
            taken = number
        return taken, writing

    async def _with_room(self, advice: ScaleAdvised) -> ScaleAdvised:
        """Complete an advice to scale with the room that the cluster has, which the decision cannot see."""
        role = self._spec.roles.get(advice.role)
        if role is None or role.elastic is None:
            return advice  # it is not followed
        wanted = min(advice.count, role.elastic.max)
        return replace(advice, possible=await self._scheduler.places.room(advice.role, wanted))

    def _submit_report(self, address: Address, number: int, event: Event) -> asyncio.Future[int]:
        """Submit the event. One that cannot be decided or journaled is recorded as refused and changes nothing: if it
        ended the master, the vertex would only report it again, to the next master."""
        told = {"actor": address.vertex, "event_id": f"{address.vertex}/{address.incarnation}/{number}"}
        try:
            return self._context.submit(event, **told)
        except Exception as error:  # a decision may fail in any way on what a vertex says
            traceback.print_exception(error)
            reason = f"{type(error).__name__}: {error}"
            return self._context.submit(refused(address, number, type(event).__name__, reason), **told)

    @property
    def progress(self) -> dict[str, Any]:
        """The trainer's own report. Readable from any thread."""
        return dict(self.telemetry.get(_TRAINER, {}).get("fields", {}))

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._owner.fault(error)
