"""Instances that leave, and what follows: their samples go on elsewhere.

Invariant *who died is known*: an instance that is lost, and not left in order, counts against the samples that it had.

This module must not know about sockets, or what agents say.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.rollouts.plane import placement, requesters, updates
from gyre.rollouts.plane.sessions import AgentSession
from gyre.rollouts.protocol.frames import Reject

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane

DEATHS = frozenset(("connection_lost", "silent", "replaced"))
"""Ways to leave that a sample may be to blame for."""


def lose(plane: Plane, session: AgentSession, reason: str) -> None:
    """The instance is gone: its samples go on elsewhere."""
    plane.take_in()
    if plane.sessions.get(session.name) is session:
        del plane.sessions[session.name]
    if session.connection is not None:
        plane.close(session.connection)
        session.connection = None
    instance = plane.groups.instances.get(session.name)
    if instance is None or instance.number != session.number:
        return
    died = f"its machine or agent was lost ({reason})" if reason in DEATHS else ""
    orphans = plane.groups.leave(session.name, died=died)
    requesters.report_failures(plane)
    plane.report_event(
        "InstanceLeft",
        {
            "instance": session.name,
            "reason": reason,
            "moved": len(orphans),
            "tokens": sum(state.length for state in orphans),
        },
    )
    placement.dispatch_soon(plane)


def disconnected(plane: Plane, session: AgentSession) -> None:
    """The session's connection ended. The instance has a while to dial again, unless it was draining."""
    plane.take_in()
    if not plane.sessions.disconnected(session, plane.now):
        return
    if session.draining:
        lose(plane, session, "drained")
    placement.dispatch_soon(plane)


def cut(plane: Plane, session: AgentSession, message: str) -> None:
    """Its token admits the instance no longer. What it reported is in the ledger, and its samples go on elsewhere."""
    if session.connection is not None:
        plane.send(session.connection, Reject(code="unauthorised", message=message))
    lose(plane, session, "token")


def refresh(plane: Plane, session: AgentSession) -> None:
    """What may be done with a local instance has changed: its window opens or closes, or it woke."""
    if session.name in plane.groups.instances:
        updates.update(plane, session)
        placement.dispatch_soon(plane)
