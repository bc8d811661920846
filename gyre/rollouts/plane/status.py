"""How the rollout plane is, as plain data: what `GET /v1/status` and the job's status show.

This module must not know how any of it came about, and changes nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gyre.rollouts.plane.admission import NotAdmitted
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.links import AgentLink
from gyre.rollouts.plane.reported import EngineStatus, PoolStatus
from gyre.rollouts.plane.stored_account import account_in
from gyre.rollouts.protocol.frames import SampleCounts
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


def underway(groups: OpenGroups, links: Iterable[AgentLink], now: float) -> SampleCounts:
    """What becomes of the samples that have not ended, for the trainer."""
    here = [one for one in links if one.connection is not None and not one.draining]
    generating = at_engine = 0
    for link in here:
        held = len(groups.instances[link.name].held)
        running = min(held, link.running)
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


def _queued_for(groups: OpenGroups, here: Sequence[AgentLink], now: float) -> str:
    """What queued samples wait for whose policy is served, as a field of `SampleCounts`."""
    if any(link.not_admitted is None for link in here):
        return "for_place"
    if any(
        groups.instances[link.name].version < 0 and (link.loading is not None or now < link.start_at)
        for link in here
    ):
        return "for_engine"
    away = (NotAdmitted.NO_WINDOW, NotAdmitted.ASLEEP, NotAdmitted.GATHERING)
    if here and all(link.not_admitted in away for link in here):
        return "for_devices"
    return "for_weights" if here else "for_instance"


def instance_status(link: AgentLink, instance: Instance, now: float, *, checksum: str) -> dict[str, Any]:
    """An `EngineStatus`; `checksum` is of the version that the instance acknowledged."""
    status = EngineStatus(
        instance=link.name,
        incarnation=link.hello.incarnation,
        engine=link.hello.engine,
        node=link.hello.node,
        pid=link.hello.pid,
        version=instance.version,
        checksum=checksum,
        source=link.source,
        state=_state(link, instance),
        not_admitted=str(link.not_admitted or ""),
        samples=len(instance.held),
        running=link.running,
        tokens=instance.generated_tokens,
        rate_tokens_s=round(link.rate_tokens_s, 1),
        max_running=instance.max_running,
        kv_used_tokens=link.used_tokens,
        kv_tokens=instance.kv_tokens,
        limits_why=link.limits.why if link.limits is not None else "",
        silent_s=round(now - link.heard_at, 2),
    )
    if (loaded := link.loaded) is not None:
        status.loads, status.loads_why = loaded.how, loaded.note
        status.transport, status.codec, status.transfer_why = loaded.way, loaded.codec, loaded.why
    return vars(status)


def rates_by_role(links: Iterable[AgentLink]) -> dict[str, float]:
    """Tokens/s of one instance of each role, of those that generate."""
    found: dict[str, list[float]] = defaultdict(list)
    for link in links:
        if link.rate_tokens_s > 0 and (role := link.role):
            found[role].append(link.rate_tokens_s)
    return {role: sum(rates) / len(rates) for role, rates in found.items()}


def pools_status(links: Iterable[AgentLink], prices: Mapping[str, float]) -> dict[str, Any]:
    """The `PoolStatus` of each role with a price, by its name; its instances are those that are connected."""
    here = [one for one in links if one.connection is not None]
    rates = rates_by_role(here)
    return {
        role: vars(
            PoolStatus(
                instances=sum(one.role == role for one in here),
                price_per_hour=price,
                rate_tokens_s=round(rates[role], 1) if role in rates else None,
                price_per_million_tokens=round(token_price(price, rates[role]), 4) if role in rates else None,
            )
        )
        for role, price in prices.items()
        if price
    }


def _state(link: AgentLink, instance: Instance) -> str:
    if link.connection is None:
        return "cut"
    if link.draining:
        return "draining"
    if link.resting:
        return {"falling": "asleep", "asleep": "asleep", "waking": "waking"}[link.resting]
    if link.loading is not None:
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
        "pools": pools_status(plane.links.values(), plane.settings.prices),
        "instances": [
            instance_status(link, instance, plane.now, checksum=plane.versions.checksum_of(instance.version))
            for link in plane.links.values()
            if (instance := plane.groups.instances.get(link.name)) is not None
        ],
    }
