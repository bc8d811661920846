"""Commands: the outputs of decisions, imperative, idempotent by id.

A command is carried out after the event that caused it is committed, at least once: a restarted master runs
again what is still in the outbox. So each says *which* incarnation it means, and doing it twice is harmless.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gyre.failover.state import fields_of


class Command:
    """The common base; see the subclasses."""


@dataclass(frozen=True, slots=True)
class StartRegion(Command):
    """Start the vertices together, as these incarnations. The incarnations in `replaces` and all before
    them are killed first, because an abandoned start may not have killed its own predecessor.

    Answered by VertexStarted or VertexStartFailed, one for each vertex.
    """

    region: str
    vertices: dict[str, int]
    replaces: dict[str, int] = field(default_factory=dict)
    not_before: float = 0.0


@dataclass(frozen=True, slots=True)
class StopVertex(Command):
    """Let calls in flight end for at most `grace_s`, run `teardown()`, end the process, and every incarnation before
    it that may still live. Answered by VertexStopped."""

    vertex: str
    incarnation: int
    grace_s: float = 0.0


@dataclass(frozen=True, slots=True)
class UpdateMembership(Command):
    """Tell the trainer which vertices run, as which incarnation, and how many of each role are wanted.

    `serial` orders announcements.
    """

    serial: int
    running: dict[str, int]
    roles: dict[str, int]
    trainer_incarnation: int


@dataclass(frozen=True, slots=True)
class StartTrainer(Command):
    """Run `fit()` in this incarnation of the trainer. Answered by TrainerFinished or TrainerFailed, much later."""

    incarnation: int
    paused: bool
    serial: int
    running: dict[str, int]
    roles: dict[str, int]


@dataclass(frozen=True, slots=True)
class PauseTrainer(Command):
    incarnation: int


@dataclass(frozen=True, slots=True)
class ResumeTrainer(Command):
    incarnation: int


@dataclass(frozen=True, slots=True)
class StopTrainer(Command):
    """Ask `fit()` to return at the next step's end."""

    incarnation: int


@dataclass(frozen=True, slots=True)
class SetTimer(Command):
    """Answered by TimerFired at `at` (seconds since the Unix epoch), also by a later master."""

    timer: str
    at: float


@dataclass(frozen=True, slots=True)
class FinishJob(Command):
    """Every vertex is gone: release the placement groups and end the master."""

    phase: str


_KINDS: dict[str, type[Command]] = {
    name: kind
    for name, kind in list(vars().items())
    if isinstance(kind, type) and issubclass(kind, Command) and kind is not Command
}


def command_kind(command: Command) -> str:
    return type(command).__name__


def command_body(command: Command) -> dict[str, Any]:
    return fields_of(command)


def command_from(kind: str, body: Mapping[str, Any]) -> Command:
    """Raises ValueError for a kind that this Gyre does not know."""
    cls = _KINDS.get(kind)
    if cls is None:
        raise ValueError(f"command kind {kind!r} is not known to this Gyre")
    return cls(**body)
