"""Fitting a placement plan to a cluster: which machine each logical node becomes.

Invariants:
- *one machine per logical node*: vertices that the plan puts on one logical node stay together;
- *devices are real for GPUs*: a logical node that uses GPUs has a machine of its own with enough of them. For
  CPU a device is only a number, so logical nodes may share a machine, and a note says so.

This module must not ask the cluster itself: its machines are an argument.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from gyre.errors import GraphError
from gyre.graph.elements import PlacementPlan, SubGraph


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """A live machine of the cluster and what it can still give."""

    node_id: str
    ip: str
    cpu: float
    memory_bytes: int
    gpu: float = 0.0


@dataclass(slots=True)
class _Need:
    node: int
    cpu: float = 0.0
    memory_bytes: int = 0
    gpu: float = 0.0


@dataclass(slots=True)
class _Machine:
    capacity: NodeCapacity
    cpu: float
    memory_bytes: int
    gpu: float
    guests: int = 0
    devices_taken: bool = False

    def holds(self, need: _Need) -> bool:
        if need.gpu and self.devices_taken:
            return False
        tolerance = 1e-6
        return (
            need.cpu <= self.cpu + tolerance
            and need.memory_bytes <= self.memory_bytes
            and need.gpu <= self.gpu + tolerance
        )

    def take(self, need: _Need) -> None:
        self.guests += 1
        self.cpu -= need.cpu
        self.memory_bytes -= need.memory_bytes
        self.gpu -= need.gpu
        self.devices_taken = self.devices_taken or bool(need.gpu)


def fit_to_cluster(plan: PlacementPlan, nodes: Sequence[NodeCapacity]) -> PlacementPlan:
    """The plan with `assignments`: for each logical node in use, the id of its machine.

    Raises GraphError with required and available if a logical node finds no machine.
    """
    if not nodes:
        raise GraphError("cluster: required 1 machine at least, available 0.", hint="Start Ray on a machine.")
    gpu_nodes = sum(1 for need in _needs(plan) if need.gpu)
    with_gpu = sum(1 for node in nodes if node.gpu)
    if gpu_nodes > with_gpu:
        raise GraphError(
            f"cluster: required {gpu_nodes} machines with GPUs, available {with_gpu}.",
            hint="Wait for more machines, or lower node_num and raise device_per_node.",
            details={"required": gpu_nodes, "available": with_gpu},
        )
    fitted, lacking = fit_what_has_room(plan, nodes)
    for error in lacking.values():
        raise error
    return fitted


def fit_what_has_room(
    plan: PlacementPlan, nodes: Sequence[NodeCapacity], standing: Mapping[int, str] | None = None
) -> tuple[PlacementPlan, dict[int, GraphError]]:
    """The plan with `assignments` for the logical nodes that find a machine, and for each of the others what it lacks.

    `standing` has the machines of logical nodes on which vertices run: these stay, as far as the machines are there.
    """
    needs = _needs(plan)
    machines = [
        _Machine(node, node.cpu, node.memory_bytes, node.gpu)
        for node in sorted(nodes, key=lambda node: (-node.gpu, -node.cpu, node.node_id))
    ]
    by_id = {machine.capacity.node_id: machine for machine in machines}
    assignments: dict[int, str] = {}
    for need in needs:
        machine = by_id.get((standing or {}).get(need.node, ""))
        if machine is not None:
            machine.take(need)
            assignments[need.node] = machine.capacity.node_id
    moving = sorted(
        (need for need in needs if need.node not in assignments),
        key=lambda need: (-need.gpu, -need.cpu, -need.memory_bytes, need.node),
    )
    # The tightest fit for devices keeps big machines free. Without devices: the machine with the fewest logical nodes.
    lacking = _assign(
        [need for need in moving if need.gpu], machines, lambda machine: machine.gpu, assignments
    )
    lacking |= _assign(
        [need for need in moving if not need.gpu], machines, lambda machine: machine.guests, assignments
    )
    ordered = {need.node: assignments[need.node] for need in needs if need.node in assignments}
    fitted = replace(
        plan,
        sub_graphs=tuple(_laid_out(sub_graph, ordered) for sub_graph in plan.sub_graphs),
        notes=(*plan.notes, *_notes(ordered, nodes)),
        assignments=ordered,
    )
    return fitted, lacking


def _assign(
    needs: Sequence[_Need],
    machines: Sequence[_Machine],
    preference: Callable[[_Machine], float],
    assignments: dict[int, str],
) -> dict[int, GraphError]:
    """Assign each need to the machine with the least `preference` that holds it; of equal ones to that with most CPU,
    then to the first. Returns what each need lacks that no machine holds."""
    lacking: dict[int, GraphError] = {}

    def entry(number: int) -> tuple[float, float, int]:
        return preference(machines[number]), -machines[number].cpu, number

    heap = [
        entry(number)
        for number, machine in enumerate(machines)
        if not (machine.devices_taken and needs and needs[0].gpu)
    ]
    heapq.heapify(heap)
    for need in needs:
        passed = []
        while heap and not machines[heap[0][2]].holds(need):
            passed.append(heapq.heappop(heap))
        if not heap:
            lacking[need.node] = _no_machine(need, machines)
            for item in passed:
                heapq.heappush(heap, item)
            continue
        number = heap[0][2]
        chosen = machines[number]
        chosen.take(need)
        assignments[need.node] = chosen.capacity.node_id
        if need.gpu:
            heapq.heappop(heap)  # its devices are numbered once, so no other node with devices stands on it
        else:
            heapq.heapreplace(heap, entry(number))
        for item in passed:
            heapq.heappush(heap, item)
    return lacking


def _needs(plan: PlacementPlan) -> list[_Need]:
    """Returns what each logical node in use reserves, in the order of node numbers."""
    needs: dict[int, _Need] = {}
    for sub_graph in plan.sub_graphs:
        for bundle in sub_graph.bundles:
            need = needs.setdefault(bundle.node, _Need(bundle.node))
            need.cpu += bundle.cpu
            need.memory_bytes += bundle.memory_bytes
            need.gpu += bundle.accelerator
    return [needs[node] for node in sorted(needs)]


def _no_machine(need: _Need, machines: Sequence[_Machine]) -> GraphError:
    required = f"{need.cpu:g} CPU, {need.memory_bytes} bytes of memory" + (
        f", {need.gpu:g} GPUs" if need.gpu else ""
    )
    free = "; ".join(
        f"{m.capacity.ip}: {m.cpu:g} CPU, {m.memory_bytes} bytes"
        + (f", {m.gpu:g} GPUs" if m.capacity.gpu else "")
        for m in machines[:8]
    )
    more = f"; and {len(machines) - 8} more" if len(machines) > 8 else ""
    return GraphError(
        f"cluster: logical node {need.node} required {required} on one machine, available: {free}{more}.",
        hint="Lower the roles' resources, or add machines.",
        details={"required": f"{required} on one machine", "available": f"{free}{more}" or "no machine"},
    )


def _laid_out(sub_graph: SubGraph, assignments: dict[int, str]) -> SubGraph:
    """Returns the sub-graph with its bundles on their machines, if all of them have one. A strict spread that the
    machines cannot give becomes an ordinary one."""
    if not all(bundle.node in assignments for bundle in sub_graph.bundles):
        return sub_graph
    bundles = tuple(replace(bundle, machine=assignments[bundle.node]) for bundle in sub_graph.bundles)
    machines = {bundle.machine for bundle in bundles}
    narrow = sub_graph.strategy == "STRICT_SPREAD" and len(machines) < len(bundles)
    return replace(sub_graph, bundles=bundles, strategy="SPREAD" if narrow else sub_graph.strategy)


def _notes(assignments: dict[int, str], nodes: Sequence[NodeCapacity]) -> list[str]:
    guests: dict[str, list[int]] = defaultdict(list)
    for node, node_id in assignments.items():
        guests[node_id].append(node)
    ips = {node.node_id: node.ip for node in nodes}
    shared = [(ips[node_id], found) for node_id, found in guests.items() if len(found) > 1]
    if not shared:
        return []
    where = "; ".join(f"{ip} holds {_some(found)}" for ip, found in shared[:8])
    return [
        f"The job asks for {len(assignments)} nodes and the cluster has {len(nodes)}, "
        f"so logical nodes share machines: {where}."
    ]


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
