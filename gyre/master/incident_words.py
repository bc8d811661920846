"""What became of an incident, in words: the same on a terminal, on the page and in REST.

A call that is made again, and code of the user's that raised, have not recovered: nothing was repaired, and whether it
goes well the next time is not known when it is decided.

Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Incident = Mapping[str, Any]


@dataclass
class IncidentEnd:
    """What is shown of an incident's end beside its record."""

    recovery_s: float | None = None
    came_to: str = ""
    """The outcome in words: a call that is made again, and the job's own code that raised, have not recovered."""


def has_recovered(incident: Incident) -> bool:
    """Whether something of Gyre's or the machines' was lost and is there again."""
    there = incident.get("recovered_at") is not None
    return there and not is_own_code(incident) and not _is_called_again(incident)


def is_own_code(incident: Incident) -> bool:
    """Whether the job's own code raised."""
    return bool(incident.get("user_code"))


def came_to(incident: Incident) -> str:
    """`recovered`, `open`, `called again`, `restarted`, `scaled away`, …"""
    if incident.get("recovered_at") is None:
        return str(incident["outcome"])
    if _is_called_again(incident):
        return "called again"
    return "restarted" if is_own_code(incident) else "recovered"


def counted(incidents: Sequence[Incident]) -> str:
    """`2 incidents, 1 recovered`, `the job's own code raised 3 times`, or both; empty where there was none."""
    own = sum(map(is_own_code, incidents))
    others = [one for one in incidents if not is_own_code(one)]
    parts = []
    if others:
        recovered = sum(map(has_recovered, others))
        parts.append(f"{len(others)} incident{'' if len(others) == 1 else 's'}, {recovered} recovered")
    if own:
        parts.append(f"the job's own code raised {'once' if own == 1 else f'{own} times'}")
    return ", ".join(parts)


def _is_called_again(incident: Incident) -> bool:
    """Whether it was over when it was decided: then nothing is repaired, and a call is made again."""
    return str(incident.get("scope")) == "retry" and incident.get("recovered_at") == incident.get("at")
