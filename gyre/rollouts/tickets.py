"""Groups that were asked for, and their samples on the way: plain state, which `Book` alone changes.

This module must not know who generates, or how anything is stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.samples import Group, Sample, VersionRun

INDEX_BITS = 16
"""A sample's key is its ticket and, in the low bits, its index in the group."""

MERGE_PARTS = 64
"""Pieces of one sample in memory before they are joined, so that a long one does not hold others' frames."""


class SampleState:
    """One sample on its way. Everything but its tokens is plain and small: there may be 100,000 of them."""

    __slots__ = (
        "deaths",
        "deltas",
        "died_at",
        "evidence",
        "failed_at",
        "finish",
        "index",
        "instance",
        "key",
        "lease",
        "length",
        "lent_at",
        "parts",
        "resets",
        "row",
        "runs",
        "ticket",
    )

    def __init__(self, ticket: Ticket, index: int) -> None:
        self.ticket = ticket
        self.index = index
        self.key = ticket.number << INDEX_BITS | index
        self.row = -1
        self.lease = 0
        self.length = 0
        self.lent_at = 0
        """Its length when the lease began."""
        self.instance: str | None = None
        self.finish = ""
        self.deaths = 0
        """Times that an engine died with it, or failed at it, while it got no further."""
        self.died_at = 0
        """Its length at the last of these."""
        self.failed_at = ""
        """The instance of the last one: it is tried elsewhere first."""
        self.evidence: tuple[str, ...] = ()
        """What was said each time."""
        self.resets = 0
        """How often it was set aside and begun anew, with another seed."""
        self.parts: list[tuple[NDArray[np.int32], NDArray[np.float32], int, int]] = []
        """(ids, log-probs, first, end) of the frames that brought its tokens."""
        self.runs: list[list[int]] = []
        """[version, start, end] of its tokens."""
        self.deltas: list[int] = []
        """Numbers of the ledger's deltas that hold its tokens."""

    def take(
        self,
        ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        first: int,
        count: int,
        version: int,
        seq: int,
    ) -> None:
        end = self.length + count
        if self.runs and self.runs[-1][0] == version:
            self.runs[-1][2] = end
        else:
            self.runs.append([version, self.length, end])
        self.length = end
        self.parts.append((ids, logprobs, first, first + count))
        self.deltas.append(seq)
        if len(self.parts) >= MERGE_PARTS:
            ids, logprobs = self.tokens()
            self.parts = [(ids, logprobs, 0, len(ids))]

    def tokens(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """int32 `[t]` ids and float32 `[t]` log-probs, as copies of their own."""
        if not self.parts:
            return np.empty(0, np.int32), np.empty(0, np.float32)
        return (
            np.concatenate([ids[first:end] for ids, _, first, end in self.parts]),
            np.concatenate([logprobs[first:end] for _, logprobs, first, end in self.parts]),
        )

    def correct(self, since: int, runs: Iterable[tuple[int, int]]) -> None:
        """The tokens from `since` on have these versions, as (version, tokens) one after another."""
        kept = [[version, start, min(end, since)] for version, start, end in self.runs if start < since]
        for version, count in runs:
            start = kept[-1][2] if kept else 0
            if kept and kept[-1][0] == version:
                kept[-1][2] += count
            elif count:
                kept.append([version, start, start + count])
        self.runs = kept

    def clear(self) -> int:
        """Forget the tokens; how many there were."""
        lost, self.length = self.length, 0
        self.parts, self.runs = [], []
        return lost


@dataclass(slots=True, eq=False)
class Ticket:
    """One group that was asked for. `number` grows with every request and names the group to agents."""

    number: int
    purpose: str
    group: Group
    n: int
    sampling: dict[str, Any]
    seed: int
    min_version: int
    pinned: bool
    samples: list[SampleState] = field(default_factory=list)
    left: int = 0
    """Samples that are not finished."""

    @property
    def max_new_tokens(self) -> int:
        return int(self.sampling["max_new_tokens"])

    def whole(self) -> Group:
        """The group with its samples; all are finished."""
        samples = []
        for state in self.samples:
            ids, logprobs = state.tokens()
            runs = tuple(VersionRun(*run) for run in state.runs)
            samples.append(Sample(ids, logprobs, runs, state.finish))
        return Group(self.group.id, self.group.prompt_ids, self.group.meta, samples)
