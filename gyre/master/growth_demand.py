"""Growth that the elasticity policy wants and the present machines have no room for: shown to whoever adds machines.

A sub-graph that is wished for is a pending placement group, which Ray's autoscaler sees. When there is room the advice
is given again, so that the role grows within a second of it.

Invariants:
- *wished for, not begun*: no vertex is wanted until there is room for it;
- *a wish has an end*: it is withdrawn when another number is wanted, when the job is paused or ends, when another job
  is to be served first, and after the role's `elastic.machines_timeout_s`. Then the role wishes for nothing for as
  long.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from gyre.clock import Clock
from gyre.config import JobSpec
from gyre.failover import JobPhase
from gyre.failover.events import ScaleAdvised
from gyre.graph import SubGraph
from gyre.master.cluster import Cluster
from gyre.master.fitted_plans import FittedPlans
from gyre.master.job_context import JobContext
from gyre.master.places import Places

LOOK_EVERY_S = 1.0
"""Between two looks for room: a machine that came is used within seconds."""


@dataclass(slots=True)
class _Wish:
    advice: ScaleAdvised
    since: float
    timeout_s: float
    present: int
    """The role's number of vertices that the wish adds to."""
    is_followed: bool = False
    """Whether the role has had that number; before that it has the advice's `seen`."""
    sub_graphs: dict[int, SubGraph] = field(default_factory=dict)
    """What is shown, by the rank of the vertex."""


class GrowthDemand:
    """The wishes of one job."""

    def __init__(
        self,
        spec: JobSpec,
        cluster: Cluster,
        plans: FittedPlans,
        places: Places,
        context: JobContext,
        *,
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._cluster = cluster
        self._plans = plans
        self._places = places
        self._clock = clock
        self._context = context
        self._wishes: dict[str, _Wish] = {}
        self._not_before: dict[str, float] = {}
        self._look_at = 0.0

    @property
    def shown(self) -> Mapping[str, int]:
        """How many sub-graphs of each role are shown as wanted."""
        return {role: len(wish.sub_graphs) for role, wish in self._wishes.items()}

    async def advised(self, advice: ScaleAdvised) -> None:
        """Show what the advice wants beyond `possible`, or withdraw what an earlier one wanted. One that is out of
        date, or about a role that does not scale, changes nothing: it is not followed either."""
        role = self._spec.roles.get(advice.role)
        if (
            role is None
            or role.elastic is None
            or advice.seen != self._context.state.job.roles.get(advice.role)
        ):
            return
        possible = advice.count if advice.possible is None else advice.possible
        count = min(advice.count, role.elastic.max)
        if count <= max(possible, advice.seen) or not self._may_wish():
            await self._withdraw(advice.role)
            return
        now = self._clock.monotonic()
        if now < self._not_before.get(advice.role, 0.0):
            return
        before = self._wishes.get(advice.role)
        wish = _Wish(
            replace(advice, count=count),
            since=before.since if before is not None else now,
            timeout_s=role.elastic.machines_timeout_s,
            present=max(possible, advice.seen),
            sub_graphs=before.sub_graphs if before is not None else {},
        )
        self._wishes[advice.role] = wish
        await self._show(wish)

    async def look(self) -> None:
        """Advise to grow where there is room now, and withdraw what is no longer wanted; called often."""
        now = self._clock.monotonic()
        if now < self._look_at or not self._wishes:
            return
        self._look_at = now + LOOK_EVERY_S
        for role, wish in list(self._wishes.items()):
            present = self._context.state.job.roles.get(role, 0)
            wish.is_followed = wish.is_followed or present == wish.present
            expected = wish.present if wish.is_followed else wish.advice.seen
            if not self._may_wish() or present != expected:
                await self._withdraw(role)
                continue
            if now - wish.since >= wish.timeout_s:
                self._not_before[role] = now + wish.timeout_s
                await self._withdraw(role)
                continue
            if await self._places.is_another_first():
                await self._withdraw(role)
                continue
            possible = await self._places.room(role, wish.advice.count)
            if possible > present:
                advice = replace(wish.advice, seen=present, possible=possible, report=0)
                self._context.submit(advice, actor="diagnosis")
                wish.advice, wish.present = replace(wish.advice, seen=present), possible
                wish.is_followed = False
                if possible >= wish.advice.count:
                    del self._wishes[role]  # it came true: its places are the vertices' now
                    continue
            await self._show(wish)

    def _may_wish(self) -> bool:
        job = self._context.state.job
        return not (job.paused or job.phase is JobPhase.STOPPING or job.phase.ended)

    async def _show(self, wish: _Wish) -> None:
        wanted = self._plans.growth(wish.advice.role, wish.present, wish.advice.count)
        for rank in [rank for rank in wish.sub_graphs if rank < wish.present]:
            del wish.sub_graphs[rank]  # it is the vertex's place now
        for rank, sub_graph in wanted.items():
            if rank not in wish.sub_graphs:
                wish.sub_graphs[rank] = sub_graph
                await self._cluster.demand(sub_graph)

    async def _withdraw(self, role: str) -> None:
        wish = self._wishes.pop(role, None)
        if wish is None:
            return
        for rank, sub_graph in wish.sub_graphs.items():
            if rank >= self._context.state.job.roles.get(role, 0):
                await self._cluster.release(sub_graph.id)
