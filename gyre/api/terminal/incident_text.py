"""One incident in full, for a terminal: what happened, what was decided, what came of it, and the events around it.

Pure: it prints nothing and reads no clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gyre.api.terminal.formats import duration, local_time, one_line
from gyre.errors import NotFound, nearest
from gyre.master.incident_words import came_to, has_recovered

AROUND_S = 5.0
"""Of the events before an incident and after its end that are shown with it."""
MOST_EVENTS = 40
_BLOCKS = ("traceback", "stack", "stacks", "last_words", "log")
"""Evidence of several lines, which stands below the table, whole."""


def incident_named(incidents: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The incident of this id, the last one of this vertex, or the one of this number, from 1 on. Raises NotFound."""
    for incident in incidents:
        if incident["id"] == name:
            return incident
    of_vertex = [incident for incident in incidents if incident["vertex"] == name]
    if of_vertex:
        return of_vertex[-1]
    if name.isdecimal() and 1 <= int(name) <= len(incidents):
        return incidents[int(name) - 1]
    known = [str(incident["id"]) for incident in incidents]
    raise NotFound(
        f"There is no incident {name!r}; the job has {len(known)}.",
        hint=nearest(name, known) if known else "Nothing has gone wrong so far.",
    )


def facts_of(incident: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Label and value, in the order in which they are asked for."""
    whose = "the job's own code" if incident["user_code"] else ""
    rows = [
        ("incident", str(incident["id"])),
        ("at", local_time(incident["at"])),
        ("vertex", f"{incident['vertex']} (incarnation {incident['incarnation']})"),
        ("cause", str(incident["cause"])),
        ("fault of", whose),
        ("noticed after", duration(incident["detected_after_s"])),
        ("decision", str(incident["decision"])),
        ("restarted", ", ".join(incident["region"])),
        ("outcome", came_to(incident)),
        ("recovered after", duration(incident["recovery_s"]) if has_recovered(incident) else ""),
    ]
    for key, value in incident["evidence"].items():
        if key not in _BLOCKS and value not in ("", None, [], {}):
            rows.append((str(key).replace("_", " "), one_line(value)))
    return [(label, value) for label, value in rows if value]


def blocks_of(incident: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The evidence of several lines: its name and its text."""
    evidence = incident["evidence"]
    return [(key, str(evidence[key]).rstrip()) for key in _BLOCKS if evidence.get(key)]


def events_around(
    incident: Mapping[str, Any], events: Sequence[Mapping[str, Any]]
) -> list[Mapping[str, Any]]:
    """The events from a moment before the incident to a moment after its end."""
    begins = incident["at"] - AROUND_S
    ends = (incident["recovered_at"] or incident["at"]) + AROUND_S
    return [event for event in events if begins <= event["at"] <= ends][:MOST_EVENTS]
