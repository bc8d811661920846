"""Starts and stops vertices: placement, processes, set-up. It takes commands and answers with events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from gyre.config import ROLLOUT_MANAGER, TRAINER, JobSpec
from gyre.errors import GraphError, GyreError
from gyre.failover import Activity, Cause, JobPhase, JobState, Reason, VertexPhase
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
    CompiledJob,
    NodeCapacity,
    PlacementPlan,
    SubGraph,
    VertexPlacement,
    compile_job,
    fit_what_has_room,
    local_roles,
    pools_of,
    rollouts_of,
    sub_graph_id,
    with_numbers,
    without_vertices,
)
from gyre.master.cluster import Address, CannotPlace, Cluster, NotAnswering, ProcessDied, Spawned
from gyre.master.room_queue import RoomQueue
from gyre.master.start_troubles import cannot_place, lost, waiting
from gyre.rollouts.weight_dirs import remove_left_by_job
from gyre.store import QueuedJob
from gyre.workloads.plain_data import plain_text
from gyre.workloads.vertex.messages import Binding, Failure

PLACE_TIMEOUT_S = 5.0
"""How long a sub-graph waits for room before that is told: placing takes a fraction of a second where there is room.
The waiting itself has no end here; `failover.wait_for_room_s` ends it."""

SPAWN_TIMEOUT_S = 60.0
"""Deadline of a process's start: Ray's worker on a busy machine takes some ten seconds."""

LOOK_FOR_ROOM_S = 1.0
"""How often the machines are looked at for one that has come."""

TELL_AGAIN_S = 60.0
"""What is missing is told again, if it has changed, at most this often."""

CONTROL_TIMEOUT_S = 30.0
"""Deadline of control calls. A healthy vertex answers in milliseconds, more slowly while its machine starts many
others."""


class Fitted(NamedTuple):
    """A plan on the present machines, and for each sub-graph that finds no room what it lacks."""

    plan: PlacementPlan
    lacking: dict[str, GraphError]
    sub_graphs: dict[str, SubGraph]
    """Those of the plan, by their ids."""

    def of(self, vertex: str) -> SubGraph:
        return self.sub_graphs[self.plan.placements[vertex].sub_graph]


class Scheduler:
    def __init__(
        self,
        spec: JobSpec,
        cluster: Cluster,
        *,
        job_id: str,
        directory: Path,
        store_url: str,
        state: Callable[[], JobState],
        epoch: Callable[[], int],
        clock: Callable[[], float],
        queued: Callable[[], Sequence[QueuedJob]] = tuple,
    ) -> None:
        """`queued` gives the jobs of this cluster that wait for room that others hold, the longest waiting first."""
        self._spec = spec
        self._cluster = cluster
        self._queue = RoomQueue(job_id, queued, clock)
        self._job_id = job_id
        self._directory = directory
        self._store_url = store_url
        self._state = state
        self._epoch = epoch
        self._clock = clock
        self._plans: dict[tuple[tuple[str, int], ...], CompiledJob] = {}
        self._plan: PlacementPlan | None = None
        """The present plan. It is changed vertex by vertex, so that the others stay."""
        self._numbers: dict[str, int] = {}
        """The numbers of vertices that it is for, by role."""
        self._fitted: tuple[tuple[Any, ...], Fitted] | None = None
        """The plan on the machines, and what it was made of."""
        self._lacking_alone: tuple[object, frozenset[str]] = (None, frozenset())
        """For the fitted plan: the sub-graphs that would find no room though no other job held any."""
        self._avoiding: tuple[object, dict[str, str]] = (None, {})
        self._machines = 0
        """How many there were at the last look."""
        self._heading: dict[str, tuple[int, str]] = {}
        """Where each vertex is being started: its incarnation, and the machine."""
        self._used: set[str] = set()
        self._last_seen: dict[tuple[str, int], tuple[int, str]] = {}
        self._gone: dict[str, int] = {}
        """The newest incarnation of each vertex that is known to have no process, nor has any before it."""

    # -- plans --------------------------------------------------------------------------------------

    def compiled(self, roles: Mapping[str, int]) -> CompiledJob:
        """Returns the job compiled with these numbers of vertices by role. Raises GraphError if they do not fit."""
        key = tuple(sorted(roles.items()))
        if key not in self._plans:
            spec = self._spec.model_copy(deep=True)
            if any(spec.roles[role].total != count for role, count in roles.items()):
                # Who stands beside whom follows from the totals that were submitted; see `with_numbers`.
                spec.affinity.collocate_hosts = []
            for role, count in roles.items():
                spec.roles[role].total = max(1, count)
                if spec.roles[role].per_node is not None and count % (spec.roles[role].per_node or 1):
                    spec.roles[
                        role
                    ].per_node = None  # scaled by hand to a number that per_node does not divide
            self._plans[key] = compile_job(spec)
        return self._plans[key]

    def check_numbers(self, roles: Mapping[str, int]) -> None:
        """Raises GraphError if the job cannot have these numbers of vertices by role."""
        self.compiled(roles)
        with_numbers(self._planned(), self._spec, roles)

    async def room(self, role: str, count: int) -> int:
        """Returns how many vertices of the role, at most `count`, fit on the present machines beside the other roles.
        The result is at least the present number, whose vertices have their places, and no more while another job is
        to be served first."""
        roles = self._state().job.roles
        present = roles.get(role, 0)
        if await self._queue.first() is not None:
            return min(count, present)
        nodes = await self._nodes()
        for number in range(count, present, -1):
            with contextlib.suppress(GraphError):
                plan = with_numbers(self._planned(), self._spec, {**roles, role: number})
                if not self._fit(plan, nodes)[1]:
                    return number
        return min(count, present)

    async def plan(self) -> Fitted:
        """Returns the plan for the vertices wanted now, fitted to the present machines, and what it lacks. Raises
        GraphError where the numbers of vertices do not fit each other."""
        plan = self._planned()
        nodes = await self._nodes()
        closed, avoids = self._closed(nodes), self._avoids()
        seen = (plan, nodes, closed, avoids, self._leaving(closed, avoids))
        if self._fitted is None or self._fitted[0][0] is not plan or self._fitted[0][1:] != seen[1:]:
            # What runs stays, what starts finds its place anew.
            fitted, lacking = self._fit(plan, nodes)
            by_id = {sub_graph.id: sub_graph for sub_graph in fitted.sub_graphs}
            self._fitted = (seen, Fitted(fitted, lacking, by_id))
        return self._fitted[1]

    def _fit(
        self, plan: PlacementPlan, nodes: list[NodeCapacity]
    ) -> tuple[PlacementPlan, dict[str, GraphError]]:
        closed, avoids = self._closed(nodes), self._avoids()
        return fit_what_has_room(plan, nodes, self._standing(closed, avoids), closed=closed, avoids=avoids)

    def _closed(self, nodes: Sequence[NodeCapacity]) -> frozenset[str]:
        """The machines that take nobody new: those that are drained, and those that are left alone for the deaths there
        while there is another."""
        now, known = self._clock(), self._state().machines
        drained = {name for name, machine in known.items() if machine.draining}
        closed = {name for name, machine in known.items() if machine.is_closed(now)}
        there = {node.node_id for node in nodes}
        return frozenset((closed if there - closed else drained) & there)

    def _leaving(self, closed: frozenset[str], avoids: Mapping[str, str]) -> set[str]:
        """Those who still stand where they will not stand again."""
        if not closed and not avoids:
            return set()
        leaving = (VertexPhase.RUNNING, VertexPhase.STOPPING)
        return {
            one.id
            for one in self._state().vertices.values()
            if one.phase in leaving and (one.node in closed or one.id in avoids)
        }

    def _avoids(self) -> dict[str, str]:
        """The machines to which drained vertices do not go, by vertex."""
        vertices = self._state().vertices
        if self._avoiding[0] is not vertices:  # a start of ten thousand vertices asks as often
            self._avoiding = vertices, {one.id: one.avoids for one in vertices.values() if one.avoids}
        return self._avoiding[1]

    def graph(self) -> CompiledJob:
        """The job compiled with the present numbers of vertices, on the machines where they are, as far as known."""
        compiled = self.compiled(self._state().job.roles)
        return compiled if self._fitted is None else replace(compiled, plan=self._fitted[1].plan)

    async def _nodes(self) -> list[NodeCapacity]:
        nodes = await self._cluster.nodes()
        self._machines = len(nodes)
        return nodes

    def to_blame(self, node: str) -> str:
        """The machine as the events name it: "" where it is the only one, which cannot be left alone."""
        return node if self._machines > 1 else ""

    def _planned(self) -> PlacementPlan:
        """Returns the last plan with those who have come, and without those who have left."""
        if self._plan is None:
            self._plan = compile_job(self._spec).plan
        state = self._state()
        if self._numbers != state.job.roles:
            leaving = [one.id for one in state.vertices.values() if one.phase is VertexPhase.STOPPING]
            self._plan = with_numbers(self._plan, self._spec, state.job.roles, leaving)
            self._numbers = dict(state.job.roles)
        return self._plan

    def _standing(self, closed: frozenset[str], avoids: Mapping[str, str]) -> dict[str, str]:
        """The machines of the vertices that run, that end, that are being started, or that ran before they were
        restarted and may do so again: there their sub-graphs still stand."""
        standing = {}
        for one in self._state().vertices.values():
            if one.phase is VertexPhase.STOPPED:
                continue
            node = one.node
            if one.phase is VertexPhase.STARTING:
                incarnation, machine = self._heading.get(one.id, (0, ""))
                node = machine if incarnation == one.incarnation else node
                if node in closed or avoids.get(one.id, "") == node:
                    continue
            if node:
                standing[one.id] = node
        return standing

    # -- starting -----------------------------------------------------------------------------------

    async def start_region(self, command: StartRegion) -> AsyncIterator[Event]:
        """Kill the replaced incarnations, spawn, rendezvous, set up. Yields each vertex's event as it comes.

        Where no machine has room, that is told, and the start waits for one. Waiting for the back-off or for room takes
        long, and a later decision may overtake the command meanwhile: then the start ends without a further event, and
        every process that it has started is killed.
        """
        await asyncio.gather(
            *(self._kill_through(vertex, incarnation) for vertex, incarnation in command.replaces.items())
        )
        wait_s = command.not_before - self._clock()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        addresses = [Address(vertex, incarnation) for vertex, incarnation in command.vertices.items()]
        told, told_at = "", -TELL_AGAIN_S
        try:
            while self._is_meant(command):
                try:
                    fitted = await self._placed(addresses)
                    break
                except GraphError as error:
                    yield VertexStartFailed(addresses[0].vertex, addresses[0].incarnation, error=str(error))
                    return
                except CannotPlace as lack:
                    now = self._clock()
                    said = f"{lack.required} {lack.available}"
                    if not self._is_meant(command):
                        return
                    if said != told and (not told or now - told_at >= TELL_AGAIN_S):
                        told, told_at = said, now
                        yield waiting(addresses[0], lack)
                    await asyncio.sleep(LOOK_FOR_ROOM_S)
        finally:
            self._queue.leave(list(command.vertices))
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
                    addresses[0], "address", self._epoch(), timeout_s=CONTROL_TIMEOUT_S
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

    async def _placed(self, addresses: Sequence[Address]) -> Fitted:
        """Returns the plan once these vertices' sub-graphs have their places. Raises CannotPlace where one has no room
        now, GraphError where the numbers of vertices do not fit each other, which no machine mends."""
        fitted = await self.plan()
        if not all(one.vertex in fitted.plan.placements for one in addresses):
            raise CannotPlace("a vertex was scaled away meanwhile")
        sub_graphs = {sub.id: sub for sub in (fitted.of(one.vertex) for one in addresses)}
        lacking = {name: lack for name in sub_graphs if (lack := fitted.lacking.get(name)) is not None}
        first = await self._queue.first() if self._asks_anew(addresses) else None
        vertices = [one.vertex for one in addresses]
        if (
            (first is not None or lacking)
            and self._is_needed(vertices)
            and not await self._lacks_alone(sub_graphs)
        ):
            self._queue.wait(vertices, self._waits_since(vertices))
        else:
            self._queue.leave(vertices)
        if first is not None:
            for name, sub_graph in sub_graphs.items():
                if name in self._used and set(vertices).issuperset(sub_graph.vertices):
                    await self._cluster.release(name)  # what it has asked for must not come before
            raise CannotPlace(
                "another job has waited longer",
                required=f"room for {', '.join(sub_graphs)}",
                available=f"none before the job {first.name}, which has waited longer",
            )
        for name, lack in lacking.items():
            if lack.details.get("another_would_help"):
                self._used.add(name)
                await self._cluster.demand(sub_graphs[name])
            raise cannot_place(lack)
        self._used.update(sub_graphs)
        machines = fitted.plan.machines()
        # Whoever must stand beside them is placed meanwhile.
        self._heading |= {one.vertex: (one.incarnation, machines[one.vertex]) for one in addresses}
        for outcome in await asyncio.gather(
            *(self._cluster.place(sub, PLACE_TIMEOUT_S) for sub in sub_graphs.values()),
            return_exceptions=True,
        ):
            if isinstance(outcome, BaseException):
                for one in addresses:
                    self._heading.pop(one.vertex, None)
                raise outcome
        return fitted

    @property
    def queued_since(self) -> float | None:
        """Since when the job waits for room that other jobs hold, in seconds since 1970; None while it does not."""
        return self._queue.since

    def _waits_since(self, vertices: Sequence[str]) -> float:
        """Since when one of them waits for room; now, if none does."""
        records = (self._state().vertices.get(vertex) for vertex in vertices)
        return min((one.no_room_since for one in records if one and one.no_room), default=self._clock())

    def _asks_anew(self, addresses: Sequence[Address]) -> bool:
        """Whether they ask for room beyond what the job has had: to begin, or to grow."""
        begins = self._state().job.phase in (JobPhase.SUBMITTED, JobPhase.STARTING)
        return begins or all(one.incarnation == 1 for one in addresses)

    def _is_needed(self, vertices: Sequence[str]) -> bool:
        """Whether the job does not begin, or go on, without them."""
        begins = self._state().job.phase in (JobPhase.SUBMITTED, JobPhase.STARTING)
        roles = {vertex.rpartition("-")[0] for vertex in vertices}
        return begins or not all(self._spec.roles[role].elastic for role in roles)

    async def _lacks_alone(self, sub_graphs: Iterable[str]) -> bool:
        """Whether one of the sub-graphs would find no room though no other job held any."""
        fitted = self._fitted
        assert fitted is not None, "a plan was fitted just now"
        if self._lacking_alone[0] is not fitted:
            nodes = await self._cluster.whole_nodes()
            self._lacking_alone = fitted, frozenset(self._fit(fitted[1].plan, nodes)[1])
        return not self._lacking_alone[1].isdisjoint(sub_graphs)

    def _is_meant(self, command: StartRegion) -> bool:
        """Whether no later decision has overtaken the start."""
        records = self._state().vertices
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
                epoch=self._epoch(),
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
                address, self._epoch(), binding, timeout_s=self._spec.roles[role].setup_timeout_s
            )
        except ProcessDied as error:
            return lost(address, error, self.to_blame(spawned.node))
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
                node=self.to_blame(spawned.node),
            )
        if status == "error":
            failure: Failure = value
            return VertexStartFailed(
                address.vertex,
                address.incarnation,
                error=plain_text(failure.error),
                traceback=plain_text(failure.traceback),
                user_code=bool(failure.user_code),
                node=self.to_blame(spawned.node),
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
        world = self._state().job.roles.get(role, spec.total)
        devices = {"GYRE_DEVICES": ",".join(str(device) for device in placement.devices)}
        return Binding(
            job_id=self._job_id,
            job_name=self._state().job.name,
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
            rollouts=rollouts_of(self._spec, role).model_dump(mode="json"),
            weights=self._spec.weights.model_dump(mode="json"),
            pools=pools_of(self._spec) if role == ROLLOUT_MANAGER else {},
            local=role in local_roles(self._spec),
        )

    # -- stopping -----------------------------------------------------------------------------------

    async def stop_vertex(self, command: StopVertex) -> Event:
        address = Address(command.vertex, command.incarnation)
        job_ends = self._state().job.phase is JobPhase.STOPPING
        # Whether the process is gone or stuck, the kill below ends it.
        with contextlib.suppress(ProcessDied, NotAnswering):
            await self._cluster.call(
                address,
                "shutdown",
                self._epoch(),
                command.grace_s,
                job_ends,
                timeout_s=command.grace_s + 2.0,
            )
        await self._kill_through(command.vertex, command.incarnation)
        if not job_ends:  # else `release_all` does it
            await self._release_left(command.vertex)
            await self._release_drained(command.vertex)
        return VertexStopped(command.vertex, command.incarnation)

    async def _release_left(self, vertex: str) -> None:
        """Release the place of a vertex that has left, if nobody who is wanted stands there."""
        state = self._state()
        role, _, rank = vertex.rpartition("-")
        if (
            self._plan is None
            or int(rank) < state.job.roles.get(role, 0)
            or vertex not in self._plan.placements
        ):
            return
        with contextlib.suppress(GraphError):  # others stand there
            self._plan = without_vertices(self._plan, [vertex])
            self._numbers = {}
            await self._cluster.release(sub_graph_id(self._spec, role, int(rank)))

    async def _release_drained(self, vertex: str) -> None:
        """Release the place of a vertex that is drained, if it stands there alone."""
        record = self._state().vertices[vertex]
        if record.reason is not Reason.DRAINED or self._fitted is None:
            return
        plan = self._fitted[1]
        if vertex in plan.plan.placements and plan.of(vertex).vertices == (vertex,):
            await self._cluster.release(plan.of(vertex).id)

    async def release_all(self) -> None:
        """Release every placement group that this or an earlier master may have made, and this machine's memory in
        which vertices left weights."""
        counts = dict(self._state().job.roles)
        for vertex in self._state().vertices.values():
            counts[vertex.role] = max(counts.get(vertex.role, 0), vertex.rank + 1)
        names = {
            sub_graph_id(self._spec, role, rank) for role, count in counts.items() for rank in range(count)
        }
        await asyncio.gather(*(self._cluster.release(name) for name in names | self._used))
        # The memory of vertices that were killed here and never came back; on other machines the vertices there free
        # it.
        vertices = [f"{role}-{rank}" for role, count in counts.items() for rank in range(count)]
        await asyncio.to_thread(remove_left_by_job, self._directory, vertices)

    # -- looking ------------------------------------------------------------------------------------

    def remember(self, vertex: str, incarnation: int, pid: int, node: str) -> None:
        """Note where a vertex runs that an earlier master started."""
        self._last_seen[(vertex, incarnation)] = (pid, node)

    def node_of(self, address: Address) -> str:
        """The node of a vertex that runs; "" if it is not known."""
        return self._last_seen.get((address.vertex, address.incarnation), (0, ""))[1]

    async def activity(self, address: Address, over_s: float) -> Activity | None:
        """What the vertex's process does for a moment. None where that cannot be told."""
        pid, node = self._last_seen.get((address.vertex, address.incarnation), (0, ""))
        return await self._cluster.activity(pid=pid, node=node, over_s=over_s)

    async def stacks(self, address: Address) -> str:
        """Returns the vertex's stacks: its own answer, or a look from outside if it does not answer."""
        try:
            return plain_text(await self._cluster.call(address, "stacks", self._epoch(), timeout_s=1.0))
        except (ProcessDied, NotAnswering):
            pid, node = self._last_seen.get((address.vertex, address.incarnation), (0, ""))
            return await self._cluster.stacks(pid=pid, node=node, timeout_s=3.0)
