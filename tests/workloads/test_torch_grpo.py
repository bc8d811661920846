"""GRPO's pure functions: advantages, clip and KL by hand, and sums that may be cut anywhere."""

from __future__ import annotations

import math

import pytest
import torch

from gyre.workloads.torch.grpo import group_advantages, k3, policy_loss
from gyre.workloads.torch.intervals import contains, merge

CLIP = {"clip_low": 0.2, "clip_high": 0.3, "aggregation": "token"}


def test_advantages_are_relative_to_the_group():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.1, 0.1, 0.1, 0.1]])
    scaled = group_advantages(rewards, scale_by_std=True)
    assert scaled[0].tolist() == pytest.approx([1.0, -1.0, -1.0, 1.0], abs=1e-4)
    assert group_advantages(rewards, scale_by_std=False)[0].tolist() == [0.5, -0.5, -0.5, 0.5]
    assert (scaled[1:] == 0).all()


def test_the_clip_bounds_what_can_be_gained_and_not_what_can_be_lost():
    def loss(ratio, advantage):
        logprobs = torch.tensor([[math.log(ratio)]])
        result = policy_loss(
            logprobs, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1, dtype=torch.bool), **CLIP
        )
        return result.loss.item(), int(result.clipped)

    assert loss(1.0, 2.0) == (pytest.approx(-2.0), 0)
    assert loss(2.0, 1.0) == (pytest.approx(-1.3), 1)
    assert loss(0.5, -1.0) == (pytest.approx(0.8), 1)
    assert loss(2.0, -1.0) == (pytest.approx(2.0), 0)
    assert loss(0.5, 1.0) == (pytest.approx(-0.5), 0)


def test_k3_is_zero_at_equality_and_never_negative():
    logprobs = torch.linspace(-3, 0, 20)
    assert (k3(logprobs, logprobs) == 0).all()
    assert (k3(logprobs, torch.full((20,), -1.0)) >= 0).all()


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_losses_of_pieces_sum_to_the_loss_of_the_whole(aggregation):
    generator = torch.Generator().manual_seed(0)
    logprobs, behaviour, reference = -torch.rand(3, 6, 5, generator=generator)
    advantages = torch.randn(6, generator=generator)
    mask = torch.arange(5)[None, :] < torch.tensor([5, 1, 3, 2, 4, 5])[:, None]
    options = {"clip_low": 0.2, "clip_high": 0.3, "aggregation": aggregation, "kl_coef": 0.1}

    def part(rows):
        return policy_loss(
            logprobs[rows],
            behaviour[rows],
            advantages[rows],
            mask[rows],
            ref_logprobs=reference[rows],
            **options,
        ).loss

    whole = part(slice(0, 6))
    assert torch.allclose(part(slice(0, 2)) + part(slice(2, 6)), whole, atol=1e-6)


def test_what_stands_at_padding_does_not_matter_even_when_it_is_not_finite():
    mask = torch.tensor([[True, False]])
    logprobs = torch.tensor([[-1.0, float("-inf")]], requires_grad=True)
    result = policy_loss(logprobs, torch.tensor([[-1.0, 0.0]]), torch.tensor([1.0]), mask, **CLIP)
    (gradient,) = torch.autograd.grad(result.loss, logprobs)
    assert result.loss.item() == -1.0
    assert gradient.tolist() == [[-1.0, 0.0]]


def test_an_unknown_aggregation_is_refused():
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="neither"):
        policy_loss(ones, ones, ones[0], ones.bool(), clip_low=0.2, clip_high=0.2, aggregation="mean")


def test_intervals_are_canonical_whatever_the_order():
    assert merge([], [3, 1, 2, 7]) == [(1, 4), (7, 8)]
    assert merge([(1, 4), (7, 8)], [4, 5, 6]) == [(1, 8)]
    assert [contains([(1, 4), (7, 8)], n) for n in (0, 1, 3, 4, 7, 8)] == [
        False,
        True,
        True,
        False,
        True,
        False,
    ]
    assert not contains([], 0)
