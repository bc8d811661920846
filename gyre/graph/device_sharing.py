"""Which roles stand on a role's devices beside it, as plain data for whoever computes there: pure.

This module must not know how much memory anybody takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypedDict

from gyre.config import JobSpec
from gyre.graph.rollout_roles import is_instance, local_roles, rollouts_of
from gyre.graph.validate import collocated


class Neighbour(TypedDict):
    """Another role on a role's devices: its class, and how many vertices it has. Of instances also what their `engine`
    is, with what arguments, and whether it generates in windows; `engine` is "" of every other role."""

    role: str
    module: str
    name: str
    total: int
    engine: str
    engine_args: list[str]
    local: bool


def neighbours_of(spec: JobSpec, role: str, counts: Mapping[str, int] | None = None) -> list[Neighbour]:
    """Of a compiled job, in which roles have as many vertices as `counts` says, or else as were submitted."""
    present = counts or {}
    group = next((group for group in collocated(spec) if role in group), [])
    found: list[Neighbour] = []
    for other in group:
        entrypoint = spec.roles[other].entrypoint
        if other == role or entrypoint is None or not spec.roles[other].resources.accelerator:
            continue
        own, instance = rollouts_of(spec, other), is_instance(spec, other)
        found.append(
            Neighbour(
                role=other,
                module=entrypoint.module,
                name=entrypoint.name,
                total=present.get(other, spec.roles[other].total),
                engine=own.engine if instance else "",
                engine_args=list(own.engine_args) if instance else [],
                local=other in local_roles(spec),
            )
        )
    return found
