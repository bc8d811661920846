"""How the rollout plane is, as plain data: what `GET /v1/status` and the job's status show.

This module must not know how any of it came about, and changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gyre.rollouts.plane.admission import NotAdmitted
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.sessions import AgentSession
from gyre.rollouts.plane.stored_account import account_in
from gyre.rollouts.protocol.frames import Loaded, SampleCounts
from gyre.rollouts.scheduling.fleet import Instance
from gyre.rollouts.scheduling.pools import token_price

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane


def groups_status(groups: OpenGroups) -> dict[str, Any]:
    """Samples, and the account in tokens."""
    return {
        "queued": groups.queued,
        "open_groups": len(groups.requests),
        "account": account_in(groups),
        "samples_quarantined": groups.account.samples_quarantined,
        "samples_given_up": len(groups.given_up),
    }


def underway(groups: OpenGroups, sessions: Iterable[AgentSession], now: float) -> SampleCounts:
    """What becomes of the samples that have not ended, for the trainer."""
    here = [one for one in sessions if one.connection is not None and not one.draining]
    generating = at_engine = 0
    for session in here:
        held = len(groups.instances[session.name].held)
        running = min(held, session.running)
        generating += running
        at_engine += held - running
    waits = groups.queued
    early = min(waits, groups.waiting_for_policy)
    rest = {_queued_for(groups, here, now): waits - early}
    return SampleCounts(
        generating=generating,
        at_engine=at_engine,
        **(rest | {"for_weights": rest.get("for_weights", 0) + early}),
    )


def _queued_for(groups: OpenGroups, here: Sequence[AgentSession], now: float) -> str:
    """What queued samples wait for whose policy is served, as a field of `SampleCounts`."""
    if any(session.not_admitted is None for session in here):
        return "for_place"
    if any(
        groups.instances[session.name].version < 0 and (session.loading is not None or now < session.start_at)
        for session in here
    ):
        return "for_engine"
    away = (NotAdmitted.NO_WINDOW, NotAdmitted.ASLEEP, NotAdmitted.GATHERING)
    if here and all(session.not_admitted in away for session in here):
        return "for_devices"
    return "for_weights" if here else "for_instance"


def instance_status(
    session: AgentSession, instance: Instance, now: float, *, checksum: str
) -> dict[str, Any]:
    """`checksum` is of the version that it acknowledged; "" where that is not known any more. `not_admitted` says why
    it is given nothing; "" where it is admitted."""
    return {
        "instance": session.name,
        "incarnation": session.hello.incarnation,
        "engine": session.hello.engine,
        "node": session.hello.node,
        "pid": session.hello.pid,
        "version": instance.version,
        "checksum": checksum,
        "source": session.source,
        "state": _state(session, instance),
        "not_admitted": str(session.not_admitted or ""),
        "samples": len(instance.held),
        "running": session.running,
        "tokens": instance.generated_tokens,
        "rate_tokens_s": round(session.rate_tokens_s, 1),
        "max_running": instance.max_running,
        "kv_used_tokens": session.used_tokens,
        "kv_tokens": instance.kv_tokens,
        "limits_why": session.limits.why if session.limits is not None else "",
        **_ways(session.loaded),
        "silent_s": round(now - session.heard_at, 2),
    }


def rates_by_role(sessions: Iterable[AgentSession]) -> dict[str, float]:
    """Tokens/s of one instance of each role, of those that generate."""
    found: dict[str, list[float]] = defaultdict(list)
    for session in sessions:
        if session.rate_tokens_s > 0 and (role := session.role):
            found[role].append(session.rate_tokens_s)
    return {role: sum(rates) / len(rates) for role, rates in found.items()}


def pools_status(sessions: Iterable[AgentSession], prices: Mapping[str, float]) -> dict[str, Any]:
    """By role with a price: how many instances are connected, what one costs an hour, and what a million tokens cost
    at the rate of those that generate; None while none does."""
    here = [one for one in sessions if one.connection is not None]
    rates = rates_by_role(here)
    return {
        role: {
            "instances": sum(one.role == role for one in here),
            "price_per_hour": price,
            "rate_tokens_s": round(rates[role], 1) if role in rates else None,
            "price_per_million_tokens": (
                round(token_price(price, rates[role]), 4) if role in rates else None
            ),
        }
        for role, price in prices.items()
        if price
    }


def _ways(loaded: Loaded | None) -> dict[str, str]:
    """How weights come to the instance: into its engine (`loads`: loader, disk, or the engine's start) and over the
    network, and why not otherwise."""
    return {
        "loads": loaded.how if loaded is not None else "",
        "loads_why": loaded.note if loaded is not None else "",
        "transport": loaded.way if loaded is not None else "",
        "codec": loaded.codec if loaded is not None else "",
        "transfer_why": loaded.why if loaded is not None else "",
    }


def _state(session: AgentSession, instance: Instance) -> str:
    if session.connection is None:
        return "cut"
    if session.draining:
        return "draining"
    if session.resting:
        return {"falling": "asleep", "asleep": "asleep", "waking": "waking"}[session.resting]
    if session.loading is not None:
        return "loading"
    return "working" if instance.held else "idle"


def plane_status(plane: Plane) -> dict[str, Any]:
    """All of it, but what fronts know."""
    return {
        "epoch": plane.epoch,
        "version": plane.versions.newest,
        "served_version": plane.groups.served_version,
        **groups_status(plane.groups),
        "refused": plane.refused,
        "local_window": plane.windows.status(plane.now),
        "pools": pools_status(plane.sessions.values(), plane.settings.prices),
        "instances": [
            instance_status(
                session, instance, plane.now, checksum=plane.versions.checksum_of(instance.version)
            )
            for session in plane.sessions.values()
            if (instance := plane.groups.instances.get(session.name)) is not None
        ],
    }
