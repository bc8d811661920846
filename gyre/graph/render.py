"""A compiled job for people and for programs: plain data, tables, Graphviz, Mermaid.

`as_dict` is the whole of it and is stable: `gyre plan --json` and the REST API print it. The other forms show the
same facts. This module must not decide anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from gyre.config import TRAINER
from gyre.graph.compile import CompiledJob
from gyre.graph.elements import Bundle, Dcg, Edge, EdgeKind, PlacementPlan, VertexPlacement

if TYPE_CHECKING:
    from rich.table import Table

_ARROWS = {
    EdgeKind.SAMPLES: ("solid", "-->"),
    EdgeKind.WEIGHTS: ("bold", "==>"),
    EdgeKind.COLLECTIVE: ("dotted", "-.-"),
    EdgeKind.CONTROL: ("dashed", "-.->"),
}


def as_dict(compiled: CompiledJob, *, placement: bool = True) -> dict[str, Any]:
    """Plain data that `json.dumps` takes. Cycles are lists of edges in the direction of flow. Without `placement`
    there are no `sub_graphs` and no `placement`, which say something of each vertex."""
    spec, dcg, plan = compiled.spec, compiled.dcg, compiled.plan
    regions = [sorted(region, key=_natural) for region in compiled.graph.regions() if len(region) > 1]
    told: dict[str, Any] = {
        "name": spec.name,
        "recipe": dcg.recipe,
        "nodes": {"count": plan.node_num, "devices": plan.device_per_node, "device_type": plan.device_type},
        "roles": [
            {
                "name": name,
                "entrypoint": str(role.entrypoint),
                "total": role.total,
                "per_node": role.per_node,
                "gang": role.gang,
                "elastic": role.elastic.model_dump() if role.elastic else None,
                "resources": role.resources.model_dump(),
            }
            for name, role in spec.roles.items()
        ],
        "operators": [{"ref": operator.ref, **asdict(operator)} for operator in dcg.operators],
        "edges": [asdict(edge) for edge in dcg.edges],
        "role_edges": [asdict(edge) for edge in dcg.role_edges],
        "cycles": [
            {"edges": [asdict(edge) for edge in cycle], "delay": sum(edge.delay for edge in cycle)}
            for cycle in cycles(dcg)
        ],
        "regions": {
            "joined": regions,
            "single": len(compiled.graph) - sum(len(region) for region in regions),
        },
        "notes": list(plan.notes),
    }
    return told | _of_each_vertex(plan) if placement else told


def _of_each_vertex(plan: PlacementPlan) -> dict[str, Any]:
    machines = plan.machines()
    return {
        "sub_graphs": [
            {
                "id": sub_graph.id,
                "strategy": sub_graph.strategy,
                "bundles": [
                    {**_fields(bundle), "vertices": list(bundle.vertices)} for bundle in sub_graph.bundles
                ],
            }
            for sub_graph in plan.sub_graphs
        ],
        "placement": [
            {**_fields(found), "devices": list(found.devices), "node_id": machines.get(found.vertex)}
            for found in plan.placements.values()
        ],
    }


def _fields(record: Bundle | VertexPlacement) -> dict[str, Any]:
    """What `asdict` gives, but fields are not copied: nobody changes them, and of 10,000 vertices the copies take half
    a second."""
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def cycles(dcg: Dcg, limit: int = 64) -> list[tuple[Edge, ...]]:
    """The simple cycles that tokens go round, shortest first, `limit` at most. The trainer's calls are none."""
    import networkx

    graph = networkx.DiGraph()
    by_ends: dict[tuple[str, str], Edge] = {}
    for edge in (*dcg.edges, *dcg.role_edges):
        called = edge in dcg.role_edges and edge.source == TRAINER and edge.kind is EdgeKind.CONTROL
        if edge.kind is not EdgeKind.COLLECTIVE and not called:
            # Of parallel edges the one with the least delay is what limits the cycle.
            known = by_ends.get((edge.source, edge.target))
            if known is None or edge.delay < known.delay:
                by_ends[edge.source, edge.target] = edge
            graph.add_edge(edge.source, edge.target)
    order = {name: number for number, name in enumerate(graph)}
    found: list[tuple[Edge, ...]] = []
    for nodes in networkx.simple_cycles(graph):
        first = min(range(len(nodes)), key=lambda at: order[nodes[at]])
        turned = [*nodes[first:], *nodes[:first]]
        found.append(tuple(by_ends[a, b] for a, b in zip(turned, [*turned[1:], turned[0]], strict=True)))
        if len(found) == limit:
            break
    return sorted(found, key=lambda cycle: (len(cycle), [order[edge.source] for edge in cycle]))


