"""The life of an instance: what it says, what it is acknowledged, and when it is given up.

Invariants:
- *acknowledged means durable*: an agent's progress is acknowledged after the commit that holds it (`committed`), and an
  agent keeps what was not acknowledged;
- *alive is not enough*: an instance that has samples and sends no token of them is suspended, whatever it reports.

This module must not know about sockets, Ray, graphs or how a trainer trains.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gyre.engines.last_words import last_words
from gyre.engines.weight_loading import NO_LOADER
from gyre.rollouts.plane import leaving, placement, requesters, updates, windows
from gyre.rollouts.plane.instructions import Commit
from gyre.rollouts.plane.joining import believed_address
from gyre.rollouts.plane.links import AgentLink
from gyre.rollouts.plane.peer_limits import RateLimit, Suspensions
from gyre.rollouts.plane.settings import ManagerSettings
from gyre.rollouts.protocol.fields import refuse
from gyre.rollouts.protocol.frames import (
    Ack,
    Asleep,
    Awake,
    Drain,
    Draining,
    EngineDied,
    EngineLimits,
    FetchFault,
    Frame,
    Loaded,
    LoadFailed,
)
from gyre.rollouts.protocol.progress import GenerationProgress, Report
from gyre.rollouts.token_log.write_buffer import WriteBatch

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane

ACK_WITHIN_S = 10.0
"""Longest time to the acknowledgement of a report that ended nothing: an agent only wants to know which of its ends are
in the ledger, and a thousand instances would each read several a second. Others are acknowledged with their commit."""

JOINS_AT_ONCE, JOINS_S = 16, 1
"""Of one name, for machines that joined."""

STRETCH_S, RATE_SLACK = 2.0, 4.0
"""A rate is proven over so long, and believed up to so many times that: its samples may just have begun."""

LONGEST_DRAIN_S = 3600.0
"""A drain ends after this, whatever deadline the instance gave itself."""

LONGEST_LOOK_S = 1.0
"""What counts at most between two looks: this process may have been stopped, and reports wait in its sockets."""

OTHERS_TOLD = 16
"""Most names of other instances at work in the event of an engine that does not start."""

DRAIN_GRACE_S = 1.0
"""Beyond the deadline that an instance was given to drain: its last report may be under way."""


@dataclass(slots=True)
class Life:
    """What is remembered of instances beyond their links."""

    looked_at: float
    stalled: Suspensions = field(default_factory=Suspensions)
    joins: RateLimit = field(default_factory=lambda: RateLimit(JOINS_AT_ONCE, JOINS_S))


def received(plane: Plane, link: AgentLink, frame: Frame | Report) -> None:
    """A frame of this instance. Raises FrameError for what an agent does not send, or what cannot be."""
    link.heard_at = plane.now
    if isinstance(frame, Report):
        _report(plane, link, frame)
        return
    plane.take_in()
    if link.connection is None or link.connection.closing:
        return  # for what it said before
    if isinstance(frame, Loaded):
        _loaded(plane, link, frame)
    elif isinstance(frame, LoadFailed):
        _load_failed(plane, link, frame)
    elif isinstance(frame, EngineLimits):
        _limited(plane, link, frame)
    elif isinstance(frame, FetchFault):
        told = {"instance": link.name, "version": frame.version, "what": frame.what}
        plane.report_event("FetchFault", {**told, "evidence": frame.evidence[:4000]})
    elif isinstance(frame, Draining):
        _drain(plane, link, frame.deadline_s, frame.reason)
    elif isinstance(frame, EngineDied):
        _engine_died(plane, link, frame)
    elif isinstance(frame, Asleep):
        windows.asleep(plane, link, frame)
    elif isinstance(frame, Awake):
        windows.awake(plane, link, frame)
    else:
        raise refuse("unexpected", f"an agent does not send {type(frame).__name__}")


def _believed_rate(plane: Plane, link: AgentLink, said: float) -> float:
    """Samples go where they end soonest, so a machine that joined is believed no rate far above that of the tokens
    that came from it. Before any came it counts as a typical instance (0)."""
    if link.caller.is_ours:
        return said
    tokens, now = plane.groups.instances[link.name].generated_tokens, link.heard_at
    if link.stretch is None:
        link.stretch = (now, tokens)
    began, before = link.stretch
    if now - began >= STRETCH_S:
        link.proven_tokens_s = (tokens - before) / (now - began)
        link.stretch = (now, tokens)
    return min(said, RATE_SLACK * link.proven_tokens_s)


def _report(plane: Plane, link: AgentLink, report: Report) -> None:
    *load, said = report.load
    report.load = (*load, _believed_rate(plane, link, said))  # type: ignore[assignment]
    link.running, link.waiting, link.used_tokens, link.rate_tokens_s = report.load
    if plane.reports.has(link.name):
        if report.ends:
            plane.take_in(link.name)
        else:
            plane.take_in()
        if link.connection is None or link.connection.closing:
            return  # for what it said before
    if report.ends:
        _ended(plane, link, report.unfold())
    elif report.columns[0]:
        plane.add_report(link.name, report)
    elif any(report.columns):
        report.unfold()  # which refuses it: something of no sample
    else:
        plane.groups.nothing_new(link.name, report)
        return  # nothing for the ledger: an idle fleet costs no commits
    plane.commit(Commit.SOON)


def _ended(plane: Plane, link: AgentLink, frame: GenerationProgress) -> None:
    placement.compute_admission(plane)
    placement.send_work(plane, plane.groups.progress(link.name, frame))
    placement.dispatch(plane)  # at once: what else this turn of the loop brings may take milliseconds
    requesters.report_failures(plane)
    if link.draining and not plane.groups.instances[link.name].held:
        _drained(plane)
    if plane.groups.has_complete:
        if any(one.held for one in plane.groups.instances.values()):
            plane.commit(Commit.NOW)
        else:
            plane.commit(Commit.AT_ONCE)  # nobody generates anything that could be written along
    windows.ended(plane, link)


def _loaded(plane: Plane, link: AgentLink, frame: Loaded) -> None:
    if link.loading is not None and frame.version >= link.loading:
        link.loading = None  # else it is on its way to a newer one already
    if frame.version > plane.groups.newest_version:
        raise refuse("unknown_version", f"{link.name} loaded version {frame.version}, never published")
    if plane.versions.is_forgotten(frame.version):
        # Its engine took that long to start; it works when it has a newer one.
        if frame.how == "start":
            _engine_started(plane, link, frame)
        updates.update(plane, link)
        return
    if not plane.versions.is_known(frame.version, frame.checksum):
        raise refuse("checksum", f"{link.name} loaded version {frame.version} with checksum {frame.checksum}")
    link.source = believed_address(plane, link, frame.source)
    plane.groups.serve(link.name, frame.version)
    plane.report_event(
        "WeightsLoaded",
        {
            "instance": link.name,
            "version": frame.version,
            "fetch_s": frame.fetch_s,
            "load_s": frame.load_s,
            "fetched": frame.fetched,
            "pause_s": frame.pause_s,
            "how": frame.how,
            "note": frame.note,
        },
    )
    if frame.how:
        before, link.loaded = link.loaded, frame
        if frame.note not in ("", NO_LOADER) and (before is None or before.note != frame.note):
            what = "weights are loaded from the disk"
            plane.report_event("LoaderFallback", {"instance": link.name, "what": what, "why": frame.note})
    if frame.how == "start":
        _engine_started(plane, link, frame)
    chosen = plane.versions.way_changed(link.name, frame, plane.now)
    if chosen is not None:
        plane.report_event("TransferChosen", chosen)
    link.refused.pop(frame.version, None)
    updates.update(plane, link)
    windows.loaded(plane, link)
    placement.dispatch_soon(plane)


def _limited(plane: Plane, link: AgentLink, frame: EngineLimits) -> None:
    known, link.limits = link.limits, frame
    plane.groups.resize(link.name, max_running=frame.max_running, kv_tokens=frame.kv_tokens)
    if frame != known:  # else it only dialled again
        plane.report_event(
            "EngineLimited",
            {
                "instance": link.name,
                "max_running": frame.max_running,
                "kv_tokens": frame.kv_tokens,
                "why": frame.why,
            },
        )
    placement.dispatch_soon(plane)


def _load_failed(plane: Plane, link: AgentLink, frame: LoadFailed) -> None:
    updates.refused(plane, link, frame.version, frame.error)
    told = {"instance": link.name, "version": frame.version, "error": frame.error[:4000]}
    if frame.starting:
        updates.not_started(plane, link)
        plane.report_event(
            "EngineStartFailed",
            {
                **told,
                "said": frame.said[:500],
                "words": frame.words[:4000],
                "others": _working(plane),
            },
        )
    else:
        plane.report_event("WeightsRefused", told)
    requesters.give_up_pinned(plane, frame)
    placement.dispatch_soon(plane)


def _engine_started(plane: Plane, link: AgentLink, frame: Loaded) -> None:
    updates.started(plane, link)
    told = {"instance": link.name, "version": frame.version, "seconds": frame.load_s}
    plane.report_event("EngineStarted", told)


def _working(plane: Plane) -> list[str]:
    """The first of those instances that serve a version, by their names."""
    return sorted(one.name for one in plane.links.values() if _works(plane, one))[:OTHERS_TOLD]


def _works(plane: Plane, link: AgentLink) -> bool:
    """Whether the instance has an engine that serves a version."""
    here = link.connection is not None and not link.draining
    return here and plane.groups.instances[link.name].version >= 0


def _engine_died(plane: Plane, link: AgentLink, frame: EngineDied) -> None:
    link.resting = ""
    plane.groups.engine_died(link.name)
    plane.report_event(
        "EngineDied",
        {
            "instance": link.name,
            "error": frame.message[:2000],
            "tail": frame.tail[-8000:],
            "words": last_words(frame.tail).text,
            "others": _working(plane),
        },
    )
    link.loading = None
    updates.update(plane, link)
    plane.commit(Commit.SOON)
    placement.dispatch_soon(plane)


def _stands_still(plane: Plane, link: AgentLink, elapsed_s: float, settings: ManagerSettings) -> bool:
    """Whether it has samples, and no token of them came for too long. While it loads a version, the time for that
    is added."""
    instance = plane.groups.instances[link.name]
    if instance.generated_tokens != link.seen_tokens:
        link.seen_tokens, link.still_s = instance.generated_tokens, 0.0
    elif instance.held and link.connection is not None:
        link.still_s += elapsed_s
    loading_s = settings.load_timeout_s if link.loading is not None else 0.0
    return link.still_s > settings.stall_timeout_s + loading_s


def _suspend(plane: Plane, link: AgentLink, first_s: float) -> None:
    """Its samples go on elsewhere, and it gets no others for a while."""
    instance = plane.groups.instances[link.name]
    by = "" if not link.caller.is_ours else link.hello.incarnation
    pause_s = plane.life.stalled.add(link.name, by, first_s, plane.now)
    plane.report_event(
        "InstanceSuspended",
        {
            "instance": link.name,
            "still_s": round(link.still_s, 1),
            "samples": len(instance.held),
            "version": instance.version,
            "running": link.running,
            "waiting": link.waiting,
            "rate_tokens_s": link.rate_tokens_s,
            "for_s": pause_s,
        },
    )
    leaving.lose(plane, link, "stalled")


def drain(plane: Plane, link: AgentLink, deadline_s: float, reason: str) -> None:
    """Ask an instance to hand its samples over and leave."""
    if link.connection is not None:
        plane.send(link.connection, Drain(deadline_s=deadline_s, reason=reason))
    _drain(plane, link, deadline_s, reason)


def _drain(plane: Plane, link: AgentLink, deadline_s: float, reason: str) -> None:
    if link.draining:
        return
    link.draining = True
    deadline_s = min(deadline_s, LONGEST_DRAIN_S)
    link.drain_until = plane.now + deadline_s
    placement.dispatch_soon(plane)
    plane.report_event(
        "InstanceDraining", {"instance": link.name, "reason": reason, "deadline_s": deadline_s}
    )
    if not plane.groups.instances[link.name].held:
        _drained(plane)


def _drained(plane: Plane) -> None:
    # Its last progress must be durable before it may forget: the acknowledgement goes out with the commit.
    plane.commit(Commit.NOW)


def committed(plane: Plane, batch: WriteBatch) -> None:
    """Acknowledge what is in the ledger, and send what waited for that."""
    now = plane.now
    for link in list(plane.links.values()):
        seq = batch.reports.get(link.number)
        due = link.number in batch.ended or now - link.acked_at >= ACK_WITHIN_S
        if seq is not None and link.connection is not None and due:
            link.acked_at = now
            plane.send(link.connection, Ack(seq=seq))
        placement.send_committed(plane, link)


def look(plane: Plane) -> None:
    """Every so often: who is gone, silent or too slow is lost."""
    settings, now = plane.settings, plane.now
    elapsed_s, plane.life.looked_at = min(now - plane.life.looked_at, LONGEST_LOOK_S), now
    for link in list(plane.links.values()):
        if link.lost_at is not None and link.connection is None:
            if now - link.lost_at > settings.reconnect_grace_s:
                leaving.lose(plane, link, "connection_lost")
        elif now - link.heard_at > settings.silence_timeout_s:
            leaving.lose(plane, link, "silent")
        elif link.drain_until is not None and now > link.drain_until + DRAIN_GRACE_S:
            leaving.lose(plane, link, "drain_deadline")
        elif link.loading is not None and now - link.loading_since > settings.load_timeout_s:
            leaving.lose(plane, link, "weights_not_loaded")
        elif _stands_still(plane, link, elapsed_s, settings):
            _suspend(plane, link, settings.stall_timeout_s)
        elif link.refused:
            updates.update(plane, link)
