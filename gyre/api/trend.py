"""Whether numbers with noise rise: tests of a trend, for the curves of a job.

    steps          Mann and Kendall's test (Mann 1945, Kendall 1975) on the mean rewards in their order: it asks for no
                   shape but "later is higher", so that a curve that rises early and stays up counts. Its variance is
                   widened for noise that goes on from step to step, as Hamed and Rao (J. Hydrology 204, 1998) do; the
                   noise is what a running median leaves.
    evaluations    the trend test of Cochran (1954) and Armitage (1955) on shares of right answers, which for two
                   evaluations is the test of two proportions, with Yates' correction; for mean rewards the same with
                   their standard deviations.

The noise of a step is that of its samples, which the next step draws anew. Noise that drifts, whose neighbours
correlate by more than 0.6, is taken for what it looks like: a change of the policy.

Pure. This module must not know what the numbers are of, nor what is said of them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from statistics import NormalDist, fmean, median

SMOOTHED = 8
"""A running median spans a quarter of the curve: an eighth to each side."""
SIGNIFICANT = 1.645
"""Correlations of the noise below so many standard errors are taken for none (one-sided 5 %, as Hamed and Rao)."""


def mann_kendall(values: Sequence[float]) -> float:
    """How surely the values rise (above 0) or fall, in standard errors; 0 where all are equal."""
    n = len(values)
    score = sum(
        (later > value) - (later < value) for at, value in enumerate(values) for later in values[at + 1 :]
    )
    ties = sum(t * (t - 1) * (2 * t + 5) for t in Counter(values).values())
    variance = (n * (n - 1) * (2 * n + 5) - ties) / 18
    if variance <= 0 or not score:
        return 0.0
    return (score - math.copysign(1, score)) / math.sqrt(variance * inflation(values))


def inflation(values: Sequence[float]) -> float:
    """By how much the variance of a sum over the curve is larger than if the noise of each step were its own; ≥ 1."""
    n, ranks = len(values), _ranks(noise_of(values))
    centre = fmean(ranks)
    off = [rank - centre for rank in ranks]
    square = sum(one * one for one in off)
    widened = 0.0
    for lag in range(1, n // 2 if square else 1):
        correlation = sum(one * other for one, other in zip(off, off[lag:], strict=False)) / square
        if correlation < SIGNIFICANT / math.sqrt(n):
            break  # beyond the first lag without one, what is found is chance
        widened += (n - lag) * (n - lag - 1) * (n - lag - 2) * correlation
    return 1 + 2 * widened / (n * (n - 1) * (n - 2)) if n > 2 else 1.0


def noise_of(values: Sequence[float]) -> list[float]:
    """What a running median leaves of the curve. A value is no part of its own median, which would follow it."""
    reach = max(2, len(values) // SMOOTHED)
    return [
        value - median([*values[max(0, at - reach) : at], *values[at + 1 : at + reach + 1]] or [value])
        for at, value in enumerate(values)
    ]


def standard_error(values: Sequence[float], *counts: int) -> float:
    """Of a difference of means over so many steps each of the curve `values`; of one mean with one count."""
    noise = noise_of(values)
    variance = sum(one * one for one in noise) / max(len(noise) - 1, 1)
    return math.sqrt(variance * inflation(values) * sum(1 / count for count in counts))


def deviations(difference: float, error: float) -> float:
    """The difference in standard errors; infinite where there is one and no noise at all."""
    if error > 0:
        return difference / error
    return math.copysign(math.inf, difference) if difference else 0.0


def share_trend(shares: Sequence[float], counts: Sequence[int]) -> float:
    """How surely shares of so many answers each rise (above 0) or fall, in standard errors: Cochran and Armitage."""
    total = sum(counts)
    pooled = sum(share * count for share, count in zip(shares, counts, strict=True)) / total
    variance = pooled * (1 - pooled)
    correction = 0.5 * sum(1 / count for count in counts) if len(counts) == 2 else 0.0
    return _weighted_trend(shares, [variance / count for count in counts], correction)


def mean_trend(means: Sequence[float], deviation: Sequence[float], counts: Sequence[int]) -> float:
    """The same for mean rewards with the standard deviations of their answers."""
    pooled = sum(one * one * n for one, n in zip(deviation, counts, strict=True)) / sum(counts)
    return _weighted_trend(means, [pooled / count for count in counts])


def _weighted_trend(values: Sequence[float], variances: Sequence[float], correction: float = 0.0) -> float:
    """The slope of values over their order, each with its variance, in standard errors."""
    if min(variances) <= 0:  # no noise at all: every answer earned the same
        return deviations(values[-1] - values[0], 0.0)
    weights = [1 / variance for variance in variances]
    whole = sum(weights)
    centre = sum(weight * at for at, weight in enumerate(weights)) / whole
    mean = sum(weight * value for value, weight in zip(values, weights, strict=True)) / whole
    spread = sum(weight * (at - centre) ** 2 for at, weight in enumerate(weights))
    slope = sum(
        weight * (at - centre) * (value - mean)
        for at, (value, weight) in enumerate(zip(values, weights, strict=True))
    )
    slope = math.copysign(max(abs(slope) - correction * spread, 0.0), slope)
    return slope / math.sqrt(spread)


def level_of(times: int, deviations: float) -> float:
    """So many standard errors are asked of the greatest of `times` differences as `deviations` are of one
    (Bonferroni)."""
    chance = 1 - NormalDist().cdf(deviations)
    return NormalDist().inv_cdf(1 - chance / max(times, 1))


def _ranks(values: Sequence[float]) -> list[float]:
    """Places from 0 on, in the order of size; equal values share the mean of theirs."""
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    at = 0
    while at < len(order):
        end = at
        while end + 1 < len(order) and values[order[end + 1]] == values[order[at]]:
            end += 1
        for place in range(at, end + 1):
            ranks[order[place]] = (at + end) / 2
        at = end + 1
    return ranks
