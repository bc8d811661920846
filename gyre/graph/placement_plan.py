"""The placement plan: the sub-graph, logical node and devices of every vertex.

Invariants:
- *placed once*: every vertex has exactly one placement, in exactly one bundle of one sub-graph;
- *no over-subscription*: the shares of one device never sum to more than 1, counted in whole 1/10,000, which is
  Ray's unit, so that n roles with a share of floor(1/n) always fit;
- *separate*: roles of one `separate` list have no logical node in common;
- *deterministic*: equal jobs get equal plans.

For device type CPU a device is only a number: bundles reserve no accelerator with Ray. The trainer takes none.
This module must not know the cluster: logical nodes meet machines in `fit_to_cluster` (module `cluster_fit`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from gyre.config import TRAINER, JobSpec
from gyre.errors import GraphError
from gyre.graph.elements import Bundle, PlacementPlan, SubGraph, VertexPlacement
from gyre.graph.units import SHARE, Unit, units_of

USUAL_DEVICES = 8
"""Devices of a logical node where the user does not say."""


@dataclass(slots=True)
class LogicalNode:
    """Free devices of a logical node: untouched ones, the lowest last, and the remainders of shared ones."""

    index: int
    free: list[int]
    remainders: dict[int, list[int]] = field(default_factory=dict)
    tenants: set[str] = field(default_factory=set)
    load: int = 0

    def room(self, width: int) -> int:
        """How many more bundles of this width (not 0) fit."""
        if width >= SHARE:
            return len(self.free) * SHARE // width
        shared = sum(amount // width * len(found) for amount, found in self.remainders.items())
        return shared + len(self.free) * (SHARE // width)

    def take(self, width: int) -> tuple[int, ...]:
        """Device numbers for a bundle; a share goes to the fullest device that still has room."""
        if width >= SHARE:
            return tuple(self.free.pop() for _ in range(width // SHARE))
        if width == 0:
            return ()
        best = min((amount for amount in self.remainders if amount >= width), default=None)
        if best is None:
            device, left = self.free.pop(), SHARE - width
        else:
            device, left = self.remainders[best].pop(0), best - width
            if not self.remainders[best]:
                del self.remainders[best]
        if left:
            self.remainders.setdefault(left, []).append(device)
        return (device,)


def untouched(index: int, devices: int) -> LogicalNode:
    """A logical node on which nothing stands."""
    return LogicalNode(index, list(range(devices - 1, -1, -1)))


_Layout = list[tuple[LogicalNode, int]]
"""How many bundles on which node, in the order of ranks."""


class _NoRoom(Exception):
    def __init__(self, unit: Unit, sentence: str) -> None:
        self.unit, self.sentence = unit, sentence


def plan_placement(spec: JobSpec) -> PlacementPlan:
    """Place a resolved job (`compile_job(...).spec`) on its `node_num` nodes, or on as few as it takes.

    Raises GraphError that says required and available. Roles are placed in the order of their declaration; where
    that leaves no room, the most constrained ones go first.
    """
    units = units_of(spec)
    devices = spec.device_per_node or _devices_on_a_node(units)
    layouts, node_num, stuck = None, 0, None
    for node_num in [spec.node_num] if spec.node_num else _numbers_of_nodes(units, devices):
        _check_sizes(units, node_num, devices)
        for order in _orders(units):
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
            f"roles.{stuck.unit.id}: {stuck.sentence}",
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
        tuple(_notes(spec, units, node_num * devices * SHARE)),
        spec.node_num,
    )


def _devices_on_a_node(units: Sequence[Unit]) -> int:
    """Returns the devices of a logical node where the user did not say: as most machines have, or what the widest role
    takes."""
    return max(USUAL_DEVICES, *(_devices_for(unit.width, unit.per_node or 1) for unit in units))


def _numbers_of_nodes(units: Sequence[Unit], devices: int) -> Iterable[int]:
    """The numbers of nodes to try where the user did not say, up to a node for each bundle."""
    width = sum(unit.width * unit.bundles for unit in units)
    gangs = (unit.bundles // unit.per_node for unit in units if unit.per_node)
    number = max(1, -(-width // (devices * SHARE)), *gangs)
    most = max(number, sum(unit.bundles for unit in units))
    while number < most:
        yield number
        number += max(1, number // 8)
    yield most


def _check_sizes(units: Sequence[Unit], node_num: int, devices: int) -> None:
    """Refuse a job that does not fit in any order of placing."""
    for unit in units:
        path = f"roles.{unit.id}"
        here = _devices_for(unit.width, unit.per_node or 1)
        if here > devices:
            how = f"per_node {unit.per_node}" if (unit.per_node or 1) > 1 else "one of them"
            raise GraphError(
                f"{path}: {how} requires {here} devices on a node, available {devices} (device_per_node).",
                hint="Lower per_node or resources.accelerator, or raise device_per_node.",
            )
        if unit.per_node and unit.bundles // unit.per_node > node_num:
            raise GraphError(
                f"{path}.per_node: {unit.bundles} with {unit.per_node} on a node requires "
                f"{unit.bundles // unit.per_node} nodes, available {node_num} (node_num).",
                hint="Raise per_node or node_num.",
            )
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


def _devices_for(width: int, bundles: int) -> int:
    """Returns the whole devices that this many bundles of this width take on one node."""
    if width >= SHARE or width == 0:
        return width * bundles // SHARE
    return -(-bundles // (SHARE // width))


# -- which node -------------------------------------------------------------------------------------


def _orders(units: Sequence[Unit]) -> Iterable[Sequence[Unit]]:
    yield units
    yield sorted(units, key=lambda unit: (not unit.apart, not unit.per_node, -unit.width, -unit.bundles))
    yield sorted(
        units, key=lambda unit: (not unit.per_node, -unit.width * (unit.per_node or 1), -unit.bundles)
    )
    yield sorted(units, key=lambda unit: (-unit.width * (unit.per_node or 1), not unit.apart, -unit.bundles))


def _lay_out(
    order: Sequence[Unit], node_num: int, devices: int
) -> dict[str, tuple[_Layout, list[tuple[int, ...]]]]:
    """Returns the nodes of every unit, and the devices of each of its bundles."""
    nodes = [untouched(index, devices) for index in range(node_num)]
    result = {}
    for unit in order:
        layout = sorted(_choose(unit, nodes), key=lambda item: item[0].index)
        taken: list[tuple[int, ...]] = []
        for node, count in layout:
            node.tenants.update(unit.roles)
            node.load += count
            taken.extend(node.take(unit.width) for _ in range(count))
        result[unit.id] = (layout, taken)
    return result


def _choose(unit: Unit, nodes: Sequence[LogicalNode]) -> _Layout:
    allowed = [node for node in nodes if not (node.tenants & unit.apart)] if unit.apart else nodes
    room = {
        node.index: unit.bundles if unit.width == 0 else min(node.room(unit.width), unit.bundles)
        for node in allowed
    }
    if unit.per_node is not None:
        count = unit.bundles // unit.per_node
        fitting = [node for node in allowed if room[node.index] >= unit.per_node]
        if len(fitting) < count:
            raise _NoRoom(
                unit,
                f"required {count} nodes with room for {unit.per_node} of them "
                f"({_devices_for(unit.width, unit.per_node)} devices) each, available {len(fitting)}"
                + _because(unit, nodes, allowed),
            )
        fitting.sort(key=lambda node: _emptiest_first(node, unit))
        return [(node, unit.per_node) for node in fitting[:count]]
    usable = [node for node in allowed if room[node.index]]
    available = sum(room[node.index] for node in usable)
    if available < unit.bundles:
        raise _NoRoom(
            unit,
            f"required room for {unit.bundles} of them, available {available}"
            + _because(unit, nodes, allowed),
        )
    if unit.spread or (unit.width == 0 and not unit.pack and not unit.apart):
        usable.sort(key=lambda node: _emptiest_first(node, unit))
        return _evenly(unit.bundles, usable, room)
    if unit.pack:
        usable.sort(key=lambda node: (-room[node.index], node.index))
    return _filled(unit.bundles, usable, lambda node: room[node.index])


def _emptiest_first(node: LogicalNode, unit: Unit) -> tuple[int, int]:
    return -node.room(unit.width) if unit.width else node.load, node.index


def _filled(bundles: int, nodes: Sequence[LogicalNode], room: Callable[[LogicalNode], int]) -> _Layout:
    layout: _Layout = []
    for node in nodes:
        if not bundles:
            break
        count = min(bundles, room(node))
        layout.append((node, count))
        bundles -= count
    return layout


def _evenly(bundles: int, nodes: Sequence[LogicalNode], room: dict[int, int]) -> _Layout:
    counts = dict.fromkeys((node.index for node in nodes), 0)
    open_nodes = list(nodes)
    while bundles:
        # Each round gives every open node its equal part, so rounds are as few as there are sizes of room.
        part = max(
            1, min(bundles // len(open_nodes), min(room[n.index] - counts[n.index] for n in open_nodes))
        )
        for node in open_nodes[:bundles]:
            counts[node.index] += part
            bundles -= part
        open_nodes = [node for node in open_nodes if room[node.index] > counts[node.index]]
    return [(node, counts[node.index]) for node in nodes if counts[node.index]]


def _because(unit: Unit, nodes: Sequence[LogicalNode], allowed: Sequence[LogicalNode]) -> str:
    if len(allowed) < len(nodes):
        apart = ", ".join(sorted(set(chain.from_iterable(node.tenants for node in nodes)) & unit.apart))
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
    return [SubGraph(unit.id, tuple(bundles), _strategy(unit, bundles), unit.apart)]


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


def _notes(spec: JobSpec, units: Sequence[Unit], total: int) -> Iterable[str]:
    for unit in units:
        takers = [member for member in unit.members if member.share]
        if len(takers) > 1:
            shares = ", ".join(f"{member.role} {member.share / SHARE:g}" for member in takers)
            yield f"{', '.join(m.role for m in unit.members)} share their devices; of a device each takes: {shares}."
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
