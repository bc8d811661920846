"""Fully asynchronous training: which groups go into the next step, when the first that are whole are taken first.

A group's deadline follows from its oldest token (or, while it is generated, from the policy that it was asked of): with
version `w` and the bound `k` it must be in a step that the trainer makes from version `w + k`. Where places are kept
(`keeps_places`), a group is taken only if those that remain can all still meet their deadlines, each step having
`per_step` places: the feasibility test of earliest-deadline-first scheduling (C. L. Liu and J. W. Layland 1973; for
unit jobs, J. R. Jackson 1955).

Invariants:
- *exactly once*: a group that was chosen is chosen once, until it is asked for again;
- *nothing in time is dropped*: where places are kept and no more was asked for than the graph permits,
  `(version + 1 + ahead) * per_step` groups in all with `ahead <= k`, no group becomes too old;
- *the oldest first*: among groups that may be taken, those with the oldest token come first, then those that were
  whole first.

This module must not know what is in a group but the versions of its tokens, nor when it came.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gyre.rollouts.samples import VersionRun
from gyre.rollouts.trainer.staleness import Action, StalenessPolicy, Verdict


@dataclass(frozen=True, slots=True)
class Choice:
    train: list[int] = field(default_factory=list)
    drop: list[tuple[int, Verdict]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Whole:
    oldest: int
    samples: tuple[Sequence[VersionRun], ...]


class ArrivalOrder:
    def __init__(self, policy: StalenessPolicy, *, per_step: int, keeps_places: bool) -> None:
        self.policy = policy
        self.per_step = per_step
        self.keeps_places = keeps_places
        self._asked: dict[int, int] = {}
        self._whole: dict[int, _Whole] = {}

    @property
    def in_flight(self) -> int:
        return len(self._asked)

    @property
    def waiting(self) -> int:
        """Whole groups that are in no step yet."""
        return len(self._whole)

    def asked(self, group: int, version: int) -> None:
        """It is generated, by policies of `version` and newer."""
        self._asked[group] = version

    def whole(self, group: int, samples: Iterable[Sequence[VersionRun]], trainer_version: int) -> None:
        """A group without tokens is as old as the trainer's policy."""
        self._asked.pop(group, None)
        kept = tuple(samples)
        versions = [run.version for runs in kept for run in runs if run.end > run.start]
        self._whole[group] = _Whole(min(versions, default=trainer_version), kept)

    def forget(self, group: int) -> None:
        """It will not come, or it is in a step already."""
        self._asked.pop(group, None)
        self._whole.pop(group, None)

    def choose(self, *, trainer_version: int, places: int) -> Choice:
        """What goes into the step that the trainer makes from `trainer_version`, which has so many places left."""
        choice = Choice()
        for group, whole in list(self._whole.items()):
            verdict = self.policy.group(whole.samples, trainer_version=trainer_version)
            if verdict.action is Action.DROP:
                del self._whole[group]
                choice.drop.append((group, verdict))
        due = Counter([*self._asked.values(), *(whole.oldest for whole in self._whole.values())])
        for group, whole in sorted(self._whole.items(), key=lambda item: item[1].oldest):
            if len(choice.train) == places:
                break
            if self.policy.group(whole.samples, trainer_version=trainer_version).action is Action.WAIT:
                continue
            if self.keeps_places and not self._spare(
                whole.oldest, due, trainer_version, places - len(choice.train)
            ):
                continue
            due[whole.oldest] -= 1
            del self._whole[group]
            choice.train.append(group)
        return choice

    def _spare(self, oldest: int, due: Counter[int], trainer_version: int, places: int) -> bool:
        """Whether all others can still be in time when a group with this oldest token takes a place. One of the most
        urgent may always: if they cannot all be in time, the trainer must not stand still for it."""
        first = trainer_version - self.policy.max_age
        if oldest <= min(
            (version for version, count in due.items() if count and version >= first), default=first
        ):
            return True
        needed = 0
        for step in range(self.policy.max_age + 1):
            needed += due[first + step] - (first + step == oldest)
            if needed > places - 1 + step * self.per_step:
                return False
        return True
