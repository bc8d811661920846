"""What a job reserves, and what that costs an hour, by its spec and how many vertices each role has: pure.

A pool with a price of its own costs that for each of its instances; of the other roles each device costs
`device_price_per_hour`. Roles that share devices reserve them once.
"""

from __future__ import annotations

from collections.abc import Mapping

from gyre.config import JobSpec
from gyre.graph.rollout_roles import local_roles
from gyre.graph.validate import collocated


def devices_of(spec: JobSpec, counts: Mapping[str, int]) -> float:
    """The devices that the roles reserve; `counts` are the vertices of each, the submitted number where it has none."""
    return _devices(spec, counts, set(spec.roles))


def rate_per_hour(spec: JobSpec, counts: Mapping[str, int]) -> float | None:
    """Price of an hour, in the currency of the job's prices; None where it has none."""
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
