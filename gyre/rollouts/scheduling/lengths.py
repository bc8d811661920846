"""How long samples get, learnt from those that finished.

A histogram with buckets that grow by a constant factor, whose old entries fade: bounded memory, no table tuned
for a model. What is asked of it is the mean residual life of reliability theory: the area under the survival
curve beyond a point, divided by its height there, `E[min(L, m) - d | L > d] = ∫ S(x) dx (d..m) / S(d)`.

Invariants:
- *within the limit*: a remainder is never more than `max_new_tokens - done_tokens`, and never negative;
- *bounded*: neither memory nor the cost of a call grows with what has been learnt.

Where few finished samples were longer than the one asked about, the answer leans to half of what the limit
leaves. That also holds the bias of a first step in check, whose short samples finish first.

This module must not know what a sample is made of, nor who runs it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

_GROWTH = 1.08
"""A bucket's width over the one before: lengths are distinguished to 8 %."""

_BUCKETS = 200
"""1.08 ** 199 is 4.5 million tokens; what is longer counts as that long."""

_PRIOR_SAMPLES = 1.0
"""Weight of the prior, in finished samples."""

_LAZIEST_REBUILD = 64
_MOST_TOLD = 1024
"""Answers that are kept until the curve changes."""

_HEAVIEST = 1e12

_LOG_GROWTH = math.log(_GROWTH)
_EDGES = [_GROWTH**index - 1.0 for index in range(_BUCKETS + 1)]


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is left to generate of unfinished samples, taken together."""

    tokens_left: float
    samples_left: int
    longest_left_tokens: float
    """The largest of their quantiles at n/(n+1), the level that the largest of n has."""


class LengthModel:
    """A sample counts half after `half_life_samples` further ones."""

    def __init__(self, *, half_life_samples: float = 4096.0) -> None:
        if half_life_samples <= 0:
            raise ValueError(f"a half-life of {half_life_samples} samples; give one above zero")
        self._inflation = 2.0 ** (1.0 / half_life_samples)
        self._weight = 1.0
        """Weight of the next sample. It grows, instead of all earlier weights shrinking."""
        self._weights = [0.0] * _BUCKETS
        self._unread = 0
        self._count = 0
        self._surviving = [0.0] * (_BUCKETS + 1)
        """How many, in units of the newest sample, got past each edge."""
        self._area = [0.0] * (_BUCKETS + 1)
        self._told: dict[tuple[int | float, int], float] = {}
        """What was asked of the curve as it is now: samples that begin together are alike."""

    def observe(self, length: int) -> None:
        """A sample ended with `length` tokens, by itself or at its limit."""
        self._weights[_bucket(length)] += self._weight
        self._weight *= self._inflation
        self._count += 1
        self._unread += 1
        if self._weight > _HEAVIEST:
            self._weights = [weight / self._weight for weight in self._weights]
            self._weight = 1.0

    def expected_remaining(self, done_tokens: int | float, max_new_tokens: int) -> float:
        """How many tokens a sample of `done_tokens` is still to get, when `max_new_tokens` is its limit in all."""
        left = max_new_tokens - done_tokens
        if left <= 0:
            return 0.0
        self._read()
        asked = done_tokens, max_new_tokens
        if (told := self._told.get(asked)) is not None:
            return told
        surviving, area = self._at(done_tokens)
        _, beyond = self._at(max_new_tokens)
        expected = (area - beyond + _PRIOR_SAMPLES * left / 2.0) / (surviving + _PRIOR_SAMPLES)
        if len(self._told) >= _MOST_TOLD:
            self._told.clear()
        self._told[asked] = min(max(expected, 0.0), float(left))
        return self._told[asked]

    def remaining_quantile(self, done_tokens: int | float, max_new_tokens: int, share: float) -> float:
        """The remainder that `share` (0..1) of such samples do not exceed."""
        left = max_new_tokens - done_tokens
        if left <= 0:
            return 0.0
        self._read()
        surviving, _ = self._at(done_tokens)
        sought = surviving * (1.0 - share)
        # The survival curve only falls: the first edge at which no more than `sought` are left.
        index = bisect_left(self._surviving, -sought, key=lambda height: -height)
        learnt = 0.0
        if index > 0:
            above, below = self._surviving[index - 1], self._surviving[index]
            part = (above - sought) / (above - below) if above > below else 1.0
            learnt = _EDGES[index - 1] + part * (_EDGES[index] - _EDGES[index - 1]) - done_tokens
        learnt = min(max(learnt, 0.0), float(left))
        blended = (surviving * learnt + _PRIOR_SAMPLES * share * left) / (surviving + _PRIOR_SAMPLES)
        return min(blended, float(left))

    def outlook(self, unfinished: Iterable[tuple[int, int]]) -> Outlook:
        """The outlook of samples given as `(done_tokens, max_new_tokens)`. Those of about the same length are predicted
        together."""
        alike: dict[tuple[int, int], tuple[int, int]] = {}
        for done, limit in unfinished:
            key = (done.bit_length() << 4 | done >> max(done.bit_length() - 4, 0), limit)
            count, total = alike.get(key, (0, 0))
            alike[key] = (count + 1, total + done)
        samples = sum(count for count, _ in alike.values())
        level = samples / (samples + 1.0)
        tokens = longest = 0.0
        for (_, limit), (count, total) in alike.items():
            done_tokens = total / count
            tokens += count * self.expected_remaining(done_tokens, limit)
            longest = max(longest, self.remaining_quantile(done_tokens, limit, level))
        return Outlook(tokens, samples, longest)

    def _at(self, length: int | float) -> tuple[float, float]:
        """The survival curve's height at `length`, and the area under it beyond."""
        index = _bucket(length)
        upper, lower = _EDGES[index + 1], _EDGES[index]
        above, below = self._surviving[index], self._surviving[index + 1]
        reach = max(upper - length, 0.0)
        height = below + (above - below) * reach / (upper - lower)
        return height, self._area[index + 1] + (height + below) / 2.0 * reach

    def _read(self) -> None:
        """Bring the curve up to date: often while little is known, later once in many samples."""
        if not self._unread or (
            self._unread < self._count // 16 and self._unread < _LAZIEST_REBUILD and self._count > 16
        ):
            return
        self._unread = 0
        self._told.clear()
        surviving = area = 0.0
        for index in range(_BUCKETS - 1, -1, -1):
            below = surviving
            surviving += self._weights[index] / self._weight
            area += (surviving + below) / 2.0 * (_EDGES[index + 1] - _EDGES[index])
            self._surviving[index] = surviving
            self._area[index] = area


def _bucket(length: int | float) -> int:
    if length <= 0:
        return 0
    return min(int(math.log(length + 1.0) / _LOG_GROWTH), _BUCKETS - 1)
