"""The life of an instance in the rollout manager: it joins, loads, reports, fails, drains and leaves.

Invariants:
- *acknowledged means durable*: an agent's progress is acknowledged after the commit that holds it (`committed`), and an
  agent keeps what was not acknowledged;
- *alive is not enough*: an instance that has samples and sends no token of them is suspended, whatever it reports;
- *who died is known*: an instance that is lost, and not left in order, counts against the samples that it had.

This module must not know about sockets, Ray, graphs or how a trainer trains.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gyre.engines.last_words import last_words
from gyre.engines.weight_loading import NO_LOADER
from gyre.rollouts.core.groups import OpenGroups
from gyre.rollouts.manager.device_sharing import DeviceSharing
from gyre.rollouts.manager.dispatch import Dispatch
from gyre.rollouts.manager.join_tokens import Caller
from gyre.rollouts.manager.peer_limits import RateLimit, Suspensions
from gyre.rollouts.manager.policy_push import PolicyPush
from gyre.rollouts.manager.policy_versions import PolicyVersions
from gyre.rollouts.manager.report_queue import ReportQueue
from gyre.rollouts.manager.sessions import AgentSession, AgentSessions, Connection
from gyre.rollouts.manager.settings import ManagerSettings
from gyre.rollouts.manager.trainer_session import TrainerSession
from gyre.rollouts.protocol.fields import LATER, FrameError, refuse
from gyre.rollouts.protocol.frames import (
    PROTOCOL,
    Ack,
    Asleep,
    Awake,
    Drain,
    Draining,
    EngineDied,
    EngineLimits,
    FetchFault,
    Frame,
    Hello,
    Loaded,
    LoadFailed,
    Reject,
    Welcome,
)
from gyre.rollouts.protocol.progress import Progress, Report
from gyre.rollouts.token_log.group_commit import GroupCommit
from gyre.rollouts.token_log.write_buffer import WriteBatch
from gyre.weights.transfer.address import may_name

ACK_WITHIN_S = 10.0
"""Longest time to the acknowledgement of a report that ended nothing: an agent only wants to know which of its ends are
in the ledger, and a thousand instances would each read several a second. Others are acknowledged with their commit."""

DEATHS = frozenset(("connection_lost", "silent", "replaced"))
"""Ways to leave that a sample may be to blame for."""

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


class InstanceLifecycle:
    """`windows()` has the windows of the trainer's devices, `settings()` what is set now; `reject(connection, error)`
    refuses a peer."""

    def __init__(
        self,
        groups: OpenGroups,
        sessions: AgentSessions,
        versions: PolicyVersions,
        dispatch: Dispatch,
        policies: PolicyPush,
        trainer: TrainerSession,
        reports: ReportQueue,
        commits: GroupCommit[WriteBatch],
        *,
        epoch: int,
        weights_key: str,
        windows: Callable[[], DeviceSharing],
        settings: Callable[[], ManagerSettings],
        reject: Callable[[Connection, FrameError], None],
        on_event: Callable[[str, dict[str, Any]], None],
        now: Callable[[], float],
    ) -> None:
        self._groups = groups
        self._sessions = sessions
        self._versions = versions
        self._dispatch = dispatch
        self._policies = policies
        self._trainer = trainer
        self._reports = reports
        self._commits = commits
        self._epoch = epoch
        self._weights_key = weights_key
        self._windows = windows
        self._settings = settings
        self._reject = reject
        self._on_event = on_event
        self._now = now
        self._stalled = Suspensions()
        self._joins = RateLimit(JOINS_AT_ONCE, JOINS_S)
        self._looked_at = now()

    def join(self, frame: Frame | Report, connection: Connection, caller: Caller) -> AgentSession:
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
        known = self._sessions.get(frame.instance)
        if known is not None and not caller.is_ours and known.caller.token != caller.token:
            raise refuse(
                "name_taken", f"an instance {frame.instance} is there, which has not joined with this token"
            )
        if not caller.is_ours and (wait_s := self._joins.wait_s(frame.instance, self._now())):
            raise refuse(LATER, f"{frame.instance} joins too often: it may again in {wait_s:.1f} s")
        self._stalled.check(frame.instance, "" if not caller.is_ours else frame.incarnation, self._now())
        model = self._versions.model
        if model is not None and frame.model not in (model, "unset"):
            raise refuse("model", f"{frame.instance} serves model {frame.model}; this job's is {model}")
        if frame.version > self._groups.newest_version:
            raise refuse(
                "unknown_version",
                f"{frame.instance} says it serves version {frame.version}; the newest is {self._groups.newest_version}",
            )
        connection.name = frame.instance
        self._reports.take_in()
        before = self._sessions.get(frame.instance)
        back = before is not None and before.hello.incarnation == frame.incarnation
        if before is not None and not back:
            if before.connection is not None:
                message = f"another process has joined as {frame.instance}"
                before.connection.send(Reject(code="superseded", message=message))
            self.lost(
                before, "drained" if before.draining else "superseded" if before.connection else "replaced"
            )
        elif before is not None and before.connection is not None:
            before.connection.close()
        now = self._now()
        keep = self._groups.join(frame)
        if keep:
            self._commits.soon()  # the leases
        instance = self._groups.instances[frame.instance]
        session = AgentSession(frame, connection, instance.number, heard_at=now)
        session.caller = caller
        session.source = self._believed(session, frame.source)
        session.limits = EngineLimits(max_running=frame.max_running, kv_tokens=frame.kv_tokens)
        self._sessions[frame.instance] = session
        version = frame.version
        if version >= 0 and not self._versions.is_known(version, frame.checksum):
            version = -1  # the same number, other bytes: an instance of another history
        instance.version = version
        if version >= 0:
            instance.loaded.came_back(version)
        session.resting = "asleep" if frame.asleep else ""
        if before is not None and back:
            session.take_over(before)
        weights = self._versions.served
        if weights is not None and (
            version == weights.version
            or not self._windows().may_load(session)
            or session.waits_to_reload(weights.version, now)
        ):
            weights = None
        adapters = self._settings().adapters
        connection.send(
            Welcome(
                protocol=PROTOCOL,
                epoch=self._epoch,
                interval_s=self._settings().report_interval_s,
                keep=keep,
                weights=self._policies.with_sources(weights) if weights is not None else None,
                update_mode=self._settings().update_mode,  # type: ignore[arg-type]
                deterministic=self._settings().deterministic,
                adapter_rank=adapters.max_rank if adapters is not None else 0,
                adapter_layers=list(adapters.layers) if adapters is not None else [],
                plane=self._settings().weights,
                weights_key=self._weights_key,
            )
        )
        if weights is not None:
            session.loading, session.loading_since = weights.version, now
            instance.loaded.tell(weights.version)
        self._policies.update(session)
        self._dispatch.cancel_superseded()
        self._on_event(
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
        self._dispatch.soon()
        return session

    def _believed(self, session: AgentSession, address: str) -> str:
        """The address where others fetch from it, "" where it may not name that one: a machine that joined speaks for
        the host that it dials from, or one in the job's networks. It works on without serving others."""
        connection = session.connection
        if not address or session.caller.is_ours or connection is None:
            return address
        if may_name(address, connection.host, self._settings().weights.sender_networks):
            return address
        told = {"instance": session.name, "address": address, "dialled_from": connection.host}
        self._on_event("AddressIgnored", told)
        return ""

    def received(self, session: AgentSession, frame: Frame | Report) -> None:
        """A frame of this instance. Raises FrameError for what an agent does not send, or what cannot be."""
        session.heard_at = self._now()
        if isinstance(frame, Report):
            self._report(session, frame)
            return
        self._reports.take_in()
        if session.connection is None or session.connection.closing:
            return  # for what it said before
        if isinstance(frame, Loaded):
            self._loaded(session, frame)
        elif isinstance(frame, LoadFailed):
            self._load_failed(session, frame)
        elif isinstance(frame, EngineLimits):
            self._limited(session, frame)
        elif isinstance(frame, FetchFault):
            told = {"instance": session.name, "version": frame.version, "what": frame.what}
            self._on_event("FetchFault", {**told, "evidence": frame.evidence[:4000]})
        elif isinstance(frame, Draining):
            self._drain(session, frame.deadline_s, frame.reason)
        elif isinstance(frame, EngineDied):
            self._engine_died(session, frame)
        elif isinstance(frame, Asleep):
            self._windows().asleep(session, frame, session.heard_at)
        elif isinstance(frame, Awake):
            self._windows().awake(session, frame, session.heard_at)
        else:
            raise refuse("unexpected", f"an agent does not send {type(frame).__name__}")

    def _believed_rate(self, session: AgentSession, said: float) -> float:
        """Samples go where they end soonest, so a machine that joined is believed no rate far above that of the tokens
        that came from it. Before any came it counts as a typical instance (0)."""
        if session.caller.is_ours:
            return said
        tokens, now = self._groups.instances[session.name].generated_tokens, session.heard_at
        if session.stretch is None:
            session.stretch = (now, tokens)
        began, before = session.stretch
        if now - began >= STRETCH_S:
            session.proven_tokens_s = (tokens - before) / (now - began)
            session.stretch = (now, tokens)
        return min(said, RATE_SLACK * session.proven_tokens_s)

    def _report(self, session: AgentSession, report: Report) -> None:
        *load, said = report.load
        report.load = (*load, self._believed_rate(session, said))  # type: ignore[assignment]
        session.running, session.waiting, session.used_tokens, session.rate_tokens_s = report.load
        if self._reports.has(session.name):
            if report.ends:
                self._reports.take_in_of(session.name)
            else:
                self._reports.take_in()
            if session.connection is None or session.connection.closing:
                return  # for what it said before
        if report.ends:
            self._ended(session, report.unfold())
        elif report.columns[0]:
            self._reports.add(session.name, report)
        elif any(report.columns):
            report.unfold()  # which refuses it: something of no sample
        else:
            self._groups.nothing_new(session.name, report)
            return  # nothing for the ledger: an idle fleet costs no commits
        self._commits.soon()

    def _ended(self, session: AgentSession, frame: Progress) -> None:
        self._dispatch.compute_admission()
        self._dispatch.send_work(self._groups.progress(session.name, frame))
        self._dispatch.at_once()  # at once: what else this turn of the loop brings may take milliseconds
        self._trainer.tell_failures()
        if session.draining and not self._groups.instances[session.name].held:
            self._drained(session)
        if self._groups.has_complete:
            if any(one.held for one in self._groups.instances.values()):
                self._commits.now()
            else:
                self._commits.at_once()  # nobody generates anything that could be written along
        self._windows().ended(session, session.heard_at)

    def report_refused(self, name: str, error: FrameError) -> None:
        """Cut an instance that reported what cannot be, which shows when the report is taken in."""
        session = self._sessions[name]
        if session.connection is not None:
            self._reject(session.connection, error)
            session.connection.close()

    def _loaded(self, session: AgentSession, frame: Loaded) -> None:
        if session.loading is not None and frame.version >= session.loading:
            session.loading = None  # else it is on its way to a newer one already
        if frame.version > self._groups.newest_version:
            raise refuse("unknown_version", f"{session.name} loaded version {frame.version}, never published")
        if self._versions.is_forgotten(frame.version):
            # Its engine took that long to start; it works when it has a newer one.
            self._policies.update(session)
            return
        if not self._versions.is_known(frame.version, frame.checksum):
            raise refuse(
                "checksum", f"{session.name} loaded version {frame.version} with checksum {frame.checksum}"
            )
        session.source = self._believed(session, frame.source)
        self._groups.serve(session.name, frame.version)
        self._on_event(
            "WeightsLoaded",
            {
                "instance": session.name,
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
            before, session.loaded = session.loaded, frame
            if frame.note not in ("", NO_LOADER) and (before is None or before.note != frame.note):
                what = "weights are loaded from the disk"
                self._on_event("LoaderFallback", {"instance": session.name, "what": what, "why": frame.note})
        if frame.how == "start":
            self._policies.started(session)
            told = {"instance": session.name, "version": frame.version, "seconds": frame.load_s}
            self._on_event("EngineStarted", told)
        chosen = self._versions.way_changed(session.name, frame, self._now())
        if chosen is not None:
            self._on_event("TransferChosen", chosen)
        session.refused.pop(frame.version, None)
        self._policies.update(session)
        self._windows().loaded(session, session.heard_at)
        self._dispatch.soon()

    def _limited(self, session: AgentSession, frame: EngineLimits) -> None:
        known, session.limits = session.limits, frame
        self._groups.resize(session.name, max_running=frame.max_running, kv_tokens=frame.kv_tokens)
        if frame != known:  # else it only dialled again
            self._on_event(
                "EngineLimited",
                {
                    "instance": session.name,
                    "max_running": frame.max_running,
                    "kv_tokens": frame.kv_tokens,
                    "why": frame.why,
                },
            )
        self._dispatch.soon()

    def _load_failed(self, session: AgentSession, frame: LoadFailed) -> None:
        self._policies.refused(session, frame.version, frame.error)
        told = {"instance": session.name, "version": frame.version, "error": frame.error[:4000]}
        if frame.starting:
            self._policies.not_started(session)
            others = sorted(one.name for one in self._sessions.values() if self._works(one))
            self._on_event(
                "EngineStartFailed",
                {
                    **told,
                    "said": frame.said[:500],
                    "words": frame.words[:4000],
                    "others": others[:OTHERS_TOLD],
                },
            )
        else:
            self._on_event("WeightsRefused", told)
        self._trainer.give_up_pinned(frame)
        self._dispatch.soon()

    def _works(self, session: AgentSession) -> bool:
        """Whether the instance has an engine that serves a version."""
        here = session.connection is not None and not session.draining
        return here and self._groups.instances[session.name].version >= 0

    def _engine_died(self, session: AgentSession, frame: EngineDied) -> None:
        self._windows().engine_died(session)
        self._groups.engine_died(session.name)
        self._on_event(
            "EngineDied",
            {
                "instance": session.name,
                "error": frame.message[:2000],
                "tail": frame.tail[-8000:],
                "words": last_words(frame.tail).text,
            },
        )
        session.loading = None
        self._policies.update(session)
        self._commits.soon()
        self._dispatch.soon()

    def disconnected(self, session: AgentSession) -> None:
        """The session's connection ended. The instance has a while to dial again, unless it was draining."""
        self._reports.take_in()
        if not self._sessions.disconnected(session, self._now()):
            return
        if session.draining:
            self.lost(session, "drained")
        self._dispatch.soon()

    def lost(self, session: AgentSession, reason: str) -> None:
        """The instance is gone: its samples go on elsewhere."""
        self._reports.take_in()
        if self._sessions.get(session.name) is session:
            del self._sessions[session.name]
        if session.connection is not None:
            session.connection.close()
            session.connection = None
        instance = self._groups.instances.get(session.name)
        if instance is None or instance.number != session.number:
            return
        died = f"its machine or agent was lost ({reason})" if reason in DEATHS else ""
        orphans = self._groups.leave(session.name, died=died)
        self._trainer.tell_failures()
        self._on_event(
            "InstanceLeft",
            {
                "instance": session.name,
                "reason": reason,
                "moved": len(orphans),
                "tokens": sum(state.length for state in orphans),
            },
        )
        self._dispatch.soon()

    def cut_unadmitted(self, why_not: Callable[[Caller], str]) -> None:
        """Cut the instances whose token admits them no longer: `why_not` says why, "" for those that stay. What they
        reported is in the ledger, and their samples go on elsewhere."""
        for session in list(self._sessions.values()):
            if message := why_not(session.caller):
                if session.connection is not None:
                    session.connection.send(Reject(code="unauthorised", message=message))
                self.lost(session, "token")

    def _stands_still(self, session: AgentSession, elapsed_s: float, settings: ManagerSettings) -> bool:
        """Whether it has samples, and no token of them came for too long. While it loads a version, the time for that
        is added."""
        instance = self._groups.instances[session.name]
        if instance.generated_tokens != session.seen_tokens:
            session.seen_tokens, session.still_s = instance.generated_tokens, 0.0
        elif instance.held and session.connection is not None:
            session.still_s += elapsed_s
        loading_s = settings.load_timeout_s if session.loading is not None else 0.0
        return session.still_s > settings.stall_timeout_s + loading_s

    def _suspend(self, session: AgentSession, first_s: float) -> None:
        """Its samples go on elsewhere, and it gets no others for a while."""
        instance = self._groups.instances[session.name]
        by = "" if not session.caller.is_ours else session.hello.incarnation
        pause_s = self._stalled.add(session.name, by, first_s, self._now())
        self._on_event(
            "InstanceSuspended",
            {
                "instance": session.name,
                "still_s": round(session.still_s, 1),
                "samples": len(instance.held),
                "version": instance.version,
                "running": session.running,
                "waiting": session.waiting,
                "rate_tokens_s": session.rate_tokens_s,
                "for_s": pause_s,
            },
        )
        self.lost(session, "stalled")

    def refresh(self, session: AgentSession) -> None:
        """What may be done with a local instance has changed: its window opens or closes, or it woke."""
        if session.name in self._groups.instances:
            self._policies.update(session)
            self._dispatch.soon()

    def drain(self, name: str, deadline_s: float, reason: str) -> bool:
        """Ask an instance to hand its samples over and leave. False where there is none of that name."""
        session = self._sessions.get(name)
        if session is None:
            return False
        if session.connection is not None:
            session.connection.send(Drain(deadline_s=deadline_s, reason=reason))
        self._drain(session, deadline_s, reason)
        return True

    def _drain(self, session: AgentSession, deadline_s: float, reason: str) -> None:
        if session.draining:
            return
        session.draining = True
        deadline_s = min(deadline_s, LONGEST_DRAIN_S)
        session.drain_until = self._now() + deadline_s
        self._dispatch.soon()
        self._on_event(
            "InstanceDraining", {"instance": session.name, "reason": reason, "deadline_s": deadline_s}
        )
        if not self._groups.instances[session.name].held:
            self._drained(session)

    def _drained(self, session: AgentSession) -> None:
        # Its last progress must be durable before it may forget: the acknowledgement goes out with the commit.
        self._commits.now()

    def committed(self, batch: WriteBatch) -> None:
        """Acknowledge what is in the ledger, and send what waited for that."""
        now = self._now()
        for session in list(self._sessions.values()):
            seq = batch.sessions.get(session.number)
            due = session.number in batch.ended or now - session.acked_at >= ACK_WITHIN_S
            if seq is not None and session.connection is not None and due:
                session.acked_at = now
                session.connection.send(Ack(seq=seq))
            self._dispatch.committed(session)

    def look(self, now: float) -> None:
        """Every so often: who is gone, silent or too slow is lost."""
        settings = self._settings()
        elapsed_s, self._looked_at = min(now - self._looked_at, LONGEST_LOOK_S), now
        for session in list(self._sessions.values()):
            if session.lost_at is not None and session.connection is None:
                if now - session.lost_at > settings.reconnect_grace_s:
                    self.lost(session, "connection_lost")
            elif now - session.heard_at > settings.silence_timeout_s:
                self.lost(session, "silent")
            elif session.drain_until is not None and now > session.drain_until + DRAIN_GRACE_S:
                self.lost(session, "drain_deadline")
            elif session.loading is not None and now - session.loading_since > settings.load_timeout_s:
                self.lost(session, "weights_not_loaded")
            elif self._stands_still(session, elapsed_s, settings):
                self._suspend(session, settings.stall_timeout_s)
            elif session.refused:
                self._policies.update(session)
