"""The placement plan: the sub-graph, logical node and devices of every vertex.

Invariants:
- *placed once*: every vertex has exactly one placement, in exactly one bundle of one sub-graph;
- *no over-subscription*: the shares of one device never sum to more than 1, counted in whole 1/10,000, which is
  Ray's unit, so that n roles with a share of floor(1/n) always fit;
- *separate*: roles of one `separate` list have no logical node in common;
- *beside each other*: the bundles of one rank of a host group are on one logical node, each with devices of its own;
- *deterministic*: equal jobs get equal plans.

For device type CPU a device is only a number: bundles reserve no accelerator with Ray. The trainer takes none.
This module must not know the cluster: logical nodes meet machines in `fit_to_cluster` (module `cluster_fit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from gyre.config import TRAINER, JobSpec
from gyre.errors import GraphError
from gyre.graph.elements import Bundle, PlacementPlan, SubGraph, VertexPlacement
from gyre.graph.logical_nodes import LogicalNode, Taken, ranks_with_room, take_rank, untouched
from gyre.graph.units import SHARE, HostGroup, Unit, host_groups_of, units_of

USUAL_DEVICES = 8
"""Devices of a logical node where the user does not say."""


_Layout = list[tuple[LogicalNode, int]]
"""How many ranks of a host group, or bundles of a unit, on which node, in the order of ranks."""


class _NoRoom(Exception):
    def __init__(self, group: HostGroup, sentence: str) -> None:
        self.group, self.sentence = group, sentence


def plan_placement(spec: JobSpec) -> PlacementPlan:
    """Place a resolved job (`compile_job(...).spec`) on its `node_num` nodes, or on as few as it takes.

    Raises GraphError that says required and available. Roles are placed in the order of their declaration; where
    that leaves no room, the most constrained ones go first.
    """
    units = units_of(spec)
    groups = host_groups_of(units)
    devices = spec.device_per_node or _devices_on_a_node(groups)
    layouts, node_num, stuck = None, 0, None
    for node_num in [spec.node_num] if spec.node_num else _numbers_of_nodes(groups, devices):
        _check_sizes(groups, node_num, devices)
        for order in _orders(groups):
            try:
                layouts = _lay_out(order, node_num, devices)
                break
            except _NoRoom as error:
                stuck = stuck or error
        if layouts is not None:
            break
    if layouts is None:
        assert stuck is not None
        raise GraphError(
            f"roles.{stuck.group.id}: {stuck.sentence}",
            hint="Raise node_num or device_per_node, or ask for less.",
        )
    sub_graphs: list[SubGraph] = []
    placements: dict[str, VertexPlacement] = {}
    for unit in units:
        bundles, unit_placements = _bundles(spec, unit, *layouts[unit.id])
        sub_graphs.extend(_sub_graphs(unit, bundles))
        placements.update(unit_placements)
    return PlacementPlan(
        node_num,
        devices,
        spec.device_type,
        tuple(sub_graphs),
        placements,
        tuple(_notes(spec, groups, node_num * devices * SHARE)),
        spec.node_num,
    )


def _devices_on_a_node(groups: Sequence[HostGroup]) -> int:
    """Returns the devices of a logical node where the user did not say: as most machines have, or what the widest role
    takes."""
    return max(USUAL_DEVICES, *(_devices_for(group, group.per_node or 1) for group in groups))


def _numbers_of_nodes(groups: Sequence[HostGroup], devices: int) -> Iterable[int]:
    """The numbers of nodes to try where the user did not say, up to a node for each rank."""
    width = sum(group.width * group.ranks for group in groups)
    gangs = (group.ranks // group.per_node for group in groups if group.per_node)
    number = max(1, -(-width // (devices * SHARE)), *gangs)
    most = max(number, sum(group.ranks for group in groups))
    while number < most:
        yield number
        number += max(1, number // 8)
    yield most


def _check_sizes(groups: Sequence[HostGroup], node_num: int, devices: int) -> None:
    """Refuse a job that does not fit in any order of placing."""
    for group in groups:
        path = f"roles.{group.id}"
        here = _devices_for(group, group.per_node or 1)
        if here > devices:
            one = "one of them" if len(group.units) == 1 else "one rank of them, beside each other,"
            how = f"per_node {group.per_node}" if (group.per_node or 1) > 1 else one
            raise GraphError(
                f"{path}: {how} requires {here} devices on a node, available {devices} (device_per_node).",
                hint="Lower per_node or resources.accelerator, or raise device_per_node.",
            )
        if group.per_node and group.ranks // group.per_node > node_num:
            raise GraphError(
                f"{path}.per_node: {group.ranks} with {group.per_node} on a node requires "
                f"{group.ranks // group.per_node} nodes, available {node_num} (node_num).",
                hint="Raise per_node or node_num.",
            )
    units = [unit for group in groups for unit in group.units]
    required = sum(unit.width * unit.bundles for unit in units)
    if required > node_num * devices * SHARE:
        shown = ", ".join(
            f"{unit.id} {unit.width * unit.bundles / SHARE:g}" for unit in units if unit.width * unit.bundles
        )
        raise GraphError(
            f"roles: required {required / SHARE:g} devices ({shown}), available {node_num * devices} "
            f"(node_num {node_num} × device_per_node {devices}).",
            hint="Collocate roles, lower their totals, or raise node_num.",
        )


def _devices_for(group: HostGroup, ranks: int) -> int:
    """Returns the whole devices that this many ranks of a host group take on one node."""
    if len(group.units) == 1:
        width = group.width
        return width * ranks // SHARE if width >= SHARE or width == 0 else -(-ranks // (SHARE // width))
    enough = sum(-(-unit.width // SHARE) * unit.each for unit in group.units) * ranks
    node = untouched(0, enough)
    for _ in range(ranks):
        take_rank(node, group, {})
    return enough - len(node.free)


# -- which node -------------------------------------------------------------------------------------


def _orders(groups: Sequence[HostGroup]) -> Iterable[Sequence[HostGroup]]:
    yield groups
    yield sorted(groups, key=lambda group: (not group.apart, not group.per_node, -group.width, -group.ranks))
    yield sorted(
        groups, key=lambda group: (not group.per_node, -group.width * (group.per_node or 1), -group.ranks)
    )
    yield sorted(
        groups, key=lambda group: (-group.width * (group.per_node or 1), not group.apart, -group.ranks)
    )


def _lay_out(
    order: Sequence[HostGroup], node_num: int, devices: int
) -> dict[str, tuple[_Layout, list[tuple[int, ...]]]]:
    """Returns the nodes of every unit, and the devices of each of its bundles."""
    nodes = [untouched(index, devices) for index in range(node_num)]
    result = {}
    for group in order:
        layout = sorted(_choose(group, nodes), key=lambda item: item[0].index)
        taken: Taken = {}
        for node, count in layout:
            node.tenants.update(group.roles)
            node.load += count * sum(unit.each for unit in group.units)
            for _ in range(count):
                take_rank(node, group, taken)
        for unit in group.units:
            result[unit.id] = ([(node, count * unit.each) for node, count in layout], taken[unit.id])
    return result


def _choose(group: HostGroup, nodes: Sequence[LogicalNode]) -> _Layout:
    allowed = [node for node in nodes if not (node.tenants & group.apart)] if group.apart else nodes
    room = {node.index: ranks_with_room(node, group) for node in allowed}
    if group.per_node is not None:
        count = group.ranks // group.per_node
        fitting = [node for node in allowed if room[node.index] >= group.per_node]
        if len(fitting) < count:
            raise _NoRoom(
                group,
                f"required {count} nodes with room for {group.per_node} of them "
                f"({_devices_for(group, group.per_node)} devices) each, available {len(fitting)}"
                + _because(group, nodes, allowed),
            )
        fitting.sort(key=lambda node: _emptiest_first(node, group))
        return [(node, group.per_node) for node in fitting[:count]]
    usable = [node for node in allowed if room[node.index]]
    available = sum(room[node.index] for node in usable)
    if available < group.ranks:
        raise _NoRoom(
            group,
            f"required room for {group.ranks} of them, available {available}"
            + _because(group, nodes, allowed),
        )
    if group.spread or (group.width == 0 and not group.pack and not group.apart):
        usable.sort(key=lambda node: _emptiest_first(node, group))
        return _evenly(group.ranks, usable, room)
    if group.pack:
        usable.sort(key=lambda node: (-room[node.index], node.index))
    return _filled(group.ranks, usable, lambda node: room[node.index])


def _emptiest_first(node: LogicalNode, group: HostGroup) -> tuple[int, int]:
    return -node.room(group.width) if group.width else node.load, node.index


def _filled(ranks: int, nodes: Sequence[LogicalNode], room: Callable[[LogicalNode], int]) -> _Layout:
    layout: _Layout = []
    for node in nodes:
        if not ranks:
            break
        count = min(ranks, room(node))
        layout.append((node, count))
        ranks -= count
    return layout


def _evenly(ranks: int, nodes: Sequence[LogicalNode], room: dict[int, int]) -> _Layout:
    counts = dict.fromkeys((node.index for node in nodes), 0)
    open_nodes = list(nodes)
    while ranks:
        # Each round gives every open node its equal part, so rounds are as few as there are sizes of room.
        part = max(1, min(ranks // len(open_nodes), min(room[n.index] - counts[n.index] for n in open_nodes)))
        for node in open_nodes[:ranks]:
            counts[node.index] += part
            ranks -= part
        open_nodes = [node for node in open_nodes if room[node.index] > counts[node.index]]
    return [(node, counts[node.index]) for node in nodes if counts[node.index]]


def _because(group: HostGroup, nodes: Sequence[LogicalNode], allowed: Sequence[LogicalNode]) -> str:
    if len(allowed) < len(nodes):
        apart = ", ".join(sorted(set(chain.from_iterable(node.tenants for node in nodes)) & group.apart))
        return (
            f" ({len(nodes) - len(allowed)} of {len(nodes)} nodes hold {apart}, which it is separated from)."
        )
    return f" on {len(nodes)} nodes, once the other roles have theirs."


# -- bundles and sub-graphs -------------------------------------------------------------------------


def _bundles(
    spec: JobSpec, unit: Unit, layout: _Layout, taken: Sequence[tuple[int, ...]]
) -> tuple[list[Bundle], dict[str, VertexPlacement]]:
    bundles: list[Bundle] = []
    placements: dict[str, VertexPlacement] = {}
    for node, count in layout:
        for local in range(count):
            number = len(bundles)
            bundle, places = bundle_of(spec.device_type, unit, number, node.index, local, taken[number])
            bundles.append(bundle)
            for place in places:
                placements[place.vertex] = place
    return bundles, placements


def bundle_of(
    device_type: str, unit: Unit, number: int, node: int, local: int, devices: tuple[int, ...]
) -> tuple[Bundle, list[VertexPlacement]]:
    """The `number`-th bundle of a unit, the `local`-th of them on its node, and the vertices that stand in it."""
    sub_graph, index = (f"{unit.id}-{number}", 0) if unit.single else (unit.id, number)
    places = [
        VertexPlacement(
            vertex=f"{member.role}-{number * member.count + inner}",
            sub_graph=sub_graph,
            bundle=index,
            node=node,
            local_rank=local * member.count + inner,
            devices=_part(devices, member.wanted, inner),
            accelerator=member.share / SHARE,
        )
        for member in unit.members
        for inner in range(member.count)
    ]
    bundle = Bundle(
        index,
        node,
        tuple(place.vertex for place in places),
        round(sum(member.cpu * member.count for member in unit.members), 6),
        sum(member.memory_bytes * member.count for member in unit.members),
        unit.width / SHARE if device_type == "GPU" else 0.0,
        unit.custom,
        unit.labels,
        unit.beside(number),
    )
    return bundle, places


def _part(devices: tuple[int, ...], wanted: int, inner: int) -> tuple[int, ...]:
    """The devices of the `inner`-th vertex of a role within its bundle."""
    if not wanted:
        return ()
    if len(devices) == 1:
        return devices
    first = inner * wanted // SHARE
    last = -(-(inner + 1) * wanted // SHARE)
    return devices[first:last]


def _sub_graphs(unit: Unit, bundles: list[Bundle]) -> list[SubGraph]:
    if unit.single:
        return [single_sub_graph(unit, number, bundle) for number, bundle in enumerate(bundles)]
    divides = bool(unit.host_group) and unit.per_node is None
    return [SubGraph(unit.id, tuple(bundles), _strategy(unit, bundles), unit.apart, divides)]


def single_sub_graph(unit: Unit, number: int, bundle: Bundle) -> SubGraph:
    """The sub-graph of one bundle of a unit that scales."""
    return SubGraph(f"{unit.id}-{number}", (bundle,), "PACK", unit.apart)


def _strategy(unit: Unit, bundles: Sequence[Bundle]) -> str:
    """Returns Ray's placement strategy: strict only if the plan says so, since a strict group cannot heal on fewer
    nodes."""
    nodes = {bundle.node for bundle in bundles}
    if len(bundles) == 1:
        return "PACK"
    if len(nodes) == 1:
        return "STRICT_PACK"
    if unit.per_node == 1 or (unit.spread and len(nodes) == len(bundles)):
        return "STRICT_SPREAD"
    return "SPREAD" if unit.spread or (unit.width == 0 and not unit.pack) else "PACK"


# -- notes ------------------------------------------------------------------------------------------


def _notes(spec: JobSpec, groups: Sequence[HostGroup], total: int) -> Iterable[str]:
    units = [unit for group in groups for unit in group.units]
    for unit in units:
        takers = [member for member in unit.members if member.share]
        if len(takers) > 1:
            shares = ", ".join(f"{member.role} {member.share / SHARE:g}" for member in takers)
            yield f"{', '.join(m.role for m in unit.members)} share their devices; of a device each takes: {shares}."
    for group in groups:
        if len(group.units) > 1:
            rank = ", ".join(f"{unit.id} {unit.each}" for unit in group.units)
            yield (
                f"{', '.join(group.roles)} stand on one machine rank by rank, each with devices of its own; "
                f"a rank has: {rank}."
            )
    if spec.node_num is None:
        return  # it takes what machines there are
    used = sum(unit.width * unit.bundles for unit in units)
    for unit in units:
        bounds = spec.roles[unit.members[0].role].elastic
        if bounds is None or unit.members[0].role == TRAINER:
            continue
        more = (bounds.max - spec.roles[unit.members[0].role].total) * unit.width
        if used + more > total:
            yield (
                f"{unit.id} may scale to {bounds.max}, which requires {more / SHARE:g} devices more; "
                f"{(total - used) / SHARE:g} of the job's {total // SHARE} are free."
            )
