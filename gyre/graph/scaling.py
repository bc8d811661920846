"""One vertex more, one vertex less, and no other moves.

Invariants:
- *others stay*: what was placed keeps its node, devices and sub-graph;
- *same rules*: a new vertex is placed by the affinities and on the devices that a plan made from scratch would obey;
- *beside each other*: a new vertex stands where its rank's partners in a host group stand, if it has any. Beyond their
  ranks it stands for itself.

Only roles without a collective scale: each of their vertices is a sub-graph of its own. Where the user bounds neither
machines nor devices, a vertex that finds no room on the plan's logical nodes has one of its own. This module must not
know which vertices live, only which are planned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from gyre.config import JobSpec
from gyre.errors import GraphError, NotFound, nearest
from gyre.graph.elements import PlacementPlan
from gyre.graph.logical_nodes import LogicalNode, untouched
from gyre.graph.placement_plan import bundle_of, single_sub_graph
from gyre.graph.units import SHARE, Unit, units_of


def with_vertices(plan: PlacementPlan, spec: JobSpec, role: str, ranks: Iterable[int]) -> PlacementPlan:
    """Returns the plan with these ranks of an elastic role added; ranks that are already in the plan stay.

    `spec` is the resolved one (`CompiledJob.spec`). Roles that are collocated with it grow along. Raises GraphError
    if the role does not scale or no node has room, NotFound for an unknown role.
    """
    unit = _unit_of(spec, role)
    nodes = _occupied(plan)
    residents: dict[int, set[int]] = defaultdict(set)
    for place in plan.placements.values():
        if place.vertex.rpartition("-")[0] == unit.roles[0]:
            residents[place.node].add(place.local_rank)
    partners = _partners(unit, plan)
    placements, sub_graphs = dict(plan.placements), list(plan.sub_graphs)
    for rank in sorted(set(ranks)):
        if f"{role}-{rank}" in placements:
            continue
        node = _choose(unit, nodes, residents, plan, partners.get(unit.beside(rank), {}))
        taken = residents[node.index]
        local = next(number for number in range(len(taken) + 1) if number not in taken)
        bundle, places = bundle_of(plan.device_type, unit, rank, node.index, local, node.take(unit.width))
        taken.add(local)
        node.load += 1
        node.tenants.update(unit.roles)
        sub_graphs.append(single_sub_graph(unit, rank, bundle))
        placements.update({place.vertex: place for place in places})
    return replace(plan, node_num=len(nodes), sub_graphs=tuple(sub_graphs), placements=placements)


def without_vertices(plan: PlacementPlan, vertices: Collection[str]) -> PlacementPlan:
    """Returns the plan without the sub-graphs of these vertices. Raises GraphError if others would go with them."""
    gone = set(vertices)
    kept = []
    for sub_graph in plan.sub_graphs:
        inside = set(sub_graph.vertices)
        if not inside & gone:
            kept.append(sub_graph)
        elif not inside <= gone:
            left = ", ".join(sorted(inside - gone)[:4])
            raise GraphError(
                f"sub-graph {sub_graph.id}: {', '.join(sorted(inside & gone)[:4])} cannot leave it without {left}.",
                hint="Only elastic roles scale.",
            )
    placements = {vertex: place for vertex, place in plan.placements.items() if vertex not in gone}
    return replace(plan, sub_graphs=tuple(kept), placements=placements)


def with_numbers(
    plan: PlacementPlan, spec: JobSpec, roles: Mapping[str, int], leaving: Iterable[str] = ()
) -> PlacementPlan:
    """Returns the plan with so many vertices of each role, and the places of those that are `leaving`. Raises
    GraphError as `with_vertices` does."""
    staying = set(leaving)
    gone = set()
    for vertex in plan.placements:
        role, _, rank = vertex.rpartition("-")
        if int(rank) >= roles.get(role, 0) and vertex not in staying:
            gone.add(vertex)
    if gone:
        plan = without_vertices(plan, gone)
    for role, count in roles.items():
        missing = [rank for rank in range(count) if f"{role}-{rank}" not in plan.placements]
        if missing:
            plan = with_vertices(plan, spec, role, missing)
    return plan


def sub_graph_id(spec: JobSpec, role: str, rank: int) -> str:
    """The id of the sub-graph of a vertex, whatever the plan."""
    unit = next(unit for unit in units_of(spec) if role in unit.roles)
    count = next(member.count for member in unit.members if member.role == role)
    return f"{unit.id}-{rank // count}" if unit.single else unit.id


def can_come_later(spec: JobSpec, roles: Mapping[str, int] | None = None) -> set[str]:
    """The sub-graphs of elastic roles beyond their minimum: a job begins without them if they find no room. `roles` has
    the present number of vertices of each role; None takes those of the spec."""
    counts = {name: role.total for name, role in spec.roles.items()} if roles is None else roles
    return {
        sub_graph_id(spec, name, rank)
        for name, role in spec.roles.items()
        if role.elastic is not None
        for rank in range(role.elastic.min, counts.get(name, 0))
    }


def _unit_of(spec: JobSpec, role: str) -> Unit:
    if role not in spec.roles:
        raise NotFound(f"{role!r} is not a role of this job; {nearest(role, spec.roles)}")
    unit = next(unit for unit in units_of(spec) if role in unit.roles)
    if not unit.single:
        raise GraphError(
            f"roles.{role}: cannot scale, because it is not elastic.", hint="Give it .elastic(min, max)."
        )
    return unit


def _occupied(plan: PlacementPlan) -> list[LogicalNode]:
    """Returns the plan's nodes, with the devices that its vertices take."""
    used: dict[int, dict[int, int]] = defaultdict(lambda: defaultdict(int))
    nodes = [LogicalNode(index, []) for index in range(plan.node_num)]
    for place in plan.placements.values():
        nodes[place.node].tenants.add(place.vertex.rpartition("-")[0])
        nodes[place.node].load += 1
        for device in place.devices:
            used[place.node][device] += round(place.accelerator * SHARE) // len(place.devices)
    for node in nodes:
        for device in range(plan.device_per_node - 1, -1, -1):
            left = SHARE - used[node.index][device]
            if left == SHARE:
                node.free.append(device)
            elif left > 0:
                node.remainders.setdefault(left, []).insert(0, device)
    return nodes


