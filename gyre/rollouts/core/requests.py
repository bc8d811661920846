"""Groups that were asked for, and their samples on the way: plain state, which `Book` alone changes.

This module must not know who generates, or how anything is stored.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gyre.rollouts.core.token_table import TokenTable
from gyre.rollouts.samples import Group, Sample, VersionRun

KEPT_EVIDENCE = 3
"""Of the last so many deaths of a sample it is kept what was said."""

INDEX_BITS = 16
"""A sample's key is its request's number and, in the low bits, its index in the group."""


class Record(NamedTuple):
    """What a sample answers for: see `gyre.rollouts.core.quarantine`."""

    deaths: int
    died_at: int
    failed_at: str


class InFlightSample:
    """One sample on its way. Everything but its tokens is plain and small: there may be 100,000 of them."""

    __slots__ = (
        "deaths",
        "died_at",
        "evidence",
        "failed_at",
        "finish",
        "index",
        "instance",
        "key",
        "lease",
        "lent_at",
        "request",
        "resets",
        "row",
        "table",
    )

    def __init__(self, request: GroupRequest, index: int, table: TokenTable) -> None:
        self.request = request
        self.table = table
        """Where its tokens are."""
        self.index = index
        self.key = request.number << INDEX_BITS | index
        self.row = -1
        self.lease = 0
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

    @property
    def length(self) -> int:
        return int(self.table.lengths[self.row])

    @property
    def runs(self) -> list[list[int]]:
        """[version, start, end] of its tokens."""
        return self.table.runs(self.row)

    def tokens(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """int32 `[t]` ids and float32 `[t]` log-probs, as copies of their own."""
        return self.table.tokens(self.row)

    def correct(self, since: int, runs: Iterable[tuple[int, int]]) -> None:
        """The tokens from `since` on have these versions, as (version, tokens) one after another."""
        self.table.correct(self.row, since, runs)

    @property
    def record(self) -> Record:
        return Record(self.deaths, self.died_at, self.failed_at)

    @record.setter
    def record(self, record: Record) -> None:
        self.deaths, self.died_at, self.failed_at = record

    def add_evidence(self, said: str) -> None:
        self.evidence = (*self.evidence[-(KEPT_EVIDENCE - 1) :], said)

    def clear(self) -> int:
        """Forget the tokens; how many there were."""
        return self.table.clear(self.row)


@dataclass(slots=True, eq=False)
class GroupRequest:
    """One group that was asked for. `number` grows with every request and names the group to agents."""

    number: int
    purpose: str
    group: Group
    n: int
    sampling: dict[str, Any]
    seed: int
    min_version: int
    pinned: bool
    samples: list[InFlightSample] = field(default_factory=list)
    left: int = 0
    """Samples that are not finished."""
    seeds: list[int] = field(default_factory=list)
    """Of each sample, as long as it was not begun anew; none before the first was asked for."""

    @property
    def max_new_tokens(self) -> int:
        return int(self.sampling["max_new_tokens"])

    def complete(self) -> Group:
        """The group with its samples; all are finished."""
        samples = []
        for state in self.samples:
            ids, logprobs = state.tokens()
            runs = tuple(VersionRun(*run) for run in state.runs)
            samples.append(Sample(ids, logprobs, runs, state.finish))
        return Group(self.group.id, self.group.prompt_ids, self.group.meta, samples)
