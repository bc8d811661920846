"""Does a job learn: the verdict that a person gives who looks at its curves, and because of what.

    It learns: held-out accuracy 34 % at version 0, 97 % at version 80.

    yes         a held-out set rose, or the rewards did
    partly      one held-out set rose and another did not; or the rewards rose and nothing that is held out did; or all
                held-out prompts have one and the same answer
    no          flat: a change that matters would have been seen
    worse       what was there, or had been learnt, is lost: it fell, or it collapsed
    stuck       no group of the last steps has a gradient, and the prompts are not solved
    saturated   the reward has been at its maximum from the start: there is nothing to learn
    too early   fewer steps than a trend can be seen in
    unknown     the noise is larger than any change

Evaluations go before rewards, for their prompts are the same each time. What a learning warning says stands beside the
verdict (`beside`) and never changes it. How a rise is distinguished from noise is in `gyre.api.trend`.

Pure: from a view of the job and the metrics of its steps. This module must not know where its words are shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal

from typing_extensions import TypeAliasType, TypedDict

from gyre.api.terminal.formats import accuracy_name, all_same, one_line, right_rule
from gyre.api.trend import (
    deviations,
    level_of,
    mann_kendall,
    mean_trend,
    share_trend,
    standard_error,
)
from gyre.workloads.trainer.learning.step_line import percent, short

View = Mapping[str, Any]
Steps = Sequence[Mapping[str, Any]]
Verdict = Literal["yes", "partly", "no", "worse", "stuck", "saturated", "too early", "unknown"]
Tone = TypeAliasType("Tone", Literal["good", "attention", "bad", "over"])

AT_LEAST_STEPS = 8
"""The fewest in whose order a rise can be distinguished from chance as surely as `SURE` asks."""
SURE = 2.5
"""Standard errors of a trend of the steps: one in 160 curves of noise has it by chance."""
SURE_LEVEL = 3.3
"""Of the last steps above the first few, where the order of all says nothing: a curve that rose at once and stayed."""
SURE_EVALUATED = 2.0
"""Of evaluations: they are few, and asked of the same prompts each time, which makes them surer than they look."""
PART_SHARE = 0.15
"""Of the steps: as long are the parts whose mean rewards are named, and compared with the best of them."""
START_SHARE = 0.05
END_SHARE = 0.3
"""Of the steps, at each end, that are compared where nothing rose or fell."""
LEAST_STEPS = 3
"""Fewer are no mean."""
MATTERS = 0.05
"""Of the range of all rewards: a change that a person would call one."""
LEAST_CHANGE = 0.01
"""Of that range: a rise below it is none, however sure."""
LOST_SHARE = 0.5
"""Of what was gained: from then on a fall is a collapse."""
TOP = 0.95
"""Of the range of all rewards, or of an evaluation: from there on it is at its maximum."""
WIDE = 0.15
"""A held-out set whose change is not known any better says nothing against rewards that rose."""

LOOKS, IN_A_LOOK = 6, 40
"""Of a long job so many parts of so many steps each, evenly spread, stand for all: their trend is judged in 20 ms."""


class Learns(TypedDict):
    """`words` is the verdict as a sentence's beginning, `because` what it is drawn from; `beside` are the warnings that
    hold, with their steps."""

    verdict: Verdict
    words: str
    tone: Tone
    because: str
    beside: list[str]


WORDS: Mapping[Verdict, tuple[str, str, Tone]] = {
    "yes": ("It learns", "It learnt", "good"),
    "partly": ("It learns in part", "It learnt in part", "attention"),
    "no": ("It does not learn so far", "It did not learn", "bad"),
    "worse": ("It gets worse", "It got worse", "bad"),
    "stuck": ("It does not learn any more", "It had stopped learning", "bad"),
    "saturated": ("There is nothing left to learn", "There was nothing left to learn", "attention"),
    "too early": ("Too early to say whether it learns", "Too short to say whether it learnt", "over"),
    "unknown": ("Whether it learns cannot be told yet", "Whether it learnt cannot be told", "over"),
}
"""The words while the job runs, the words once it has ended, and the tone."""


def learns(view: View, steps: Steps | None) -> Learns:
    """`steps` are the metrics of the job's steps, in order: all of them, or those that `looks` names; None where they
    cannot be read now."""
    verdict, because = _judged(view, steps)
    now, ended, tone = WORDS[verdict]
    return {
        "verdict": verdict,
        "words": ended if view["job"]["ended_at"] else now,
        "tone": tone,
        "because": because,
        "beside": [
            f"since step {warning['step']}: {one_line(warning['message'])}"
            if warning["step"]
            else one_line(warning["message"])
            for warning in view.get("warnings") or ()
        ],
    }


def sentence_of(found: Learns) -> str:
    """`It learns: held-out accuracy 34 % at version 0, 97 % at version 80.`"""
    return f"{found['words']}{': ' if found['because'] else ''}{found['because']}."


def looks(last: int) -> Iterator[tuple[int, int]]:
    """Which steps of a job of `last` steps to judge it by, as pairs: the step after which to read, and how many."""
    if last <= LOOKS * IN_A_LOOK:
        yield 0, LOOKS * IN_A_LOOK
        return
    for number in range(LOOKS):
        yield (last - IN_A_LOOK) * number // (LOOKS - 1), IN_A_LOOK


def judged_steps(read: Callable[[int, int], Steps], last: int) -> list[Mapping[str, Any]]:
    """Those steps; `read(after, limit)` gives the metrics of the first `limit` steps beyond one."""
    return [row for after, limit in looks(last) for row in read(after, limit)]


# -- both together ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Curve:
    """`since` is the step at which it fell; `wide` says that the change is hardly known, `same` that all prompts have
    one answer."""

    kind: Literal["rose", "fell", "flat", "noisy", "at top", "too short"]
    because: str
    since: int = 0
    wide: bool = False
    same: bool = False


_UNREAD = _Curve("noisy", "the rewards of the steps cannot be read now")


def _judged(view: View, steps: Steps | None) -> tuple[Verdict, str]:
    evaluations = view.get("evaluations")
    several = isinstance(evaluations, Mapping) and len(evaluations) > 1
    sets = [
        found
        for name, rows in (evaluations.items() if isinstance(evaluations, Mapping) else ())
        if (found := _of_set(_called(str(name), several), rows)) is not None
    ]
    rewards = _UNREAD if steps is None else _of_rewards(steps)
    rose = [one for one in sets if one.kind == "rose"]
    fell = [one for one in sets if one.kind == "fell"]
    others = [one for one in sets if one.kind not in ("rose", "fell", "at top")]
    told = "; ".join(one.because for one in (*rose, *fell, *others))
    if rewards.kind == "fell" and not fell and rewards.since > _last_version(evaluations):
        return "worse", "; ".join(filter(None, (rewards.because, told)))
    if steps is not None and rewards.kind != "fell" and (stuck := _stuck(steps)):
        return "stuck", "; ".join(filter(None, (stuck, told)))
    if rose:
        return ("partly" if fell or others or any(one.same for one in rose) else "yes"), told
    if fell:
        return "worse", told
    return _by_rewards(rewards, sets)


def _by_rewards(rewards: _Curve, sets: Sequence[_Curve]) -> tuple[Verdict, str]:
    """Where no held-out set rose or fell."""
    because = "; ".join((rewards.because, *(one.because for one in sets)))
    at_top = bool(sets) and all(one.kind == "at top" for one in sets)
    if rewards.kind == "rose":
        known = [one for one in sets if not one.wide and one.kind != "at top"]
        return ("partly" if known else "yes"), because
    if rewards.kind == "fell":
        return "worse", because
    if rewards.kind == "at top" or at_top:
        return "saturated", because
    if rewards.kind == "too short":
        return ("unknown" if sets else "too early"), because
    return ("no" if rewards.kind == "flat" else "unknown"), because


def _called(name: str, several: bool) -> str:
    return "held-out" if name == "held_out" else f"held-out {name}" if several else name


def _last_version(evaluations: Any) -> int:
    """The newest version that a set was evaluated at; a fall of the rewards before it is in its result."""
    rows = (
        [row for found in evaluations.values() for row in found] if isinstance(evaluations, Mapping) else []
    )
    return max((int(row["version"]) for row in rows), default=0)


# -- held-out sets ----------------------------------------------------------------------------------


def _of_set(name: str, rows: Sequence[Mapping[str, Any]]) -> _Curve | None:
    """None where there are not two results to compare. Results by another rule of what is right are not compared."""
    rows = [row for row in rows if right_rule(row) == right_rule(rows[-1])]
    shares = bool(rows) and all(_is_number(rows[at].get("accuracy")) for at in (0, -1))
    key, what = ("accuracy", accuracy_name(rows[-1])) if shares else ("reward_mean", "reward")
    form = percent if shares else short
    rows = [row for row in rows if _is_number(row.get(key))]
    if len(rows) < 2 or rows[-1]["version"] <= rows[0]["version"]:
        return None
    values = [float(row[key]) for row in rows]
    first, last, best = values[0], values[-1], max(range(len(values)), key=values.__getitem__)

    def at(place: int) -> str:
        return f"{form(values[place])} at version {rows[place]['version']}"

    same = all_same(rows[-1]) and not (shares and last >= TOP)
    alike = f", where all {rows[-1]['count']} answers are the same" if same else ""
    told = f"{name} {what} {at(0)}, {at(-1)}{alike}"
    lost = len(rows) > 2 and _trend([rows[best], rows[-1]], key) <= -level_of(len(rows) - 1, SURE_EVALUATED)
    if lost and values[best] - last > LOST_SHARE * (values[best] - first):
        return _Curve("fell", f"{name} {what} {at(0)}, {at(best)}, {at(-1)}: it fell")
    trend = _trend(rows, key), _trend([rows[0], rows[-1]], key)
    if max(trend) >= SURE_EVALUATED and last > first:
        return _Curve("rose", told, same=same)
    if min(trend) <= -SURE_EVALUATED and last < first:
        return _Curve("fell", f"{told}: it fell")
    if shares and min(first, last) >= TOP:
        return _Curve("at top", told)
    return _Curve("noisy", f"{told}: no more than chance", wide=_is_wide(rows, key))


def _trend(rows: Sequence[Mapping[str, Any]], key: str) -> float:
    values, counts = [float(row[key]) for row in rows], [_count(row) for row in rows]
    if key == "accuracy":
        return share_trend(values, counts)
    return mean_trend(values, [float(row.get("reward_std") or 0.0) for row in rows], counts)


def _is_wide(rows: Sequence[Mapping[str, Any]], key: str) -> bool:
    """Whether the change from the first result to all later ones together is hardly known. 0 of 16 is no 0 %, so a
    right and a wrong answer are added to each side (Agresti and Caffo, The American Statistician 54, 2000)."""
    first, later = _count(rows[0]), sum(_count(row) for row in rows[1:])
    if key != "accuracy":  # in units of two deviations, which is the range of rewards of two values
        return SURE_EVALUATED * math.sqrt(1 / first + 1 / later) / 2 > WIDE
    variance = 0.0
    for count, right in (
        (first, rows[0][key] * first),
        (later, sum(row[key] * _count(row) for row in rows[1:])),
    ):
        share = (right + 1) / (count + 2)
        variance += share * (1 - share) / (count + 2)
    return SURE_EVALUATED * math.sqrt(variance) > WIDE


def _count(row: Mapping[str, Any]) -> int:
    """Of prompts, not of answers: several answers to one prompt say hardly more than one."""
    return max(int(row.get("prompts") or row["count"]), 1)


# -- rewards ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rewards:
    """The mean rewards of steps, whose numbers are `steps`; `low` and `high` are of all answers, where known."""

    steps: Sequence[int]
    means: Sequence[float]
    low: float
    high: float

    @property
    def extent(self) -> float:
        return self.high - self.low

    @property
    def top(self) -> float:
        return self.low + TOP * self.extent

    def part(self, first: int, count: int) -> tuple[float, str]:
        """The mean of `count` steps from place `first` on, and its words."""
        begin, end = self.steps[first], self.steps[first + count - 1]
        mean = fmean(self.means[first : first + count])
        return mean, f"{short(mean)} in step{'' if begin == end else 's'} {_span(begin, end)}"

    def length(self, share: float) -> int:
        return max(int(len(self.means) * share), LEAST_STEPS)


def _of_rewards(steps: Steps) -> _Curve:
    rows = [row for row in steps if _is_number(row.get("reward_mean"))]
    if len(rows) < AT_LEAST_STEPS:
        made = f"{len(rows)} step{'' if len(rows) == 1 else 's'}"
        return _Curve("too short", f"{made} with a reward, {AT_LEAST_STEPS} are needed for a trend")
    told = _rewards(rows)
    if told.extent == 0:
        return _all_equal(told, every=all(_is_number(row.get("reward_min")) for row in rows))
    return _fall_of(told) or _top_of(told) or _rise_of(told) or _rest_of(told)


def _rewards(rows: Steps) -> _Rewards:
    means = [float(row["reward_mean"]) for row in rows]
    low, high = (
        most([*means, *(float(row[name]) for row in rows if _is_number(row.get(name)))])
        for name, most in (("reward_min", min), ("reward_max", max))
    )
    return _Rewards([int(row.get("step", at)) for at, row in enumerate(rows, 1)], means, low, high)


def _all_equal(told: _Rewards, *, every: bool) -> _Curve:
    """Above 0 it is what right answers earn, or the reward does not tell right from wrong. `every` is whether the least
    and the greatest reward of each step are known."""
    since = f"{'every answer' if every else 'an answer'} of {len(told.means)} steps earned {told.high:g}"
    if not every:
        return _Curve("noisy", f"{since} on average")
    if told.high > 0:
        return _Curve("at top", f"{since}: all of them are right, or the reward does not tell them apart")
    return _Curve("flat", f"{since}: no answer is better than another")


def _fall_of(told: _Rewards) -> _Curve | None:
    """Whether the last steps are well below the best part before them."""
    count = told.length(PART_SHARE)
    starts = [*range(0, len(told.means) - 2 * count + 1, count)]
    best = max(starts, key=lambda at: told.part(at, count)[0], default=0)
    last = len(told.means) - count
    (begin, _), (peak, at_best), (end, at_end) = (told.part(at, count) for at in (0, best, last))
    sure = deviations(peak - end, standard_error(told.means, count, count)) >= level_of(len(starts), SURE)
    if not sure or peak - end < MATTERS * told.extent or peak - end < LOST_SHARE * (peak - begin):
        return None
    fell = next(at for at in range(best, len(told.means)) if told.means[at] < (peak + end) / 2)
    start = f"{told.part(0, count)[1]}, " if best else ""
    return _Curve("fell", f"mean reward {start}{at_best}, {at_end}: it fell", since=told.steps[fell])


def _stuck(steps: Steps) -> str:
    """Since when no group has had a gradient, where that is so to the end and the rewards are not at their maximum;
    else "". Of a long job it looks back no further than the steps that are judged without a gap."""
    rows = [row for row in steps if _is_number(row.get("reward_mean"))]
    flat = 0
    for row in reversed(rows):
        follows = not flat or int(row.get("step", 0)) == int(rows[-flat].get("step", 0)) - 1
        if not follows or (row.get("flat_groups_ratio") or 0.0) < 1.0:
            break
        flat += 1
    if flat < LEAST_STEPS:
        return ""
    told = _rewards(rows)
    mean, _ = told.part(len(rows) - flat, flat)
    if told.extent and mean >= told.top:
        return ""
    return f"no group has had a gradient since step {told.steps[-flat]}, at a mean reward of {short(mean)}"


def _top_of(told: _Rewards) -> _Curve | None:
    first, _ = told.part(0, told.length(START_SHARE))
    last, _ = told.part(len(told.means) - told.length(END_SHARE), told.length(END_SHARE))
    if min(first, last, fmean(told.means)) < told.top:
        return None
    return _Curve(
        "at top",
        f"mean reward {short(first)} in the first steps, {short(last)} in the last, and no answer earned more than "
        f"{short(told.high)}",
    )


def _rise_of(told: _Rewards) -> _Curve | None:
    count, few = told.length(PART_SHARE), told.length(START_SHARE)
    (begin, at_begin), (end, at_end) = told.part(0, count), told.part(len(told.means) - count, count)
    start, at_start = told.part(0, few)
    trend = mann_kendall(told.means)
    level = deviations(end - start, standard_error(told.means, few, count))
    if trend <= -SURE and end < begin - LEAST_CHANGE * told.extent:
        return _Curve("fell", f"mean reward {at_begin}, {at_end}: it fell", since=told.steps[count])
    if trend >= SURE and end > begin + LEAST_CHANGE * told.extent:
        return _Curve("rose", f"mean reward {at_begin}, {at_end}{_since_top(told)}")
    if level >= SURE_LEVEL and end > start + MATTERS * told.extent:
        return _Curve("rose", f"mean reward {at_start}, {at_end}{_since_top(told)}")
    return None


def _since_top(told: _Rewards) -> str:
    """Since when it has been at its maximum, where it has been for half of the job."""
    below = [at for at, mean in enumerate(told.means) if mean < told.top]
    if not below or below[-1] >= len(told.means) // 2:
        return ""
    return f", at its maximum since step {told.steps[below[-1] + 1]}"


def _rest_of(told: _Rewards) -> _Curve:
    """Neither rose nor fell: flat, where a change that matters would have been seen, else noisy."""
    count = told.length(END_SHARE)
    (begin, at_begin), (end, at_end) = told.part(0, count), told.part(len(told.means) - count, count)
    error = standard_error(told.means, count, count)
    because = f"mean reward {at_begin}, {at_end}"
    if abs(end - begin) + SURE_EVALUATED * error < MATTERS * told.extent:
        return _Curve("flat", because)
    return _Curve("noisy", f"{because}: no more than chance")


def _span(begin: int, end: int) -> str:
    return str(begin) if begin == end else f"{begin} to {end}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
