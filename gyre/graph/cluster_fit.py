"""Fitting a placement plan to a cluster: which machine each bundle stands on.

Invariants:
- *others stay*: a bundle whose vertices stand on a machine that is there stays on it;
- *together where it fits*: the bundles of one logical node stand on one machine if one holds them all; else its
  sub-graphs find machines of their own, one by one, and what finds none waits alone;
- *beside each other*: the bundles of one rank of a host group find a machine that holds all of them, or wait together.
  While one of them stands, the others go to its machine, or wait for room there;
- *needs first*: what can come later takes no room from what cannot. Where the whole finds no room, the former look for
  what the latter leave;
- *bounds are the user's*: a job with `node_num` uses no more machines than that, and where it also uses GPUs each of
  its logical nodes has a machine of its own. A job without takes what machines there are.

For CPU a device is only a number, so logical nodes may share a machine, and a note says so. This module must not ask
the cluster itself: its machines are an argument.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gyre.errors import GraphError
from gyre.graph.elements import Bundle, PlacementPlan, SubGraph

_Key = tuple[str, int]
"""A bundle: its sub-graph's id and its index there."""


@dataclass(frozen=True, slots=True)
class NodeCapacity:
    """A live machine of the cluster and what the job may use of it: what is free, and what the job has there."""

    node_id: str
    ip: str
    cpu: float
    memory_bytes: int
    gpu: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Need:
    """Bundles of one logical node that look for a machine together, and what they reserve."""

    node: int
    bundles: list[_Key] = field(default_factory=list)
    roles: set[str] = field(default_factory=set)
    apart: set[str] = field(default_factory=set)
    avoids: set[str] = field(default_factory=set)
    cpu: float = 0.0
    memory_bytes: int = 0
    gpu: float = 0.0
    custom: dict[str, float] = field(default_factory=dict)
    labels: set[tuple[str, str]] = field(default_factory=set)
    partners: set[str] = field(default_factory=set)
    """The vertices that stand, beside which it must stand."""

    def add(self, sub_graph: SubGraph, bundle: Bundle) -> None:
        self.bundles.append((sub_graph.id, bundle.index))
        self.roles.update(vertex.rpartition("-")[0] for vertex in bundle.vertices)
        self.apart.update(sub_graph.apart)
        self.cpu += bundle.cpu
        self.memory_bytes += bundle.memory_bytes
        self.gpu += bundle.accelerator
        for name, amount in bundle.custom.items():
            self.custom[name] = self.custom.get(name, 0.0) + amount
        self.labels.update(bundle.labels.items())

    def __str__(self) -> str:
        parts = [f"{self.cpu:g} CPU, {self.memory_bytes} bytes of memory"]
        parts += [f"{self.gpu:g} GPUs"] if self.gpu else []
        parts += [f"{amount:g} {name}" for name, amount in sorted(self.custom.items())]
        parts += [f"the label {name}={value}" for name, value in sorted(self.labels)]
        return ", ".join(parts)


@dataclass(slots=True)
class _Machine:
    capacity: NodeCapacity
    cpu: float
    memory_bytes: int
    gpu: float
    custom: dict[str, float]
    exclusive: bool
    """Whether one logical node with devices has it for itself."""
    closed: bool
    """Whether it accepts no new vertices."""
    guests: set[int] = field(default_factory=set)
    roles: set[str] = field(default_factory=set)
    devices_of: int | None = None
    """The logical node whose devices are here; -1 for several."""

    def holds(self, need: _Need) -> bool:
        if need.gpu and self.exclusive and self.devices_of not in (None, need.node):
            return False
        tolerance = 1e-6
        return (
            need.cpu <= self.cpu + tolerance
            and need.memory_bytes <= self.memory_bytes
            and need.gpu <= self.gpu + tolerance
            and all(amount <= self.custom.get(name, 0.0) + tolerance for name, amount in need.custom.items())
            and all(self.capacity.labels.get(name) == value for name, value in need.labels)
        )

    def take(self, need: _Need) -> None:
        self.guests.add(need.node)
        self.roles |= need.roles
        self.cpu -= need.cpu
        self.memory_bytes -= need.memory_bytes
        self.gpu -= need.gpu
        for name, amount in need.custom.items():
            self.custom[name] = self.custom.get(name, 0.0) - amount
        if need.gpu:
            self.devices_of = need.node if self.devices_of in (None, need.node) else -1


