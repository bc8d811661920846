"""Gradients in expectation: every outcome of a small policy, weighed by the probability with which it is sampled.

Where an estimator is unbiased, the expectation is the gradient of what it estimates, computed without any sample. Where
it is not (a group's own deviation, clipping, a truncated weight) the expectation is that of the formula in
docs/algorithms.md.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from gyre.config.sections import KL_TYPES, LossSettings
from gyre.rollouts.samples import Group, Sample, VersionRun
from gyre.workloads.algorithms.advantages import advantages_of, gae
from gyre.workloads.algorithms.losses import policy_loss

FREE = {"clip_ratio_low": 1.0, "clip_ratio_high": 1e9}
"""No ratio is clipped."""
TOKENS = 4
EXACT = {"rtol": 1e-9, "atol": 1e-12}


def logits_of(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def policies(stale, *, seed=0, tokens=TOKENS):
    """The policy's logits, with a gradient, and the log-probs of the policy that sampled."""
    sampled_by = logits_of(tokens, seed=seed)
    moved = 0.7 * logits_of(tokens, seed=seed + 1) if stale else 0.0
    return (sampled_by + moved).requires_grad_(), sampled_by.log_softmax(0)


def loss_at(token, logits, settings, *, advantage=0.0, old=None, engine=None, reference=None):
    """The loss of one token, whose log-prob `logits` give."""

    def of(logprobs):
        return None if logprobs is None else logprobs[token].view(1, 1)

    distribution = logits.log_softmax(0)
    return policy_loss(
        distribution[token].view(1, 1),
        torch.full((1, 1), float(advantage), dtype=torch.float64),
        torch.ones(1, 1, dtype=torch.bool),
        settings,
        old_logprobs=of(old),
        rollout_logprobs=of(engine),
        ref_logprobs=of(reference),
        entropies=-(distribution.exp() * distribution).sum().view(1, 1),
    )


def expected_gradient(logits, sampled_by, loss):
    """The gradient of `loss(token)`, by the probability of each token."""
    return sum(
        math.exp(sampled_by[token]) * torch.autograd.grad(loss(token), logits)[0]
        for token in range(len(sampled_by))
    )


def gradient_of(value, logits):
    return torch.autograd.grad(value, logits)[0]


# -- the KL term --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KL_TYPES)
@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_the_kl_term_has_the_gradient_of_the_divergence(kind, stale, seed):
    logits, old = policies(stale, seed=seed)
    reference = logits_of(TOKENS, seed=9).log_softmax(0)
    policy = logits.log_softmax(0)
    exact = gradient_of((policy.exp() * (policy - reference)).sum(), logits)
    settings = LossSettings(kl_loss_coef=0.5, kl_loss_type=kind)
    found = expected_gradient(
        logits, old, lambda token: loss_at(token, logits, settings, old=old, reference=reference).loss
    )
    torch.testing.assert_close(found, 0.5 * exact, **EXACT)
    if not stale:  # the policy's own samples need no log-probs of an older one
        found = expected_gradient(
            logits, old, lambda token: loss_at(token, logits, settings, reference=reference).loss
        )
        torch.testing.assert_close(found, 0.5 * exact, **EXACT)


@pytest.mark.parametrize("kind", KL_TYPES)
def test_the_kl_term_has_that_gradient_over_the_engine_s_samples_too(kind):
    """Truncated importance sampling, where its cap is not reached, weighs the KL term as it does the surrogate."""
    logits, old = policies(stale=True)
    engine, reference = (logits_of(TOKENS, seed=seed).log_softmax(0) for seed in (5, 9))
    policy = logits.log_softmax(0)
    exact = gradient_of((policy.exp() * (policy - reference)).sum(), logits)
    settings = LossSettings(kl_loss_coef=1.0, kl_loss_type=kind, tis_imp_ratio_cap=1e6)

    def loss(token):
        return loss_at(token, logits, settings, old=old, engine=engine, reference=reference).loss

    torch.testing.assert_close(expected_gradient(logits, engine, loss), exact, **EXACT)


@pytest.mark.parametrize(("kind", "value"), [("k1", -1.5), ("k2", 1.125), ("k3", math.exp(1.5) - 2.5)])
def test_the_kl_term_shows_the_estimate_whatever_its_gradient(kind, value):
    """`log p` is -2.5 and `log q` -1; the sampling policy's was -3, so that the ratio is `exp(0.5)`."""
    new, old, reference = (
        torch.tensor([[at]], dtype=torch.float64, requires_grad=True) for at in (-2.5, -3, -1)
    )
    settings = LossSettings(kl_loss_coef=0.1, kl_loss_type=kind)
    found = policy_loss(
        new,
        torch.zeros(1, 1),
        torch.ones(1, 1, dtype=torch.bool),
        settings,
        old_logprobs=old.detach(),
        ref_logprobs=reference.detach(),
    )
    assert found.metrics["kl"].item() == pytest.approx(value)
    assert found.loss.item() == pytest.approx(0.1 * value)
    (slope,) = torch.autograd.grad(found.loss, new)
    assert slope.item() == pytest.approx(0.1 * math.exp(0.5) * -1.5)


