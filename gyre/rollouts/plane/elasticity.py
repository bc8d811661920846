"""How many instances there should be: what the elasticity policy is told of the plane, and its advice.

This module must not know how instances are started.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from gyre.rollouts.plane.admission import NotAdmitted
from gyre.rollouts.plane.autoscaler import Fleet
from gyre.rollouts.plane.links import AgentLink
from gyre.rollouts.plane.status import rates_by_role

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane


def look(plane: Plane, cores_busy: float | None) -> None:
    """Ask the policy how many instances there should be."""
    if not plane.settings.pools:
        return  # people decide
    here = [s for s in plane.links.values() if not s.draining and not s.hello.local]
    serving = [
        (link, one)
        for link in here
        if (one := plane.groups.instances.get(link.name)) and one.version >= 0
        if link.not_admitted is not NotAdmitted.SPARE  # it is nobody's help yet
    ]
    placed = Counter(link.role for link, _ in serving if link.role in plane.settings.pools)
    spares = sum(link.is_spare for link, _ in serving)  # they do what missing ones would
    placing = plane.groups.placement
    fleet = Fleet(
        placed=placed,
        others=len(serving) - placed.total() - spares,
        serving=len(serving),
        busy=sum(bool(one.held) for _, one in serving),
        queued_tokens=placing.queue.tokens,
        rate_tokens_s=placing.load.rate_tokens_s,
        cores_busy=cores_busy if _all_here(plane, here) else None,
        rates=rates_by_role(here),
    )
    for advice in plane.autoscaler.look(fleet, plane.now, window_open=plane.windows.is_open):
        told = {"role": advice.role, "seen": advice.seen, "count": advice.count, "reason": advice.reason}
        plane.report_event("ScaleAdvised", {**told, "observed": asdict(advice.observed)})


def _all_here(plane: Plane, links: list[AgentLink]) -> bool:
    """Whether all engines compute on this machine's cores."""
    return all(link.hello.node == plane.node for link in links)
