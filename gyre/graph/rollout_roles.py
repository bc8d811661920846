"""Roles of the rollout plane: pools of instances, what their engines are, and which stand on the trainer's devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gyre.config import LOCAL_ROLLOUT, JobSpec, PoolSpec, RolloutsSpec
from gyre.errors import GraphError
from gyre.graph.recipes import ROLLOUT_INSTANCE
from gyre.graph.validate import collocated

ROLLOUT = "rollout"


def pool_role(pool: str) -> str:
    """The role of a pool of this name."""
    return f"{ROLLOUT}_{pool}"


def pools_of(spec: JobSpec, counts: Mapping[str, int] | None = None) -> dict[str, dict[str, Any]]:
    """By role, the instances that stand on machines of their own, for the rollout manager: `count`, which is that of
    `counts` or else the submitted one, `elastic` as data, None where it has none, `price_per_hour`, `engine`, and
    `stall_timeout_s`."""
    local, present = local_roles(spec), counts or {}
    return {
        name: {
            "count": present.get(name, role.total),
            "elastic": role.elastic.model_dump(mode="json") if role.elastic is not None else None,
            "price_per_hour": (role.pool or PoolSpec()).price_per_hour,
            "engine": rollouts_of(spec, name).engine,
            "stall_timeout_s": role.stall_timeout_s,
        }
        for name, role in spec.roles.items()
        if is_instance(spec, name) and name not in local
    }


def rollouts_of(spec: JobSpec, role: str) -> RolloutsSpec:
    """The job's `rollouts` section as the instances of this role have it."""
    found = spec.roles.get(role)
    return found.pool.over(spec.rollouts) if found is not None and found.pool is not None else spec.rollouts


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


def check_context(spec: JobSpec, positions: int, what: str) -> None:
    """Raises GraphError if an engine is to read more tokens than the model has `positions`, which `what` says."""
    for role in spec.roles:
        length = rollouts_of(spec, role).context_length
        if is_instance(spec, role) and length is not None and length > positions:
            pool = spec.roles[role].pool
            own = pool is not None and pool.context_length is not None
            raise GraphError(
                f"{f'roles.{role}.pool' if own else 'rollouts'}.context_length: {length} given, but the model has "
                f"{positions} positions ({what}).",
                hint="Leave it out: then it is what the model has.",
            )
