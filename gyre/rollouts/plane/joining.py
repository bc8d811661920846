"""An instance joins: who it is, what it may keep of what it holds, and what it is told to load.

This module must not know about sockets, Ray, graphs or how a trainer trains.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gyre.rollouts.plane import leaving, placement, updates
from gyre.rollouts.plane.instructions import Commit
from gyre.rollouts.plane.links import AgentLink
from gyre.rollouts.plane.peers import Caller, Peer
from gyre.rollouts.protocol.fields import LATER, refuse
from gyre.rollouts.protocol.frames import PROTOCOL, EngineLimits, Frame, Hello, Reject, Welcome
from gyre.rollouts.protocol.progress import Report
from gyre.weights.transfer.address import may_name

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane


def join(plane: Plane, connection: Peer, frame: Frame | Report, caller: Caller) -> None:
    """Take an agent in by its first frame. Raises FrameError where it is none, not one of this job, or says that it
    is what its token does not permit."""
    if not isinstance(frame, Hello):
        raise refuse("no_hello", f"the first frame is {type(frame).__name__}, not Hello")
    if frame.protocol != PROTOCOL:
        raise refuse(
            "protocol", f"{frame.instance} speaks protocol {frame.protocol}, this manager {PROTOCOL}"
        )
    if frame.local and not caller.is_ours:
        raise refuse("local", f"{frame.instance} has joined, so it is not on the trainer's devices")
    known = plane.links.get(frame.instance)
    if known is not None and not caller.is_ours and known.caller.token != caller.token:
        raise refuse(
            "name_taken", f"an instance {frame.instance} is there, which has not joined with this token"
        )
    if not caller.is_ours and (wait_s := plane.life.joins.wait_s(frame.instance, plane.now)):
        raise refuse(LATER, f"{frame.instance} joins too often: it may again in {wait_s:.1f} s")
    plane.life.stalled.check(frame.instance, "" if not caller.is_ours else frame.incarnation, plane.now)
    model = plane.versions.model
    if model is not None and frame.model not in (model, "unset"):
        raise refuse("model", f"{frame.instance} serves model {frame.model}; this job's is {model}")
    if frame.version > plane.groups.newest_version:
        raise refuse(
            "unknown_version",
            f"{frame.instance} says it serves version {frame.version}; the newest is {plane.groups.newest_version}",
        )
    connection.name = frame.instance
    plane.take_in()
    before = plane.links.get(frame.instance)
    back = before is not None and before.hello.incarnation == frame.incarnation
    if before is not None and not back:
        if before.connection is not None:
            message = f"another process has joined as {frame.instance}"
            plane.send(before.connection, Reject(code="superseded", message=message))
        reason = "drained" if before.draining else "superseded" if before.connection else "replaced"
        leaving.lose(plane, before, reason)
    elif before is not None and before.connection is not None:
        plane.close(before.connection)
    now = plane.now
    keep = plane.groups.join(frame)
    if keep:
        plane.commit(Commit.SOON)  # the leases
    instance = plane.groups.instances[frame.instance]
    link = AgentLink(frame, connection, instance.number, heard_at=now)
    link.caller = caller
    link.source = believed_address(plane, link, frame.source)
    link.limits = EngineLimits(max_running=frame.max_running, kv_tokens=frame.kv_tokens)
    plane.links[frame.instance] = link
    version = frame.version
    if version >= 0 and not plane.versions.is_known(version, frame.checksum):
        version = -1  # the same number, other bytes: an instance of another history
    instance.version = version
    if version >= 0:
        instance.loaded.came_back(version)
    link.resting = "asleep" if frame.asleep else ""
    if before is not None and back:
        link.take_over(before)
    weights = plane.versions.served
    if weights is not None and (
        version == weights.version
        or not plane.windows.may_load(link)
        or link.waits_to_reload(weights.version, now)
    ):
        weights = None
    adapters = plane.settings.adapters
    plane.send(
        connection,
        Welcome(
            protocol=PROTOCOL,
            epoch=plane.epoch,
            interval_s=plane.settings.report_interval_s,
            keep=keep,
            weights=updates.with_sources(plane, weights) if weights is not None else None,
            update_mode=plane.settings.update_mode,  # type: ignore[arg-type]
            deterministic=plane.settings.deterministic,
            adapter_rank=adapters.max_rank if adapters is not None else 0,
            adapter_layers=list(adapters.layers) if adapters is not None else [],
            turns=plane.settings.sessions is not None,
            plane=plane.settings.weights,
            weights_key=plane.weights_key,
        ),
    )
    if weights is not None:
        link.loading, link.loading_since = weights.version, now
        instance.loaded.tell(weights.version)
    updates.update(plane, link)
    placement.cancel_superseded(plane)
    plane.report_event(
        "InstanceJoined",
        {
            "instance": frame.instance,
            "incarnation": frame.incarnation,
            "engine": frame.engine,
            "held": len(frame.held),
            "kept": len(keep),
            "back": back,
            **({"token": caller.token} if caller.token else {}),
        },
    )
    placement.dispatch_soon(plane)


def believed_address(plane: Plane, link: AgentLink, address: str) -> str:
    """The address where others fetch from it, "" where it may not name that one: a machine that joined speaks for
    the host that it dials from, or one in the job's networks. It works on without serving others."""
    connection = link.connection
    if not address or link.caller.is_ours or connection is None:
        return address
    if may_name(address, connection.host, plane.settings.weights.sender_networks):
        return address
    told = {"instance": link.name, "address": address, "dialled_from": connection.host}
    plane.report_event("AddressIgnored", told)
    return ""
