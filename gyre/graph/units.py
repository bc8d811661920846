"""Units of placement: a role by itself, or collocated roles rank by rank, with their shares of devices.

Invariant: *shares fit*: within a bundle, the shares that its vertices take of a device never sum to more than 1,
counted in whole 1/10,000, which is Ray's unit. This module must not know nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gyre.config import JobSpec
from gyre.graph.validate import collocated

SHARE = 10_000
"""One device, counted in the smallest share that Ray can account for."""


@dataclass(frozen=True, slots=True)
class Member:
    """A role's part of a bundle: `count` vertices of it, each wanting `wanted` and given `share` of the devices."""

    role: str
    count: int
    wanted: int
    share: int
    cpu: float
    memory_bytes: int
    custom: Mapping[str, float]
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Unit:
    """Roles that are placed together: one role, or collocated ones. `width` is the devices of one bundle."""

    members: tuple[Member, ...]
    bundles: int
    per_node: int | None
    width: int
    gang: bool
    elastic: bool
    spread: bool
    pack: bool
    apart: frozenset[str]
    """Roles that must not be on the same node."""

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(member.role for member in self.members)

    @property
    def id(self) -> str:
        return "+".join(self.roles)

    @property
    def custom(self) -> dict[str, float]:
        """What one bundle reserves of the user's own resources."""
        out: dict[str, float] = {}
        for member in self.members:
            for name, amount in member.custom.items():
                out[name] = round(out.get(name, 0.0) + amount * member.count, 6)
        return out

    @property
    def labels(self) -> dict[str, str]:
        """The labels that a bundle's machine must have."""
        return {name: value for member in self.members for name, value in member.labels.items()}

    @property
    def single(self) -> bool:
        """Each bundle is a sub-graph of its own: it is started, replaced and scaled without touching the others."""
        return not self.gang


def units_of(spec: JobSpec) -> list[Unit]:
    groups = collocated(spec)
    affinity = spec.affinity
    units = []
    for name in spec.roles:
        group = next((group for group in groups if name in group), [name])
        if group[0] != name:
            continue
        roles = {role: spec.roles[role] for role in group}
        base = min(role.total for role in roles.values())
        counts = {role: found.total // base for role, found in roles.items()}
        wanted = {role: round(found.resources.accelerator * SHARE) for role, found in roles.items()}
        width, shares = _shares(counts, wanted)
        members = tuple(
            Member(
                role,
                counts[role],
                wanted[role],
                shares[role],
                found.resources.cpu,
                found.resources.memory_bytes,
                found.resources.custom,
                found.resources.labels,
            )
            for role, found in roles.items()
        )
        nodes = next((found.total // found.per_node for found in roles.values() if found.per_node), None)
        units.append(
            Unit(
                members=members,
                bundles=base,
                per_node=base // nodes if nodes else None,
                width=width,
                gang=any(found.gang for found in roles.values()),
                elastic=any(found.elastic for found in roles.values()),
                spread=any(role in affinity.spread for role in group),
                pack=any(role in affinity.pack for role in group),
                apart=frozenset(
                    other
                    for names in affinity.separate
                    if any(role in names for role in group)
                    for other in names
                    if other not in group
                ),
            )
        )
    return units


def _shares(counts: dict[str, int], wanted: dict[str, int]) -> tuple[int, dict[str, int]]:
    """The devices of one bundle, and the share of one vertex of each role, in 1/10,000 of a device.

    If the shares asked for fit on one device together, they stay. Otherwise a bundle is as wide as its widest role
    and each role has an equal part of it, rounded down; above one device Ray wants whole ones.
    """
    total = sum(counts[role] * amount for role, amount in wanted.items())
    takers = sum(1 for amount in wanted.values() if amount)
    if total <= SHARE:
        return total, dict(wanted)
    width = max(counts[role] * amount for role, amount in wanted.items())
    width = -(-width // SHARE) * SHARE
    if takers <= 1:
        return width, dict(wanted)
    shares = {}
    for role, amount in wanted.items():
        share = amount // takers
        shares[role] = share // SHARE * SHARE if share > SHARE else share
    return width, shares