def _partners(unit: Unit, plan: PlacementPlan) -> dict[str, dict[int, str]]:
    """By rank of the unit's host group, the logical nodes on which other units of it stand, with a vertex of each."""
    found: dict[str, dict[int, str]] = defaultdict(dict)
    if unit.host_group:
        for sub_graph in plan.sub_graphs:
            for bundle in sub_graph.bundles:
                if bundle.beside and bundle.vertices[0].rpartition("-")[0] not in unit.roles:
                    found[bundle.beside].setdefault(bundle.node, bundle.vertices[0])
    return found


def _choose(
    unit: Unit,
    nodes: list[LogicalNode],
    residents: dict[int, set[int]],
    plan: PlacementPlan,
    partners: Mapping[int, str],
) -> LogicalNode:
    fitting = [
        node
        for node in nodes
        if not node.tenants & unit.apart
        and (unit.per_node is None or len(residents[node.index]) < unit.per_node)
        and (unit.width == 0 or node.room(unit.width))
        and (not partners or node.index in partners)
    ]
    if not fitting and plan.most_nodes is None:
        nodes.append(untouched(len(nodes), plan.device_per_node))
        return nodes[-1]
    if not fitting and partners:
        raise GraphError(
            f"roles.{unit.id}: one more required {unit.width / SHARE:g} devices on the node of "
            f"{', '.join(partners.values())}, beside which it stands; available there: none.",
            hint="Scale another role down first, or raise device_per_node.",
        )
    if not fitting:
        limit = f", at most {unit.per_node} on a node" if unit.per_node else ""
        raise GraphError(
            f"roles.{unit.id}: one more required {unit.width / SHARE:g} devices on a node{limit}; "
            f"available on none of {len(nodes)}.",
            hint="Scale another role down first, or submit the job with more nodes.",
        )
    if unit.pack:
        return min(fitting, key=lambda node: (-len(residents[node.index]), node.index))
    if unit.spread or unit.width == 0:
        return min(fitting, key=lambda node: (len(residents[node.index]), node.load, node.index))
    return fitting[0]