def test_a_policy_that_the_reference_rules_out_is_pulled_back():
    """A token that the reference never gives has a pull of bounded size, rather than none."""
    new = torch.tensor([[-1.0]], requires_grad=True)
    for reference, pull in ((-math.inf, 20.0), (-200.0, 20.0), (-2.0, 1.0)):
        found = policy_loss(
            new,
            torch.zeros(1, 1),
            torch.ones(1, 1, dtype=torch.bool),
            LossSettings(kl_loss_coef=1.0),
            ref_logprobs=torch.tensor([[reference]]),
        )
        assert math.isfinite(found.loss.item())
        assert torch.autograd.grad(found.loss, new)[0].item() == pytest.approx(pull)


# -- advantages of groups -------------------------------------------------------------------------------


def group_of(tokens, rewards, **extras):
    samples = tuple(
        Sample(
            np.array([token], np.int32),
            np.zeros(1, np.float32),
            (VersionRun(0, 0, 1),),
            "stop",
            float(rewards[token]),
            {name: np.array([value[token]], np.float32) for name, value in extras.items()},
        )
        for token in tokens
    )
    return Group(0, np.zeros(1, np.int32), {}, samples)


def expected_of_groups(estimator, rewards, logits, sampled_by, size, **settings):
    """The loss's expected gradient over all groups of `size` samples, each a mean over its samples."""
    options = LossSettings(adv_estimator=estimator, **{**FREE, **settings})
    total = torch.zeros_like(logits)
    for tokens in itertools.product(range(len(sampled_by)), repeat=size):
        advantages = advantages_of([group_of(tokens, rewards)], options)
        loss = sum(
            loss_at(token, logits, options, advantage=advantage[0], old=sampled_by).loss
            for token, advantage in zip(tokens, advantages, strict=True)
        )
        total += math.exp(sum(sampled_by[token] for token in tokens)) * gradient_of(loss / size, logits)
    return total


REWARDS = torch.tensor([0.0, 1.0, 0.25, -0.5], dtype=torch.float64)
"""They and their means over groups are exact in the float32 that advantages are kept in."""


@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize(
    ("estimator", "size", "share"), [("rloo", 2, 1.0), ("rloo", 1, 1.0), ("dr_grpo", 2, 0.5)]
)
def test_without_deviations_the_gradient_is_the_expected_reward_s(estimator, size, share, stale):
    """Leave-one-out is unbiased; the mean of all, the sample itself among them, takes `(n - 1) / n` of it."""
    logits, old = policies(stale)
    exact = gradient_of(-(logits.softmax(0) * REWARDS).sum(), logits)
    found = expected_of_groups(estimator, REWARDS, logits, old, size)
    torch.testing.assert_close(found, share * exact, rtol=1e-6, atol=1e-8)


def test_leave_one_out_of_more_is_unbiased_up_to_the_float32_of_advantages():
    logits, old = policies(stale=True, tokens=3)
    exact = gradient_of(-(logits.softmax(0) * REWARDS[:3]).sum(), logits)
    found = expected_of_groups("rloo", REWARDS[:3], logits, old, 4)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("stale", [False, True])
def test_grpo_s_deviation_makes_another_gradient_which_is_its_formula(stale):
    """Over a group's own deviation there is no unbiased gradient: it is the expectation of `(r - mean) / deviation`
    times the ratio's gradient."""
    logits, old = policies(stale)
    expected = torch.zeros_like(logits)
    ratio = (logits.log_softmax(0) - old).exp()
    for tokens in itertools.product(range(TOKENS), repeat=2):
        earned = REWARDS[list(tokens)].numpy()
        for token, reward in zip(tokens, earned, strict=True):
            advantage = (reward - earned.mean()) / (earned.std() + 1e-6)
            slope = torch.autograd.grad(ratio[token], logits, retain_graph=True)[0]
            expected -= math.exp(sum(old[at] for at in tokens)) * advantage * slope / 2
    found = expected_of_groups("grpo", REWARDS, logits, old, 2)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
    exact = gradient_of(-(logits.softmax(0) * REWARDS).sum(), logits)
    assert not torch.allclose(found, exact, rtol=0.1)


@pytest.mark.parametrize("estimator", ["rloo"])
def test_a_kl_penalty_in_the_reward_has_the_divergence_s_gradient_on_the_policy_s_own_samples(estimator):
    logits, old = policies(stale=False)
    reference = logits_of(TOKENS, seed=9).log_softmax(0)
    policy = logits.log_softmax(0)
    exact = gradient_of((policy.exp() * (0.5 * (policy - reference) - REWARDS)).sum(), logits)
    options = LossSettings(adv_estimator=estimator, kl_reward_coef=0.5)
    total = torch.zeros_like(logits)
    for tokens in itertools.product(range(TOKENS), repeat=2):
        group = group_of(tokens, REWARDS, ref_logprobs=reference)
        for sample, token in zip(group.samples, tokens, strict=True):
            sample.logprobs[:] = old[token]
        loss = sum(
            loss_at(token, logits, options, advantage=advantage[0], old=old).loss
            for token, advantage in zip(tokens, advantages_of([group], options), strict=True)
        )
        total += math.exp(sum(old[token] for token in tokens)) * gradient_of(loss / 2, logits)
    torch.testing.assert_close(total, exact, rtol=1e-5, atol=1e-7)


