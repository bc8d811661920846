"""The words of the graph: operators, typed edges with rates and delays, vertices, placement.

A job's directed cyclic graph (DCG) is a synchronous dataflow graph (Lee and Messerschmitt, 1987): each firing
of an operator takes a fixed number of tokens from each edge into it and puts a fixed number on each edge
out of it. On `samples` edges a token is a group, on `weights` edges a policy version (or a share of one), on
`control` edges a go-ahead. Rates and delays being static, deadlock and imbalance are found before a process
starts.

This module is data only: it imports nothing of Gyre's but `config`, reads no clock and does no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class EdgeKind(StrEnum):
    SAMPLES = "samples"
    """Durable and replayable: the ledger holds what flows here. Stops a failure from spreading."""
    WEIGHTS = "weights"
    """Versioned: a receiver can take any published version again. Stops a failure from spreading."""
    COLLECTIVE = "collective"
    """NCCL or Gloo peers: the death of one ends the call of all. Joins a region."""
    CONTROL = "control"
    """A call whose result the caller can ask for again. Stops a failure from spreading."""


DURABLE = frozenset({EdgeKind.SAMPLES, EdgeKind.WEIGHTS, EdgeKind.CONTROL})


class Dispatch(StrEnum):
    """Who runs one firing of an operator."""

    ONE = "one"
    """Any one vertex of the role; a firing lost with its vertex is repeated on another."""
    GANG = "gang"
    """Every rank of the role at once, in firing order; samples are dealt out to the ranks, and stay there."""
    SPREAD = "spread"
    """Every rank of a gang at once; samples are dealt out to the ranks, and come back from them."""
    CONTROLLER = "controller"
    """The trainer's own process."""
    PLANE = "plane"
    """The rollout plane: the rollout manager spreads the firing over the role's instances, sample by sample."""


@dataclass(frozen=True, slots=True)
class Operator:
    """A method of a role that the graph calls.

    `ordered` operators fire in the order of their tokens, whatever order these arrive in; a synchronous
    seeded recipe needs it to be repeatable bit by bit.
    """

    role: str
    method: str
    dispatch: Dispatch = Dispatch.ONE
    ordered: bool = False
    initial_policy: bool = False
    """Its vertices hold the weights that training began with, and keep them: a reference model."""

    @property
    def ref(self) -> str:
        return f"{self.role}.{self.method}"


@dataclass(frozen=True, slots=True)
class Edge:
    """`produce` tokens appear per firing of `source`, `consume` are taken per firing of `target`.

    `delay` is in firings of the source: `delay * produce` tokens lie on the edge at the start. `capacity` is
    the number of tokens at which the source waits for room; None is unbounded.
    """

    source: str
    target: str
    kind: EdgeKind
    produce: int = 1
    consume: int = 1
    delay: int = 0
    capacity: int | None = None

    @property
    def initial_tokens(self) -> int:
        return self.delay * self.produce

    def __str__(self) -> str:
        return f"{self.source} → {self.target} ({self.kind}, delay {self.delay})"


@dataclass(frozen=True, slots=True)
class Dcg:
    """Operators and the edges between them; `roles` in the order they were declared.

    `role_edges` join roles whose operators the graph does not know: a trainer with a `fit()` of its own.
    """

    roles: tuple[str, ...]
    operators: tuple[Operator, ...] = ()
    edges: tuple[Edge, ...] = ()
    role_edges: tuple[Edge, ...] = ()
    recipe: str | None = None

    def operator(self, ref: str) -> Operator:
        for operator in self.operators:
            if operator.ref == ref:
                return operator
        raise KeyError(ref)

    def into(self, ref: str) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.target == ref)

    def out_of(self, ref: str) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.source == ref)


@dataclass(frozen=True, slots=True)
class Vertex:
    """One instance (rank) of a role. Its id names it in every table, log line and Ray actor name."""

    role: str
    rank: int

    @property
    def id(self) -> str:
        return f"{self.role}-{self.rank}"


@dataclass(frozen=True, slots=True)
class Bundle:
    """What one placement-group bundle reserves, and the vertices in it."""

    index: int
    node: int
    """Logical node, `0 .. node_num-1`."""
    vertices: tuple[str, ...]
    cpu: float = 0.0
    memory_bytes: int = 0
    accelerator: float = 0.0
    custom: Mapping[str, float] = field(default_factory=dict)
    """Of the cluster's resources of the user's own naming."""
    labels: Mapping[str, str] = field(default_factory=dict)
    """What its machine must be labelled with."""
    beside: str = ""
    """The rank of its host group. Bundles with the same one stand on one machine; empty for a bundle without."""
    machine: str = ""
    """Id of the cluster's node that the logical node was fitted to; empty before that, or if any will do."""


@dataclass(frozen=True, slots=True)
class SubGraph:
    """What must be placed together: the unit of scheduling (one placement group) and of scaling."""

    id: str
    bundles: tuple[Bundle, ...]
    strategy: str
    """Ray's placement strategy: PACK, SPREAD, STRICT_PACK or STRICT_SPREAD."""
    apart: frozenset[str] = frozenset()
    """Roles that must not be where it is."""
    divides: bool = False
    """Whether its bundles on one logical node may stand on several machines, each beside its partners there, if no
    machine holds all of them."""

    @property
    def vertices(self) -> tuple[str, ...]:
        return tuple(vertex for bundle in self.bundles for vertex in bundle.vertices)


@dataclass(frozen=True, slots=True)
class VertexPlacement:
    vertex: str
    sub_graph: str
    bundle: int
    node: int
    local_rank: int
    """Rank among the vertices of its role on its logical node."""
    devices: tuple[int, ...] = ()
    accelerator: float = 0.0


@dataclass(frozen=True, slots=True)
class PlacementPlan:
    """Where every vertex goes. `notes` are sentences for people to read."""

    node_num: int
    device_per_node: int
    device_type: str
    sub_graphs: tuple[SubGraph, ...]
    placements: dict[str, VertexPlacement] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    most_nodes: int | None = None
    """The most machines, if the user said so."""

    def machines(self) -> dict[str, str]:
        """The cluster's node that each vertex is meant for; empty before the plan is fitted to a cluster."""
        return {
            vertex: bundle.machine
            for sub_graph in self.sub_graphs
            for bundle in sub_graph.bundles
            if bundle.machine
            for vertex in bundle.vertices
        }
