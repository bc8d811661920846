"""Carries out commands through the Scheduler and the Executor, and repeats what got lost.

Commands run as tasks of the control loop, each at most once at a time. The reconciliation pass compares the state with
what is under way and starts again whatever got lost in between: a backstop for the commands, not a replacement.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from functools import partial

from gyre.clock import Clock
from gyre.config import TRAINER
from gyre.errors import Fenced
from gyre.failover import JobPhase, VertexPhase
from gyre.failover.commands import (
    Command,
    FinishJob,
    SetTimer,
    StartRegion,
    StartTrainer,
    StopVertex,
)
from gyre.failover.events import TimerFired
from gyre.master.cluster import NotAnswering, ProcessDied
from gyre.master.executor import Executor
from gyre.master.job_context import Issued, JobContext
from gyre.master.owner import HearsTheEnd
from gyre.master.vertex_scheduler import Scheduler


class JobManager:
    def __init__(
        self,
        context: JobContext,
        scheduler: Scheduler,
        executor: Executor,
        *,
        clock: Clock,
        owner: HearsTheEnd,
    ) -> None:
        self._context = context
        self._scheduler = scheduler
        self._executor = executor
        self._clock = clock
        self._owner = owner
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._starting: set[tuple[str, int]] = set()
        self._stopping: set[tuple[str, int]] = set()
        self._repairs = 0
        self._is_closed = False

    def run(self, commands: Iterable[Issued]) -> None:
        """Begin the commands. Once closed, none: the journal has them for the next master."""
        for issued in commands:
            if issued.id in self._tasks or self._is_closed:
                continue
            # Marked now, not when the task first runs, so that the reconciliation sees the command as under way.
            self._claim(issued.command)
            task = asyncio.get_running_loop().create_task(self._run(issued))
            self._tasks[issued.id] = task
            task.add_done_callback(partial(self._ended, issued.id))

    async def close(self) -> None:
        self._is_closed = True
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def reconcile(self) -> None:
        """Start again whatever the committed state asks for and no task is doing."""
        state = self._context.committed
        if state.job.phase.ended or self._context.state is not state:
            return  # the commands of what is still being written will come by themselves
        lost: list[Command] = []
        for vertex in state.vertices.values():
            key = (vertex.id, vertex.incarnation)
            if vertex.phase is VertexPhase.STARTING and key not in self._starting:
                region = self._context.coordinator.region(vertex.id)
                members = {
                    member: state.vertices[member].incarnation
                    for member in sorted(region)
                    if member in state.vertices and state.vertices[member].phase is VertexPhase.STARTING
                }
                if not any((member, number) in self._starting for member, number in members.items()):
                    lost.append(StartRegion(vertex.id, members))
                    self._starting.update(members.items())
            elif vertex.phase is VertexPhase.STOPPING and key not in self._stopping:
                lost.append(StopVertex(vertex.id, vertex.incarnation))
        trainer = state.vertices.get(f"{TRAINER}-0")
        if (
            state.job.trainer_started
            and state.job.phase is not JobPhase.STOPPING
            and trainer is not None
            and trainer.phase is VertexPhase.RUNNING
            and self._executor.told_serial < state.job.serial
        ):
            running = {
                vertex.id: vertex.incarnation
                for vertex in state.vertices.values()
                if vertex.phase is VertexPhase.RUNNING and vertex.role != TRAINER
            }
            lost.append(
                StartTrainer(
                    trainer.incarnation, state.job.paused, state.job.serial, running, dict(state.job.roles)
                )
            )
        for command in lost:
            self._repairs += 1
            self.run([Issued(f"reconcile/{self._context.epoch}.{self._repairs}", command)])

    def _claim(self, command: Command) -> None:
        if isinstance(command, StartRegion):
            self._starting.update(command.vertices.items())
        elif isinstance(command, StopVertex):
            self._stopping.add((command.vertex, command.incarnation))

    def _ended(self, key: str, task: asyncio.Task[None]) -> None:
        self._tasks.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._owner.fault(error)

    async def _run(self, issued: Issued) -> None:
        command = issued.command
        try:
            match command:
                case StartRegion():
                    await self._start_region(issued.id, command)
                case StopVertex():
                    await self._stop_vertex(issued.id, command)
                case SetTimer():
                    await asyncio.sleep(max(0.0, command.at - self._clock.time()))
                    await self._context.submit(TimerFired(command.timer), cause=issued.id)
                case FinishJob():
                    await self._scheduler.places.release_all()
                    self._owner.finish()
                case _:
                    await self._executor.run(command)
        except (ProcessDied, NotAnswering):
            pass  # the trainer's death is an event of its own; if it is silent, the reconciliation tries again
        except Fenced as error:
            self._owner.fault(error)
        finally:
            if not issued.id.startswith("reconcile/"):
                self._context.finished(issued.id)

    async def _start_region(self, command_id: str, command: StartRegion) -> None:
        pairs = set(command.vertices.items())
        try:
            records = self._context.state.vertices
            current = {
                vertex: incarnation
                for vertex, incarnation in pairs
                if vertex in records
                and records[vertex].incarnation == incarnation
                and records[vertex].phase is VertexPhase.STARTING
            }
            if len(current) == len(pairs):
                async for event in self._scheduler.start_region(command):
                    await self._context.submit(event, cause=command_id)
        finally:
            self._starting -= pairs

    async def _stop_vertex(self, command_id: str, command: StopVertex) -> None:
        key = (command.vertex, command.incarnation)
        try:
            record = self._context.state.vertices.get(command.vertex)
            if (
                record is not None
                and record.incarnation == command.incarnation
                and record.phase is VertexPhase.STOPPING
            ):
                event = await self._scheduler.stop_vertex(command)
                await self._context.submit(event, cause=command_id)
        finally:
            self._stopping.discard(key)
