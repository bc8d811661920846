"""What one rank has accumulated of a step: which micro-batches and groups, and the sums that normalise its gradient.

The gradient itself is the back end's. Invariants:
- *all or nothing*: a micro-batch's counts are added in one go, after everything that can fail;
- *sums*: nothing is divided before the whole mini-batch, over all ranks, is known.

This module must not know about ranks, optimizers or the idempotence of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gyre.rollouts.samples import Group

_COUNTS = (
    "groups",
    "samples",
    "sequences",
    "tokens",
    "reward",
    "loss",
    "scored_tokens",
    "flops",
    "peak_flops",
)


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over samples. `sequences` are the samples that have a token. `scored_tokens` are those that went through
    the model: where a sample has no gradient it is left out. `flops` are the model's operations, and `peak_flops` what
    the ranks' devices could make in a second, NaN where one does not say. `sums` are the loss's own metrics, over
    scored tokens."""

    groups: float = 0.0
    samples: float = 0.0
    sequences: float = 0.0
    tokens: float = 0.0
    reward: float = 0.0
    loss: float = 0.0
    scored_tokens: float = 0.0
    flops: float = 0.0
    peak_flops: float = 0.0
    sums: dict[str, float] = field(default_factory=dict)

    def to_list(self, names: Sequence[str]) -> list[float]:
        """The counts, then the sums of these names: equally long on every rank, whatever it had to do."""
        return [*(getattr(self, name) for name in _COUNTS), *(self.sums.get(name, 0.0) for name in names)]

    @classmethod
    def from_list(cls, values: Sequence[float], names: Sequence[str]) -> Tally:
        """The inverse of `to_list`."""
        counts = dict(zip(_COUNTS, values, strict=False))
        return cls(**counts, sums=dict(zip(names, values[len(_COUNTS) :], strict=True)))

    def plus(self, other: Tally) -> Tally:
        counts = {name: getattr(self, name) + getattr(other, name) for name in _COUNTS}
        names = dict.fromkeys((*self.sums, *other.sums))
        sums = {name: self.sums.get(name, 0.0) + other.sums.get(name, 0.0) for name in names}
        return Tally(**counts, sums=sums)

    def mean(self, name: str) -> float:
        """The mean of a sum over scored tokens; 0 where there were none."""
        return self.sums.get(name, 0.0) / max(self.scored_tokens, 1.0)


@dataclass(slots=True)
class Accumulation:
    """What this rank has accumulated for step `step`. Where a step has several updates, the groups themselves are in
    `held`, for no update has its groups before all are there."""

    step: int
    tally: Tally = field(default_factory=Tally)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    group_ids: set[int] = field(default_factory=set)
    held: list[Group] = field(default_factory=list)

    def add(
        self, index: int, tally: Tally, group_ids: Sequence[int], *, held: Sequence[Group] = ()
    ) -> dict[str, Any]:
        """Take a micro-batch in and return its record."""
        record = {
            "index": index,
            "groups": int(tally.groups),
            "samples": int(tally.samples),
            "tokens": int(tally.tokens),
            "reward_mean": tally.reward / max(tally.samples, 1.0),
        }
        self.tally = self.tally.plus(tally)
        self.group_ids.update(group_ids)
        self.held += held
        self.records[index] = record
        return record
