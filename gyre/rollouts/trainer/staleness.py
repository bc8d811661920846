"""What is trained, given how old the policy is that produced it.

A sample's age is the trainer's policy version minus the version that produced a token; a sample that was continued
after a weight update has tokens of several ages. The bound `max_age` counts in versions: 0 is synchronous, and with `k`
a token may be `k` versions behind. What is beyond the bound is dropped. A function of the user's, instead of the bound,
is told the ages and answers with a verdict.

Which of the groups that may be trained are taken first, and for which a slot is kept: `arrival`. How far generation
runs ahead is the delay on the graph's weights edge.

Invariants:
- *no old for new*: without a user's function, no token older than the bound is trained;
- *whole*: a group has one verdict, that of its strictest sample.

This module must not know what trains, nor why a version is what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from gyre.errors import UserCodeError
from gyre.rollouts.samples import VersionRun


class Action(Enum):
    TRAIN = "train"
    WAIT = "wait"
    """It is asked about again after the next step."""
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class Verdict:
    action: Action
    reason: str = ""
    """A sentence where it is not trained."""


TRAIN = Verdict(Action.TRAIN)


@dataclass(frozen=True, slots=True)
class Ages:
    """Of a sample's tokens, in policy versions. Negative: of a later version than the trainer has."""

    oldest: int
    newest: int
    mean: float
    tokens: int


def ages(runs: Sequence[VersionRun], trainer_version: int) -> Ages:
    """A sample without tokens is as old as the trainer's policy."""
    spans = [(trainer_version - run.version, run.end - run.start) for run in runs if run.end > run.start]
    tokens = sum(length for _, length in spans)
    if not tokens:
        return Ages(0, 0, 0.0, 0)
    return Ages(
        oldest=max(age for age, _ in spans),
        newest=min(age for age, _ in spans),
        mean=sum(age * length for age, length in spans) / tokens,
        tokens=tokens,
    )


Judge = Callable[[Ages], Verdict]


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    max_age: int = 0
    judge: Judge | None = None
    """A function is asked about every sample, the young ones too, and the bound is not."""

    def __post_init__(self) -> None:
        if self.max_age < 0:
            raise ValueError(f"a staleness of {self.max_age} versions; 0 is synchronous")

    def sample(self, runs: Sequence[VersionRun], *, trainer_version: int) -> Verdict:
        """May the trainer, whose policy is `trainer_version`, train this sample now?

        Raises UserCodeError where the user's function answers with something else than a Verdict.
        """
        age = ages(runs, trainer_version)
        if self.judge is not None:
            verdict = self.judge(age)
            if not isinstance(verdict, Verdict):
                raise UserCodeError(f"the staleness function answered {verdict!r:.100}, expected a Verdict.")
            return verdict
        if age.newest < 0:
            return Verdict(
                Action.WAIT,
                f"It has tokens of version {trainer_version - age.newest} and the trainer is at {trainer_version}; "
                "it waits until the trainer is there.",
            )
        if age.oldest > self.max_age:
            return Verdict(
                Action.DROP,
                f"It has tokens of version {trainer_version - age.oldest}, {age.oldest} behind the trainer's"
                f" {trainer_version}; {self.max_age} are permitted.",
            )
        return TRAIN

    def group(self, samples: Iterable[Sequence[VersionRun]], *, trainer_version: int) -> Verdict:
        """One verdict for samples that are trained together: drop before wait before train."""
        strictest = TRAIN
        for runs in samples:
            verdict = self.sample(runs, trainer_version=trainer_version)
            if verdict.action is Action.DROP:
                return verdict
            if verdict.action is Action.WAIT and strictest.action is Action.TRAIN:
                strictest = verdict
        return strictest
