"""What is told of a start that finds no room, or whose process is gone."""

from __future__ import annotations

from gyre.failover import Cause
from gyre.failover.events import VertexLost, VertexWaitsForRoom
from gyre.master.cluster import Address, CannotPlace, NotAnswering, ProcessDied


def waiting(address: Address, lack: CannotPlace) -> VertexWaitsForRoom:
    return VertexWaitsForRoom(
        address.vertex,
        address.incarnation,
        required=lack.required,
        available=lack.available,
        hint="Add machines, or end other jobs: it starts within seconds of room.",
    )


def lost(address: Address, error: ProcessDied | NotAnswering, node: str = "") -> VertexLost:
    if isinstance(error, ProcessDied):
        cause = Cause.NODE_LOST if error.node_lost else Cause.DIED
        return VertexLost(address.vertex, address.incarnation, cause, {"error": error.detail}, node=node)
    return VertexLost(address.vertex, address.incarnation, Cause.SILENT, {"error": str(error)}, node=node)