def fit_to_cluster(
    plan: PlacementPlan,
    nodes: Sequence[NodeCapacity],
    can_come_later: Collection[str] = (),
    *,
    waits: bool = False,
) -> PlacementPlan:
    """The plan with a machine for each bundle that finds one.

    A sub-graph without room is told of in a note if it `can_come_later`, or if the job `waits` for what it needs. Else
    GraphError is raised, with required and available.
    """
    if not nodes:
        raise GraphError("cluster: required 1 machine at least, available 0.", hint="Start Ray on a machine.")
    fitted, lacking = fit_what_has_room(plan, nodes, can_come_later=can_come_later)
    needed = {name: error for name, error in lacking.items() if name not in can_come_later}
    later = {name: error for name, error in lacking.items() if name in can_come_later}
    notes = list(fitted.notes)
    if needed:
        error = _too_few_machines(plan, nodes, later) or next(iter(needed.values()))
        if not waits:
            raise error
        lack = error.message.removeprefix("cluster: ")
        notes.append(f"The job waits for room, for {_listed(needed)}: {lack} {error.hint}")
    if later:
        notes.append(f"{_listed(later)} will wait for room: {next(iter(later.values()))}")
    return replace(fitted, notes=tuple(notes))


def _too_few_machines(
    plan: PlacementPlan, nodes: Sequence[NodeCapacity], later: Collection[str]
) -> GraphError | None:
    """The error of a job that wants machines with GPUs of its own, where there are fewer than it needs to begin."""
    needs = {
        bundle.node
        for sub_graph in plan.sub_graphs
        if sub_graph.id not in later
        for bundle in sub_graph.bundles
        if bundle.accelerator
    }
    with_gpu = sum(1 for node in nodes if node.gpu)
    if plan.most_nodes is None or len(needs) <= with_gpu:
        return None
    return GraphError(
        f"cluster: required {len(needs)} machines with GPUs, available {with_gpu}.",
        hint="Add machines, or lower node_num and raise device_per_node.",
        details={"required": len(needs), "available": with_gpu},
    )


def _listed(names: Collection[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:8]) + (f" and {len(shown) - 8} more" if len(shown) > 8 else "")


def fit_what_has_room(
    plan: PlacementPlan,
    nodes: Sequence[NodeCapacity],
    standing: Mapping[str, str] | None = None,
    *,
    closed: Collection[str] = (),
    avoids: Mapping[str, str] | None = None,
    can_come_later: Collection[str] = (),
) -> tuple[PlacementPlan, dict[str, GraphError]]:
    """The plan with a machine for each bundle of the sub-graphs that find room, and what each of the others lacks, by
    sub-graph.

    `standing` has the machines of the vertices that run, or did before they were restarted. `closed` machines take
    nobody new, and of the vertices in `avoids` each does not go to the machine named there. The sub-graphs that
    `can_come_later` leave the others their room, but for those that must stand beside one of them.
    """
    standing, avoids = standing or {}, avoids or {}

    def fit(part: PlacementPlan, seated: Mapping[str, str]) -> tuple[PlacementPlan, dict[str, GraphError]]:
        return _fitted(_Fit(part, nodes, closed, avoids), standing, seated)

    fitted, lacking = fit(plan, {})
    partners = [
        names for names in _ranks_of_host_groups(plan).values() if not set(names) <= {*can_come_later}
    ]
    later = set(can_come_later).difference(*partners)
    if later.issuperset(lacking):
        return fitted, lacking
    needs = [
        sub for sub in plan.sub_graphs if sub.id not in later or not standing.keys().isdisjoint(sub.vertices)
    ]
    if len(needs) == len(plan.sub_graphs):
        return fitted, lacking
    begun, _ = fit(replace(plan, sub_graphs=tuple(needs)), {})
    return fit(plan, begun.machines())


