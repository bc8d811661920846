"""Instances that leave, and what follows: their samples go on elsewhere.

Invariant *who died is known*: an instance that is lost, and not left in order, counts against the samples that it had.

This module must not know about sockets, or what agents say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.rollouts.plane import placement, requesters, updates
from gyre.rollouts.plane.links import AgentLink
from gyre.rollouts.protocol.frames import Reject

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane

DEATHS = frozenset(("connection_lost", "silent", "replaced"))
"""Ways to leave that a sample may be to blame for."""


def lose(plane: Plane, link: AgentLink, reason: str) -> None:
    """The instance is gone: its samples go on elsewhere."""
    plane.take_in()
    if plane.links.get(link.name) is link:
        del plane.links[link.name]
    if link.connection is not None:
        plane.close(link.connection)
        link.connection = None
    instance = plane.groups.instances.get(link.name)
    if instance is None or instance.number != link.number:
        return
    died = f"its machine or agent was lost ({reason})" if reason in DEATHS else ""
    orphans = plane.groups.leave(link.name, died=died)
    requesters.report_failures(plane)
    plane.report_event(
        "InstanceLeft",
        {
            "instance": link.name,
            "reason": reason,
            "moved": len(orphans),
            "tokens": sum(state.length for state in orphans),
        },
    )
    placement.dispatch_soon(plane)


def disconnected(plane: Plane, link: AgentLink) -> None:
    """The link's connection ended. The instance has a while to dial again, unless it was draining."""
    plane.take_in()
    if not plane.links.disconnected(link, plane.now):
        return
    if link.draining:
        lose(plane, link, "drained")
    placement.dispatch_soon(plane)


def cut(plane: Plane, link: AgentLink, message: str) -> None:
    """Its token admits the instance no longer. What it reported is in the ledger, and its samples go on elsewhere."""
    if link.connection is not None:
        plane.send(link.connection, Reject(code="unauthorised", message=message))
    lose(plane, link, "token")


def refresh(plane: Plane, link: AgentLink) -> None:
    """What may be done with a local instance has changed: its window opens or closes, or it woke."""
    if link.name in plane.groups.instances:
        updates.update(plane, link)
        placement.dispatch_soon(plane)
