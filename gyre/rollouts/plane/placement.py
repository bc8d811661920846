"""Giving samples to instances: who is admitted is computed, the placement decides, and the assignments go out.

Invariants:
- *admitted means verified*: admission is computed from the present state before samples are given out, whatever came
  since the last time;
- *continued means durable*: a sample goes on elsewhere after the commit that holds its tokens;
- *a recall has an end*: a sample that was recalled and not handed back in time is taken back;
- *in order*: what is sent to an instance behind a frame that waits for a commit waits too.

This module must not know about sockets or who asked for samples.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gyre.rollouts.plane.admission import NotAdmitted
from gyre.rollouts.plane.groups import Given, Recalled
from gyre.rollouts.plane.instructions import DISPATCH_SOON, Commit
from gyre.rollouts.plane.links import AgentLink
from gyre.rollouts.plane.requests import InFlightSample
from gyre.rollouts.protocol.frames import Assign, Assignment, Cancel, Frame

if TYPE_CHECKING:
    from gyre.rollouts.plane.state import Plane

WORK_PORTION_BYTES = 4 << 20
"""Largest batch of continued samples in one frame; well below the frame limit, however long they are."""

ASSIGN_PER_TURN = 2048
"""Samples given out before the loop looks at its sockets again: about 20 ms."""


MISSING_TOLD = 16
"""Most names of missing instances in the event of a spare that begins to serve."""


@dataclass(slots=True)
class Placing:
    """What is remembered between two times that samples are given out."""

    hold_until: float = 0.0
    """Nothing is given out before: samples may still be held by instances that have not dialled yet."""
    committed_seq: int = 0
    """The number of the newest delta in the ledger."""
    is_due: bool = False
    """Whether a dispatch is due in this turn of the loop."""
    recalled: dict[tuple[int, int], float] = field(default_factory=dict)
    """When each (row, lease) was recalled, in that order."""
    is_stale: bool = True
    """Something other than a report came since admission was computed."""
    rebalanced_at: float = 0.0
    moved: Counter[str] = field(default_factory=Counter)
    """How many samples each instance was asked for that move, since this was told last."""
    serving_spares: frozenset[str] = frozenset()
    """The spares that serve, as was told last."""


def dispatch_soon(plane: Plane) -> None:
    """Dispatch once for everything that this turn of the loop brings, with admission computed anew."""
    plane.placing.is_stale = True
    if not plane.placing.is_due:
        plane.placing.is_due = True
        plane.instructions.append(DISPATCH_SOON)


def dispatch(plane: Plane) -> None:
    """Stop what is over, and assign the queued samples to admitted instances."""
    plane.placing.is_due = False
    cancel_superseded(plane)
    compute_admission(plane)
    if plane.now < plane.placing.hold_until:
        return
    given = plane.groups.assign(ASSIGN_PER_TURN)
    send_work(plane, given)
    if given:
        plane.commit(Commit.SOON)  # the leases
    if sum(len(work) for _, work in given.values()) == ASSIGN_PER_TURN:
        dispatch_soon(plane)
    else:  # nothing waits here for the slots that are free
        _move(plane, plane.groups.deal(plane.now))


def compute_admission(plane: Plane) -> bool:
    """Compute who may be given samples now; whether anybody may who might not before. A report changes nothing of
    it, and there are thousands of reports."""
    if not plane.placing.is_stale:
        return False
    plane.placing.is_stale = False
    more = plane.links.admit(plane.windows.device_use, handover=plane.settings.update_mode == "handover")
    if plane.now >= plane.placing.hold_until:  # before, instances that have not dialled yet are not dead
        _report_spares(plane)
    return more


def set_wanted(plane: Plane, wanted: Mapping[str, int]) -> None:
    """So many instances of these roles there are to be."""
    if wanted.items() - plane.links.wanted.items():
        plane.links.wanted.update(wanted)
        dispatch_soon(plane)


def _report_spares(plane: Plane) -> None:
    """Tell which spares have begun to serve, or are relieved, since this was told last."""
    now = plane.links.substitution
    for name in sorted(now.serving - plane.placing.serving_spares):
        version = plane.groups.instances[name].version
        told = {"instance": name, "missing": list(now.missing[:MISSING_TOLD]), "version": version}
        plane.report_event("SparePromoted", told)
    for name in sorted(plane.placing.serving_spares - now.serving):
        link = plane.links.get(name)
        if link is not None and link.not_admitted is NotAdmitted.SPARE:  # else it is gone itself
            held = len(plane.groups.instances[name].held)
            plane.report_event("SpareRelieved", {"instance": name, "samples": held})
    plane.placing.serving_spares = now.serving


def send_work(plane: Plane, given: Given) -> None:
    for name, (prompts, work) in given.items():
        link = plane.links.get(name)
        if link is None or link.connection is None:
            continue
        known = {prompt.request_id: prompt for prompt in prompts}
        for portion in _portions(work):
            needed = 0
            for one in portion:
                state = plane.groups.sample(one.key)
                if one.prior and state is not None:
                    needed = max(needed, plane.groups.last_delta(state))
            request_ids = dict.fromkeys(one.request_id for one in portion)
            send(
                plane,
                link,
                Assign(prompts=[known[number] for number in request_ids], work=portion),
                needed,
            )


def send(plane: Plane, link: AgentLink, frame: Frame, needed: int = 0) -> None:
    """Send it when the delta `needed` is committed, and after what waits for that already."""
    if link.deferred or needed > plane.placing.committed_seq:
        link.deferred.append((needed, frame))
        plane.commit(Commit.NOW)
    elif link.connection is not None:
        plane.send(link.connection, frame)


def send_committed(plane: Plane, link: AgentLink) -> None:
    """Send what waited for the deltas that are in the ledger now."""
    while link.deferred and link.deferred[0][0] <= plane.placing.committed_seq:
        _, frame = link.deferred.popleft()
        if link.connection is not None:
            plane.send(link.connection, frame)


def recall(plane: Plane, states: Iterable[InFlightSample]) -> None:
    """What runs there goes on elsewhere, from its last token."""
    _send_recalls(plane, plane.groups.recall(states))


def _send_recalls(plane: Plane, recalled: Recalled) -> None:
    for name, rows in recalled.items():
        if (link := plane.links.get(name)) is not None:
            send(plane, link, Cancel(rows=rows))
            plane.placing.recalled.update(dict.fromkeys(rows, plane.now))


def _take_back(plane: Plane, since: float) -> None:
    """What was recalled before `since`, and was not handed back, goes on elsewhere, whatever its holder says."""
    taken: Counter[str] = Counter()
    while plane.placing.recalled:
        (row, lease), recalled_at = next(iter(plane.placing.recalled.items()))
        if recalled_at > since:
            break
        del plane.placing.recalled[row, lease]
        if (name := plane.groups.take_back(row, lease)) is not None:
            taken[name] += 1
    for name, count in taken.items():
        plane.report_event("RecallIgnored", {"instance": name, "count": count})
    if taken:
        dispatch_soon(plane)


def cancel_superseded(plane: Plane) -> None:
    """Stop what went on elsewhere."""
    cancelled, plane.groups.cancelled = plane.groups.cancelled, []
    for name, row, lease in cancelled:
        link = plane.links.get(name)
        if link is not None:
            send(plane, link, Cancel(rows=[(row, lease)]))


def look(plane: Plane) -> None:
    """Periodic catch-up of admission, dispatch and rebalancing."""
    now = plane.now
    plane.placing.is_stale = True
    _take_back(plane, now - plane.settings.recall_timeout_s)
    if compute_admission(plane):
        dispatch_soon(plane)
    if plane.placing.hold_until and now >= plane.placing.hold_until:
        plane.placing.hold_until = 0.0
        dispatch_soon(plane)
    if plane.groups.can_deal:
        dispatch_soon(plane)
    if now - plane.placing.rebalanced_at > plane.settings.rebalance_every_s:
        _rebalance(plane, now)
        dispatch_soon(plane)


def _rebalance(plane: Plane, now: float) -> None:
    plane.placing.rebalanced_at = now
    _move(plane, plane.groups.rebalance(now))
    for name, count in plane.placing.moved.items():
        plane.report_event("SamplesMoved", {"instance": name, "count": count})
    plane.placing.moved.clear()


def _move(plane: Plane, recalled: Recalled) -> None:
    _send_recalls(plane, recalled)
    for name, rows in recalled.items():
        plane.placing.moved[name] += len(rows)


def _portions(work: list[Assignment]) -> Iterator[list[Assignment]]:
    """Fresh samples first, for they wait for nothing; then those that go on, by size."""
    if fresh := [one for one in work if not one.prior]:
        yield fresh
    portion: list[Assignment] = []
    size = 0
    for one in work:
        if one.prior:
            portion.append(one)
            size += len(one.prior)
            if size >= WORK_PORTION_BYTES:
                yield portion
                portion, size = [], 0
    if portion:
        yield portion