def as_tables(compiled: CompiledJob, rows: int = 64) -> list[Table]:
    """Rich tables; of vertices at most `rows` are shown, and the last row says how many more there are."""
    from rich.table import Table

    tables = []
    for title, columns, lines in (*_of_the_graph(compiled), *_of_the_places(compiled)):
        made = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None)
        for column in columns:
            made.add_column(column, overflow="fold")
        for line in lines[:rows]:
            made.add_row(*line)
        if len(lines) > rows:
            made.add_row(f"… and {len(lines) - rows} more")
        tables.append(made)
    return tables


_Lines = tuple[str, tuple[str, ...], list[tuple[str, ...]]]
"""A table: its title, the names of its columns, its lines."""


def _of_the_graph(compiled: CompiledJob) -> Iterator[_Lines]:
    """Roles, operators, edges and cycles."""
    dcg = compiled.dcg
    yield _of_the_roles(compiled)
    if dcg.operators:
        yield (
            "Operators",
            ("operator", "runs on", "ordered"),
            [(op.ref, str(op.dispatch), "yes" if op.ordered else "-") for op in dcg.operators],
        )
    yield (
        "Edges",
        ("from", "to", "kind", "produce", "consume", "delay", "room"),
        [
            (
                edge.source,
                edge.target,
                str(edge.kind),
                str(edge.produce),
                str(edge.consume),
                str(edge.delay),
                str(edge.capacity or "-"),
            )
            for edge in (*dcg.edges, *dcg.role_edges)
        ],
    )
    if found := cycles(dcg):
        yield (
            "Cycles",
            ("operators", "delay"),
            [
                (" → ".join([*(edge.source for edge in cycle), cycle[0].source]), _delays(cycle))
                for cycle in found
            ],
        )


def _of_the_roles(compiled: CompiledJob) -> _Lines:
    placements = compiled.plan.placements
    shares = {vertex.rpartition("-")[0]: place.accelerator for vertex, place in placements.items()}
    return (
        "Roles",
        ("role", "total", "per node", "device share", "gang", "elastic", "class"),
        [
            (
                name,
                str(role.total),
                str(role.per_node or "-"),
                f"{shares.get(name, 0.0):g}",
                "yes" if role.gang else "-",
                f"{role.elastic.min} to {role.elastic.max}" if role.elastic else "-",
                str(role.entrypoint),
            )
            for name, role in compiled.spec.roles.items()
        ],
    )


