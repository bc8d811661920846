"""Roles of the rollout plane: which of them scale, and which stand on the trainer's devices."""

from __future__ import annotations

from typing import Any

from gyre.config import LOCAL_ROLLOUT, JobSpec
from gyre.graph.recipes import ROLLOUT_INSTANCE
from gyre.graph.validate import collocated

ROLLOUT = "rollout"


def elastic_of(spec: JobSpec) -> dict[str, Any] | None:
    """Returns the rollout role's `elastic` section as data, for the rollout manager; None if it has none."""
    role = spec.roles.get(ROLLOUT)
    return role.elastic.model_dump(mode="json") if role is not None and role.elastic is not None else None


def is_instance(spec: JobSpec, role: str) -> bool:
    """Whether the role's vertices are instances of the rollout plane."""
    found = spec.roles.get(role)
    return found is not None and found.entrypoint == ROLLOUT_INSTANCE


def local_roles(spec: JobSpec) -> frozenset[str]:
    """Returns the roles whose instances share the trainer's devices: those collocated with the actor."""
    found = {LOCAL_ROLLOUT} & spec.roles.keys()
    for group in collocated(spec):
        if "actor" in group:
            found |= {role for role in group if spec.roles[role].entrypoint == ROLLOUT_INSTANCE}
    return frozenset(found)
