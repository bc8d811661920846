"""The coordinator's invariants, checked at every decision that a test drives or that a master's journal holds.

A `Witness` sees each decision of one history, in order, and raises `InvariantBroken` with the invariant's name and
the event at the first one that breaks a rule. It compares states by identity first, so it costs little.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.config import JOIN_TOKEN, Budget, JobSpec
from gyre.failover import Decision, JobState
from gyre.failover import commands as c
from gyre.failover import events as e
from gyre.failover.draft import InvariantBroken
from gyre.failover.handlers.full_disk import AFTERMATH_S, SAID
from gyre.failover.state import TRAINING, VERTEX_TRANSITIONS, RowKey, VertexPhase


class Witness:
    """Remembers which incarnations were started and which phase changes were seen."""

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._asked: set[tuple[str, int]] = set()
        self.transitions: set[tuple[VertexPhase, VertexPhase]] = set()

    def check(self, before: JobState, event: e.Event, decision: Decision, now: float) -> None:
        """Raises InvariantBroken."""
        changed = differing(before, decision.state)
        for name, broken in (
            ("old news is no news", self._old_news(before, event, decision)),
            ("one repair at a time", self._one_repair(before, decision)),
            ("the version never falls", self._falls(before, decision.state)),
            ("ended is ended", self._wakes(before, event, decision)),
            ("every repair is paid for", self._unpaid(before, decision.state, changed, now)),
            ("no fault outlives its attempts", self._outlived(decision.state)),
            ("changed is what differs", sorted(changed ^ decision.changed)),
            ("phases follow the table", self._off_the_table(before, event, decision.state, changed)),
        ):
            if broken:
                raise InvariantBroken(f"{name}: {broken} at {event}")

    @staticmethod
    def _wakes(before: JobState, event: e.Event, decision: Decision) -> bool:
        return before.job.phase.ended and bool(decision.commands) and not isinstance(event, e.JobContinued)

    @staticmethod
    def _old_news(before: JobState, event: e.Event, decision: Decision) -> str:
        named = named_incarnation(event)
        if named is None or (decision.state == before and not decision.commands):
            return ""
        record = before.vertices.get(named[0])
        if record is not None and record.incarnation == named[1]:
            return ""
        return f"{named} is not the current incarnation of {record}"

    def _one_repair(self, before: JobState, decision: Decision) -> str:
        for vertex, record in decision.state.vertices.items():
            old = before.vertices.get(vertex)
            if old is not None and not 0 <= record.incarnation - old.incarnation <= 1:
                return f"{vertex} went from incarnation {old.incarnation} to {record.incarnation}"
        for command in decision.commands:
            if not isinstance(command, c.StartRegion):
                continue
            for pair in command.vertices.items():
                if pair in self._asked:
                    return f"{pair} is started twice"
                self._asked.add(pair)
                record = decision.state.vertices[pair[0]]
                if (record.incarnation, record.phase) != (pair[1], VertexPhase.STARTING):
                    return f"{pair} is started, and the state says {record}"
        return ""

    @staticmethod
    def _falls(before: JobState, after: JobState) -> str:
        for name in ("version", "step", "checkpoint_step", "epoch", "serial"):
            old, new = getattr(before.job, name), getattr(after.job, name)
            if new < old:
                return f"{name} fell from {old} to {new}"
        return ""

    def _unpaid(self, before: JobState, after: JobState, changed: set[RowKey], now: float) -> str:
        paid = [
            name
            for kind, name in changed
            if kind == "budget" and after.uses[name] and after.uses[name] != before.uses.get(name)
        ]  # else it was given back, or there was progress
        restarted = [
            name
            for kind, name in changed
            if kind == "vertex"
            and name in before.vertices
            and name in after.vertices
            and after.vertices[name].restarts > before.vertices[name].restarts
        ]
        at = before.job.disk_had_room_at
        if before.job.full_disks or (at is not None and now - at < AFTERMATH_S):
            return f"{paid} pays for a full disk" if restarted and paid else ""
        if restarted and len(paid) != 1:
            return f"{restarted} restart and {paid or 'no budget'} pays"
        for key in paid:
            budget = self._budget(key)
            uses = [at for at in after.uses[key] if now - at < budget.window_s]
            if not uses or uses[-1] != now or len(uses) > budget.max:
                return f"{key} is used {len(uses)} times of {budget.max}"
        return ""

    def _outlived(self, after: JobState) -> str:
        for key, attempts in after.attempts.items():
            most = self._budget(key).most_attempts
            if self._spec.recipe is None and key.startswith(("vertex:", "region:")):
                most = max(most, self._spec.failover.silent_attempts)
            if attempts > most:
                return f"{key} had {attempts} attempts of {most}"
        return ""

    def _budget(self, key: str) -> Budget:
        if key.startswith("disk:"):
            return SAID
        found: Budget = getattr(self._spec.failover, key.partition(":")[0])
        return found

    def _off_the_table(self, before: JobState, event: e.Event, after: JobState, changed: set[RowKey]) -> str:
        for kind, name in changed:
            if kind != "vertex" or name not in before.vertices or name not in after.vertices:
                continue
            old, new = before.vertices[name], after.vertices[name]
            if old.phase is new.phase and old.incarnation == new.incarnation:
                continue
            pair = (old.phase, new.phase)
            if isinstance(event, e.ClusterLost) and new.phase is VertexPhase.STOPPED:
                pair = (VertexPhase.STOPPING, new.phase)  # the one decision that goes two steps at once
            self.transitions.add(pair)
            if pair not in VERTEX_TRANSITIONS:
                return f"{name} went from {old.phase} to {new.phase}"
        return ""


def named_incarnation(event: e.Event) -> tuple[str, int] | None:
    """The incarnation that an event is about: the reporter's for what it reports."""
    if isinstance(event, e.ReportedEvent):
        return (e.reporter_of(event), event.incarnation) if event.report else None
    if isinstance(event, e.VertexStarted | e.VertexStartFailed | e.VertexLost | e.VertexStopped):
        return event.vertex, event.incarnation
    return None


def differing(before: JobState, after: JobState) -> set[RowKey]:
    """The keys of the snapshot rows that differ between two states."""
    out: set[RowKey] = set()
    if before.job != after.job:
        out.add(("job", "job"))
    if before.training != after.training:
        out.add((TRAINING, TRAINING))
    tables: tuple[tuple[str, Mapping[str, Any], Mapping[str, Any]], ...] = (
        ("vertex", before.vertices, after.vertices),
        ("incident", before.incidents, after.incidents),
        ("budget", before.uses, after.uses),
        ("machine", before.machines, after.machines),
        (JOIN_TOKEN, before.tokens, after.tokens),
        ("evaluation", before.evaluations, after.evaluations),
        ("warning", before.warnings, after.warnings),
        ("budget", before.attempts, after.attempts),
    )
    for kind, old, new in tables:
        if old is new:
            continue
        out |= {(kind, name) for name in old if name not in new}
        for name, row in new.items():
            was = old.get(name)
            if was is not row and was != row:
                out.add((kind, name))
    return out