def _of_the_places(compiled: CompiledJob) -> Iterator[_Lines]:
    """What restarts together and what is placed together, and where; notes."""
    plan, machines = compiled.plan, compiled.plan.machines()
    joined = [region for region in compiled.graph.regions() if len(region) > 1]
    if joined:
        yield (
            "Regions that restart together",
            ("vertices",),
            [(_some(sorted(region, key=_natural)),) for region in joined],
        )
    beside = {sub.id: [one.beside for one in sub.bundles if one.beside] for sub in plan.sub_graphs}
    on_hosts = any(beside.values())
    yield (
        "Sub-graphs",
        ("sub-graph", "strategy", "bundles", "logical nodes", *(["on one host as"] if on_hosts else [])),
        [
            (
                sub_graph.id,
                sub_graph.strategy,
                str(len(sub_graph.bundles)),
                _some([str(node) for node in sorted({bundle.node for bundle in sub_graph.bundles})]),
                *([_some(beside[sub_graph.id]) or "-"] if on_hosts else []),
            )
            for sub_graph in plan.sub_graphs
        ],
    )
    yield (
        "Placement",
        ("vertex", "node", "machine", "devices", "share"),
        [
            (
                place.vertex,
                str(place.node),
                machines.get(place.vertex, "-"),
                ",".join(str(device) for device in place.devices) or "-",
                f"{place.accelerator:g}",
            )
            for place in plan.placements.values()
        ],
    )
    if plan.notes:
        yield "Notes", ("",), [(note,) for note in plan.notes]


def as_dot(compiled: CompiledJob) -> str:
    """Graphviz, one cluster per role."""
    dcg = compiled.dcg
    lines = ["digraph job {", "  rankdir=LR;", "  node [shape=box];"]
    for role in dcg.roles:
        lines += [f"  subgraph cluster_{role} {{", f'    label="{_label(compiled, role)}";']
        alone, refs = _nodes_of(dcg, role)
        if alone:
            lines.append(f'    "{role}";')
        lines += [f'    "{ref}" [label="{ref.partition(".")[2]}"];' for ref in refs]
        lines.append("  }")
    for edge in (*dcg.edges, *dcg.role_edges):
        style, _ = _ARROWS[edge.kind]
        lines.append(f'  "{edge.source}" -> "{edge.target}" [label="{_edge_label(edge)}", style={style}];')
    return "\n".join([*lines, "}"]) + "\n"


def as_mermaid(compiled: CompiledJob) -> str:
    """A Mermaid flowchart, one subgraph per role."""
    dcg = compiled.dcg
    lines = ["flowchart LR"]
    for role in dcg.roles:
        lines.append(f'  subgraph role_{role}["{_label(compiled, role)}"]')
        alone, refs = _nodes_of(dcg, role)
        if alone:
            lines.append(f'    {_id(role)}["{role}"]')
        lines += [f'    {_id(ref)}["{ref.partition(".")[2]}"]' for ref in refs]
        lines.append("  end")
    for edge in (*dcg.edges, *dcg.role_edges):
        _, arrow = _ARROWS[edge.kind]
        lines.append(f'  {_id(edge.source)} {arrow}|"{_edge_label(edge)}"| {_id(edge.target)}')
    return "\n".join(lines) + "\n"


def _nodes_of(dcg: Dcg, role: str) -> tuple[bool, list[str]]:
    """Whether the role is a node by itself, because an edge ends there or it has no operator; and its operators."""
    refs = [operator.ref for operator in dcg.operators if operator.role == role]
    return not refs or any(role in (edge.source, edge.target) for edge in dcg.role_edges), refs


def _label(compiled: CompiledJob, role: str) -> str:
    total = compiled.spec.roles[role].total
    return f"{role} × {total}" + (", gang" if compiled.spec.roles[role].gang else "")


def _edge_label(edge: Edge) -> str:
    rates = f" {edge.produce}:{edge.consume}" if (edge.produce, edge.consume) != (1, 1) else ""
    return f"{edge.kind}{rates}" + (f", delay {edge.delay}" if edge.delay else "")


def _id(ref: str) -> str:
    return "op_" + ref.replace(".", "__")


def _delays(cycle: tuple[Edge, ...]) -> str:
    delayed = [f"{edge.delay} on {edge.source} → {edge.target}" for edge in cycle if edge.delay]
    return ", ".join(delayed) or "0"


def _natural(vertex_id: str) -> tuple[str, int]:
    role, _, rank = vertex_id.rpartition("-")
    return role, int(rank)


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" … {names[-1]} ({len(names)})" if len(names) > 8 else "")
