"""What the roles of the rollout plane are to each other, as the job's graph has it."""

from __future__ import annotations

from typing import Any

from gyre.config import JobSpec

ROLLOUT = "rollout"


def elastic_of(spec: JobSpec) -> dict[str, Any] | None:
    """The rollout role's `elastic` section as data, for the rollout manager; None where it has none."""
    role = spec.roles.get(ROLLOUT)
    return role.elastic.model_dump(mode="json") if role is not None and role.elastic is not None else None
