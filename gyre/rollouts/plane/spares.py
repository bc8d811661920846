"""Spares: instances that are ready and get no samples, until one of those that Gyre placed does not serve.

Who serves is computed from the present state whenever admission is, and nobody stores it: a manager that has just
started finds the same answer, whatever died meanwhile.

Invariants:
- *as many serve as are wanted*: of the instances that Gyre placed at least as many serve as their roles are to have, as
  long as so many can;
- *a spare waits*: a spare serves only while an instance of another role is wanted and cannot serve;
- *whoever has begun goes on*: of several spares those serve first that have samples.

This module must not know about sockets, samples, policies, or who counts what is wanted.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

from gyre.rollouts.plane.admission import NotAdmitted

_CANNOT_SERVE = frozenset(
    (
        NotAdmitted.SUPERSEDED,
        NotAdmitted.DISCONNECTED,
        NotAdmitted.DRAINING,
        NotAdmitted.NO_POLICY,
        NotAdmitted.POLICY_REFUSED,
    )
)
"""Why an instance is one less. The other reasons pass within moments: each new version brings them to all instances."""


class PlacedInstance(NamedTuple):
    """An instance that Gyre placed, as the choice of spares sees it."""

    role: str
    rank: int
    not_admitted: NotAdmitted | None
    """Why it would get no samples, were it no spare."""
    is_busy: bool
    """Whether it has samples."""

    @property
    def name(self) -> str:
        return f"{self.role}-{self.rank}"

    @property
    def can_serve(self) -> bool:
        return self.not_admitted not in _CANNOT_SERVE


class Substitution(NamedTuple):
    """Which spares serve, and the names of the instances that are wanted and cannot."""

    serving: frozenset[str]
    missing: tuple[str, ...]


def substitute(
    instances: Collection[PlacedInstance], wanted: Mapping[str, int], spare_role: str
) -> Substitution:
    """Choose the spares that serve. `instances` are those that are known, `wanted` is how many of each role there are
    to be; what it says of `spare_role` does not matter."""
    able: dict[str, set[int]] = {}
    for one in instances:
        if one.can_serve:
            able.setdefault(one.role, set()).add(one.rank)
    missing: list[str] = []
    for role, count in sorted(wanted.items()):
        if role == spare_role:
            continue
        here = able.get(role, set())
        absent = [rank for rank in range(count) if rank not in here]
        # A rank beyond the wanted ones is about to leave, and does their work until it does.
        missing += [f"{role}-{rank}" for rank in absent[: max(0, count - len(here))]]
    ready = [one for one in instances if one.role == spare_role and one.can_serve]
    ready.sort(key=lambda one: (not one.is_busy, one.rank))
    return Substitution(frozenset(one.name for one in ready[: len(missing)]), tuple(missing))
