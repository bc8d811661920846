"""Reports of a start that finds no room, and of a process that is gone: why, and what it said last, as evidence.

Invariants of its last words, which are the end of its log with its engine's output:
- *bounded*: at most `LINES` lines and `BYTES` bytes, for they go into the journal;
- *nobody waits*: a folder that does not answer within `WITHIN_S` has no words; a death is reported without them.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from gyre.engines.last_words import clean
from gyre.failover import Cause
from gyre.failover.events import VertexLost, VertexWaitsForRoom
from gyre.logs.reading import last_lines
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


def lost(address: Address, error: ProcessDied | NotAnswering) -> VertexLost:
    """One that never came up, so that it has said nothing."""
    cause, said = death(error, 0) if isinstance(error, ProcessDied) else (Cause.SILENT, str(error))
    return VertexLost(address.vertex, address.incarnation, cause, {"error": said})


async def death_of(
    address: Address, error: ProcessDied, cluster: Cluster, node: str, before: MemoryKills | None, logs: Path
) -> tuple[Cause, dict[str, str]]:
    """Why a process on `node` is gone, and the evidence. `before` are the kills of when it was last heard."""
    kills = 0 if error.node_lost else await new_memory_kills(cluster, node, before)
    cause, said = death(error, kills)
    return cause, {"error": said, **await last_words_of(logs, address)}


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


LINES = 20
BYTES = 4000
WITHIN_S = 2.0


async def last_words_of(logs: Path, address: Address) -> dict[str, str]:
    """`last_words`, the text of the last lines of the vertex's process; nothing where there are none."""
    try:
        async with asyncio.timeout(WITHIN_S):
            lines = await asyncio.to_thread(
                last_lines, logs, address.vertex, address.incarnation, lines=LINES, most_bytes=BYTES
            )
    except (OSError, TimeoutError):  # the evidence has what else is known
        return {}
    return {"last_words": clean("\n".join(lines))} if lines else {}