def _fitted(
    fit: _Fit, standing: Mapping[str, str], seated: Mapping[str, str]
) -> tuple[PlacementPlan, dict[str, GraphError]]:
    """The plan beside those that stand, with the vertices that are `seated` on the machines that they were given."""
    moving, lacking = fit.beside_partners(fit.keep(standing, seated))
    split = fit.beside_others(moving)
    wholes = sorted(moving.values(), key=lambda need: (-need.gpu, -need.cpu, -need.memory_bytes, need.node))
    # The tightest fit for devices keeps big machines free. Without devices: the machine with the fewest logical nodes.
    split += fit.together([need for need in wholes if need.gpu], lambda machine: machine.gpu)
    split += fit.together([need for need in wholes if not need.gpu], lambda machine: len(machine.guests))
    lacking = fit.waiting_together({**fit.one_by_one(split), **lacking})
    return fit.laid_out(lacking), lacking


class _Fit:
    def __init__(
        self,
        plan: PlacementPlan,
        nodes: Sequence[NodeCapacity],
        closed: Collection[str],
        avoids: Mapping[str, str],
    ) -> None:
        self._plan = plan
        self._avoids = avoids
        self._nodes = nodes
        self._sub_graphs = {sub_graph.id: sub_graph for sub_graph in plan.sub_graphs}
        self._bundles = {
            (sub.id, bundle.index): (sub, bundle) for sub in plan.sub_graphs for bundle in sub.bundles
        }
        exclusive = plan.most_nodes is not None
        self._machines = [
            _Machine(
                node,
                node.cpu,
                node.memory_bytes,
                node.gpu,
                dict(node.custom),
                exclusive,
                node.node_id in closed,
            )
            for node in sorted(nodes, key=lambda node: (-node.gpu, -node.cpu, node.node_id))
        ]
        self._found: dict[_Key, _Machine] = {}
        self._homes: dict[int, _Machine] = {}
        """For each logical node the machine on which most of it stands, or some of it."""
        self._ranks = _ranks_of_host_groups(plan)
        self._stand: dict[str, list[_Key]] = {}
        """The bundles of ranks of host groups that stand, by the rank."""

    def _seat(self, need: _Need, machine: _Machine) -> None:
        machine.take(need)
        self._homes.setdefault(need.node, machine)
        for key in need.bundles:
            self._found[key] = machine

    def _add(self, need: _Need, sub_graph: SubGraph, bundle: Bundle) -> None:
        need.add(sub_graph, bundle)
        need.avoids.update(self._avoids[vertex] for vertex in bundle.vertices if vertex in self._avoids)

    def keep(self, standing: Mapping[str, str], seated: Mapping[str, str]) -> list[tuple[SubGraph, Bundle]]:
        """Seat the bundles that stand somewhere, and those that are to. Returns the others."""
        by_id = {machine.capacity.node_id: machine for machine in self._machines}
        self._anybody_stands = not by_id.keys().isdisjoint(standing.values())
        standing = {**seated, **standing}
        rest: list[tuple[SubGraph, Bundle]] = []
        for sub_graph in self._plan.sub_graphs:
            for bundle in sub_graph.bundles:
                places = (standing[vertex] for vertex in bundle.vertices if vertex in standing)
                machine = by_id.get(next(places, ""))
                if machine is not None:
                    need = _Need(bundle.node)
                    self._add(need, sub_graph, bundle)
                    self._seat(need, machine)
                    if bundle.beside in self._ranks:
                        self._stand.setdefault(bundle.beside, []).append((sub_graph.id, bundle.index))
                else:
                    rest.append((sub_graph, bundle))
        return rest

    def beside_partners(
        self, rest: Sequence[tuple[SubGraph, Bundle]]
    ) -> tuple[dict[int, _Need], dict[str, GraphError]]:
        """Seat the bundles whose partners in a host group stand. Returns what each logical node needs for the others,
        and what each sub-graph lacks for which its partners' machine has no room."""
        bound: list[tuple[_Need, list[_Machine]]] = []
        moving: dict[int, _Need] = {}
        nodes: dict[str, int] = {}
        for sub_graph, bundle in rest:
            if bundle.beside in self._stand:
                need = _Need(bundle.node)
                self._add(need, sub_graph, bundle)
                bound.append((need, self._partners(need, bundle)))
            else:
                # Partners look for a machine together, also where they were scaled onto different logical nodes.
                rank = bundle.beside if bundle.beside in self._ranks else ""
                node = nodes.setdefault(rank, bundle.node) if rank else bundle.node
                self._add(moving.setdefault(node, _Need(node)), sub_graph, bundle)
        lacking: dict[str, GraphError] = {}
        for need, machines in sorted(bound, key=lambda one: (-one[0].gpu, -one[0].cpu, one[0].node)):
            machine = next((one for one in machines if self._may_take(one, need)), None)
            if machine is not None:
                self._seat(need, machine)
            else:
                lacking.setdefault(need.bundles[0][0], _no_room_beside(need, machines))
        return {node: moving[node] for node in sorted(moving)}, lacking

    def _partners(self, need: _Need, bundle: Bundle) -> list[_Machine]:
        """The machines of those beside whom the bundle must stand: of other roles first, for vertices of its own role
        may have come before these, to several machines. The need is told who they are."""
        found = []
        for key in self._stand[bundle.beside]:
            vertices = self._bundles[key][1].vertices
            own = any(vertex.rpartition("-")[0] in need.roles for vertex in vertices)
            found.append((own, vertices, self._found[key]))
        others = [one for one in found if not one[0]] or found
        for _, vertices, _ in others:
            need.partners.update(vertices)
        return list({id(machine): machine for _, _, machine in others}.values())

    def beside_others(self, moving: dict[int, _Need]) -> list[_Need]:
        """Seat the rest of logical nodes of which a part stands. Takes these out of `moving`, and returns those that
        have no room beside the others."""
        split = []
        for node in [node for node in moving if node in self._homes]:
            need, home = moving.pop(node), self._homes[node]
            if self._may_take(home, need):
                self._seat(need, home)
            else:
                split.append(need)
        return split

    def together(self, needs: Sequence[_Need], preference: Callable[[_Machine], float]) -> list[_Need]:
        """Seat each need on the machine with the least `preference` that holds it; of equal ones on that with most CPU,
        then the first. Returns those that no machine holds."""
        machines, left = self._machines, []

        def entry(number: int) -> tuple[float, float, int]:
            return preference(machines[number]), -machines[number].cpu, number

        heap = [entry(number) for number in range(len(machines))]
        heapq.heapify(heap)
        for need in needs:
            passed = []
            while heap and not self._may_take(machines[heap[0][2]], need):
                passed.append(heapq.heappop(heap))
            if heap:
                number = heap[0][2]
                self._seat(need, machines[number])
                if need.gpu and machines[number].exclusive:
                    heapq.heappop(heap)  # no other logical node with devices may stand on it
                else:
                    heapq.heapreplace(heap, entry(number))
            else:
                left.append(need)
            for item in passed:
                heapq.heappush(heap, item)
        return left

    def _may_take(self, machine: _Machine, need: _Need) -> bool:
        """Whether the machine holds it, and who stands there does not have to be apart from it. Where devices are only
        numbers, `separate` is about logical nodes, and these may share a machine."""
        if machine.closed or machine.capacity.node_id in need.avoids:
            return False
        if need.gpu and need.apart & machine.roles:
            return False
        return machine.holds(need)

    def one_by_one(self, needs: Sequence[_Need]) -> dict[str, GraphError]:
        """Seat the sub-graphs of logical nodes that no machine holds as a whole, those of partners together. Returns
        what each lacks that found no machine; a sub-graph with several logical nodes lacks what its first one does."""
        most = self._plan.most_nodes
        used = {id(machine) for machine in self._found.values()}
        lacking: dict[str, GraphError] = {}
        nowhere: list[_Need] = []
        parts = (part for need in needs for part in self._parts(need))
        waiting = deque(sorted(parts, key=lambda part: (-part.gpu, -part.cpu, part.node)))
        while waiting:
            need = waiting.popleft()
            home = self._homes.get(need.node)
            holding = [machine for machine in self._machines if self._may_take(machine, need)]
            full = most is not None and len(used) >= most
            fitting = [machine for machine in holding if not full or id(machine) in used]
            if not fitting and len(pieces := self._divided(need)) > 1:
                waiting.extendleft(reversed(pieces))
                continue
            if not fitting:
                if holding and most:
                    lacking.setdefault(need.bundles[0][0], _bound_reached(need, holding, most))
                else:
                    nowhere.append(need)
                continue
            machine = min(
                fitting,
                key=lambda one: (
                    one is not home,
                    bool(need.apart & one.roles),
                    one.gpu if need.gpu else len(one.guests),
                    -one.cpu,
                ),
            )
            self._seat(need, machine)
            used.add(id(machine))
        for need in nowhere:  # once it is known how many machines the others take
            # Where nobody stands yet, all find their machines anew when another one comes.
            full = most is not None and len(used) >= most and self._anybody_stands
            lacking.setdefault(need.bundles[0][0], _no_machine(need, self._machines, full=full))
        return lacking

    def _parts(self, need: _Need) -> list[_Need]:
        """The needs of sub-graphs on their own, and of partners together. Ranks of a gang that the plan has on one
        logical node stay together."""
        above: dict[str, str] = {}

        def part_of(name: str) -> str:
            while (here := above.get(name, name)) != name:
                above[name] = above.get(here, here)
                name = here
            return name

        for key in need.bundles:
            rank = self._bundles[key][1].beside
            if rank in self._ranks:
                above[part_of(key[0])] = part_of(rank)
        return self._gathered(need, {key: part_of(key[0]) for key in need.bundles})

    def _divided(self, part: _Need) -> list[_Need]:
        """The needs of each rank of the host groups in it, if its gangs may be divided."""
        ranks: dict[_Key, str] = {}
        for name, index in part.bundles:
            sub_graph, bundle = self._bundles[name, index]
            if not (sub_graph.divides or len(sub_graph.bundles) == 1):
                return [part]
            ranks[name, index] = bundle.beside if bundle.beside in self._ranks else name
        return self._gathered(part, ranks)

    def _gathered(self, need: _Need, parts: Mapping[_Key, str]) -> list[_Need]:
        out: dict[str, _Need] = {}
        for key in need.bundles:
            self._add(out.setdefault(parts[key], _Need(need.node)), *self._bundles[key])
        return list(out.values())

    def waiting_together(self, lacking: Mapping[str, GraphError]) -> dict[str, GraphError]:
        """What lacks room, and with it its partners in ranks of host groups of which nobody stands."""
        waiting = dict(lacking)
        reached = [*waiting]
        for name in reached:
            for bundle in self._sub_graphs[name].bundles:
                partners = () if bundle.beside in self._stand else self._ranks.get(bundle.beside, ())
                for partner in partners:
                    if partner not in waiting:
                        waiting[partner] = waiting[name]
                        reached.append(partner)
        return waiting

    def laid_out(self, lacking: Mapping[str, GraphError]) -> PlacementPlan:
        """The plan with the bundles of the sub-graphs that lack nothing on their machines. A strict spread that the
        machines cannot give becomes an ordinary one."""
        seated = []
        for sub_graph in self._plan.sub_graphs:
            if sub_graph.id in lacking:
                seated.append(sub_graph)
                continue
            bundles = tuple(
                replace(bundle, machine=self._found[sub_graph.id, bundle.index].capacity.node_id)
                for bundle in sub_graph.bundles
            )
            machines = {bundle.machine for bundle in bundles}
            strategy = sub_graph.strategy
            if strategy == "STRICT_SPREAD" and len(machines) < len(bundles):
                strategy = "SPREAD"
            elif strategy == "STRICT_PACK" and len(machines) > 1:
                strategy = "PACK"
            seated.append(replace(sub_graph, bundles=bundles, strategy=strategy))
        return replace(
            self._plan, sub_graphs=tuple(seated), notes=(*self._plan.notes, *_notes(seated, self._nodes))
        )


