"""The alignment of a gang before it is used: its ranks have begun and ended the same calls.

A trainer that dies between the submits of one gang call leaves a rank in a collective that the others never enter. So
does a call that reached one rank and was lost on its way to another. The rank itself cannot know, and its collective
library ends the wait after many minutes. Here the ranks are compared: a rank that has ended all its calls, and was not
given the call that another rank is inside, will never join it.

Invariant *in step*: a gang that was aligned has begun and ended the same calls on every rank, so its next collective is
the same one for all. Any other gang is lost. The rank that is ahead is blamed, so that the master replaces all of them:
a collective that was broken off leaves Gloo or NCCL in a state that the next one cannot build on.

This module must not know what the calls do.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass

from gyre.errors import Fenced, VertexDied
from gyre.workloads.gang.gang import PEERS_S, Gang, GangLost, Outcome, outcome_of
from gyre.workloads.vertex.messages import CallPosition, Failure

LOOK_S = 0.25
"""Time between two looks at ranks that have not ended their calls. A stray call counts when two looks in a row find
it."""

ANSWER_S = 5.0
"""Deadline for a rank to say which call it is in. A process that is stopped never does; the master finds that out."""


@dataclass(frozen=True, slots=True)
class StrayCall:
    """The rank `ahead` was given a call in which the rank `behind` will never join it."""

    ahead: int
    behind: int
    position: CallPosition
    """The position of the rank ahead."""
    failed: bool = False
    """Whether the rank behind was given the call, and left it by an exception."""


def align(gang: Gang, *, timeout_s: float) -> None:
    """Returns when the gang is in step. Raises GangLost where it is not, where a rank dies, or takes longer than
    `timeout_s` for what it was sent before; and Fenced."""
    if gang.size == 1:
        return
    futures = [gang.transport.settle(*member) for member in gang.members]
    deadline = time.monotonic() + timeout_s
    seen, seen_at = None, 0.0
    with gang.owner.waiting():
        while True:
            left_s = deadline - time.monotonic()
            wait(futures, max(0.0, min(LOOK_S, left_s)), return_when=FIRST_EXCEPTION)
            settled = _settled(gang, futures)
            busy = [rank for rank in range(gang.size) if rank not in settled]
            inside = _inside(gang, busy)
            stray = find_stray(settled, inside)
            if stray is not None and (not busy or (stray == seen and _is_over(stray, seen_at))):
                raise GangLost(_blame(gang, stray))
            if not busy:
                return
            if stray != seen:
                seen, seen_at = stray, time.monotonic()
            if left_s <= 0.0:
                method = inside[busy[0]].method if busy[0] in inside else "settle"
                text = f"{method}, which an earlier trainer called, did not return within {timeout_s:g} s"
                failure = Failure(error=text, traceback="", user_code=False)
                raise GangLost((gang.members[busy[0]], f"{gang.role}.{method}", failure))


def find_stray(settled: Mapping[int, CallPosition], inside: Mapping[int, CallPosition]) -> StrayCall | None:
    """Both arguments are by rank: the ranks in `settled` have ended all their calls, those in `inside` are in one. A
    rank may have calls that it has not begun, so only a settled one shows which calls it was not given."""
    for rank, position in inside.items():
        for other, last in settled.items():
            if last.call < position.call:
                return StrayCall(rank, other, position)
            if last.call == position.call and last.failed:
                return StrayCall(rank, other, position, failed=True)
    if inside or not settled:
        return None
    ahead = max(settled, key=lambda rank: settled[rank].call)
    behind = min(settled, key=lambda rank: settled[rank].call)
    if settled[ahead].call == settled[behind].call:
        return None
    return StrayCall(ahead, behind, settled[ahead])


def _is_over(stray: StrayCall, seen_at: float) -> bool:
    """Whether the ranks have had time to leave a failed call: a peer may be about to fail in the same way."""
    return not stray.failed or time.monotonic() - seen_at >= PEERS_S


def _settled(gang: Gang, futures: Iterable[Future[Outcome]]) -> dict[int, CallPosition]:
    """The positions of the ranks that have ended all their calls. Raises GangLost as soon as one rank is lost, since
    the others may wait for it."""
    found = {}
    for rank, future in enumerate(futures):
        if not future.done():
            continue
        outcome = outcome_of(future)
        if isinstance(outcome, VertexDied):
            gang.membership.doubt(*gang.members[rank])
            raise GangLost
        status, value = outcome
        if status == "error":
            if value.fenced:
                raise Fenced(value.error)
            raise GangLost((gang.members[rank], f"{gang.role}.settle", value))
        found[rank] = value
    return found


def _inside(gang: Gang, ranks: Iterable[int]) -> dict[int, CallPosition]:
    """The positions of those ranks that say that they are in a call. A rank that dies meanwhile fails its `settle`."""
    answers = {rank: gang.transport.call_position(*gang.members[rank]) for rank in ranks}
    wait(answers.values(), ANSWER_S)
    outcomes = {rank: outcome_of(future) for rank, future in answers.items() if future.done()}
    return {
        rank: got[1]
        for rank, got in outcomes.items()
        if not isinstance(got, VertexDied) and got[0] == "ok" and got[1].inside
    }


def _blame(gang: Gang, stray: StrayCall) -> tuple[tuple[str, int], str, Failure]:
    ahead, behind = gang.members[stray.ahead][0], gang.members[stray.behind][0]
    method = stray.position.method
    where = "is inside" if stray.position.inside else "has done"
    if stray.failed:
        text = (
            f"{ahead} {where} {method}, which {behind} has left by an exception: it waits for a peer in vain"
        )
    else:
        text = (
            f"{ahead} {where} {method}, which {behind} was never given, for whoever sent it died or lost touch in "
            "between: the ranks are out of step"
        )
    return (
        gang.members[stray.ahead],
        f"{gang.role}.{method}",
        Failure(error=f"{text}.", traceback="", user_code=False),
    )
