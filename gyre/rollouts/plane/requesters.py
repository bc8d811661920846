"""Who asks the plane for samples. A trainer is one kind, the keys of a fleet's door are another; all kinds are
requesters, and the machine knows none of them by name.

A new kind is a class here below: it says which requests are its own, takes its own events (`handlers`), and is given
what comes of its requests. What comes in by a socket is a front's: `gyre.rollouts.manager.front`.

This module must not know what a kind of requester is like.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from gyre.rollouts.plane import placement
from gyre.rollouts.plane.groups import MOST_RESETS, OpenGroups
from gyre.rollouts.plane.instructions import Commit
from gyre.rollouts.plane.requests import InFlightRequest, InFlightSample
from gyre.rollouts.plane.settings import ManagerSettings
from gyre.rollouts.protocol.frames import LoadFailed
from gyre.rollouts.token_log.write_buffer import WriteBatch

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane

Handler = Callable[["Plane", Any], object]
"""Takes an event of one type. Raises GyreError, and changes nothing, where the event is refused."""


class Requester:
    """One kind of those who ask for samples. What a kind does not need it leaves as it is here."""

    most_resets: ClassVar[int] = MOST_RESETS
    """Times that a sample may be begun anew; 0 where tokens are told as they come, and never taken back."""

    trains: ClassVar[bool] = False
    """Whether it publishes a version after each of its steps, and waits for samples between them."""

    def __init__(self, groups: OpenGroups, settings: ManagerSettings) -> None:
        self.groups = groups

    def handlers(self) -> Mapping[type, Handler]:
        """Of the events that only this kind brings about, by their types."""
        return {}

    def owns(self, request: InFlightRequest) -> bool:
        """Whether the request is one of theirs. The first kind that says so has it."""
        return False

    @property
    def open_count(self) -> int:
        """Requests that have not ended, where they are counted."""
        return 0

    def restore(self, plane: Plane, sessions: Mapping[str, bytes]) -> None:
        """The groups are restored; these rows of sessions go with them."""

    def collect(self, plane: Plane, batch: WriteBatch, finished: Sequence[InFlightSample]) -> None:
        """The batch goes to the ledger next; these samples of theirs have finished in it."""

    def committed(self, plane: Plane, batch: WriteBatch, complete: Sequence[InFlightRequest]) -> None:
        """That batch is in the ledger, and these requests of theirs are complete there."""

    def given_up(self, plane: Plane, samples: Sequence[InFlightSample]) -> None:
        """These samples of theirs failed on every instance and with every seed, now or before."""

    def unservable(self, plane: Plane, request: InFlightRequest, why: str) -> None:
        """No instance can have the only version that may answer the request."""

    def policy_lost(self, plane: Plane, version: int, why: str) -> None:
        """No instance can have this version any more: what is to come of it, and of no other, cannot be generated.
        Requests that are open were told of before, by `unservable`."""

    def looked_at(self, plane: Plane, wanted: Mapping[str, int]) -> None:
        """The master looks at a fleet, and says how many instances of each role there are to be."""

    def look(self, plane: Plane) -> None:
        """Time has passed."""


def owner_of(plane: Plane, request: InFlightRequest) -> Requester | None:
    return next((one for one in plane.requesters if one.owns(request)), None)


def owned(plane: Plane, who: Requester, samples: Iterable[InFlightSample]) -> list[InFlightSample]:
    return [sample for sample in samples if owner_of(plane, sample.request) is who]


def report_failures(plane: Plane) -> None:
    """Report quarantined samples, and tell requesters of groups that are given up."""
    quarantined, plane.groups.quarantined = plane.groups.quarantined, []
    for state in quarantined:
        plane.report_event("SampleQuarantined", {**_description(state), "evidence": list(state.evidence)})
    if plane.groups.given_up:
        for one in plane.requesters:
            one.given_up(plane, owned(plane, one, plane.groups.given_up.values()))


def give_up_pinned(plane: Plane, frame: LoadFailed) -> None:
    """An instance cannot load a version that only pinned requests keep served, and no other instance has it: its
    publisher and everybody who had it have died. The requests fail, or nobody would ever generate again."""
    served = plane.versions.served
    if served is None or served.version != frame.version:
        return
    if any(instance.version == served.version for instance in plane.groups.instances.values()):
        return
    message = f"Version {served.version} is to be had nowhere any more: {frame.error}"
    if served.version < plane.versions.durable:
        for request in plane.groups.pinned_to(served.version):
            if (owner := owner_of(plane, request)) is not None:
                owner.unservable(plane, request, message)
        for one in plane.requesters:
            one.policy_lost(plane, served.version, message)
        placement.cancel_superseded(plane)
        plane.commit(Commit.SOON)


def _description(state: InFlightSample) -> dict[str, Any]:
    return {
        "group": state.request.group.id,
        "purpose": state.request.purpose,
        "index": state.index,
        "prompt": state.request.group.prompt_ids[:256].tolist(),
    }
