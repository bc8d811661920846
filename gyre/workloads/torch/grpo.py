"""Group-relative policy optimisation as pure functions of tensors.

Invariant *sums, not means*: losses are summed over tokens and come with the count to divide by, so that a
mini-batch may be cut into micro-batches and spread over ranks in any way and still have one gradient.

Sources: GRPO, DeepSeekMath (arXiv 2402.03300), for group-relative advantages, the clipped objective and the k3
estimate of the KL divergence (Schulman, "Approximating KL divergence", 2020); PPO (arXiv 1707.06347) for the
clip; DAPO (arXiv 2503.14476) for token-level aggregation and the higher upper clip; Dr. GRPO (arXiv 2503.20783)
for advantages that are not divided by the group's deviation.

This module must not know about models, samples or steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, *, scale_by_std: bool, eps: float = 1e-6) -> Tensor:
    """Advantages float32 `[groups, n]` of rewards `[groups, n]`: what a sample earned beyond its group's mean.

    With `scale_by_std` (GRPO) they are divided by the group's deviation; without, left as they are (Dr. GRPO).
    A group whose rewards are all equal gets exact zeros.
    """
    rewards = rewards.float()
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    flat = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    if scale_by_std:
        centred = centred / (centred.square().mean(dim=1, keepdim=True).sqrt() + eps)
    return torch.where(flat, torch.zeros_like(centred), centred)


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """`loss` is a sum, to be divided by the mini-batch's count. `kl` is the summed k3 estimate, `clipped` a count."""

    loss: Tensor
    kl: Tensor
    clipped: Tensor


def policy_loss(
    logprobs: Tensor,
    behaviour_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    aggregation: str,
    ref_logprobs: Tensor | None = None,
    kl_coef: float = 0.0,
) -> PolicyLoss:
    """The clipped surrogate of log-probs `[rows, t]`, advantages `[rows]` and a bool mask `[rows, t]`.

    `aggregation` `token` sums over tokens, to be divided by the number of tokens (DAPO); `sequence` sums each
    row's mean over its tokens, to be divided by the number of rows (GRPO).
    """
    zero = torch.zeros_like(logprobs)
    ratio = torch.where(mask, logprobs - behaviour_logprobs, zero).exp()
    gain = advantages[:, None]
    unclipped = ratio * gain
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * gain
    per_token = -torch.minimum(unclipped, bounded)
    kl = zero
    if ref_logprobs is not None:
        kl = k3(logprobs, ref_logprobs)
        per_token = per_token + kl_coef * kl
    weights = mask.float()
    if aggregation == "sequence":
        weights = weights / weights.sum(dim=1, keepdim=True).clamp(min=1.0)
    elif aggregation != "token":
        raise ValueError(f"aggregation {aggregation!r} is neither 'token' nor 'sequence'")
    return PolicyLoss(
        loss=torch.where(mask, per_token * weights, zero).sum(),
        kl=torch.where(mask, kl, zero).sum().detach(),
        clipped=(mask & (bounded < unclipped)).sum().detach(),
    )


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """The k3 estimate of KL(policy ‖ reference) a token: `r - 1 - log r`, `r` = reference / policy. Never negative."""
    log_ratio = ref_logprobs - logprobs
    return log_ratio.exp() - 1.0 - log_ratio
