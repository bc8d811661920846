"""The rollout plane as a machine: `handle(plane, event, now) -> instructions`.

Pure: it reads no clock, draws no random number, and knows no socket, task or database. The shell
(`gyre.rollouts.manager`) turns what happens into events and carries instructions out; a recorded history does the same
again (`tests/rollouts/machine`).

Invariants:
- *acknowledged means durable*, *published means durable*: see `ledger`;
- *one event at a time*: an event is handled whole, and its instructions are carried out in order, before the next;
- *refused changes nothing*: an event that cannot be is answered with `Refuse`, its last instruction.

This module has the entry and the table of handlers; each subject has a module of its own (`state` lists them). It must
not know what a requester is like: each kind adds its own events to the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gyre.errors import GyreError
from gyre.rollouts.plane import (
    elasticity,
    instances,
    joining,
    leaving,
    ledger,
    placement,
    updates,
    windows,
)
from gyre.rollouts.plane import events as e
from gyre.rollouts.plane.instructions import Instruction, Refuse
from gyre.rollouts.plane.requesters import Handler
from gyre.rollouts.plane.state import Plane


def handle(plane: Plane, event: object, now: float) -> list[Instruction]:
    """What is to be done of the event, which changes the plane. `now` is monotonic, in seconds."""
    plane.now = now
    try:
        kind = type(event)
        (_HANDLERS.get(kind) or plane.own_handlers[kind])(plane, event)
    except GyreError as error:
        plane.instructions.append(Refuse(error))
    done, plane.instructions = plane.instructions, []
    return done


def _with_fields(do: Callable[..., object]) -> Handler:
    """Gives `do` the event's fields, one by one."""

    def handler(plane: Plane, event: Any) -> None:
        do(plane, *event)

    return handler


def _roles_wanted(plane: Plane, event: e.RolesWanted) -> None:
    placement.set_wanted(plane, event.wanted)
    for one in plane.requesters:
        one.looked_at(plane, event.wanted)


def _ticked(plane: Plane, event: e.Ticked) -> None:
    plane.take_in()
    plane.report_counted()
    instances.look(plane)
    updates.report_service(plane)
    placement.look(plane)
    windows.look(plane)
    for one in plane.requesters:
        one.look(plane)
    elasticity.look(plane, event.cores_busy)


_HANDLERS: Mapping[type, Handler] = {
    e.Restored: ledger.restore,
    e.LedgerFree: ledger.collect,
    e.Committed: ledger.committed,
    e.AgentDialled: _with_fields(joining.join),
    e.AgentSent: _with_fields(instances.received),
    e.AgentGone: _with_fields(leaving.disconnected),
    e.AgentUnadmitted: _with_fields(leaving.cut),
    e.PeerRefused: _with_fields(Plane.reject),
    e.AgentDrainRequested: _with_fields(instances.drain),
    e.Published: _with_fields(updates.publish),
    e.RolesWanted: _roles_wanted,
    e.ReportsDue: _with_fields(Plane.take_in),
    e.DispatchDue: _with_fields(placement.dispatch),
    e.Ticked: _ticked,
}
