"""Reports of a start that finds no room, and of a process that is gone."""

from __future__ import annotations

from collections.abc import Mapping

from gyre.failover import Cause
from gyre.failover.events import VertexLost, VertexWaitsForRoom
from gyre.master.cluster import Address, CannotPlace, Cluster, NotAnswering, ProcessDied
from gyre.workloads.vertex.memory_kills import MemoryKills


def waiting(address: Address, lack: CannotPlace) -> VertexWaitsForRoom:
    return VertexWaitsForRoom(
        address.vertex,
        address.incarnation,
        required=lack.required,
        available=lack.available,
        hint="Add machines, or end other jobs: it starts within seconds of room.",
    )


def lost(
    address: Address,
    error: ProcessDied | NotAnswering,
    node: str = "",
    *,
    memory_kills: int = 0,
    last_words: Mapping[str, str] | None = None,
) -> VertexLost:
    if isinstance(error, ProcessDied):
        cause, said = death(error, memory_kills)
        evidence = {"error": said, **(last_words or {})}
        return VertexLost(address.vertex, address.incarnation, cause, evidence, node=node)
    return VertexLost(address.vertex, address.incarnation, Cause.SILENT, {"error": str(error)}, node=node)


def death(error: ProcessDied, memory_kills: int) -> tuple[Cause, str]:
    """Why a process is gone, and a sentence about it. `memory_kills` processes of its control group were killed by the
    kernel for want of memory since it was last heard."""
    if error.node_lost:
        return Cause.NODE_LOST, error.detail
    if error.out_of_memory:
        return Cause.OUT_OF_MEMORY, error.detail
    if memory_kills:
        told = f"the kernel killed {memory_kills} process(es) of its control group for want of memory when it died"
        return Cause.OUT_OF_MEMORY, f"{told}; {error.detail}"
    return Cause.DIED, error.detail


async def new_memory_kills(cluster: Cluster, node: str, before: MemoryKills | None) -> int:
    """How many more processes the kernel of a machine has killed for want of memory than `before`; 0 where that cannot
    be told."""
    if before is None or not node:
        return 0
    now = await cluster.memory_kills(before.counter, node=node)
    return max(0, now - before.kills) if now is not None else 0
