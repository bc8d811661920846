"""The cluster as the master sees it: one small interface between its decisions and Ray.

`RayCluster` is the real one, `tests.doubles.fake_cluster` a double in memory; nothing else in the master knows Ray.
Every call has a deadline, and a death shows as `ProcessDied` at whatever call is pending.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from gyre.graph import NodeCapacity, SubGraph
from gyre.process_activity import Activity
from gyre.workloads.vertex.host import VertexHost
from gyre.workloads.vertex.memory_kills import MemoryKills
from gyre.workloads.vertex.messages import Binding
from gyre.workloads.vertex.preflight import Needs

P = ParamSpec("P")
R = TypeVar("R")
HostMethod = Callable[Concatenate[VertexHost, P], R]
"""A method of the class of hosts, such as `VertexHost.watch`."""


class ProcessDied(Exception):
    """The process of a vertex is gone. `detail` is what the cluster says about its end."""

    def __init__(self, detail: str, *, node_lost: bool = False, out_of_memory: bool = False) -> None:
        """`out_of_memory`: the cluster itself ended the process, because its machine ran out of memory."""
        super().__init__(detail)
        self.detail = detail
        self.node_lost = node_lost
        self.out_of_memory = out_of_memory


class NotAnswering(Exception):
    """No answer within the deadline; whether the process lives is not known."""


class CannotPlace(Exception):
    """The cluster has no room now: what is required, what is available, and whether there may be room once other jobs
    have ended."""

    def __init__(
        self, message: str, *, required: str = "", available: str = "", by_others: bool = True
    ) -> None:
        super().__init__(message)
        self.required = required or message
        self.available = available
        self.by_others = by_others


class HeldBack(CannotPlace):
    """There is room, but not for the rest of the job, which begins as a whole or not at all."""


@dataclass(frozen=True, slots=True)
class Address:
    """One incarnation of a vertex."""

    vertex: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Spawned:
    pid: int
    node: str
    bound: bool
    """True if an earlier master had already set the vertex up."""
    memory_kills: MemoryKills | None = None
    """How many processes of its control group the kernel had killed for want of memory when it came up."""


class Cluster(Protocol):
    async def nodes(self) -> list[NodeCapacity]:
        """The living machines, and what the job may use of each: what is free, and what it has reserved itself."""
        ...

    async def whole_nodes(self) -> list[NodeCapacity]:
        """The living machines, and what each has, used or free."""
        ...

    async def draining(self) -> dict[str, str]:
        """The machines that the cluster says will go, and why. Cheap: it is asked several times a second."""
        ...

    async def examine(self, node: str, needs: Needs) -> list[str] | None:
        """What the pre-flight finds wrong with a machine, a sentence each; None if it does not answer in time."""
        ...

    async def place(self, sub_graph: SubGraph, timeout_s: float) -> None:
        """Reserve a sub-graph's bundles; a second call finds them reserved. Raises CannotPlace where there is no room
        within the timeout; what was asked for goes on waiting, so that whoever adds machines sees it, and a later call
        waits for the same."""
        ...

    async def demand(self, sub_graph: SubGraph) -> None:
        """Let whoever adds machines see that none has room for this sub-graph, wherever it would stand. `place` takes
        over what was asked for, `release` takes it back."""
        ...

    async def release(self, sub_graph_id: str) -> None: ...

    async def reserved(self) -> set[str]:
        """The sub-graphs of the job for which room is reserved or asked for, by this or an earlier master."""
        ...

    async def spawn(
        self, address: Address, *, sub_graph: SubGraph, bundle: int, epoch: int, timeout_s: float
    ) -> Spawned:
        """Start the process of this incarnation, or find it. Raises ProcessDied, NotAnswering, CannotPlace."""
        ...

    async def call(
        self,
        address: Address,
        timeout_s: float,
        method: HostMethod[P, R],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Call a control method of the vertex's host, and wait up to `timeout_s`. Raises ProcessDied, NotAnswering, and
        what the host raises."""
        ...

    async def bind(
        self, address: Address, epoch: int, binding: Binding, *, timeout_s: float
    ) -> tuple[str, Any]:
        """Call `bind` of the vertex's host, which runs on the host's work thread. Raises what `call` raises."""
        ...

    async def kill(self, address: Address, *, pid: int, node: str) -> None:
        """End the process at once, even if it is stopped by a signal, and return when it is gone. Idempotent."""
        ...

    async def stacks(self, *, pid: int, node: str, timeout_s: float) -> str:
        """Stacks of the process's threads, taken without its help. Never raises: the text says what is missing."""
        ...

    async def activity(self, *, pid: int, node: str, over_s: float) -> Activity | None:
        """What the process does for a moment of this length, by its kernel. None where it is gone or that cannot be
        told, within a few seconds."""
        ...

    async def memory_kills(self, counter: str, *, node: str) -> int | None:
        """How many processes the kernel has killed for want of memory, by a file of a machine that counts them. None
        where it does not tell, within a second."""
        ...

    async def end(self) -> None:
        """Release everything that belongs to the job, and end the master's own process for good."""
        ...
