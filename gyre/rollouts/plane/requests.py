"""Requested groups and their samples in flight: plain state, which `OpenGroups` alone changes; and the samples' seeds.

Invariant *the same again*: a seed depends on the request's seed, the group, the sample's index and how often it was
begun anew, and on nothing that happens.

This module must not know who generates, or how anything is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from gyre.philox import word, words
from gyre.rollouts.plane.token_table import TokenTable
from gyre.rollouts.protocol.fields import check_sampling, refuse
from gyre.rollouts.protocol.frames import Request
from gyre.rollouts.samples import Group, GroupRequest, InstanceRun, Sample, VersionRun, unpack_groups
from gyre.rollouts.scheduling.fleet import PlacedSample

KEPT_EVIDENCE = 3
"""Number of a sample's last failures whose evidence is kept."""

INDEX_BITS = 16
"""A sample's key is the number of its request and, in the low bits, its index in the group."""


class FailureRecord(NamedTuple):
    """A sample's failures: their number, and where the last one was; see `gyre.rollouts.plane.quarantine`."""

    deaths: int
    died_at: int
    failed_at: str


class EarlierLease(NamedTuple):
    """A lease of a sample that an earlier manager granted."""

    lease: int
    incarnation: str
    length: int
    """Tokens of the sample that were in the ledger when it ended."""


