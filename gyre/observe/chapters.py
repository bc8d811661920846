"""What happened in a part of a history: its decisions, its flags, and how its vertices moved from phase to phase.

A decision is an event whose handling made or settled an incident, or a command. A flag is what people look for on a
time line: an incident, a publish, an evaluation, a checkpoint, a command.

Invariants:
- *bounded*: a chapter has at most so many flags of each kind, evenly left out where there are more, but every incident,
  and every command;
- *what is packed is unpacked*.

Pure but for the compression. This module must not know where chapters are kept.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import zstandard

from gyre.errors import StoreCorrupt
from gyre.failover import Incident, VertexPhase
from gyre.failover import events as e
from gyre.observe.folding import Folded

MOST_OF_A_KIND = 64
LARGEST_BYTES = 64 * 2**20
LONGEST_TEXT = 200

_COMMANDS = (
    e.JobContinued,
    e.ScaleRequested,
    e.DrainRequested,
    e.UndrainRequested,
    e.JoinTokenCreated,
    e.JoinTokenRevoked,
    e.PauseRequested,
    e.ResumeRequested,
    e.StopRequested,
)

INCIDENT, PUBLISH, EVALUATION, CHECKPOINT, COMMAND = (
    "incident",
    "publish",
    "evaluation",
    "checkpoint",
    "command",
)


class Flag(NamedTuple):
    at: float
    kind: str
    text: str
    seq: int


class PhaseChange(NamedTuple):
    """A vertex came into a phase. `why` is the cause of the incident that led to it, else the phase's reason."""

    at: float
    vertex: str
    role: str
    phase: str
    why: str


@dataclass(slots=True)
class Chapter:
    decisions: list[int] = field(default_factory=list)
    flags: list[Flag] = field(default_factory=list)
    moves: list[PhaseChange] = field(default_factory=list)

    def add(self, folded: Folded) -> None:
        """Take in the next event."""
        incidents = _incidents(folded)
        if is_decision(folded):
            self.decisions.append(folded.row.seq)
        at, seq = folded.row.at, folded.row.seq
        self.flags += [Flag(at, INCIDENT, text[:LONGEST_TEXT], seq) for text in incidents]
        if (teller := _FLAGS.get(type(folded.event))) is not None:
            kind, text = teller(folded.event)
            self.flags.append(Flag(at, kind, text[:LONGEST_TEXT], seq))
        self.moves += _moves(folded)

    def trimmed(self) -> Chapter:
        """This chapter with no more flags of a kind than are kept."""
        by_kind: dict[str, list[Flag]] = defaultdict(list)
        for flag in self.flags:
            by_kind[flag.kind].append(flag)
        kept = [
            flag
            for kind, flags in by_kind.items()
            for flag in (flags if kind in (INCIDENT, COMMAND) else spread(flags, MOST_OF_A_KIND))
        ]
        return Chapter(self.decisions, sorted(kept, key=lambda flag: (flag.seq, flag.kind)), self.moves)


def spread(items: list[Any], most: int) -> list[Any]:
    """At most so many of them, at equal distances, with the last."""
    count = len(items)
    return items if count <= most else [items[(at + 1) * count // most - 1] for at in range(most)]


def is_decision(folded: Folded) -> bool:
    return isinstance(folded.event, _COMMANDS) or any(True for _ in changed_incidents(folded))


def changed_incidents(folded: Folded) -> Iterator[tuple[Incident | None, Incident]]:
    """The incidents that the event made (None before) or settled."""
    before, after = folded.before.incidents, folded.decision.state.incidents
    for kind, key in folded.decision.changed:
        if kind == "incident" and (incident := after.get(key)) is not None:
            known = before.get(key)
            if known is None or known.outcome != incident.outcome:
                yield known, incident


def _incidents(folded: Folded) -> list[str]:
    """The incidents that the event made, in words."""
    return sorted(
        f"{incident.vertex or 'job'}: {incident.cause}; {incident.decision}"
        for known, incident in changed_incidents(folded)
        if known is None
    )


def _moves(folded: Folded) -> list[PhaseChange]:
    before, after = folded.before.vertices, folded.decision.state.vertices
    found = []
    blamed: dict[str, str] = {}
    for known_incident, incident in changed_incidents(folded):
        if known_incident is None:
            blamed |= dict.fromkeys((incident.vertex, *incident.region), incident.cause)
    for kind, key in sorted(folded.decision.changed):
        if kind != "vertex":
            continue
        known, record = before.get(key), after.get(key)
        if record is None:
            if known is not None and known.phase is not VertexPhase.STOPPED:
                found.append(PhaseChange(folded.row.at, key, known.role, "stopped", ""))
        elif known is None or known.phase is not record.phase or known.incarnation != record.incarnation:
            why = blamed.get(key, record.reason.value)
            found.append(PhaseChange(folded.row.at, key, record.role, record.phase.value, why))
    return found


def _of_command(event: Any) -> tuple[str, str]:
    return COMMAND, command_text(event)


def command_text(event: Any) -> str:
    """Who asked for what, in words."""
    by = f" ({event.by})" if getattr(event, "by", "") else ""
    match event:
        case e.ScaleRequested():
            return f"scale {event.role} to {event.count}{by}"
        case e.DrainRequested():
            return f"drain {event.vertex or event.node}{by}"
        case e.UndrainRequested():
            return f"undrain {event.vertex or event.node}{by}"
        case e.JoinTokenCreated():
            return f"create token {event.name}{by}"
        case e.JoinTokenRevoked():
            return f"revoke token {event.name}{by}"
        case e.StopRequested():
            return f"stop: {event.reason}{by}"
        case e.PauseRequested():
            return f"pause{by}"
        case e.ResumeRequested():
            return f"resume{by}"
        case _:
            return f"go on{by}"


def _of_publish(event: e.WeightsPublished) -> tuple[str, str]:
    return PUBLISH, f"version {event.version} of step {event.step}"


def _of_evaluation(event: e.Evaluated) -> tuple[str, str]:
    accuracy = "" if event.accuracy is None else f": {event.accuracy:.3f} right"
    return EVALUATION, f"{event.set} by version {event.version}{accuracy}"


def _of_checkpoint(event: e.CheckpointCommitted) -> tuple[str, str]:
    return CHECKPOINT, f"step {event.step}"


_FLAGS: dict[type[e.Event], Callable[[Any], tuple[str, str]]] = {
    **dict.fromkeys(_COMMANDS, _of_command),
    e.WeightsPublished: _of_publish,
    e.Evaluated: _of_evaluation,
    e.CheckpointCommitted: _of_checkpoint,
}


def pack_chapter(chapter: Chapter) -> bytes:
    parts = [[list(flag) for flag in chapter.flags], [list(move) for move in chapter.moves]]
    body: bytes = zstandard.ZstdCompressor(level=3).compress(msgpack.packb(parts))
    return body


def unpack_chapter(body: bytes) -> Chapter:
    """The flags and moves of a chapter; its decisions are kept beside it. Raises StoreCorrupt for other bytes."""
    try:
        raw = zstandard.ZstdDecompressor().decompress(body, max_output_size=LARGEST_BYTES)
        flags, moves = msgpack.unpackb(raw)
        return Chapter([], [Flag(*flag) for flag in flags], [PhaseChange(*move) for move in moves])
    except (ValueError, TypeError, zstandard.ZstdError, msgpack.UnpackException) as error:
        raise StoreCorrupt(
            f"A chapter of the job's history is none: {error!r:.200}.",
            hint="It was changed or damaged outside Gyre; it can be made again from the events.",
        ) from error
