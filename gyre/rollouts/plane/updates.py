"""The policy version that each instance should have, and the sources that it can fetch it from.

Invariants:
- *published means durable*, *pinned waits*: see `gyre.rollouts.plane.versions`, which says what may be served;
- *the newest is enough*: an instance that is still fetching an older version goes on with the newer one; a local one
  loads only within a window, and fetches ahead before;
- *told whether it is served*: a version that every instance refused is told once, and again when one is served after
  that; who asks hears by whom each version is served, and why not;
- *not for ever*: a version that an instance cannot load is told again after ever longer pauses, and so is any version
  to one whose engine does not start.

This module must not know about sockets, samples or how a version is fetched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from gyre.rollouts.plane import placement
from gyre.rollouts.plane.instructions import Commit
from gyre.rollouts.plane.links import AgentLink, RefusedVersion
from gyre.rollouts.protocol.frames import Publish, Weights

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane

RELOAD_FIRST_S, RELOAD_MAX_S = 0.5, 60.0
"""Pause before an instance should load a version again that it could not load, doubled each time. Each try costs a
row in the journal, and what failed often will most likely fail again."""

START_FIRST_S, START_MAX_S = 2.0, 60.0
"""Pause before an engine that did not start is started again, doubled each time. What stood in its way, such as memory
of the device that a dying process still holds, may be gone by then."""

REFUSALS_TOLD = 8
"""Instances whose words stand in the event of a version that none serves."""

ERROR_CHARS = 2000
"""Kept of what an instance says that could not load a version."""

SOURCES_TOLD = 16
"""Of those who have a version; more find each other."""


@dataclass(slots=True)
class Service:
    """Which versions people were told of, as served or not."""

    not_served: int = -1
    """The version that was last told of as served by nobody."""
    is_news: bool = True
    """Whether the next version that is served is to be told: one that nobody served was told of, or an earlier
    manager may have told it."""


def promote(plane: Plane) -> None:
    """Send out the newest version that is in the ledger and that may be served."""
    served = plane.versions.promote(plane.groups.pinned_version)
    if served is None:
        return
    plane.commit(Commit.SOON)
    plane.groups.promote(served.version)
    told = with_sources(plane, served)
    for link in plane.links.values():
        update(plane, link, told)
    placement.dispatch_soon(plane)


def update(plane: Plane, link: AgentLink, told: Weights | None = None) -> None:
    """Send the served version, unless the instance has it or is loading it. One that it is still fetching is not
    finished then: the agent goes on with the newer. `told` is the version with its sources, from a caller that
    sends it to many: finding them means a look at every instance."""
    served = plane.versions.served
    if served is None or link.connection is None or link.draining:
        return
    if link.loading is not None and link.loading >= served.version:
        return
    if plane.groups.instances[link.name].version == served.version:
        return
    if link.waits_to_reload(served.version, plane.now):
        return
    if plane.windows.may_load(link):
        link.loading, link.loading_since = served.version, plane.now
        plane.groups.instances[link.name].loaded.tell(served.version)
        plane.send(link.connection, told or with_sources(plane, served))
        placement.dispatch_soon(plane)
    elif link.loading is None and link.told_ahead != served.version:
        # It loads it when its window opens; that it has it by then costs no memory of the trainer's devices.
        # What it is loading it finishes first: the window's end waits for that.
        link.told_ahead = served.version
        plane.send(link.connection, replace(told or with_sources(plane, served), ahead=True))


def refused(plane: Plane, link: AgentLink, version: int, error: str = "") -> None:
    """The instance could not load the version, for the reason `error`: it tries again after a pause, each time a
    longer one."""
    link.loading = None
    count = link.refused[version].count + 1 if version in link.refused else 1
    pause_s = min(RELOAD_MAX_S, RELOAD_FIRST_S * 2 ** (count - 1))
    link.refused = {version: RefusedVersion(count, plane.now + pause_s, error[:ERROR_CHARS])}


def report_service(plane: Plane) -> None:
    """Tell of the version that instances should have, if every one of them has refused it; and of the first that is
    served after that."""
    served = plane.versions.served
    if served is None:
        return
    here = _here(plane)
    if any(_version_of(plane, link) == served.version for link in here):
        if plane.service.is_news:
            plane.report_event("PolicyServed", {"version": served.version})
        plane.service.is_news = False
    elif (
        served.version != plane.service.not_served
        and here
        and all(served.version in one.refused for one in here)
    ):
        plane.service.not_served, plane.service.is_news = served.version, True
        refused = dict(list(refusals(plane, served.version).items())[:REFUSALS_TOLD])
        plane.report_event("PolicyNotServed", {"version": served.version, "refused": refused})


def _here(plane: Plane) -> list[AgentLink]:
    """Those of instances that could serve."""
    return [one for one in plane.links.values() if one.connection is not None and not one.draining]


def _version_of(plane: Plane, link: AgentLink) -> int:
    """-1 also of one that has just left."""
    instance = plane.groups.instances.get(link.name)
    return instance.version if instance is not None else -1


def standing(plane: Plane, version: int) -> dict[str, Any] | None:
    """What became of a published version: `state` is `served` (by at least one instance), `refused` (by every one
    that is here), `loading`, `waiting` (to be in the ledger, for requests that are pinned to the one before, or for
    an instance) or `superseded`. None where it was never published, or is long forgotten."""
    checksum = plane.versions.checksum_of(version)
    if not checksum:
        return None
    here, served = _here(plane), plane.versions.served
    by = [one.name for one in here if _version_of(plane, one) == version]
    loading = [one.name for one in here if one.loading == version]
    refused = refusals(plane, version)
    if by:
        state = "served"
    elif served is None or version > served.version or (version == served.version and not here):
        state = "waiting"
    elif version < served.version:
        state = "superseded"
    else:
        state = "refused" if all(one.name in refused for one in here) else "loading"
    return {
        "version": version,
        "checksum": checksum,
        "state": state,
        "served_by": by,
        "loading": loading,
        "refused": refused,
    }


def refusals(plane: Plane, version: int) -> dict[str, str]:
    """By instance that could not load this version: what it said."""
    return {
        link.name: link.refused[version].error for link in plane.links.values() if version in link.refused
    }


def not_started(plane: Plane, link: AgentLink) -> None:
    """The instance's engine did not start: no version is told again before a pause, longer each time in a row."""
    link.failed_starts += 1
    pause_s = min(START_MAX_S, START_FIRST_S * 2 ** min(link.failed_starts - 1, 16))
    link.start_at = plane.now + pause_s


