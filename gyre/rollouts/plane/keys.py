"""The keys of a fleet's door, as a requester: their requests over the open groups.

Invariants:
- *written before answered*, *same id same tokens*, *a key sees its own*: see `gyre.rollouts.plane.door_ledger`;
- *every wait has an end*: where others are served, and for as long as clients wait no instance had the version that a
  request asks for, it has failed.

This module must not know about HTTP, or who waits for a request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from gyre.rollouts.plane import placement, updates
from gyre.rollouts.plane.door_ledger import PURPOSE, Asked, DoorLedger, DoorRequest
from gyre.rollouts.plane.groups import OpenGroups
from gyre.rollouts.plane.instructions import Answer, Commit, CommitWithin
from gyre.rollouts.plane.requesters import Handler, Requester
from gyre.rollouts.plane.requests import InFlightRequest, InFlightSample
from gyre.rollouts.plane.settings import DoorSettings, ManagerSettings
from gyre.rollouts.protocol.frames import TrainerStatus
from gyre.rollouts.token_log.write_buffer import WriteBatch

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane

REFUSALS_TOLD = 4
"""Instances whose words stand in the error of a request for a version that none could load."""

WRITTEN_WITHIN_S = 0.02
"""For a new request, of which nothing is told before it is written: the commit of an end takes it along, so that ends
wait for half as many commits. Where the manager dies before, whoever asks again begins anew, and what an engine has
generated in that time is lost."""

REASON_CHARS = 2000
"""Kept of why a request cannot be generated."""


class SamplesAsked(NamedTuple):
    """By the key `owner`, at `at`, in seconds since 1970. The ledger has the request after it, unless it is refused."""

    owner: str
    asked: Asked
    at: float


class RequestDeleted(NamedTuple):
    owner: str
    id: str


class RequestsAborted(NamedTuple):
    """Those of the key that run, or the one of this id, if it does: an `Answer` has them."""

    owner: str
    id: str | None


class KeysRequester(Requester):
    most_resets = 0  # a door never takes back what it told

    def __init__(self, groups: OpenGroups, settings: ManagerSettings) -> None:
        super().__init__(groups, settings)
        door = settings.door or DoorSettings()
        self.ledger = DoorLedger(
            groups,
            keep_s=door.keep_s,
            keep_tokens=door.keep_tokens,
            key_bytes=door.key_bytes,
            most_open=door.most_open,
        )
        self.waited_s = 0.0
        """How long in all a sample has waited for a place."""
        self._answer_within_s = door.answer_within_s
        self._looked_at = 0.0
        self._unserved_since: dict[int, float] = {}
        """Since when no instance has the version that a request asks for, by the request's number."""

    def handlers(self) -> Mapping[type, Handler]:
        return {SamplesAsked: self._asked, RequestDeleted: self._deleted, RequestsAborted: self._aborted}

    def owns(self, request: InFlightRequest) -> bool:
        return request.purpose == PURPOSE

    @property
    def open_count(self) -> int:
        return self.ledger.open_count

    # -- what clients ask ---------------------------------------------------------------------------

    def _asked(self, plane: Plane, event: SamplesAsked) -> None:
        """Raises RequestRefused."""
        newest = plane.versions.newest
        _, is_new = self.ledger.ask(event.owner, event.asked, newest=newest, now=event.at)
        if is_new:
            plane.instructions.append(CommitWithin(WRITTEN_WITHIN_S))
            placement.dispatch_soon(plane)

    def _deleted(self, plane: Plane, event: RequestDeleted) -> None:
        """Raises RequestRefused where this key has no such request."""
        known = self.ledger.find(event.owner, event.id)
        self.ledger.close([known])
        self._closed(plane, [known])

    def _aborted(self, plane: Plane, event: RequestsAborted) -> None:
        if some := self.ledger.abort(event.owner, event.id):
            self._closed(plane, some)

    def _closed(self, plane: Plane, some: Sequence[DoorRequest]) -> None:
        plane.instructions.append(Answer(some))
        placement.cancel_superseded(plane)
        plane.commit(Commit.SOON)
        updates.promote(plane)

    # -- what comes of its requests -----------------------------------------------------------------

    def restore(self, plane: Plane, sessions: Mapping[str, bytes]) -> None:
        self.ledger.restore(plane.now)
        self._looked_at = plane.now

    def collect(self, plane: Plane, batch: WriteBatch, finished: Sequence[InFlightSample]) -> None:
        self.ledger.collect(batch)

    def committed(self, plane: Plane, batch: WriteBatch, complete: Sequence[InFlightRequest]) -> None:
        changed = self.ledger.committed(plane.now)
        plane.instructions.append(Answer(changed))
        if any(known.failed and known.request.pinned for known in changed):
            updates.promote(plane)

    def unservable(self, plane: Plane, request: InFlightRequest, why: str) -> None:
        plane.groups.give_up(request, why[:REASON_CHARS])

    def looked_at(self, plane: Plane, wanted: Mapping[str, int]) -> None:
        """Keys are to the elasticity policy what a trainer is: it waits while one of their samples has no place."""
        status = TrainerStatus(at_s=plane.now, waited_s=self.waited_s, wanted=dict(wanted))
        plane.autoscaler.pulse(status, plane.now)

    def look(self, plane: Plane) -> None:
        """Forget what was kept for long enough, and count the time in which samples wait for a place."""
        now = plane.now
        if len(plane.groups.placement.queue):
            self.waited_s += now - self._looked_at
        self._looked_at = now
        self._give_up_unserved(plane)
        if over := self.ledger.forget(now):
            self._closed(plane, over)

    def _give_up_unserved(self, plane: Plane) -> None:
        """Fail the requests for a version that no instance has had for as long as anybody waits for an answer."""
        now, within_s = plane.now, self._answer_within_s
        waiting = plane.groups.out_of_reach
        self._unserved_since = {one.number: self._unserved_since.get(one.number, now) for one in waiting}
        over = [one for one in waiting if now - self._unserved_since[one.number] > within_s]
        for request in over:
            version = request.min_version
            said = [f"{name}: {error}" for name, error in updates.refusals(plane, version).items()]
            why = f"No instance has version {version} or a newer one after {within_s:g} s."
            plane.groups.give_up(request, " ".join((why, *said[:REFUSALS_TOLD])))
        if over:
            placement.cancel_superseded(plane)
            plane.commit(Commit.SOON)
