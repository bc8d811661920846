"""The links of agents: what is known of each instance beside its samples.

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
class AgentLink:
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

    def take_over(self, before: AgentLink) -> None:
        """Go on where an earlier link of the same agent stood."""
        self.refused, self.limits, self.loaded = before.refused, before.limits, before.loaded
        self.failed_starts, self.start_at = before.failed_starts, before.start_at


class AgentLinks(dict[str, AgentLink]):
    """The newest link of each instance, by name, and which of them are admitted.

    Invariants:
    - *newest wins*: a link that was replaced under its name changes nothing any more, however late its connection
      ends;
    - *computed, not remembered*: `admit` computes every link's admission from the present state alone, and so which
      spares serve.

    `wanted` is how many instances of each role there are to be, as far as is known.
    """

    def __init__(self, groups: OpenGroups, wanted: Mapping[str, int] | None = None) -> None:
        super().__init__()
        self.wanted = dict(wanted or {})
        self.substitution = Substitution(frozenset(), ())
        """Which spares serve, as of the last `admit`."""
        self._groups = groups

    def is_ours(self, name: str) -> bool:
        """Whether the instance of this name is one of the job's own."""
        link = self.get(name)
        return link is not None and link.caller.is_ours

    def disconnected(self, link: AgentLink, now: float) -> bool:
        """Note that the link's connection ended. False if the instance has a newer link, which stays as it is."""
        link.connection = None
        link.loading = None
        if self.get(link.name) is not link:
            return False
        link.lost_at = now
        return True

    def admit(self, devices: Callable[[AgentLink], DeviceUse], *, handover: bool) -> bool:
        """Compute every instance's admission, and tell the groups. Returns whether an instance is newly admitted."""
        more = False
        known: list[tuple[AgentLink, Instance]] = []
        bounds = self._groups.bounds
        instances = self._groups.instances
        for name, link in self.items():
            instance = instances.get(name)
            if instance is None:
                continue
            known.append((link, instance))
            link.not_admitted = why_not_admitted(
                is_current=instance.number == link.number,
                connected=link.connection is not None and not link.connection.closing,
                draining=link.draining,
                version=instance.version,
                bounds=bounds,
                loading=link.loading is not None,
                handover=handover,
                refused=link.refused,
                devices=devices(link),
            )
        self._hold_spares_back(known)
        for link, instance in known:
            admitted = link.not_admitted is None
            if instance.admitted != admitted:
                self._groups.admit(link.name, able=admitted)
                more = more or admitted
        return more

    def _hold_spares_back(self, known: list[tuple[AgentLink, Instance]]) -> None:
        """Of the spares that could be admitted, those that are not needed are not."""
        if not any(link.is_spare for link, _ in known):
            self.substitution = Substitution(frozenset(), ())
            return
        placed = [
            PlacedInstance(
                link.role,
                int(link.name.rpartition("-")[2]),
                link.not_admitted or self._why_too_old(link, instance),
                bool(instance.held),
            )
            for link, instance in known
            if link.role and link.caller.is_ours and not link.hello.local
        ]
        self.substitution = substitute(placed, self.wanted, SPARE_ROLLOUT)
        for link, _ in known:
            if link.is_spare and link.name not in self.substitution.serving:
                link.not_admitted = link.not_admitted or NotAdmitted.SPARE

    def _why_too_old(self, link: AgentLink, instance: Instance) -> NotAdmitted | None:
        """An instance that could not load the served version serves for those that accept what it has. Where others
        wait for newer ones, it is one less."""
        if self._groups.served_version not in link.refused:
            return None
        return NotAdmitted.POLICY_REFUSED if self._groups.is_newer_wanted(instance.version) else None