class InFlightSample:
    """One sample in flight. It is plain and small apart from its tokens, because there may be 100,000 samples."""

    __slots__ = (
        "deaths",
        "died_at",
        "earlier_leases",
        "evidence",
        "failed_at",
        "finish",
        "holders",
        "index",
        "key",
        "lease",
        "length_at_lease",
        "placed",
        "request",
        "resets",
        "row",
        "table",
    )

    def __init__(self, request: InFlightRequest, index: int, table: TokenTable) -> None:
        self.request = request
        self.table = table
        """The table with its tokens."""
        self.index = index
        self.key = request.number << INDEX_BITS | index
        self.placed = PlacedSample(
            self.key,
            request.number,
            len(request.group.prompt_ids),
            request.max_new_tokens,
            request.min_version,
        )
        """The sample as scheduling sees it."""
        self.row = -1
        self.lease = 0
        self.length_at_lease = 0
        """Its length when the lease began."""
        self.earlier_leases: tuple[EarlierLease, ...] = ()
        """Leases of it that earlier managers granted, as far as the ledger has them."""
        self.holders: tuple[tuple[str, int], ...] = ()
        """The instances that had it, in order, each with its length when the lease began."""
        self.finish = ""
        self.deaths = 0
        """Times that an engine died or failed with it while it got no further."""
        self.died_at = 0
        """Its length at the last of these failures."""
        self.failed_at = ""
        """The instance of the last failure; the sample is tried elsewhere first."""
        self.evidence: tuple[str, ...] = ()
        """The error texts of the last failures."""
        self.resets = 0
        """Times that it was quarantined and begun anew with another seed."""

    @property
    def instance(self) -> str | None:
        """The name of the instance that has it."""
        holder = self.placed.holder
        return holder.name if holder is not None else None

    @property
    def length(self) -> int:
        return int(self.table.lengths[self.row])

    @property
    def finished_as(self) -> Literal["stop", "length"] | None:
        """How its tokens end it, though its engine did not live to say so; None while more are to come."""
        if not self.length:
            return None
        if int(self.token_ids()[-1]) in self.request.stops:
            return "stop"
        return "length" if self.length >= self.request.max_new_tokens else None

    def hold(self, instance: str, length: int) -> None:
        """The instance has it from now on, with so many tokens. One that added none before is forgotten."""
        kept = self.holders
        if kept and kept[-1][1] == length:
            kept = kept[:-1]
        if not kept or kept[-1][0] != instance:
            kept = (*kept, (instance, length))
        self.holders = kept

    def stays_since(self, instance: str) -> int:
        """Its length when the instance that has it now got it, from another or first, under whatever lease."""
        name, length = self.holders[-1] if self.holders else ("", 0)
        return length if name == instance else self.length_at_lease

    @property
    def instances(self) -> tuple[InstanceRun, ...]:
        """Who generated which of its tokens; without those of instances whose names are not known."""
        ends = [*(start for _, start in self.holders[1:]), self.length]
        return tuple(
            InstanceRun(name, start, end)
            for (name, start), end in zip(self.holders, ends, strict=False)
            if name and start < end
        )

    @property
    def runs(self) -> list[list[int]]:
        """[version, start, end] of each run of its tokens."""
        return self.table.runs(self.row)

    def tokens(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Copies of its ids, int32 `[t]`, and log-probs, float32 `[t]`."""
        return self.table.tokens(self.row)

    def token_ids(self) -> NDArray[np.int32]:
        """A copy of its ids, int32 `[t]`."""
        return self.table.ids(self.row)

    def correct(self, since: int, runs: Iterable[tuple[int, int]]) -> None:
        """Set the versions of the tokens from `since` on, as consecutive runs (version, tokens)."""
        self.table.correct(self.row, since, runs)

    @property
    def record(self) -> FailureRecord:
        return FailureRecord(self.deaths, self.died_at, self.failed_at)

    @record.setter
    def record(self, record: FailureRecord) -> None:
        self.deaths, self.died_at, self.failed_at = record

    def add_evidence(self, said: str) -> None:
        self.evidence = (*self.evidence[-(KEPT_EVIDENCE - 1) :], said)

    def forget_tokens(self) -> int:
        """Drop its tokens; returns how many there were."""
        return self.table.clear(self.row)


@dataclass(slots=True, eq=False, weakref_slot=True)
class InFlightRequest(GroupRequest):
    """A requested group and its samples in flight. `number` grows with every request, and names the group to
    agents."""

    number: int = field(kw_only=True)
    samples: list[InFlightSample] = field(default_factory=list)
    left: int = 0
    """Number of samples that are not finished."""
    seeds: list[int] = field(default_factory=list)
    """The first seed of each sample; empty before one was needed."""
    before: InFlightRequest | None = None
    """The request that it goes on from, which is finished and has one sample."""
    added: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    """What its prompt adds to that; the whole prompt where it goes on from none."""

    @classmethod
    def of(cls, request: GroupRequest, number: int) -> InFlightRequest:
        return cls(
            request.purpose,
            request.group,
            request.n,
            request.sampling,
            request.seed,
            request.min_version,
            request.pinned,
            request.after,
            number=number,
            added=request.group.prompt_ids,
        )

    def prompt(self) -> NDArray[np.int32]:
        """int32 `[p]`: the whole prompt, which is its group's only while it has to be generated."""
        parts = [self.added]
        at = self.before
        while at is not None:
            parts += [at.samples[0].token_ids(), at.added]
            at = at.before
        return np.concatenate(parts[::-1]) if len(parts) > 1 else self.added

    def put_together(self, prompt_ids: NDArray[np.int32] | None = None) -> None:
        """Give the group, and the samples that are to be generated, the whole prompt, which is `prompt_ids` where
        somebody has it."""
        if self.before is not None:
            prompt_ids = self.prompt() if prompt_ids is None else prompt_ids
            self.group = Group(self.group.id, prompt_ids, self.group.meta)
            for sample in self.samples:
                sample.placed.prompt_tokens = len(self.group.prompt_ids)

    def take_apart(self) -> None:
        """It is generated: its group has what it adds alone, for the rest is its predecessors'."""
        if self.before is not None:
            self.group = Group(self.group.id, self.added, self.group.meta)

    @property
    def max_new_tokens(self) -> int:
        return int(self.sampling["max_new_tokens"])

    @property
    def stops(self) -> Sequence[int]:
        """The tokens that end a sample."""
        return () if self.sampling.get("ignore_eos") else self.sampling.get("stop_token_ids") or ()

    def complete(self) -> Group:
        """The group with its samples, which are all finished."""
        samples = []
        for sample in self.samples:
            ids, logprobs = sample.tokens()
            runs = tuple(VersionRun(*run) for run in sample.runs)
            samples.append(Sample(ids, logprobs, runs, sample.finish, instances=sample.instances))
        return Group(self.group.id, self.group.prompt_ids, self.group.meta, samples)


def requested_groups(frame: Request) -> list[Group]:
    """The groups that a frame requests. Raises FrameError if nobody could generate them."""
    try:
        groups = unpack_groups(frame.groups)
    except ValueError as error:
        raise refuse("invalid", f"request.groups: {error}") from None
    check_sampling(frame.sampling)
    limit = frame.sampling.get("max_new_tokens")
    if type(limit) is not int or limit < 1:
        raise refuse("invalid", f"request.sampling.max_new_tokens: {limit!r:.40}, expected a positive number")
    stops = frame.sampling.get("stop_token_ids")
    if not isinstance(stops, list | tuple | None):
        raise refuse("invalid", f"request.sampling.stop_token_ids: {stops!r:.40}, expected a list of ids")
    for group in groups:
        _check_group(group, limit)
    return groups


def sampling_of(frame: Request, group: Group) -> dict[str, Any]:
    """How the group's samples are drawn: as the frame says, and no longer than the group's own limit."""
    sampling: dict[str, Any] = frame.sampling
    limit = group.token_limit(sampling["max_new_tokens"])
    return sampling if limit == sampling["max_new_tokens"] else sampling | {"max_new_tokens": limit}


def _check_group(group: Group, limit: int) -> None:
    if type(group.id) is not int or not -(2**63) <= group.id < 2**63:  # held-out prompts have negative ids
        raise refuse("invalid", f"request.groups: {group.id!r:.40} is no group's id")
    ids = group.prompt_ids
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not len(ids):
        raise refuse(
            "invalid", f"request.groups: group {group.id} has no prompt, or one that is no list of ids"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= 2**31:
        raise refuse("invalid", f"request.groups: group {group.id} has a token id out of range")
    try:
        group.token_limit(limit)
    except ValueError as error:
        raise refuse("invalid", f"request.groups: {error}") from None


_STREAM = 32
_MASK = 0x7FFFFFFF


def draw_seeds(requests: Sequence[InFlightRequest]) -> None:
    """Draw the seeds of groups that were requested together, in one pass that costs as much as a single seed."""
    if requests:
        ids = np.array([[request.group.id] for request in requests])
        bits = words(requests[0].seed, _STREAM, ids, np.arange(requests[0].n), 0) & np.uint64(_MASK)
        for request, seeds in zip(requests, bits.tolist(), strict=True):
            request.seeds = seeds


def seed_of(sample: InFlightSample) -> int:
    """31 bits."""
    request = sample.request
    if sample.resets:
        return word(request.seed, _STREAM, request.group.id, sample.index, sample.resets) & _MASK
    if not request.seeds and request.n == 1:
        request.seeds = [word(request.seed, _STREAM, request.group.id) & _MASK]
    elif not request.seeds:
        draw_seeds([request])
    return request.seeds[sample.index]