# -- advantages of a critic, and sequences ------------------------------------------------------------------


@pytest.mark.parametrize(("lam", "right_values"), [(1.0, False), (0.5, True), (0.0, True)])
def test_generalised_advantages_have_the_expected_reward_s_gradient(lam, right_values):
    """Answers of two tokens, with a reward at each. At λ = 1 any values do; below it they must be the policy's own."""
    first = logits_of(3, seed=0).requires_grad_()
    second = logits_of(3, 3, seed=1).requires_grad_()
    earned_first, earned_second = logits_of(3, seed=2), logits_of(3, 3, seed=3)
    p, after = first.log_softmax(0), second.log_softmax(1)
    later = (after.exp() * earned_second).sum(1)
    value = (p.exp() * (earned_first + later)).sum()
    exact = torch.autograd.grad(-value, (first, second), retain_graph=True)
    settings = LossSettings(adv_estimator="gae", lam=lam, loss_agg_mode="seq-mean-token-sum", **FREE)
    total = [torch.zeros_like(first), torch.zeros_like(second)]
    for one, two in itertools.product(range(3), repeat=2):
        rewards = [earned_first[one].item(), earned_second[one, two].item()]
        values = [value.item(), later[one].item()] if right_values else [0.3, -0.8]
        advantages, _ = gae(rewards, values, gamma=1.0, lam=lam)
        logprobs = torch.stack([p[one], after[one, two]]).view(1, 2)
        loss = policy_loss(
            logprobs,
            torch.from_numpy(advantages).view(1, 2),
            torch.ones(1, 2, dtype=torch.bool),
            settings,
            old_logprobs=logprobs.detach(),
        ).loss
        weight = math.exp(logprobs.sum().item())
        for sum_, part in zip(
            total, torch.autograd.grad(loss, (first, second), retain_graph=True), strict=True
        ):
            sum_ += weight * part
    for found, wanted in zip(total, exact, strict=True):
        torch.testing.assert_close(found, wanted, **EXACT)


# -- clipping, truncated importance sampling, entropy ---------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_the_clip_leaves_out_the_tokens_that_have_gone_far_enough(seed):
    """The expectation is the surrogate's gradient without the tokens whose ratio is beyond the clip on the side to
    which their advantage pulls."""
    logits, old = policies(stale=True, seed=seed)
    settings = LossSettings(clip_ratio_low=0.1, clip_ratio_high=0.15)
    ratio = (logits.log_softmax(0) - old).exp()
    gone = ((ratio > 1.15) & (REWARDS > 0)) | ((ratio < 0.9) & (REWARDS < 0))
    expected = gradient_of(-(old.exp() * ratio * REWARDS * ~gone).sum(), logits)
    found = expected_gradient(
        logits,
        old,
        lambda token: loss_at(token, logits, settings, advantage=REWARDS[token].item(), old=old).loss,
    )
    torch.testing.assert_close(found, expected, **EXACT)


@pytest.mark.parametrize("cap", [1e6, 1.1])
def test_truncated_importance_sampling_corrects_for_the_engine_up_to_its_cap(cap):
    """The engine's sampling is corrected exactly where the cap is not reached; where it is, a token counts as if the
    trainer's policy of before gave it with the probability `cap` times the engine's."""
    logits, old = policies(stale=True)
    engine = logits_of(TOKENS, seed=5).log_softmax(0)
    settings = LossSettings(tis_imp_ratio_cap=cap, **FREE)
    taken = torch.minimum(old.exp(), cap * engine.exp())
    expected = gradient_of(-(taken * (logits.log_softmax(0) - old).exp() * REWARDS).sum(), logits)
    if cap == 1e6:
        torch.testing.assert_close(expected, gradient_of(-(logits.softmax(0) * REWARDS).sum(), logits))

    def loss(token):
        return loss_at(token, logits, settings, advantage=REWARDS[token].item(), old=old, engine=engine).loss

    torch.testing.assert_close(expected_gradient(logits, engine, loss), expected, **EXACT)


@pytest.mark.parametrize("stale", [False, True])
def test_the_entropy_bonus_is_that_of_the_whole_distribution(stale):
    """It needs no weight: every token sampled after a prefix has the same entropy there."""
    logits, old = policies(stale)
    policy = logits.log_softmax(0)
    exact = gradient_of(0.3 * (policy.exp() * policy).sum(), logits)
    settings = LossSettings(entropy_coeff=0.3)
    found = expected_gradient(logits, old, lambda token: loss_at(token, logits, settings, old=old).loss)
    torch.testing.assert_close(found, exact, **EXACT)
