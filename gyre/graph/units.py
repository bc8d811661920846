"""Units of placement: a role by itself, or collocated roles rank by rank, with their shares of devices; and host
groups, which are units that share machines rank by rank, each on devices of its own.

Invariants:
- *shares fit*: within a bundle, the shares that its vertices take of a device never sum to more than 1, counted in
  whole 1/10,000, which is Ray's unit;
- *partners for good*: which bundles stand beside each other follows from the submitted totals and their numbers alone,
  so that scaling gives nobody another partner.

This module must not know nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gyre.config import JobSpec
from gyre.graph.validate import collocated, collocated_on_hosts

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
    host_group: str = ""
    """The id of the host group that it is one of; empty if it stands for itself."""
    each: int = 1
    """How many of its bundles each rank of the host group has."""

    def beside(self, number: int) -> str:
        """The id of the rank of the host group that its `number`-th bundle belongs to; empty without a group."""
        return f"{self.host_group}-{number // self.each}" if self.host_group else ""

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


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Units whose bundles share machines rank by rank, or one unit that stands for itself. `width` is the devices of
    one rank."""

    units: tuple[Unit, ...]
    ranks: int
    per_node: int | None
    width: int
    spread: bool
    pack: bool
    apart: frozenset[str]

    @property
    def id(self) -> str:
        return self.units[0].host_group or self.units[0].id

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(role for unit in self.units for role in unit.roles)


def host_groups_of(units: Sequence[Unit]) -> list[HostGroup]:
    """All units, those of one host group together, in the order of the first of each."""
    grouped: dict[str, list[Unit]] = {}
    for unit in units:
        grouped.setdefault(unit.host_group or unit.id, []).append(unit)
    groups = []
    for members in grouped.values():
        ranks = members[0].bundles // members[0].each
        counted = next((unit for unit in members if unit.per_node), None)
        groups.append(
            HostGroup(
                units=tuple(members),
                ranks=ranks,
                per_node=counted.per_node // counted.each if counted and counted.per_node else None,
                width=sum(unit.width * unit.each for unit in members),
                spread=any(unit.spread for unit in members),
                pack=any(unit.pack for unit in members),
                apart=frozenset().union(*(unit.apart for unit in members)),
            )
        )
    return groups


def units_of(spec: JobSpec) -> list[Unit]:
    groups = collocated(spec)
    on_hosts = collocated_on_hosts(spec)
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
        beside = next((roles_there for roles_there in on_hosts if name in roles_there), group)
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
                apart=_apart(spec, beside, on_hosts),
                host_group="&".join(beside) if beside is not group else "",
                each=base // min(spec.roles[role].total for role in beside),
            )
        )
    return units


def _apart(spec: JobSpec, beside: Sequence[str], on_hosts: Sequence[Sequence[str]]) -> frozenset[str]:
    """The roles that `separate` keeps apart from any of `beside`, and the roles that share hosts with those."""
    apart: set[str] = set()
    for names in spec.affinity.separate:
        if set(names) & set(beside):
            for other in set(names) - set(beside):
                apart.update(next((roles for roles in on_hosts if other in roles), [other]))
    return frozenset(apart)


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
