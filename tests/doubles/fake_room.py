"""The machines of a `FakeCluster`, and the places that are reserved on them.

As with Ray, a place is a sub-graph's bundles, each on one machine; a bundle that the plan pins to a living machine
finds room there or nowhere; and a machine that vanishes takes the places on it along.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from gyre.graph import Bundle, NodeCapacity, SubGraph


@dataclass(eq=False)
class FakeMachine:
    """A machine: what it has, and what other jobs hold of that."""

    name: str
    ip: str
    cpu: float = 64.0
    memory_bytes: float = float(1 << 38)
    gpu: float = 0.0
    others_cpu: float = 0.0
    others_gpu: float = 0.0
    draining: bool = False
    unfit: tuple[str, ...] = ()
    """What its pre-flight finds."""
    memory_kills: int = 0
    """How many processes its kernel has killed for want of memory."""
    custom: dict[str, float] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def whole(self) -> NodeCapacity:
        """What it has, whoever holds it."""
        return NodeCapacity(
            self.name, self.ip, self.cpu, int(self.memory_bytes), self.gpu, self.custom, self.labels
        )

    @property
    def capacity(self) -> NodeCapacity:
        """What the job may use of it."""
        return replace(self.whole, cpu=self.cpu - self.others_cpu, gpu=self.gpu - self.others_gpu)


class FakeRoom:
    def __init__(self) -> None:
        self.machines: dict[str, FakeMachine] = {}
        """The living machines, by name."""
        self.places: dict[str, list[tuple[Bundle, str]]] = {}
        """What is reserved, by sub-graph: each bundle with its machine."""
        self.demands: set[str] = set()
        """The sub-graphs for which whoever adds machines was shown that none has room."""
        self._added = 0

    def add(self, name: str, **what: Any) -> None:
        self._added += 1
        self.machines[name] = FakeMachine(name, f"10.0.0.{self._added}", **what)

    def lose(self, name: str) -> None:
        del self.machines[name]
        for sub_graph, bundles in list(self.places.items()):
            if any(where == name for _, where in bundles):
                del self.places[sub_graph]

    def capacities(self) -> list[NodeCapacity]:
        return [machine.capacity for machine in self.machines.values()]

    def has(self, sub_graph: SubGraph) -> bool:
        """Whether the sub-graph has its place, on the machines that the plan says."""
        held = self.places.get(sub_graph.id)
        return held is not None and all(
            bundle.machine in ("", where) or bundle.machine not in self.machines
            for bundle, (_, where) in zip(sub_graph.bundles, held, strict=True)
        )

    def reserve(self, sub_graph: SubGraph) -> bool:
        """Give the sub-graph a place, instead of the one it may have elsewhere. Returns whether there is room."""
        self.places.pop(sub_graph.id, None)
        free = self._free()
        taken = []
        for bundle in sub_graph.bundles:
            pinned = [bundle.machine] if bundle.machine in free else list(free)
            pinned = [name for name in pinned if not self.machines[name].draining]
            where = next((name for name in pinned if _holds(free[name], bundle)), None)
            if where is None:
                return False
            free[where][0] -= bundle.cpu
            free[where][1] -= bundle.accelerator
            taken.append((bundle, where))
        self.places[sub_graph.id] = taken
        self.demands.discard(sub_graph.id)
        return True

    def machine_of(self, sub_graph: str, bundle: int) -> str:
        return next(where for reserved, where in self.places[sub_graph] if reserved.index == bundle)

    def release(self, sub_graph: str) -> None:
        self.demands.discard(sub_graph)
        self.places.pop(sub_graph, None)

    def _free(self) -> dict[str, list[float]]:
        """CPU and accelerators that are free, by machine; memory is not counted."""
        free = {one.node_id: [one.cpu, one.gpu] for one in self.capacities()}
        for bundles in self.places.values():
            for bundle, where in bundles:
                free[where][0] -= bundle.cpu
                free[where][1] -= bundle.accelerator
        return free


def _holds(free: list[float], bundle: Bundle) -> bool:
    return free[0] >= bundle.cpu and free[1] >= bundle.accelerator
