"""Whether a job learns: its steps' metrics folded to warnings for people.

    code                 the job is warned when
    equal_rewards        every reward of the first 3 steps is the same, or of any 10 steps in a row, and the prompts
                         are not solved
    flat_groups          more than half of the groups of the last 10 steps have no gradient (3 steps are enough), and
                         the prompts are not solved
    no_gradient          the gradient's norm is exactly 0 in 3 steps in a row, and the prompts are not solved
    cut_off              more than a quarter of the answers of the last 10 steps end at their limit of tokens (3 steps
                         are enough)
    kl_runs_away         a KL of the last 5 steps is above 0.1, and above 10 times that of the first 5
    entropy_collapsed    the entropy of the last 5 steps is below 5 % of that of the first 5, and the reward is not
                         above its start
    not_finite           a step is skipped, because its gradient was not finite
    not_evaluated        the job has no held-out prompts, or evaluates never
    never_trained        rows of the training data are held out, too, so that they are never trained

The last three hold to the end, the others until it is so no longer. A job that ends sooner is judged by the steps that
it has (`at_end`).

Prompts are solved where the reward rose to the upper third of the range of all rewards. A group whose samples are all
right teaches nothing either, and says that the job has learnt.

Why these numbers: one step's rewards are often all equal by chance, three are not, where the policy is new; later they
are, where all prompts are solved. A policy that has learnt is surer of itself, so its entropy alone says nothing. k3 of
an engine that computes a little differently is below 0.01; at 0.1 per token an answer of 50 tokens is 150 times as
likely for one as for the other.

Invariants:
- *few*: a warning of a code is reported when it begins to hold and when it ends, and between, where its words have
  changed, whenever the steps since the start have doubled, and at the end of the run: nobody reads of the first three
  steps in a job's thousandth;
- *a fold*: what holds depends on the metrics in their order alone, so a later trainer that folds the ledger's steps
  again comes to the same.

Pure.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from gyre.workloads.trainer.learning.step_line import percent

AT_START = 3
"""Steps that are enough at the start."""
RECENT = 10
SHORT = 5
FLAT_SHARE = 0.5
CUT_SHARE = 0.25
SOLVED_RISE = 0.1
SOLVED_SHARE = 2 / 3
"""Of the range of all rewards: what the reward must have risen by, and to, for prompts to be solved."""
KL_HIGH = 0.1
KL_FACTOR = 10.0
ENTROPY_SHARE = 0.05

_KLS = ("kl", "rollout_kl", "old_kl")


@dataclass(frozen=True, slots=True)
class Warned:
    """A warning that begins to hold at `step`, or with `holds` False holds no longer."""

    code: str
    message: str
    step: int
    holds: bool = True


class LearningWatch:
    """`group_baseline` is whether a sample is compared with its group, so that a group of equal rewards teaches
    nothing. `not_evaluated` says why nothing is evaluated, where that is so; `never_trained` which rows are not
    trained, where somebody may expect it."""

    def __init__(
        self, *, group_baseline: bool = True, not_evaluated: str = "", never_trained: str = ""
    ) -> None:
        self._group_baseline = group_baseline
        self._never_trained = never_trained
        self._not_evaluated = not_evaluated
        self._recent: deque[Mapping[str, Any]] = deque(maxlen=RECENT)
        self._first: list[Mapping[str, Any]] = []
        """The metrics of the first `SHORT` steps."""
        self._same_for = 0
        """Steps in a row whose every reward is `_reward`."""
        self._reward: float | None = None
        self._low, self._high = math.inf, -math.inf
        """The least and the greatest reward of all steps."""
        self._zero_for = 0
        self._seen = 0
        self._skipped: list[int] = []
        """The steps whose gradient was not finite."""
        self._held: dict[str, Warned] = {}
        self._told_at: dict[str, int] = {}
        """After how many steps each that holds was last reported."""

    @property
    def held(self) -> dict[str, Warned]:
        """The warnings that hold, by code."""
        return dict(self._held)

    def begin(self) -> list[Warned]:
        """What is known before the first step."""
        found: dict[str, str] = {}
        if self._not_evaluated:
            found["not_evaluated"] = (
                f"nothing is evaluated: {self._not_evaluated}; the rewards of training are all there is to go by"
            )
        if self._never_trained:
            found["never_trained"] = self._never_trained
        return self._changes(found, 0, tuple(code for code in found if code not in self._held))

    def step(self, metrics: Mapping[str, Any]) -> list[Warned]:
        """Fold the metrics of the next step. Returns the warnings that begin to hold or end with it."""
        step = int(metrics.get("step", self._seen + 1))
        self._seen += 1
        if metrics.get("skipped"):
            self._skipped.append(step)
            return self._changes({"not_finite": self._of_skips()}, step, ("not_finite",))
        self._recent.append(metrics)
        if len(self._first) < SHORT:
            self._first.append(metrics)
        low, high = metrics.get("reward_min"), metrics.get("reward_max")
        self._low = min(self._low, math.inf if low is None else low)
        self._high = max(self._high, -math.inf if high is None else high)
        if low is not None and low == high:
            self._same_for = self._same_for + 1 if low == self._reward else 1
            self._reward = low
        else:
            self._same_for, self._reward = 0, None
        self._zero_for = self._zero_for + 1 if metrics.get("grad_norm") == 0 else 0
        return self._changes(self._found(step, AT_START), step, _OF_STEPS)

    def at_end(self) -> list[Warned]:
        """The run is over: judge it by the steps that it has, however few."""
        found = {code: one.message for code, one in self._held.items()}
        step = self._seen
        if self._recent:
            step = int(self._recent[-1].get("step", self._seen))
            found |= self._found(step, min(AT_START, self._seen))
        if self._skipped:
            found["not_finite"] = self._of_skips()
        newer = [code for code, one in self._held.items() if found.get(code, one.message) != one.message]
        for code in newer:  # their words are of earlier steps
            self._held[code] = replace(self._held[code], message=found[code])
        changes = self._changes({code: found[code] for code in _OF_STEPS if code in found}, step, _OF_STEPS)
        return [*(self._held[code] for code in newer), *changes]

    def _changes(self, found: Mapping[str, str], step: int, codes: tuple[str, ...]) -> list[Warned]:
        changes = []
        for code in codes:
            if code in found and code not in self._held:
                self._held[code] = Warned(code, found[code], step)
                self._told_at[code] = self._seen
                changes.append(self._held[code])
            elif code in found and found[code] != self._held[code].message:
                if self._seen >= 2 * self._told_at[code]:
                    self._held[code] = replace(self._held[code], message=found[code])
                    self._told_at[code] = self._seen
                    changes.append(self._held[code])
            elif code not in found and code in self._held:
                changes.append(Warned(code, self._held.pop(code).message, step, holds=False))
        return changes

    def _found(self, step: int, enough: int) -> dict[str, str]:
        """What is wrong now, by code. `enough` steps are enough to judge by."""
        found: dict[str, str] = {}
        seen = len(self._recent)
        solved = self._prompts_are_solved()
        at_start = self._same_for == self._seen
        if self._same_for >= (enough if at_start else RECENT) and self._reward is not None and not solved:
            found["equal_rewards"] = (
                f"every reward has been {self._reward:g} since step {step - self._same_for + 1}: with equal rewards no "
                "answer is better than another, and nothing is learnt"
            )
        if seen >= enough:
            flat = self._mean("flat_groups_ratio")
            if self._group_baseline and not solved and flat is not None and flat > FLAT_SHARE:
                found["flat_groups"] = (
                    f"{percent(flat)} of the groups of {_steps(step, seen)} have no gradient: all of their samples "
                    "earned the same"
                )
            cut = self._mean("cut_off_ratio")
            if cut is not None and cut > CUT_SHARE:
                found["cut_off"] = (
                    f"{percent(cut)} of the answers of {_steps(step, seen)} were cut off at their limit of tokens, "
                    "which sampling.max_new_tokens sets"
                )
        if self._zero_for >= enough and not solved:
            found["no_gradient"] = (
                f"the gradient has been exactly 0 since step {step - self._zero_for + 1}: nothing is learnt"
            )
        if self._seen >= 2 * SHORT:
            found |= self._of_distributions()
        return found

    def _prompts_are_solved(self) -> bool:
        """Whether the reward rose to the upper part of its range: then most flat groups are of solved prompts."""
        before, now, extent = self._start("reward_mean"), self._mean("reward_mean"), self._high - self._low
        if before is None or now is None or not 0 < extent < math.inf:
            return False
        return now - before >= SOLVED_RISE * extent and now - self._low >= SOLVED_SHARE * extent

    def _of_skips(self) -> str:
        if len(self._skipped) == 1:
            return f"step {self._skipped[0]} was skipped: its gradient was not finite"
        last = self._skipped[-1]
        return f"{len(self._skipped)} steps were skipped, last step {last}: their gradients were not finite"

    def _of_distributions(self) -> dict[str, str]:
        found = {}
        for name in _KLS:
            start, now = self._start(name), self._mean(name, SHORT)
            if start is not None and now is not None and now > max(KL_HIGH, KL_FACTOR * start):
                found["kl_runs_away"] = f"{name} went from {start:.2g} to {now:.2g} per token: lower optim.lr"
                break
        start, now = self._start("entropy"), self._mean("entropy", SHORT)
        before, reward = self._start("reward_mean"), self._mean("reward_mean", SHORT)
        if (
            start is not None
            and now is not None
            and now < ENTROPY_SHARE * start
            and (reward is None or before is None or reward <= before)
        ):
            found["entropy_collapsed"] = (
                f"the entropy went from {start:.2g} to {now:.2g} per token, and the reward did not rise: the policy "
                "always answers the same; lower optim.lr, or set loss.entropy_coeff"
            )
        return found

    def _mean(self, name: str, last: int = RECENT) -> float | None:
        return _mean(list(self._recent)[-last:], name)

    def _start(self, name: str) -> float | None:
        return _mean(self._first, name)


_OF_STEPS = ("equal_rewards", "flat_groups", "no_gradient", "cut_off", "kl_runs_away", "entropy_collapsed")

CODES = (*_OF_STEPS, "not_finite", "not_evaluated", "never_trained")


def _mean(rows: list[Mapping[str, Any]], name: str) -> float | None:
    values = [row[name] for row in rows if isinstance(row.get(name), int | float)]
    return fmean(values) if values else None


def _steps(last: int, count: int) -> str:
    return f"step {last}" if count == 1 else f"steps {last - count + 1} to {last}"