def _ranks_of_host_groups(plan: PlacementPlan) -> dict[str, list[str]]:
    """The sub-graphs in each rank of a host group that has partners in the plan."""
    ranks: dict[str, list[str]] = defaultdict(list)
    roles: dict[str, set[str]] = defaultdict(set)
    for sub_graph in plan.sub_graphs:
        for bundle in sub_graph.bundles:
            if bundle.beside:
                ranks[bundle.beside].append(sub_graph.id)
                roles[bundle.beside].add(bundle.vertices[0].rpartition("-")[0])
    return {rank: names for rank, names in ranks.items() if len(roles[rank]) > 1}


def _named(need: _Need) -> str:
    """The sub-graphs that look for a machine."""
    names = list(dict.fromkeys(name for name, _ in need.bundles))
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}, beside each other,"


def _bound_reached(need: _Need, holding: Sequence[_Machine], most: int) -> GraphError:
    room = ", ".join(machine.capacity.ip for machine in holding[:8])
    return GraphError(
        f"cluster: {_named(need)} required a machine more than the {most} of node_num; {room} would have room.",
        hint="Raise node_num, or leave it out.",
        details={"required": "a machine more", "available": f"{most} by node_num; {room} would have room"},
    )


def _no_machine(need: _Need, machines: Sequence[_Machine], *, full: bool) -> GraphError:
    """No machine holds it. Where the bound of machines is `full`, another would not help."""
    required, (free, shut) = str(need), _free(need, machines)
    named = _named(need)
    whose = f" for {named.rstrip(',')}" if "," in named else ""
    return GraphError(
        f"cluster: {named} required {required} on one machine, available: {free}.",
        hint="Lower the roles' resources, or add machines.",
        details={
            "required": f"{required} on one machine{whose}",
            "available": free or "no machine",
            "another_would_help": not (shut or full),
        },
    )


