"""What is trained, given how old the policy is that produced it.

A sample's age is the trainer's policy version minus the version that produced a token; a sample that was continued
after a weight update has tokens of several ages. The bound `max_age` counts in versions: 0 is synchronous, `k` lets
the generation run `k` steps ahead, None is fully asynchronous. What is beyond the bound:

- `DROP`: the sample is given up;
- `WAIT`: it does not come to that. The trainer waits for what is in flight before a step that would make it too old;
- a function of the user's, which is told the ages and answers with a verdict.

Whether generation may run ahead at all is asked before it starts (`may_generate`), after AReaL (arXiv 2505.24298,
equation 3): then little is ever too old.

Invariants:
- *no old for new*: with a bound and without a user's function, no token older than the bound is trained;
- *nothing dropped while waiting is permitted*: under `WAIT` a sample is dropped only if it came too old;
- *whole*: a group has one verdict, that of its strictest sample.

This module must not know what trains, nor why a version is what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from gyre.rollouts.samples import VersionRun


class Action(Enum):
    TRAIN = "train"
    WAIT = "wait"
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


class TooOld(Enum):
    DROP = "drop"
    WAIT = "wait"


Judge = Callable[[Ages], Verdict]


@dataclass(frozen=True, slots=True)
class StalenessPolicy:
    max_age: int | None = 0
    too_old: TooOld | Judge = TooOld.DROP
    """A function is asked about every sample, the young ones too."""

    def __post_init__(self) -> None:
        if self.max_age is not None and self.max_age < 0:
            raise ValueError(
                f"a staleness of {self.max_age} versions; 0 is synchronous, None is without a bound"
            )

    def sample(
        self, runs: Sequence[VersionRun], *, trainer_version: int, oldest_in_flight: int | None = None
    ) -> Verdict:
        """May the trainer, whose policy is `trainer_version`, train this sample now?

        `oldest_in_flight` is the lowest version that any unfinished sample has a token of; None where none is.
        """
        age = ages(runs, trainer_version)
        if not isinstance(self.too_old, TooOld):
            return self.too_old(age)
        if self.max_age is None:
            return TRAIN
        if age.newest < 0:
            return Verdict(
                Action.WAIT,
                f"It has tokens of version {trainer_version - age.newest} and the trainer went back to"
                f" {trainer_version}; it waits until the trainer is there again.",
            )
        if age.oldest > self.max_age:
            return Verdict(
                Action.DROP,
                f"It has tokens of version {trainer_version - age.oldest}, {age.oldest} behind the trainer's"
                f" {trainer_version}; {self.max_age} are permitted.",
            )
        # In a synchronous step all that is in flight is of this very step, and streams into it.
        if self.max_age > 0 and not self.may_step(
            trainer_version=trainer_version, oldest_in_flight=oldest_in_flight
        ):
            return Verdict(
                Action.WAIT,
                f"An unfinished sample has tokens of version {oldest_in_flight}; a step of the trainer from"
                f" {trainer_version} on would leave it more than the permitted {self.max_age} behind.",
            )
        return TRAIN

    def group(
        self,
        samples: Iterable[Sequence[VersionRun]],
        *,
        trainer_version: int,
        oldest_in_flight: int | None = None,
    ) -> Verdict:
        """One verdict for samples that are trained together: drop before wait before train."""
        strictest = TRAIN
        for runs in samples:
            verdict = self.sample(runs, trainer_version=trainer_version, oldest_in_flight=oldest_in_flight)
            if verdict.action is Action.DROP:
                return verdict
            if verdict.action is Action.WAIT and strictest.action is Action.TRAIN:
                strictest = verdict
        return strictest

    def may_step(self, *, trainer_version: int, oldest_in_flight: int | None) -> bool:
        """May the trainer make its next version, as far as what is in flight is concerned? Always, but under `WAIT`.

        What is too old already is no reason to wait: it will be dropped whatever the trainer does.
        """
        if self.max_age is None or oldest_in_flight is None or self.too_old is not TooOld.WAIT:
            return True
        return trainer_version + 1 - oldest_in_flight != self.max_age + 1

    def may_generate(self, *, groups_started: int, groups_per_step: int, trainer_version: int) -> bool:
        """May one more group be started, after so many in the whole job, such that it is not too old when trained?

        `trainer_version` is the number of steps trained. A group is trained in the step that its place in the order
        falls into, if groups are trained in about the order in which they are started.
        """
        if self.max_age is None:
            return True
        return groups_started // groups_per_step <= trainer_version + self.max_age
