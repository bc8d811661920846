"""Devices by a job's spec: which roles stand on a role's devices beside it, as plain data for whoever computes there;
what the job reserves, and what that costs an hour. Pure.

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


def devices_of(spec: JobSpec, counts: Mapping[str, int]) -> float:
    """The devices that the roles reserve; `counts` are the vertices of each, the submitted number where it has none."""
    return _devices(spec, counts, set(spec.roles))


def rate_per_hour(spec: JobSpec, counts: Mapping[str, int]) -> float | None:
    """Price of an hour, in the currency of the job's prices; None where it has none.

    A pool with a price of its own costs that for each of its instances; of the other roles each device costs
    `device_price_per_hour`. Roles that share devices reserve them once.
    """
    pools = {
        name: role.pool.price_per_hour
        for name, role in spec.roles.items()
        if role.pool is not None and role.pool.price_per_hour
    }
    if not pools and not spec.device_price_per_hour:
        return None
    rate = sum(price * _count(spec, counts, name) for name, price in pools.items())
    return rate + spec.device_price_per_hour * _devices(spec, counts, spec.roles.keys() - pools.keys())


def _devices(spec: JobSpec, counts: Mapping[str, int], roles: set[str]) -> float:
    local = local_roles(spec)
    shared = [set(group) & roles for group in collocated(spec)]
    alone = [{name} for name in roles if not any(name in group for group in shared)]
    return sum(
        max(
            (
                spec.roles[name].resources.accelerator * _count(spec, counts, name)
                for name in group
                if name not in local
            ),
            default=0.0,
        )
        for group in (*shared, *alone)
    )


def _count(spec: JobSpec, counts: Mapping[str, int], role: str) -> int:
    return counts.get(role, spec.roles[role].total)