def _no_room_beside(need: _Need, machines: Sequence[_Machine]) -> GraphError:
    required, (free, _) = str(need), _free(need, machines)
    partners = ", ".join(sorted(need.partners))
    return GraphError(
        f"cluster: {_named(need)} required {required} on the machine of {partners}, available there: {free}.",
        hint=f"Free room there, or drain {partners}: then they look for a machine together.",
        details={
            "required": f"{required} for {_named(need)} beside {partners}",
            "available": f"{free} on the machine of {partners}",
            "another_would_help": False,
        },
    )


def _free(need: _Need, machines: Sequence[_Machine]) -> tuple[str, bool]:
    """What is free on these machines of the kinds that are needed, and whether one of them takes nobody new."""
    free = "; ".join(
        f"{m.capacity.ip}: {m.cpu:g} CPU, {m.memory_bytes} bytes"
        + (f", {m.gpu:g} GPUs" if m.capacity.gpu else "")
        + "".join(f", {m.custom.get(name, 0.0):g} {name}" for name in sorted(need.custom))
        + ("" if need.labels <= set(m.capacity.labels.items()) else ", not so labelled")
        for m in machines[:8]
    )
    more = f"; and {len(machines) - 8} more" if len(machines) > 8 else ""
    # What it avoids is said, since that machine may well have room.
    ips = {m.capacity.ip for m in machines if m.closed or m.capacity.node_id in need.avoids}
    more += f" ({', '.join(sorted(ips))}: left alone or drained)" if ips else ""
    return f"{free}{more}", bool(ips)


def _notes(sub_graphs: Sequence[SubGraph], nodes: Sequence[NodeCapacity]) -> list[str]:
    guests: dict[str, set[int]] = defaultdict(set)
    for sub_graph in sub_graphs:
        for bundle in sub_graph.bundles:
            if bundle.machine:
                guests[bundle.machine].add(bundle.node)
    ips = {node.node_id: node.ip for node in nodes}
    shared = [(ips[node_id], sorted(found)) for node_id, found in guests.items() if len(found) > 1]
    if not shared:
        return []
    where = "; ".join(f"{ip} holds {_some(found)}" for ip, found in shared[:8])
    count = len({bundle.node for sub_graph in sub_graphs for bundle in sub_graph.bundles})
    return [
        f"The job asks for {count} nodes and the cluster has {len(nodes)}, "
        f"so logical nodes share machines: {where}."
    ]


def _some(numbers: Sequence[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:8])
    return shown + (f" and {len(numbers) - 8} more" if len(numbers) > 8 else "")
