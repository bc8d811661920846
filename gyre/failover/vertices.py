"""Vertices of a draft: which one an event is about, which are wanted and run, and the commands that start them.

The trainer learns which vertices run from `StartTrainer` and `UpdateMembership`; the serial of a command says which of
two is newer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from gyre.config import TRAINER
from gyre.failover import commands as c
from gyre.failover.draft import Draft
from gyre.failover.layout import JobLayout
from gyre.failover.state import VertexPhase, VertexRecord

TRAINER_VERTEX = f"{TRAINER}-0"

_LEAVING = (VertexPhase.STOPPING, VertexPhase.STOPPED)


def current(draft: Draft, vertex: str, incarnation: int) -> VertexRecord | None:
    """The vertex's record if `incarnation` is its current one; otherwise None: old news is no news."""
    record = draft.vertices.get(vertex)
    return record if record is not None and record.incarnation == incarnation else None


def is_wanted(draft: Draft, vertex: str) -> bool:
    record = draft.vertices.get(vertex)
    return record is not None and record.phase not in _LEAVING


def is_coming(vertex: VertexRecord) -> bool:
    """Whether it is wanted and does not run yet, and waits for no room."""
    return vertex.phase is not VertexPhase.RUNNING and vertex.phase not in _LEAVING and not vertex.no_room


def wanted(draft: Draft) -> list[VertexRecord]:
    """The vertices that neither leave nor have left."""
    return [vertex for vertex in draft.vertices.values() if vertex.phase not in _LEAVING]


def roles_that_can_wait(layout: JobLayout, draft: Draft, *, at_least: int = 0) -> frozenset[str]:
    """The elastic roles of which the minimum runs, and `at_least` so many: the job goes on while others of them wait
    for room."""
    running = Counter(
        vertex.role for vertex in draft.vertices.values() if vertex.phase is VertexPhase.RUNNING
    )
    return frozenset(
        name
        for name, role in layout.spec.roles.items()
        if role.elastic is not None and running[name] >= max(role.elastic.min, at_least)
    )


def live_trainer(draft: Draft) -> VertexRecord | None:
    """The trainer's record if its process runs and `fit()` has begun; otherwise None."""
    trainer = draft.vertices.get(TRAINER_VERTEX)
    running = trainer is not None and trainer.phase is VertexPhase.RUNNING
    return trainer if running and draft.job.trainer_started else None


def start_commands(layout: JobLayout, draft: Draft, vertices: Iterable[str]) -> list[c.Command]:
    """One StartRegion for each region among the vertices, at their current incarnations."""
    return [
        c.StartRegion(region[0], {vertex: draft.vertices[vertex].incarnation for vertex in region})
        for region in layout.split(vertices)
    ]


def start_trainer(draft: Draft) -> c.Command:
    serial = _next_serial(draft)
    return c.StartTrainer(
        incarnation=draft.vertices[TRAINER_VERTEX].incarnation,
        paused=draft.job.paused,
        serial=serial,
        running=_running(draft),
        roles=dict(draft.job.roles),
    )


def announce(draft: Draft) -> c.Command:
    """The command that informs the trainer of which vertices run now."""
    serial = _next_serial(draft)
    trainer = draft.vertices.get(TRAINER_VERTEX)
    return c.UpdateMembership(
        serial, _running(draft), dict(draft.job.roles), trainer.incarnation if trainer else 0
    )


def _next_serial(draft: Draft) -> int:
    draft.set_job(serial=draft.job.serial + 1)
    return draft.job.serial


def _running(draft: Draft) -> dict[str, int]:
    return {
        vertex.id: vertex.incarnation
        for vertex in draft.vertices.values()
        if vertex.phase is VertexPhase.RUNNING and vertex.role != TRAINER
    }
