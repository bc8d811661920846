"""The length model learns what is there, stays within limits, and forgets what was."""

from __future__ import annotations

import math
import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.rollouts.scheduling.lengths import LengthModel, Outlook

LIMIT = 16_384


def model_of(lengths: list[int], **settings: float) -> LengthModel:
    model = LengthModel(**settings)
    for length in lengths:
        model.observe(length)
    return model


def truth(lengths: list[int], done: int, limit: int) -> float:
    longer = [min(length, limit) - done for length in lengths if length > done]
    return sum(longer) / len(longer)


def drawn(count: int) -> list[int]:
    random_ = random.Random(7)
    return [min(int(random_.lognormvariate(math.log(3000), 0.7)), LIMIT) for _ in range(count)]


def test_with_nothing_learnt_half_of_what_the_limit_leaves_is_expected() -> None:
    assert LengthModel().expected_remaining(0, 1000) == 500
    assert LengthModel().expected_remaining(600, 1000) == 200
    assert LengthModel().remaining_quantile(0, 1000, 0.9) == pytest.approx(900)


@pytest.mark.parametrize("done", [0, 500, 2000, 5000, 8000])
@pytest.mark.parametrize("limit", [LIMIT, 9000])
def test_the_mean_residual_length_is_that_of_what_was_seen(done: int, limit: int) -> None:
    lengths = drawn(4000)
    found = model_of(lengths, half_life_samples=1e6).expected_remaining(done, limit)
    assert found == pytest.approx(truth(lengths, done, limit), rel=0.05)


def test_a_quantile_is_that_of_what_was_seen() -> None:
    lengths = sorted(drawn(4000))
    model = model_of(lengths, half_life_samples=1e6)
    for share in (0.1, 0.5, 0.9, 0.99):
        assert model.remaining_quantile(0, LIMIT, share) == pytest.approx(
            lengths[int(share * 4000)], rel=0.05
        )


def test_lengths_of_long_ago_fade() -> None:
    model = model_of([4000] * 500 + [1000] * 500, half_life_samples=50)
    assert model.expected_remaining(0, LIMIT) == pytest.approx(1000, rel=0.1)


def test_weights_stay_finite_however_many_samples_come() -> None:
    model = model_of([2000] * 3000, half_life_samples=20)
    assert model.expected_remaining(0, LIMIT) == pytest.approx(2000, rel=0.2)


def test_beyond_everything_seen_the_prior_answers() -> None:
    assert model_of([1000] * 100).expected_remaining(8000, 10_000) == pytest.approx(1000)


def test_the_outlook_sums_what_is_expected_and_bounds_it_by_the_longest() -> None:
    lengths = LengthModel()
    assert lengths.outlook([]) == Outlook(0, 0, 0)
    for length in range(100, 1100):
        lengths.observe(length)
    seen = lengths.outlook([(0, 5000)] * 99)
    assert seen.tokens_left == pytest.approx(99 * 600, rel=0.05)
    assert seen.longest_left_tokens == pytest.approx(1090, rel=0.05)


def test_the_outlook_of_samples_of_any_length_is_about_the_sum_over_each() -> None:
    model = model_of(drawn(2000))
    unfinished = [(done, LIMIT) for done in range(0, 9000, 7)]
    seen = model.outlook(unfinished)
    assert seen.samples_left == len(unfinished)
    assert seen.tokens_left == pytest.approx(
        sum(model.expected_remaining(done, limit) for done, limit in unfinished), rel=0.01
    )


def test_a_half_life_is_positive() -> None:
    with pytest.raises(ValueError, match="half-life"):
        LengthModel(half_life_samples=0)


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 10**7), max_size=60),
    done=st.integers(0, 10**6),
    limit=st.integers(0, 10**6),
    share=st.floats(0, 1),
)
def test_a_remainder_is_within_the_limit(lengths: list[int], done: int, limit: int, share: float) -> None:
    model = model_of(lengths)
    left = max(limit - done, 0)
    assert 0 <= model.expected_remaining(done, limit) <= left
    assert 0 <= model.remaining_quantile(done, limit, share) <= left


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 9000), min_size=1, max_size=60), done=st.integers(0, 9000))
def test_quantiles_grow_with_their_share(lengths: list[int], done: int) -> None:
    model = model_of(lengths)
    found = [model.remaining_quantile(done, 10_000, share / 10) for share in range(11)]
    assert all(low <= high + 1e-6 for low, high in pairwise(found))
