"""Which machines the vertices of a job stand on: its plan, fitted to the machines that there are.

Invariant *who stands stays*: a plan is changed vertex by vertex, and those that run keep their machines. Only those
that start find a place anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gyre.clock import Clock
from gyre.config import JobSpec
from gyre.errors import GraphError
from gyre.failover import VertexPhase
from gyre.graph import (
    CompiledJob,
    NodeCapacity,
    PlacementPlan,
    SubGraph,
    can_come_later,
    compile_job,
    fit_what_has_room,
    with_numbers,
    without_vertices,
)
from gyre.master.cluster import Cluster
from gyre.master.job_context import JobNow


class Fitted(NamedTuple):
    """A plan on the present machines, and for each sub-graph that finds no room what it lacks."""

    plan: PlacementPlan
    lacking: dict[str, GraphError]
    sub_graphs: dict[str, SubGraph]
    """Those of the plan, by their ids."""

    def of(self, vertex: str) -> SubGraph:
        return self.sub_graphs[self.plan.placements[vertex].sub_graph]


class FittedPlans:
    """The plans of one job."""

    def __init__(self, spec: JobSpec, cluster: Cluster, *, job: JobNow, clock: Clock) -> None:
        self.heading: dict[str, tuple[int, str]] = {}
        """Where each vertex is being started: its incarnation, and the machine."""
        self._spec = spec
        self._cluster = cluster
        self._job = job
        self._clock = clock
        self._compiled: dict[tuple[tuple[str, int], ...], CompiledJob] = {}
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

    def compiled(self, roles: Mapping[str, int]) -> CompiledJob:
        """Returns the job compiled with these numbers of vertices by role. Raises GraphError if they do not fit."""
        key = tuple(sorted(roles.items()))
        if key not in self._compiled:
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
            self._compiled[key] = compile_job(spec)
        return self._compiled[key]

    def check_numbers(self, roles: Mapping[str, int]) -> None:
        """Raises GraphError if the job cannot have these numbers of vertices by role."""
        self.compiled(roles)
        with_numbers(self._planned(), self._spec, roles)

    async def most(self, role: str, count: int) -> int:
        """Returns how many vertices of the role, at most `count`, fit on the present machines beside the other roles;
        at least the present number, whose vertices have their places."""
        roles = self._job.state.job.roles
        present = roles.get(role, 0)
        nodes = await self._nodes()
        for number in range(count, present, -1):
            with contextlib.suppress(GraphError):
                plan = with_numbers(self._planned(), self._spec, {**roles, role: number})
                if not self._fit(plan, nodes)[1]:
                    return number
        return min(count, present)

    def growth(self, role: str, present: int, count: int) -> dict[int, SubGraph]:
        """The sub-graphs of the role's vertices from `present` up to `count`, by rank; none where the job's own bounds
        have no place for so many."""
        roles = self._job.state.job.roles
        try:
            plan = with_numbers(self._planned(), self._spec, {**roles, role: count})
        except GraphError:
            return {}
        by_id = {sub_graph.id: sub_graph for sub_graph in plan.sub_graphs}
        return {rank: by_id[plan.placements[f"{role}-{rank}"].sub_graph] for rank in range(present, count)}

    async def fitted(self) -> Fitted:
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
        return fit_what_has_room(
            plan,
            nodes,
            self._standing(closed, avoids),
            closed=closed,
            avoids=avoids,
            can_come_later=can_come_later(self._spec, self._job.state.job.roles),
        )

    def _closed(self, nodes: Sequence[NodeCapacity]) -> frozenset[str]:
        """The machines that accept no new vertices: those that are drained, and those that are left alone for the
        deaths there while there is another."""
        now, known = self._clock.time(), self._job.state.machines
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
            for one in self._job.state.vertices.values()
            if one.phase in leaving and (one.node in closed or one.id in avoids)
        }

    def _avoids(self) -> dict[str, str]:
        """The machines to which drained vertices do not go, by vertex."""
        vertices = self._job.state.vertices
        if self._avoiding[0] is not vertices:  # a start of ten thousand vertices asks as often
            self._avoiding = vertices, {one.id: one.avoids for one in vertices.values() if one.avoids}
        return self._avoiding[1]

    def graph(self) -> CompiledJob:
        """The job compiled with the present numbers of vertices, on the machines where they are, as far as known."""
        compiled = self.compiled(self._job.state.job.roles)
        return compiled if self._fitted is None else replace(compiled, plan=self._fitted[1].plan)

    @property
    def last(self) -> Fitted | None:
        """The plan as it was fitted last; None before that."""
        return self._fitted[1] if self._fitted is not None else None

    def remove(self, vertex: str) -> bool:
        """Take a vertex that has left out of the plan. False if it is not in it, or if others stand in its place."""
        if self._plan is None or vertex not in self._plan.placements:
            return False
        try:
            self._plan = without_vertices(self._plan, [vertex])
        except GraphError:
            return False
        self._numbers = {}
        return True

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
        state = self._job.state
        if self._numbers != state.job.roles:
            leaving = [one.id for one in state.vertices.values() if one.phase is VertexPhase.STOPPING]
            self._plan = with_numbers(self._plan, self._spec, state.job.roles, leaving)
            self._numbers = dict(state.job.roles)
        return self._plan

    def _standing(self, closed: frozenset[str], avoids: Mapping[str, str]) -> dict[str, str]:
        """The machines of the vertices that run, that end, that are being started, or that ran before they were
        restarted and may do so again: there their sub-graphs still stand."""
        standing = {}
        for one in self._job.state.vertices.values():
            if one.phase is VertexPhase.STOPPED:
                continue
            node = one.node
            if one.phase is VertexPhase.STARTING:
                incarnation, machine = self.heading.get(one.id, (0, ""))
                node = machine if incarnation == one.incarnation else node
                if node in closed or avoids.get(one.id, "") == node:
                    continue
            if node:
                standing[one.id] = node
        return standing

    async def lack_alone(self, sub_graphs: Iterable[str]) -> bool:
        """Whether one of the sub-graphs would find no room though no other job held any."""
        fitted = self._fitted
        assert fitted is not None, "`fitted` was called before"
        if self._lacking_alone[0] is not fitted:
            nodes = await self._cluster.whole_nodes()
            self._lacking_alone = fitted, frozenset(self._fit(fitted[1].plan, nodes)[1])
        return not self._lacking_alone[1].isdisjoint(sub_graphs)
