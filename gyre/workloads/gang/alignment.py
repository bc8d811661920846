"""Before a gang is used: what was sent to its ranks before has ended on all of them, and it was the same on each.

A trainer that dies between the submits of one gang call leaves a rank in a collective that the others never enter, and
so does a call that reached one rank and was lost on its way to another. The rank itself cannot know, and its collective
library ends the wait after many minutes. Here the ranks are compared: one that has nothing left to do, and was not
given the call that another is inside of, will never come.

Invariant *in step*: a gang that was mustered has begun and ended the same calls on every rank, so its next collective
is the same one for all. Any other gang is lost, and the rank that is ahead is blamed, for the master to replace all of
them: what a collective that was broken off leaves behind in Gloo or NCCL is no base for the next one.

This module must not know what the calls do.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass

from gyre.errors import Fenced, VertexLost
from gyre.workloads.gang.gang import PEERS_S, Gang, GangLost, Outcome, outcome_of
from gyre.workloads.vertex.messages import Failure, Standing

LOOK_S = 0.25
"""Between two looks at ranks that are not through with what they were sent. What is found in two of them is so."""

ANSWER_S = 5.0
"""How long a rank may take to say where it stands. One that is stopped never does; the master finds that out."""


@dataclass(frozen=True, slots=True)
class StrayCall:
    """The rank `ahead` was given a call in which the rank `behind` will never join it."""

    ahead: int
    behind: int
    standing: Standing
    """Of the rank ahead."""
    failed: bool = False
    """The one behind was given it, and left it by an exception."""


def muster(gang: Gang, *, timeout_s: float) -> None:
    """Returns when the gang is in step. Raises GangLost where it is not, where a rank dies, or takes longer than
    `timeout_s` for what it was sent before; and Fenced."""
    if gang.size == 1:
        return
    futures = [gang.transport.settle(*member) for member in gang.members]
    deadline = time.monotonic() + timeout_s
    seen, seen_at = None, 0.0
    with gang.waiting():
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


def find_stray(settled: Mapping[int, Standing], inside: Mapping[int, Standing]) -> StrayCall | None:
    """By rank: `settled` are through with all that they were sent, `inside` are in a call. A rank may be behind with
    what it was given, so only one that is through tells what it was not given."""
    for rank, standing in inside.items():
        for other, last in settled.items():
            if last.call < standing.call:
                return StrayCall(rank, other, standing)
            if last.call == standing.call and last.failed:
                return StrayCall(rank, other, standing, failed=True)
    if inside or not settled:
        return None
    ahead = max(settled, key=lambda rank: settled[rank].call)
    behind = min(settled, key=lambda rank: settled[rank].call)
    if settled[ahead].call == settled[behind].call:
        return None
    return StrayCall(ahead, behind, settled[ahead])


def _is_over(stray: StrayCall, seen_at: float) -> bool:
    """A peer of one that failed may be about to come out with the same failure."""
    return not stray.failed or time.monotonic() - seen_at >= PEERS_S


def _settled(gang: Gang, futures: Iterable[Future[Outcome]]) -> dict[int, Standing]:
    """Where those stand that are through. Raises GangLost as soon as one is lost: the others may wait for it."""
    found = {}
    for rank, future in enumerate(futures):
        if not future.done():
            continue
        outcome = outcome_of(future)
        if isinstance(outcome, VertexLost):
            gang.membership.doubt(*gang.members[rank])
            raise GangLost
        status, told = outcome
        if status == "error":
            if told.fenced:
                raise Fenced(told.error)
            raise GangLost((gang.members[rank], f"{gang.role}.settle", told))
        found[rank] = told
    return found


def _inside(gang: Gang, ranks: Iterable[int]) -> dict[int, Standing]:
    """Those of the ranks that are in a call, by their own word. One that dies meanwhile is heard of by `settle`."""
    asked = {rank: gang.transport.standing(*gang.members[rank]) for rank in ranks}
    wait(asked.values(), ANSWER_S)
    outcomes = {rank: outcome_of(future) for rank, future in asked.items() if future.done()}
    return {
        rank: got[1]
        for rank, got in outcomes.items()
        if not isinstance(got, VertexLost) and got[0] == "ok" and got[1].inside
    }


def _blame(gang: Gang, stray: StrayCall) -> tuple[tuple[str, int], str, Failure]:
    ahead, behind = gang.members[stray.ahead][0], gang.members[stray.behind][0]
    method = stray.standing.method
    where = "is inside" if stray.standing.inside else "has done"
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
