"""Places for vertices: reserved, waited for, and released."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from gyre.clock import Clock
from gyre.config import JobSpec
from gyre.errors import GraphError
from gyre.failover import JobPhase, Reason, VertexPhase
from gyre.graph import SubGraph, sub_graph_id
from gyre.master.cluster import Address, CannotPlace, Cluster, HeldBack
from gyre.master.fitted_plans import Fitted, FittedPlans
from gyre.master.job_context import JobNow
from gyre.master.room import RoomQueue, WholeStart
from gyre.rollouts.weight_dirs import remove_left_by_job

PLACE_TIMEOUT_S = 5.0
"""How long a sub-graph waits for room before that is reported: placing takes a fraction of a second where there is
room. The waiting itself has no end here; `failover.wait_for_room_s` ends it."""

REST_TIMEOUT_S = 2 * PLACE_TIMEOUT_S
"""How long a start waits for the answers of the others that the job needs. Each comes within `PLACE_TIMEOUT_S`."""


class Places:
    """The places of one job's vertices."""

    def __init__(
        self,
        spec: JobSpec,
        cluster: Cluster,
        plans: FittedPlans,
        *,
        directory: Path,
        job: JobNow,
        clock: Clock,
        queue: RoomQueue,
    ) -> None:
        self._spec = spec
        self._cluster = cluster
        self._plans = plans
        self._queue = queue
        self._whole = WholeStart()
        self._directory = directory
        self._job = job
        self._clock = clock
        self._used: set[str] = set()
        """The sub-graphs for which the cluster was asked for room."""

    @property
    def queued_since(self) -> float | None:
        """Since when the job waits for room that other jobs hold, in seconds since 1970; None while it does not."""
        return self._queue.since

    async def is_another_first(self) -> bool:
        """Whether another job is to be served before this one takes any more room."""
        return await self._queue.first() is not None

    async def room(self, role: str, count: int) -> int:
        """Returns how many vertices of the role, at most `count`, fit on the present machines beside the other roles.
        The result is at least the present number, whose vertices have their places, and no more while another job is
        to be served first."""
        if await self.is_another_first():
            return min(count, self._job.state.job.roles.get(role, 0))
        return await self._plans.most(role, count)

    # -- taking -------------------------------------------------------------------------------------

    def begin(self, vertices: Sequence[str]) -> None:
        """Note that these are being started."""
        if self._begins():
            self._whole.ask(vertex for vertex in vertices if self._begins_with(vertex))

    def leave(self, vertices: Sequence[str]) -> None:
        """Note that these have been started, or no longer are."""
        self._queue.leave(vertices)
        self._whole.leave(vertices)

    async def take(self, addresses: Sequence[Address]) -> Fitted:
        """Returns the plan once these vertices' sub-graphs have their places. Raises CannotPlace where one has no room
        now, HeldBack where others of the job have none, and GraphError where the numbers of vertices do not fit each
        other, which no machine mends."""
        vertices = [one.vertex for one in addresses]
        if self._begins() and not any(map(self._begins_with, vertices)):
            await self._rest(vertices)  # the job's needs come first
        try:
            fitted = await self._take(addresses)
        except CannotPlace as lack:
            (self._whole.without_room if lack.by_others else self._whole.placed)(vertices)
            raise
        self._whole.placed(vertices)
        if self._begins():
            await self._rest(vertices)
        return fitted

    async def _take(self, addresses: Sequence[Address]) -> Fitted:
        fitted = await self._plans.fitted()
        if not all(one.vertex in fitted.plan.placements for one in addresses):
            raise CannotPlace("a vertex was scaled away meanwhile")
        sub_graphs = {sub.id: sub for sub in (fitted.of(one.vertex) for one in addresses)}
        lacking = {name: lack for name in sub_graphs if (lack := fitted.lacking.get(name)) is not None}
        first = await self._queue.first() if self._asks_anew(addresses) else None
        vertices = [one.vertex for one in addresses]
        by_others = (first is not None or bool(lacking)) and not await self._plans.lack_alone(sub_graphs)
        if by_others and self._is_needed(vertices):
            self._queue.wait(vertices, self._waits_since(vertices))
        else:
            self._queue.leave(vertices)
        if first is not None:
            await self._give_back(vertices, sub_graphs)  # what it has asked for must not come before
            raise CannotPlace(
                "another job has waited longer",
                required=f"room for {', '.join(sub_graphs)}",
                available=f"none before the job {first.name}, which has waited longer",
            )
        for name, lack in lacking.items():
            if lack.details.get("another_would_help"):
                self._used.add(name)
                await self._cluster.demand(sub_graphs[name])
            raise _cannot_place(lack, by_others)
        if self._begins() and fitted.plan.most_nodes is not None:
            # A job may use so many machines: whoever took a place now might take the one that the others will need.
            missing = sorted(name for name in fitted.lacking if self._needs(fitted.sub_graphs[name]))
            if missing:
                raise HeldBack(f"there is no room for {', '.join(missing)}")
        self._used.update(sub_graphs)
        machines = {
            vertex: bundle.machine
            for sub_graph in sub_graphs.values()
            for bundle in sub_graph.bundles
            for vertex in bundle.vertices
        }
        # Whoever must stand beside them is placed meanwhile.
        self._plans.heading |= {one.vertex: (one.incarnation, machines[one.vertex]) for one in addresses}
        for outcome in await asyncio.gather(
            *(self._cluster.place(sub, PLACE_TIMEOUT_S) for sub in sub_graphs.values()),
            return_exceptions=True,
        ):
            if isinstance(outcome, BaseException):
                for one in addresses:
                    self._plans.heading.pop(one.vertex, None)
                raise outcome
        return fitted

    async def _rest(self, vertices: Sequence[str]) -> None:
        """Raises HeldBack while one whom the job needs to begin has no place because of other jobs."""
        missing = [one for one in await self._whole.missing(REST_TIMEOUT_S) if one not in vertices]
        if missing:
            raise HeldBack(f"there is no room for {', '.join(missing)}")

    def _begins(self) -> bool:
        return self._job.state.job.phase in (JobPhase.SUBMITTED, JobPhase.STARTING)

    def _begins_with(self, vertex: str) -> bool:
        """Whether the job does not begin without this vertex."""
        role, _, rank = vertex.rpartition("-")
        elastic = self._spec.roles[role].elastic
        return elastic is None or int(rank) < elastic.min

    def _needs(self, sub_graph: SubGraph) -> bool:
        """Whether the job does not begin without this sub-graph."""
        return any(map(self._begins_with, sub_graph.vertices))

    def _asks_anew(self, addresses: Sequence[Address]) -> bool:
        """Whether they ask for room beyond what the job has had: to begin, or to grow."""
        return self._begins() or all(one.incarnation == 1 for one in addresses)

    def _is_needed(self, vertices: Sequence[str]) -> bool:
        """Whether the job does not begin as submitted, or go on, without them."""
        roles = {vertex.rpartition("-")[0] for vertex in vertices}
        return self._begins() or not all(self._spec.roles[role].elastic for role in roles)

    def _waits_since(self, vertices: Sequence[str]) -> float:
        """Since when one of them waits for room; now, if none does."""
        records = (self._job.state.vertices.get(vertex) for vertex in vertices)
        return min((one.no_room_since for one in records if one and one.no_room), default=self._clock.time())

    # -- giving back --------------------------------------------------------------------------------

    async def _give_back(self, vertices: Sequence[str], sub_graphs: Mapping[str, SubGraph]) -> None:
        """Release what was asked for these vertices alone."""
        for name, sub_graph in sub_graphs.items():
            if name in self._used and set(vertices).issuperset(sub_graph.vertices):
                await self._cluster.release(name)

    async def release_left(self, vertex: str) -> None:
        """Release the place of a vertex that has left, if no wanted vertex is there."""
        role, _, rank = vertex.rpartition("-")
        if int(rank) >= self._job.state.job.roles.get(role, 0) and self._plans.remove(vertex):
            await self._cluster.release(sub_graph_id(self._spec, role, int(rank)))

    async def release_drained(self, vertex: str) -> None:
        """Release the place of a vertex that is drained, if it stands there alone."""
        fitted = self._plans.last
        if self._job.state.vertices[vertex].reason is not Reason.DRAINED or fitted is None:
            return
        if vertex in fitted.plan.placements and fitted.of(vertex).vertices == (vertex,):
            await self._cluster.release(fitted.of(vertex).id)

    async def release_unwanted(self) -> None:
        """Release what an earlier master reserved, or asked for, for vertices that are not there."""
        wanted = {
            sub_graph_id(self._spec, role, rank)
            for role, count in self._job.state.job.roles.items()
            for rank in range(count)
        }
        wanted |= {
            sub_graph_id(self._spec, one.role, one.rank)
            for one in self._job.state.vertices.values()
            if one.phase is not VertexPhase.STOPPED
        }
        await asyncio.gather(
            *(self._cluster.release(name) for name in await self._cluster.reserved() - wanted)
        )

    async def release_all(self) -> None:
        """Release every placement group that this or an earlier master may have made, and this machine's memory in
        which vertices left weights."""
        counts = dict(self._job.state.job.roles)
        for vertex in self._job.state.vertices.values():
            counts[vertex.role] = max(counts.get(vertex.role, 0), vertex.rank + 1)
        names = {
            sub_graph_id(self._spec, role, rank) for role, count in counts.items() for rank in range(count)
        }
        names |= self._used | await self._cluster.reserved()
        await asyncio.gather(*(self._cluster.release(name) for name in names))
        # The memory of vertices that were killed here and never came back; on other machines the vertices there free
        # it.
        vertices = [f"{role}-{rank}" for role, count in counts.items() for rank in range(count)]
        await asyncio.to_thread(remove_left_by_job, self._directory, vertices)


def _cannot_place(error: GraphError, by_others: bool) -> CannotPlace:
    told = error.details
    return CannotPlace(
        str(error), required=str(told["required"]), available=str(told["available"]), by_others=by_others
    )
