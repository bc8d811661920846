"""Checks of what vertices report, before the master believes it.

A vertex sends plain data. The master does not rely on that: a vertex runs its user's code, and may have been started by
another version of Gyre.

Invariants:
- *every report is an event*: an event of its kind if Gyre knows the kind, `Reported` if not, and `ReportRefused` with
  the reason if the report does not have the fields of its kind; so each report comes once, and none stops the master;
- *in its own name*: a vertex reports as itself, for its own incarnation.

This module must not know how reports arrive, or what follows from them.
"""

from __future__ import annotations

import math
from typing import Any

from gyre.failover.events import Event, Reported, ReportRefused, is_known, reported_from, reporter_of
from gyre.master.cluster import Address
from gyre.workloads.plain_data import PLAIN_LIMIT, plain, plain_fields, plain_text
from gyre.workloads.vertex.disk_room import DiskRoom
from gyre.workloads.vertex.memory_kills import MemoryKills
from gyre.workloads.vertex.messages import VertexReport

LIMIT = PLAIN_LIMIT + 2**12
"""Limit of a report's data, above the vertex's own: what a vertex has already cut is not cut again."""

EVIDENCE_LIMIT = 2**14
"""Characters of a vertex's last words that an incident keeps: the state holds up to 200 incidents."""

KIND_LIMIT = 200

_MOST_DISKS = 16
"""A vertex looks at three or four."""


class Unreadable(Exception):
    """A vertex's answer is not a report. The message says what is wrong with it."""


def read_report(answer: Any) -> VertexReport:
    """Returns the answer of a watch call with plain data in every field; `event_of` reads the kinds and bodies in its
    outbox. Raises Unreadable."""
    try:
        still_s = float(answer.still_s)
        if not math.isfinite(still_s):
            raise ValueError(f"still_s is {still_s}")
        version = plain(answer.version)
        return VertexReport(
            ticks=int(answer.ticks),
            fields=plain_fields(answer.fields, limit=LIMIT),
            busy=plain_text(answer.busy, limit=KIND_LIMIT),
            still_s=still_s,
            version=version if isinstance(version, int) else None,
            unhealthy=plain_text(answer.unhealthy),
            outbox=[(int(number), kind, body) for number, kind, body in answer.outbox],
            memory_kills=answer.memory_kills if isinstance(answer.memory_kills, MemoryKills) else None,
            disks=tuple(_disk(one) for one in tuple(answer.disks)[:_MOST_DISKS]),
        )
    except (AttributeError, TypeError, ValueError, OverflowError) as error:
        raise Unreadable(f"its report cannot be read: {type(error).__name__}: {error}") from error


def _disk(told: Any) -> DiskRoom:
    return DiskRoom(
        plain_text(told.where, limit=KIND_LIMIT),
        plain_text(told.disk, limit=KIND_LIMIT),
        int(told.available_bytes),
        int(told.total_bytes),
    )


def event_of(address: Address, number: int, kind: Any, body: Any) -> Event:
    """Returns the event for a vertex's report number `number`."""
    name = plain_text(kind, limit=KIND_LIMIT)
    if not isinstance(kind, str) or not isinstance(body, dict):
        return refused(address, number, name, f"it is a {type(kind).__name__} with a {type(body).__name__}")
    told = plain_fields(body, limit=LIMIT)
    if not is_known(name):
        return Reported(address.vertex, address.incarnation, name, told, report=number)
    try:
        event = reported_from(name, {**told, "report": number})
    except ValueError as error:
        return refused(address, number, name, str(error))
    teller = reporter_of(event)
    if teller != address.vertex:
        return refused(address, number, name, f"{teller} reports it")
    incarnation = getattr(event, "incarnation", address.incarnation)
    if incarnation != address.incarnation:
        return refused(address, number, name, f"it is of incarnation {incarnation}")
    return event


def refused(address: Address, number: int, kind: Any, reason: str) -> ReportRefused:
    """Returns the event that stands for a refused report."""
    name = plain_text(kind, limit=KIND_LIMIT)
    return ReportRefused(
        address.vertex, address.incarnation, name, plain_text(reason, limit=2000), report=number
    )