def started(plane: Plane, link: AgentLink) -> None:
    """The instance's engine has started."""
    link.failed_starts, link.start_at = 0, 0.0


def with_sources(plane: Plane, weights: Weights) -> Weights:
    """Instances that have it serve it as well: the publisher may be gone."""
    others = [
        link.source
        for link in plane.links.values()
        if link.source
        and link.connection is not None
        and plane.groups.instances[link.name].version == weights.version
    ]
    return replace(weights, sources=[*weights.sources, *others][:SOURCES_TOLD])


def sources_moved(plane: Plane) -> None:
    """The publisher serves the version from elsewhere now: instances that are fetching it, or could not, hear of
    it."""
    served = plane.versions.served
    if served is None:
        return
    told = with_sources(plane, served)
    for link in plane.links.values():
        if link.loading == served.version and link.connection is not None:
            plane.send(link.connection, told)
        elif link.refused:
            link.refused = {}
            update(plane, link, told)


def publish(plane: Plane, frame: Publish, model: str) -> bool:
    """Take a published version; returns whether it is new. Raises FrameError if it was published with other bytes
    before."""
    known = plane.versions.served
    is_new = plane.versions.publish(frame, model)
    if is_new:
        plane.groups.newest_version = plane.versions.newest
        plane.commit(Commit.AT_ONCE)  # once a step, and every instance waits for it
    if plane.versions.served is not known:
        sources_moved(plane)
    return is_new
