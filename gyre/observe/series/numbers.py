"""The numbers of a job at one moment, by source, from what its processes last reported.

Sources are `vertex/<id>`, `instance/<name>`, `trainer`, `plane` and `master`. A number in nested data has its path
as its name, with slashes: `times/actor/training`.

Invariants:
- *numbers only*: what is no finite number is left out, and a state becomes the number 1 under its own name
  (`state/working`), so that a mean over time is the share of time;
- *bounded*: a source has at most `MOST_NUMBERS` numbers, whatever a workload of the user's own reports.

Pure. This module must not know when a moment is, or where the numbers go.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeGuard

from gyre.config import TRAINER
from gyre.failover import JobState, VertexPhase

Numbers = dict[str, dict[str, float]]
"""By source and name."""

MOST_NUMBERS = 200
"""A trainer of a recipe has some sixty. More come of a `report_progress` with data in it, which nobody will plot."""

LONGEST_NAME = 120
DEEPEST = 4

TRAINER_VERTEX = f"{TRAINER}-0"
_PLANE_ROLE = "rollout_manager"


def numbers_of(
    state: JobState, telemetry: Mapping[str, Mapping[str, Any]], *, master: Mapping[str, float] | None = None
) -> Numbers:
    """`telemetry` has of each running vertex what it last reported: `version`, `busy`, `fields`; of the trainer also
    when it has ended with its job, for how the job spent its time is read from the last row. `master` are numbers that
    the master has of itself."""
    found: Numbers = {}
    for vertex in state.vertices.values():
        numbers: dict[str, float] = {f"phase/{vertex.phase.value}": 1.0, "restarts": float(vertex.restarts)}
        told = telemetry.get(vertex.id, {})
        fields = told.get("fields")
        fields = fields if isinstance(fields, Mapping) else {}
        runs = vertex.phase is VertexPhase.RUNNING
        if vertex.id == TRAINER_VERTEX and fields and (runs or state.job.phase.ended):
            found["trainer"] = flat(fields)
        if told and runs:
            if is_number(version := told.get("version")):
                numbers["version"] = float(version)
            busy = told.get("busy")
            numbers["busy"] = float(bool(busy))
            if isinstance(busy, str) and busy:
                numbers[f"in/{busy[:LONGEST_NAME]}"] = 1.0
            if vertex.role == _PLANE_ROLE and isinstance(health := fields.get("health"), Mapping):
                _plane(health, found)
            elif vertex.id != TRAINER_VERTEX:
                numbers = flat(fields, numbers)
        found[f"vertex/{vertex.id}"] = numbers
    found["master"] = _of_master(state) | dict(master or {})
    return found


def _plane(health: Mapping[str, Any], found: Numbers) -> None:
    """The rollout plane's own numbers, and those of each instance."""
    instances = health.get("instances")
    found["plane"] = flat({key: value for key, value in health.items() if key != "instances"})
    for one in instances if isinstance(instances, Sequence) else ():
        if not isinstance(one, Mapping) or not isinstance(name := one.get("instance"), str):
            continue
        numbers = flat({key: value for key, value in one.items() if key not in ("pid", "incarnation")})
        if isinstance(doing := one.get("state"), str):
            numbers[f"state/{doing[:LONGEST_NAME]}"] = 1.0
        found[f"instance/{name}"] = numbers


def _of_master(state: JobState) -> dict[str, float]:
    phases = [vertex.phase for vertex in state.vertices.values()]
    return {
        **{f"vertices/{phase.value}": float(phases.count(phase)) for phase in VertexPhase},
        "incidents/open": float(sum(one.outcome == "open" for one in state.incidents.values())),
        f"phase/{state.job.phase.value}": 1.0,
        "epoch": float(state.job.epoch),
        "step": float(state.job.step),
        "version": float(state.job.version),
    }


def flat(data: Mapping[str, Any], into: dict[str, float] | None = None) -> dict[str, float]:
    """The numbers in nested mappings by their paths, with what is in `into`; at most `MOST_NUMBERS`."""
    into = {} if into is None else into
    for name, value in _leaves(data, "", DEEPEST):
        if len(into) >= MOST_NUMBERS:
            break
        into.setdefault(name, value)
    return into


def _leaves(data: Mapping[str, Any], path: str, depth: int) -> Iterator[tuple[str, float]]:
    for key, value in data.items():
        name = f"{path}{key}"[:LONGEST_NAME]
        if isinstance(value, Mapping):
            if depth > 1:
                yield from _leaves(value, f"{name}/", depth - 1)
        elif is_number(value):
            yield name, float(value)


def is_number(value: object) -> TypeGuard[int | float]:
    """Whether it is a finite number. A truth value is none: it says nothing to a curve."""
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and abs(value) < 2.0**1000  # an int may be beyond any float
        and math.isfinite(value)
    )
