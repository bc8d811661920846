"""What is drawn, by which number, and which log-prob is said of it."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre.engines.embedded.token_sampling import Sampling, choose, dice

PROBABILITIES = [0.4, 0.3, 0.2, 0.06, 0.04]
LOGITS = torch.tensor(PROBABILITIES).log()


def drawn(sampling, count=400):
    """The tokens that `count` evenly spread numbers give, and their log-probs."""
    thrown = [(i + 0.5) / count for i in range(count)]
    tokens, logprobs = choose(LOGITS.repeat(count, 1), [sampling] * count, thrown)
    return tokens, dict(zip(tokens, logprobs, strict=True))


def shares(tokens):
    return np.bincount(tokens, minlength=5) / len(tokens)


def test_tokens_come_as_often_as_they_are_likely():
    tokens, logprobs = drawn(Sampling())
    np.testing.assert_allclose(shares(tokens), PROBABILITIES, atol=0.003)
    for token, logprob in logprobs.items():
        assert math.isclose(logprob, math.log(PROBABILITIES[token]), abs_tol=1e-6)


def test_temperature_shapes_what_is_drawn_and_what_is_said():
    tokens, logprobs = drawn(Sampling(temperature=0.5))
    squares = np.square(PROBABILITIES) / np.square(PROBABILITIES).sum()
    np.testing.assert_allclose(shares(tokens), squares, atol=0.003)
    assert math.isclose(logprobs[0], math.log(squares[0]), abs_tol=1e-6)


def test_greedy_takes_the_likeliest_and_says_its_log_prob_at_temperature_1():
    tokens, logprobs = drawn(Sampling(temperature=0.0))
    assert set(tokens) == {0}
    assert math.isclose(logprobs[0], math.log(0.4), abs_tol=1e-6)


def test_cuts_leave_out_the_unlikely_and_do_not_change_what_is_said():
    for sampling, left in [
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_p=0.65), {0, 1}),
        (Sampling(top_p=0.95), {0, 1, 2, 3}),
        (Sampling(min_p=0.4), {0, 1, 2}),
        (Sampling(top_k=3, top_p=0.65), {0, 1}),
        (Sampling(top_k=1), {0}),
        (Sampling(top_p=0.001), {0}),
    ]:
        tokens, logprobs = drawn(sampling)
        assert set(tokens) == left
        weights = np.array([PROBABILITIES[t] if t in left else 0.0 for t in range(5)])
        np.testing.assert_allclose(shares(tokens), weights / weights.sum(), atol=0.005)
        assert math.isclose(logprobs[0], math.log(0.4), abs_tol=1e-6)


def test_rows_of_different_kinds_do_not_disturb_each_other():
    kinds = [Sampling(), Sampling(temperature=0.0), Sampling(top_k=1), Sampling(temperature=2.0, top_p=0.5)]
    thrown = [0.95, 0.95, 0.95, 0.2]
    together = choose(LOGITS.repeat(4, 1), kinds, thrown)
    alone = [choose(LOGITS[None].clone(), [kind], [die]) for kind, die in zip(kinds, thrown, strict=True)]
    assert together == ([one[0][0] for one in alone], [one[1][0] for one in alone])


def test_forbidden_tokens_are_not_drawn():
    tokens, logprobs = choose(
        LOGITS.repeat(50, 1),
        [Sampling()] * 50,
        [i / 50 for i in range(50)],
        [(row, [0, 1]) for row in range(50)],
    )
    assert set(tokens) == {2, 3, 4}
    assert math.isclose(max(logprobs), math.log(0.2 / 0.3), abs_tol=1e-6)


def test_broken_logits_give_log_probs_that_say_so():
    _, logprobs = choose(torch.full((1, 5), float("nan")), [Sampling()], [0.5])
    assert not math.isfinite(logprobs[0])


@settings(deadline=None)
@given(st.integers(0, 2**62), st.integers(0, 100_000), st.integers(1, 300))
def test_a_number_depends_on_seed_and_position_alone(seed, start, ahead):
    assert dice([seed], [start], ahead + 1)[0][ahead] == dice([seed], [start + ahead], 1)[0][0]


def test_numbers_are_spread():
    numbers = np.array(dice(range(200), [0] * 200, 50))
    assert len(np.unique(numbers)) == numbers.size
    np.testing.assert_allclose(np.histogram(numbers, 10, (0, 1))[0] / numbers.size, 0.1, atol=0.015)
