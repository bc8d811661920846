"""The sessions of agents: what is known of each instance beside its samples.

This module must not know about sockets, or what frames bring about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gyre.config import SPARE_ROLLOUT
from gyre.rollouts.plane.admission import DeviceUse, NotAdmitted, why_not_admitted
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.peers import Caller, Peer
from gyre.rollouts.plane.spares import PlacedInstance, Substitution, substitute
from gyre.rollouts.protocol.frames import EngineLimits, Frame, Hello, Loaded
from gyre.rollouts.scheduling.fleet import Instance


@dataclass(slots=True)
class RefusedVersion:
    """How often an instance could not load a version, when it is told to try again, and what it said last."""

    count: int
    retry_at: float
    error: str = ""


@dataclass(eq=False, slots=True)
class AgentSession:
    hello: Hello
    connection: Peer | None
    number: int
    heard_at: float
    caller: Caller = field(default_factory=Caller)
    """What it joined with."""
    limits: EngineLimits | None = None
    """What its engine takes at once, as it last said."""
    loaded: Loaded | None = None
    """How its version came, as it said when it had fetched and loaded one."""
    source: str = ""
    """host:port at which others can fetch its version."""
    lost_at: float | None = None
    draining: bool = False
    drain_until: float | None = None
    loading: int | None = None
    loading_since: float = 0.0
    told_ahead: int = -1
    """The newest version that it should fetch without loading."""
    running: int = 0
    waiting: int = 0
    used_tokens: int = 0
    rate_tokens_s: float = 0.0
    resting: Literal["", "falling", "asleep", "waking"] = ""
    """State of a local instance, whose engine gives its memory back outside of windows."""
    resting_since: float = 0.0
    acked_at: float = 0.0
    deferred: deque[tuple[int, Frame]] = field(default_factory=deque)
    """Frames that wait until the ledger's delta of this number is committed, in order."""
    refused: dict[int, RefusedVersion] = field(default_factory=dict)
    """Versions that this incarnation could not load."""
    proven_tokens_s: float = 0.0
    """Its rate over the last stretch, by the tokens that came; 0 before the first."""
    stretch: tuple[float, int] | None = None
    """When the present stretch began, and its tokens then."""
    still_s: float = 0.0
    """How long it has had samples without a new token of any."""
    seen_tokens: int = 0
    """Its tokens at the last look."""
    failed_starts: int = 0
    """Starts of its engine in a row that failed."""
    start_at: float = 0.0
    """When its engine may be started again."""
    not_admitted: NotAdmitted | None = NotAdmitted.NO_POLICY
    """Why it gets no samples, as of the last dispatch; None if it is admitted."""

    @property
    def name(self) -> str:
        return self.hello.instance

    @property
    def role(self) -> str:
        """The role of an instance that Gyre placed, by its name; "" for another name."""
        role, _, rank = self.name.rpartition("-")
        return role if rank.isdecimal() else ""

    @property
    def is_spare(self) -> bool:
        """Whether it is a spare, which serves while another one cannot."""
        return self.role == SPARE_ROLLOUT and self.caller.is_ours

    def waits_to_reload(self, version: int, now: float) -> bool:
        """Whether it could not load this version, or start an engine over any, and must not try again yet."""
        refused = self.refused.get(version)
        return now < self.start_at or (refused is not None and now < refused.retry_at)

    def take_over(self, before: AgentSession) -> None:
        """Go on where an earlier session of the same agent stood."""
        self.refused, self.limits, self.loaded = before.refused, before.limits, before.loaded
        self.failed_starts, self.start_at = before.failed_starts, before.start_at


class AgentSessions(dict[str, AgentSession]):
    """The newest session of each instance, by name, and which of them are admitted.

    Invariants:
    - *newest wins*: a session that was replaced under its name changes nothing any more, however late its connection
      ends;
    - *computed, not remembered*: `admit` computes every session's admission from the present state alone, and so which
      spares serve.

    `wanted` is how many instances of each role there are to be, as far as is known.
    """

    def __init__(self, groups: OpenGroups, wanted: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.wanted = dict(wanted or {})
        self.substitution = Substitution(frozenset(), ())
        """Which spares serve, as of the last `admit`."""
        self._groups = groups

    def disconnected(self, session: AgentSession, now: float) -> bool:
        """Note that the session's connection ended. False if the instance has a newer session, which stays as it is."""
        session.connection = None
        session.loading = None
        if self.get(session.name) is not session:
            return False
        session.lost_at = now
        return True

    def admit(self, devices: Callable[[AgentSession], DeviceUse], *, handover: bool) -> bool:
        """Compute every instance's admission, and tell the groups. Returns whether an instance is newly admitted."""
        more = False
        known: list[tuple[AgentSession, Instance]] = []
        bounds = self._groups.bounds
        instances = self._groups.instances
        for name, session in self.items():
            instance = instances.get(name)
            if instance is None:
                continue
            known.append((session, instance))
            session.not_admitted = why_not_admitted(
                is_current=instance.number == session.number,
                connected=session.connection is not None and not session.connection.closing,
                draining=session.draining,
                version=instance.version,
                bounds=bounds,
                loading=session.loading is not None,
                handover=handover,
                refused=session.refused,
                devices=devices(session),
            )
        self._hold_spares_back(known)
        for session, instance in known:
            admitted = session.not_admitted is None
            if instance.admitted != admitted:
                self._groups.admit(session.name, able=admitted)
                more = more or admitted
        return more

    def _hold_spares_back(self, known: list[tuple[AgentSession, Instance]]) -> None:
        """Of the spares that could be admitted, those that are not needed are not."""
        if not any(session.is_spare for session, _ in known):
            self.substitution = Substitution(frozenset(), ())
            return
        placed = [
            PlacedInstance(
                session.role,
                int(session.name.rpartition("-")[2]),
                session.not_admitted or self._why_too_old(session, instance),
                bool(instance.held),
            )
            for session, instance in known
            if session.role and session.caller.is_ours and not session.hello.local
        ]
        self.substitution = substitute(placed, self.wanted, SPARE_ROLLOUT)
        for session, _ in known:
            if session.is_spare and session.name not in self.substitution.serving:
                session.not_admitted = session.not_admitted or NotAdmitted.SPARE

    def _why_too_old(self, session: AgentSession, instance: Instance) -> NotAdmitted | None:
        """An instance that could not load the served version serves for those that accept what it has. Where others
        wait for newer ones, it is one less."""
        if self._groups.served_version not in session.refused:
            return None
        return NotAdmitted.POLICY_REFUSED if self._groups.is_newer_wanted(instance.version) else None
