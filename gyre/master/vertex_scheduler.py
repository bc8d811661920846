"""Starts and stops vertices: placement, processes, set-up. It takes commands and answers with events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from gyre.clock import Clock
from gyre.config import ROLLOUT_MANAGER, TRAINER, JobSpec
from gyre.errors import GraphError, GyreError
from gyre.failover import Cause, JobPhase, VertexPhase
from gyre.failover.commands import StartRegion, StopVertex
from gyre.failover.events import (
    Event,
    VertexFoundRoom,
    VertexLost,
    VertexStarted,
    VertexStartFailed,
    VertexStopped,
)
from gyre.graph import (
    VertexPlacement,
    local_roles,
    neighbours_of,
    pools_of,
    rollouts_of,
)
from gyre.master.cluster import (
    Address,
    CannotPlace,
    Cluster,
    HeldBack,
    NotAnswering,
    ProcessDied,
    Spawned,
)
from gyre.master.evidence import death_of, lost, waiting
from gyre.master.fitted_plans import Fitted, FittedPlans
from gyre.master.job_context import JobNow
from gyre.master.places import Places
from gyre.master.room import RoomQueue
from gyre.process_activity import Activity
from gyre.workloads.plain_data import plain_text
from gyre.workloads.vertex.host import VertexHost
from gyre.workloads.vertex.messages import Binding, Failure

SPAWN_TIMEOUT_S = 60.0
"""Deadline of a process's start: Ray's worker on a busy machine takes some ten seconds."""

LOOK_FOR_ROOM_S = 1.0
"""How often the machines are looked at for one that has come."""

TELL_AGAIN_S = 60.0
"""Shortest interval between two reports of missing room."""

CONTROL_TIMEOUT_S = 30.0
"""Deadline of control calls. A healthy vertex answers in milliseconds, more slowly while its machine starts many
others."""


class Scheduler:
    """The starts and stops of one job's vertices."""

    def __init__(
        self,
        spec: JobSpec,
        cluster: Cluster,
        *,
        job_id: str,
        directory: Path,
        store_url: str,
        job: JobNow,
        clock: Clock,
        queue: RoomQueue,
    ) -> None:
        self.plans = FittedPlans(spec, cluster, job=job, clock=clock)
        self.places = Places(
            spec,
            cluster,
            self.plans,
            directory=directory,
            job=job,
            clock=clock,
            queue=queue,
        )
        self._spec = spec
        self._cluster = cluster
        self._job_id = job_id
        self._directory = directory
        self._store_url = store_url
        self._job = job
        self._clock = clock
        self._last_seen: dict[tuple[str, int], tuple[int, str]] = {}
        self._gone: dict[str, int] = {}
        """The newest incarnation of each vertex that is known to have no process, nor has any before it."""

    # -- starting -----------------------------------------------------------------------------------

    async def start_region(self, command: StartRegion) -> AsyncIterator[Event]:
        """Kill the replaced incarnations, spawn, rendezvous, set up. Yields each vertex's event as it comes.

        Where no machine has room, that is told, and the start waits for one; while a disk is full it waits too. Waiting
        for the back-off or for room takes long, and a later decision may overtake the command meanwhile: then the start
        ends without a further event, and every process that it has started is killed.
        """
        await asyncio.gather(
            *(self._kill_through(vertex, incarnation) for vertex, incarnation in command.replaces.items())
        )
        wait_s = command.not_before - self._clock.time()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        addresses = [Address(vertex, incarnation) for vertex, incarnation in command.vertices.items()]
        told, told_at = "", -TELL_AGAIN_S
        self.places.begin(list(command.vertices))
        try:
            while self._is_meant(command):
                if self._job.state.job.full_disks:  # its process could not write a file
                    await asyncio.sleep(LOOK_FOR_ROOM_S)
                    continue
                try:
                    fitted = await self.places.take(addresses)
                    break
                except GraphError as error:
                    yield VertexStartFailed(addresses[0].vertex, addresses[0].incarnation, error=str(error))
                    return
                except HeldBack:  # whoever has no room tells it
                    await asyncio.sleep(LOOK_FOR_ROOM_S)
                except CannotPlace as lack:
                    now = self._clock.time()
                    said = f"{lack.required} {lack.available}"
                    if not self._is_meant(command):
                        return
                    if said != told and (not told or now - told_at >= TELL_AGAIN_S):
                        told, told_at = said, now
                        yield waiting(addresses[0], lack)
                    await asyncio.sleep(LOOK_FOR_ROOM_S)
        finally:
            self.places.leave(list(command.vertices))
        if not self._is_meant(command):
            return
        if told:
            yield VertexFoundRoom(addresses[0].vertex, addresses[0].incarnation)
        placements = {address: fitted.plan.placements[address.vertex] for address in addresses}
        outcomes = await asyncio.gather(*(self._spawn(address, fitted, command) for address in addresses))
        if not self._is_meant(command):
            await asyncio.gather(*(self._kill(address) for address in addresses))
            return
        spawned: dict[Address, Spawned] = {}
        for address, outcome in zip(addresses, outcomes, strict=True):
            if isinstance(outcome, Spawned):
                spawned[address] = outcome
            else:
                if outcome is not None:
                    yield outcome
                return
        rendezvous: tuple[str, int] | None = None
        if len(addresses) > 1:
            try:
                rendezvous = await self._cluster.call(
                    addresses[0], CONTROL_TIMEOUT_S, VertexHost.address, self._job.epoch
                )
            except (ProcessDied, NotAnswering) as error:
                yield lost(addresses[0], error)
                return
        tasks = [
            asyncio.ensure_future(self._bind(address, placements[address], spawned[address], rendezvous))
            for address in addresses
        ]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()

    def _is_meant(self, command: StartRegion) -> bool:
        """Whether no later decision has overtaken the start."""
        records = self._job.state.vertices
        return all(
            vertex in records
            and records[vertex].incarnation == incarnation
            and records[vertex].phase is VertexPhase.STARTING
            for vertex, incarnation in command.vertices.items()
        )

    async def _kill_through(self, vertex: str, incarnation: int) -> None:
        """End this incarnation and every one before it that is not known to be gone."""
        first = self._gone.get(vertex, 0) + 1
        await asyncio.gather(
            *(self._kill(Address(vertex, number)) for number in range(first, incarnation + 1))
        )
        self._gone[vertex] = max(incarnation, self._gone.get(vertex, 0))

    async def _kill(self, address: Address) -> None:
        pid, node = self._last_seen.pop((address.vertex, address.incarnation), (0, ""))
        await self._cluster.kill(address, pid=pid, node=node)

    async def _spawn(self, address: Address, fitted: Fitted, command: StartRegion) -> Spawned | Event | None:
        """Returns None if a later decision overtook the command."""
        if not self._is_meant(command):
            return None
        try:
            spawned = await self._cluster.spawn(
                address,
                sub_graph=fitted.of(address.vertex),
                bundle=fitted.plan.placements[address.vertex].bundle,
                epoch=self._job.epoch,
                timeout_s=SPAWN_TIMEOUT_S,
            )
        except (ProcessDied, NotAnswering) as error:
            return lost(address, error)
        except CannotPlace as error:
            return VertexStartFailed(address.vertex, address.incarnation, error=str(error))
        self._last_seen[(address.vertex, address.incarnation)] = (spawned.pid, spawned.node)
        return spawned

    async def _bind(
        self,
        address: Address,
        placement: VertexPlacement,
        spawned: Spawned,
        rendezvous: tuple[str, int] | None,
    ) -> Event:
        role = address.vertex.rpartition("-")[0]
        binding = self._binding(address, placement, rendezvous)
        try:
            status, value = await self._cluster.bind(
                address, self._job.epoch, binding, timeout_s=self._spec.roles[role].setup_timeout_s
            )
        except ProcessDied as error:
            cause, evidence = await death_of(
                address,
                error,
                self._cluster,
                spawned.node,
                spawned.memory_kills,
                self._directory / "logs",
            )
            node = self.plans.to_blame(spawned.node)
            return VertexLost(address.vertex, address.incarnation, cause, evidence, node=node)
        except NotAnswering:
            limit = self._spec.roles[role].setup_timeout_s
            return VertexLost(
                address.vertex,
                address.incarnation,
                Cause.STALLED,
                {
                    "error": f"setup() did not return within {limit:g} s",
                    "stack": await self.stacks(address),
                },
                detected_after_s=limit,
                node=self.plans.to_blame(spawned.node),
            )
        if status == "error":
            failure: Failure = value
            return VertexStartFailed(
                address.vertex,
                address.incarnation,
                error=plain_text(failure.error),
                traceback=plain_text(failure.traceback),
                user_code=bool(failure.user_code),
                code=failure.code,
                place=failure.place,
                method=failure.method,
                node=self.plans.to_blame(spawned.node),
            )
        return VertexStarted(address.vertex, address.incarnation, pid=spawned.pid, node=spawned.node)

    def _binding(
        self, address: Address, placement: VertexPlacement, rendezvous: tuple[str, int] | None
    ) -> Binding:
        role, _, rank = address.vertex.rpartition("-")
        spec = self._spec.roles[role]
        entrypoint = spec.entrypoint
        if entrypoint is None:
            raise GyreError(f"role {role!r} has no class.", hint="compile_job gives every role one.")
        world = self._job.state.job.roles.get(role, spec.total)
        devices = {"GYRE_DEVICES": ",".join(str(device) for device in placement.devices)}
        return Binding(
            job_id=self._job_id,
            job_name=self._job.state.job.name,
            role=role,
            rank=int(rank),
            world_size=world,
            local_rank=placement.local_rank,
            incarnation=address.incarnation,
            module=entrypoint.module,
            name=entrypoint.name,
            file=entrypoint.file,
            config=self._spec.config,
            env={**devices, **self._spec.env, **spec.env},
            python_path=self._spec.python_path,
            directory=str(self._directory),
            log_path=str(self._directory / "logs" / f"{address.vertex}.{address.incarnation}.log"),
            orphan_timeout_s=self._spec.failover.orphan_timeout_s,
            master_hung_after_s=self._spec.failover.master_hung_after_s,
            master_addr=rendezvous[0] if rendezvous else None,
            master_port=rendezvous[1] if rendezvous else None,
            spec=self._spec.model_dump(mode="json") if role == TRAINER else None,
            store_url=self._store_url if role in (TRAINER, ROLLOUT_MANAGER) else "",
            store_hold_s=self._spec.store.lost_timeout_s,
            rollouts=rollouts_of(self._spec, role).model_dump(mode="json"),
            weights=self._spec.weights.model_dump(mode="json"),
            pools=pools_of(self._spec, self._job.state.job.roles) if role == ROLLOUT_MANAGER else {},
            neighbours=neighbours_of(self._spec, role, self._job.state.job.roles),
            local=role in local_roles(self._spec),
            gpus=tuple(placement.devices) if self._spec.device_type == "GPU" else (),
        )

    # -- stopping -----------------------------------------------------------------------------------

    async def stop_vertex(self, command: StopVertex) -> Event:
        address = Address(command.vertex, command.incarnation)
        job_ends = self._job.state.job.phase is JobPhase.STOPPING
        # Whether the process is gone or stuck, the kill below ends it.
        with contextlib.suppress(ProcessDied, NotAnswering):
            timeout_s = command.grace_s + 2.0
            await self._cluster.call(
                address, timeout_s, VertexHost.shutdown, self._job.epoch, command.grace_s, job_ends
            )
        await self._kill_through(command.vertex, command.incarnation)
        if not job_ends:  # else `Places.release_all` does it
            await self.places.release_left(command.vertex)
            await self.places.release_drained(command.vertex)
        return VertexStopped(command.vertex, command.incarnation)

    # -- looking ------------------------------------------------------------------------------------

    def remember(self, vertex: str, incarnation: int, pid: int, node: str) -> None:
        """Note where a vertex runs that an earlier master started."""
        self._last_seen[(vertex, incarnation)] = (pid, node)

    def node_of(self, address: Address) -> str:
        """The node of a vertex that runs; "" if it is not known."""
        return self._last_seen.get((address.vertex, address.incarnation), (0, ""))[1]

    def pid_of(self, address: Address) -> int:
        """The process of a vertex that runs; 0 if it is not known."""
        return self._last_seen.get((address.vertex, address.incarnation), (0, ""))[0]

    async def end(self, address: Address) -> None:
        """End the vertex's process, which the journal has later."""
        await self._cluster.kill(address, pid=self.pid_of(address), node=self.node_of(address))

    async def activity(self, address: Address, over_s: float) -> Activity | None:
        """What the vertex's process does for a moment. None where that cannot be told."""
        pid, node = self._last_seen.get((address.vertex, address.incarnation), (0, ""))
        return await self._cluster.activity(pid=pid, node=node, over_s=over_s)

    async def stacks(self, address: Address) -> str:
        """Returns the vertex's stacks: its own answer, or a look from outside if it does not answer."""
        try:
            return plain_text(await self._cluster.call(address, 1.0, VertexHost.stacks, self._job.epoch))
        except (ProcessDied, NotAnswering):
            pid, node = self._last_seen.get((address.vertex, address.incarnation), (0, ""))
            return await self._cluster.stacks(pid=pid, node=node, timeout_s=3.0)
