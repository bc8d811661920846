"""The execution graph: every instance of every role, and the region that restarts with each.

Invariants:
- *implicit edges*: edges are kept once per pair of roles, never once per pair of vertices, so building is linear
  in the vertices;
- *regions partition*: every vertex is in exactly one region, and two vertices are in one region iff a chain of
  non-durable edges joins them;
- *immutable*: the graph stays as it was compiled; a vertex that scaling adds is a region of its own.

This module must not know where vertices stand (`placement_plan`) or whether they live (`failover`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import cached_property

from gyre.errors import NotFound, nearest
from gyre.graph.elements import DURABLE, Dcg, Edge, EdgeKind, Vertex


class ExecutionGraph:
    """The vertices of a job and the edges between them."""

    def __init__(self, dcg: Dcg, ranks: Mapping[str, Iterable[int]], gangs: Collection[str] = ()) -> None:
        """`ranks` gives the ranks of each role; `gangs` names the roles whose ranks are collective peers."""
        self.dcg = dcg
        self.gangs = frozenset(gangs)
        self._roles: dict[str, dict[str, Vertex]] = {
            role: {f"{role}-{rank}": Vertex(role, rank) for rank in of_role}
            for role, of_role in ranks.items()
        }
        self._targets: dict[str, dict[str, set[EdgeKind]]] = {role: {} for role in self._roles}
        for edge in self.role_pairs():
            source, target = _role_of(edge.source), _role_of(edge.target)
            if source != target:
                self._targets[source].setdefault(target, set()).add(edge.kind)

    # -- vertices -----------------------------------------------------------------------------------

    @cached_property
    def vertices(self) -> tuple[Vertex, ...]:
        return tuple(vertex for of_role in self._roles.values() for vertex in of_role.values())

    def __len__(self) -> int:
        return sum(len(of_role) for of_role in self._roles.values())

    def __contains__(self, vertex_id: object) -> bool:
        return isinstance(vertex_id, str) and vertex_id in self._roles.get(_vertex_role(vertex_id), {})

    def vertex(self, vertex_id: str) -> Vertex:
        """Raises NotFound with the nearest vertex id."""
        found = self._roles.get(_vertex_role(vertex_id), {}).get(vertex_id)
        if found is None:
            raise NotFound(f"{vertex_id!r} is not a vertex of this job; {self._nearest(vertex_id)}")
        return found

    # -- edges --------------------------------------------------------------------------------------

    def role_pairs(self) -> tuple[Edge, ...]:
        """The DCG's edges and role edges: all there is between vertices, once per pair of roles."""
        return (*self.dcg.edges, *self.dcg.role_edges)

    # -- regions ------------------------------------------------------------------------------------

    def region(self, vertex_id: str) -> frozenset[str]:
        """All vertices that must restart with this one, itself included."""
        role = self.vertex(vertex_id).role
        shared = self._shared_regions.get(role)
        return frozenset((vertex_id,)) if shared is None else shared

    def region_or_alone(self, vertex_id: str) -> frozenset[str]:
        """`region`, and for a vertex that scaling added it alone: only roles without peers can be scaled."""
        return self.region(vertex_id) if vertex_id in self else frozenset((vertex_id,))

    def regions(self) -> tuple[frozenset[str], ...]:
        """Every region once, in the order of their first vertex."""
        result: list[frozenset[str]] = []
        done: set[int] = set()
        for role, of_role in self._roles.items():
            shared = self._shared_regions.get(role)
            if shared is None:
                result.extend(frozenset((vertex_id,)) for vertex_id in of_role)
            elif id(shared) not in done and shared:
                done.add(id(shared))
                result.append(shared)
        return tuple(result)

    @cached_property
    def _region_roles(self) -> dict[str, tuple[str, ...]]:
        """Roles whose vertices share one region, by role; a role that is in none restarts one by one."""
        joined: dict[str, set[str]] = {role: {role} for role in self.gangs if role in self._roles}
        for source, targets in self._targets.items():
            for target, kinds in targets.items():
                if kinds - DURABLE:
                    both = joined.get(source, {source}) | joined.get(target, {target})
                    joined.update(dict.fromkeys(both, both))
        return {role: tuple(name for name in self._roles if name in group) for role, group in joined.items()}

    @cached_property
    def _shared_regions(self) -> dict[str, frozenset[str]]:
        built: dict[tuple[str, ...], frozenset[str]] = {}
        for group in self._region_roles.values():
            if group not in built:
                built[group] = frozenset(self._ids(group))
        return {role: built[group] for role, group in self._region_roles.items()}

    def _ids(self, roles: Iterable[str]) -> tuple[str, ...]:
        return tuple(vertex_id for role in roles for vertex_id in self._roles[role])

    def _nearest(self, vertex_id: str) -> str:
        role, _, rank = vertex_id.rpartition("-")
        if role in self._roles:
            ids = list(self._roles[role])
            return f"{role} has {ids[0]} to {ids[-1]}." if ids else f"{role} has no vertices now."
        likely = nearest(role or vertex_id, self._roles)
        for known, of_role in self._roles.items():
            if repr(known) in likely and of_role:
                number = f"{known}-{rank}"
                return f"did you mean {number if number in of_role else next(iter(of_role))!r}?"
        firsts = [next(iter(of_role)) for of_role in self._roles.values() if of_role]
        return f"known: {', '.join(firsts)}, …"


def _role_of(endpoint: str) -> str:
    """The role of `role.method` or `role`."""
    return endpoint.partition(".")[0]


def _vertex_role(vertex_id: str) -> str:
    return vertex_id.rpartition("-")[0]
