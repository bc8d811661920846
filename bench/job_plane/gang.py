"""Several ranks of one actor, asked as one: each is an `ActorProcess`, and the first answers for all.

Invariants:
- *all or none*: what computes is asked of every rank at once; the first that fails makes the call fail, and a gang that
  failed is of no more use, for the others may wait for it: close it;
- *even shares*: the groups of a micro-batch are dealt out by their tokens, the largest first.

It has the interface of `ActorProcess`, so that whoever trains need not know how many ranks there are.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import Any

from job_plane.actor import ActorFailed, ActorProcess, Row, now

FIRST_RANK_ONLY = frozenset(("publish", "bare"))
"""Calls to the first rank alone: it holds the host copy of the weights. `bare` is measured on one rank."""


class ActorGang:
    def __init__(self, start: Callable[[int], ActorProcess], ranks: int) -> None:
        """`start(rank)` begins that rank's process. They meet on this machine."""
        self.ranks = ranks
        self._processes = [start(rank) for rank in range(ranks)]
        self._callers = ThreadPoolExecutor(ranks + 1, thread_name_prefix="gang")

    def call(self, what: str, within_s: float, *, line: str = "compute", **given: Any) -> Any:
        """Raises ActorFailed with the traceback of the rank that failed first."""
        if self.ranks == 1 or what in FIRST_RANK_ONLY:
            return self._processes[0].call(what, within_s, line=line, **given)
        if what == "setup":
            until = now() + within_s
            self.call("ready", within_s)  # else the port would be free for as long as they import
            given, within_s = {**given, "port": free_port()}, max(1.0, until - now())
        shares: list[Row] = [dict(given) for _ in range(self.ranks)]
        if what == "accumulate":
            for share, groups in zip(shares, dealt(given["groups"], self.ranks), strict=True):
                share["groups"] = groups
        calls = [
            self._callers.submit(process.call, what, within_s, line=line, **share)
            for process, share in zip(self._processes, shares, strict=True)
        ]
        done, _ = wait(calls, timeout=within_s + 5.0, return_when=FIRST_EXCEPTION)
        for call in calls:
            if call in done and (error := call.exception()) is not None:
                raise error
        if len(done) < len(calls):
            raise ActorFailed(f"not every rank answered {what} within {within_s:.0f} s")
        answers = [call.result() for call in calls]
        first = answers[0]
        if (
            isinstance(first, dict) and "seconds" in first
        ):  # the slowest's: the others wait for it at the next sum
            return {**first, "seconds": max(answer["seconds"] for answer in answers)}
        if what == "memory":
            return {**first, "by_rank": answers}
        return first

    def close(self) -> None:
        for process in self._processes:  # at once: one alone would wait for another in a collective
            process.end_lines()
        for process in self._processes:
            process.close()
        self._callers.shutdown(wait=False, cancel_futures=True)


def dealt(
    groups: Sequence[Any], ranks: int, *, tokens: Callable[[Any], int] | None = None
) -> list[list[Any]]:
    """The groups of each rank: the largest goes to whoever has least. Each group once. `tokens` says how large one is,
    where it has no samples yet."""
    size = tokens or _tokens
    shares: list[list[Any]] = [[] for _ in range(ranks)]
    held = [0] * ranks
    for group in sorted(groups, key=lambda one: (-size(one), one.id)):
        least = min(range(ranks), key=lambda rank: (held[rank], rank))
        shares[least].append(group)
        held[least] += size(group)
    return shares


def _tokens(group: Any) -> int:
    return sum(len(group.prompt_ids) + len(sample.token_ids) for sample in group.samples)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
