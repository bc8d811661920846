"""Policy and value losses as pure functions of log-probs, independent of the model.

Every function takes tensors of one shape, padded rows `[rows, t]` or packed tokens `[tokens]`, with a bool `mask`
of the tokens that count, and keeps the dtype that it is given.

Invariants:
- *sums, not means*: a loss is a sum over tokens and comes with the weight to divide by, so that a mini-batch may be
  cut into micro-batches of any sizes and spread over ranks in any way and still has one gradient: add the losses,
  add the weights, divide at the end;
- *padding does not matter*: values where `mask` is False, even infinities, change neither loss nor gradient;
- *one token does not end a job*: a log-ratio is clamped before it is exponentiated, as in veRL, so that the loss of an
  outlier is large and finite;
- *the divergence has its own gradient*: over the tokens that may follow a prefix, by the probability with which they
  were sampled, the KL term's gradient has the expectation of the gradient of KL(policy ‖ reference), for every kind of
  estimate and however old the policy that sampled is.

Sources: PPO (arXiv 1707.06347) for the clipped objective and the clipped value loss; DeepSeekMath (arXiv 2402.03300)
for GRPO; DAPO (arXiv 2503.14476) for the higher upper clip and token-level aggregation; Dr. GRPO (arXiv 2503.20783)
for the constant normaliser; RLOO (arXiv 2402.14740); Schulman, "Approximating KL divergence" (2020,
joschu.net/blog/kl-approx.html) for k1, k2 and k3; Tang and Munos, "On a few pitfalls in KL divergence gradient
estimation for RL" (arXiv 2506.09477), and DeepSeek-V3.2 (arXiv 2512.02556), for the KL term's gradient; Yao et al.,
"Your efficient RL framework secretly brings you off-policy RL training" (2025), and IMPALA (arXiv 1802.01561), for
truncated importance sampling.

This module must not know about models, samples, groups or ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from gyre.config.plugins import LOSS
from gyre.config.sections import LossSettings
from gyre.workloads.algorithms.options import with_options

MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio before it is exponentiated, as in veRL: `exp(20)` is 5e8."""
MAX_KL = 10.0
"""Bound of a token's KL divergence by `k3`, as in veRL."""


@dataclass(frozen=True, slots=True)
class LossSum:
    """The loss of a part of a mini-batch. `loss` is a scalar sum with a gradient; the mini-batch's loss is the sum of
    `loss` divided by the sum of `weight`. `metrics` are detached scalars, each a sum over tokens, to be divided by the
    sum of `metrics["tokens"]`."""

    loss: Tensor
    weight: Tensor
    metrics: dict[str, Tensor] = field(default_factory=dict)


PolicyLoss = Callable[..., LossSum]
"""A policy's loss, built in or the user's by `config.loss.loss_mode`, with the parameters of `policy_loss`. Its
contract is in docs/bring-your-own.md. Its attribute `metrics`, if it has one, names sums of its own in
`LossSum.metrics`."""


def policy_loss_of(settings: LossSettings) -> PolicyLoss:
    """The loss that `settings.loss_mode` names, with its options. Raises ConfigError if it cannot be loaded or does not
    take a given option."""
    if settings.loss_mode in LOSS.built_in:
        return policy_loss
    return cast(
        PolicyLoss, with_options(LOSS, settings.loss_mode, "config.loss.loss_options", settings.loss_options)
    )


def takes_lengths(settings: LossSettings) -> bool:
    """Whether the loss has the parameter `lengths`, which a user's need not have. Raises ConfigError as
    `policy_loss_of`."""
    return "lengths" in inspect.signature(policy_loss_of(settings)).parameters


def metrics_of(settings: LossSettings) -> tuple[str, ...]:
    """The metrics that a user's loss adds to the built-in ones: its attribute `metrics`."""
    if settings.loss_mode in LOSS.built_in:
        return ()
    return tuple(getattr(LOSS.load(settings.loss_mode), "metrics", ()))


def policy_loss(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    settings: LossSettings,
    *,
    old_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    entropies: Tensor | None = None,
    rows: Tensor | None = None,
    lengths: Tensor | None = None,
    norm_length: float = 0.0,
) -> LossSum:
    """The clipped surrogate of the policy's `logprobs`, with the terms that `settings` turns on.

    `old_logprobs` are the denominator of the ratio; None means the policy's present ones, for which the ratio is 1 and
    only its gradient counts. `rollout_logprobs` are the engine's, for truncated importance sampling. `ref_logprobs` are
    the reference's, `entropies` those of the policy's distributions. `rows` (int64) has the sequence of each packed
    token, `lengths` the tokens of its rollout, see `token_weights`. `norm_length` is the constant of
    `seq-mean-token-sum-norm`.

    Metrics: `tokens`, `policy_loss`, `ratio`, `clipped_low`, `clipped_high` (counts), `old_kl` (k3 of the policy to
    the old one), and if the term is on `kl` (by `kl_loss_type`), `entropy`, `tis_weight`, `tis_capped` (count) and
    `rollout_kl` (k3 of the old policy to the engine's). Raises ValueError for a term without its tensor.
    """
    log_ratio = logprobs - (logprobs.detach() if old_logprobs is None else old_logprobs)
    log_ratio = _bounded(_within(mask, log_ratio), MAX_LOG_RATIO)
    advantages = _within(mask, advantages)
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    bounded = ratio.clamp(1.0 - settings.clip_ratio_low, 1.0 + settings.clip_ratio_high) * advantages
    per_token = -torch.minimum(unclipped, bounded)
    gain = (mask & (bounded < unclipped)).detach()
    metrics = {
        "ratio": ratio,
        "clipped_low": gain & (advantages < 0),
        "clipped_high": gain & (advantages > 0),
        "old_kl": log_ratio.expm1() - log_ratio,  # k3 under the old policy's samples
    }
    drift = ratio  # how much likelier the token is now than when it was sampled
    if settings.tis_imp_ratio_cap > 0:
        old = logprobs.detach() if old_logprobs is None else old_logprobs
        gap = _within(mask, old - _needed(rollout_logprobs, "tis_imp_ratio_cap", "rollout_logprobs"))
        gap = _bounded(gap, MAX_LOG_RATIO)
        weight = gap.exp()
        metrics["tis_capped"] = mask & (weight > settings.tis_imp_ratio_cap)
        metrics["rollout_kl"] = gap.expm1() - gap
        weight = weight.clamp(max=settings.tis_imp_ratio_cap).detach()
        metrics["tis_weight"] = weight
        per_token = per_token * weight
        drift = ratio * weight
    metrics["policy_loss"] = per_token
    if settings.kl_loss_coef > 0:
        reference = _needed(ref_logprobs, "kl_loss_coef", "ref_logprobs")
        kl = kl_estimate(logprobs, reference, settings.kl_loss_type, mask=mask)
        per_token = per_token + settings.kl_loss_coef * kl_term(kl, logprobs, reference, drift, mask=mask)
        metrics["kl"] = kl
    if settings.entropy_coeff != 0:
        entropies = _needed(entropies, "entropy_coeff", "entropies")
        per_token = per_token - settings.entropy_coeff * _within(mask, entropies)
    if entropies is not None:
        metrics["entropy"] = entropies
    return aggregate(
        per_token, mask, settings.loss_agg_mode, metrics, rows=rows, lengths=lengths, norm_length=norm_length
    )


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    settings: LossSettings,
    *,
    rows: Tensor | None = None,
    lengths: Tensor | None = None,
    norm_length: float = 0.0,
) -> LossSum:
    """Half the squared error of a critic's `values` to `returns`: the larger of the clipped and the unclipped one.

    The advantages were computed from `old_values`. Metrics: `tokens`, `value_loss`, `value`, `return`,
    `return_square`, `value_error` (squared, unclipped) and `value_clipped` (count).
    """
    values, old_values, returns = (_within(mask, given) for given in (values, old_values, returns))
    reach = settings.cliprange_value
    held = old_values + (values - old_values).clamp(-reach, reach)
    error, held_error = (values - returns).square(), (held - returns).square()
    per_token = 0.5 * torch.maximum(error, held_error)
    metrics = {
        "value_loss": per_token,
        "value": values,
        "return": returns,
        "return_square": returns.square(),
        "value_error": error,
        "value_clipped": mask & (held_error > error),
    }
    return aggregate(
        per_token, mask, settings.loss_agg_mode, metrics, rows=rows, lengths=lengths, norm_length=norm_length
    )


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, kind: str, *, mask: Tensor | None = None) -> Tensor:
    """An estimate, token by token, of KL(policy ‖ reference) from the policy's own samples.

    `k1`: `log p - log q`, unbiased, of high variance, may be negative. `k2`: half its square, biased, of low variance.
    `k3`: `q/p - 1 - log(q/p)`, unbiased and never negative. Zero where `mask` is False. `log(q/p)` is clamped to
    `MAX_LOG_RATIO`, and `k3` to `MAX_KL`; a token beyond has no gradient.

    It is a value. As a loss only `k2` has the divergence's gradient, and only on the policy's own samples: use
    `kl_term`.
    """
    log_ratio = -_kl_gap(logprobs, ref_logprobs, mask)
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    if kind == "k3":
        return _bounded(log_ratio.expm1() - log_ratio, MAX_KL)
    raise ValueError(f"KL estimator {kind!r} is none of k1, k2, k3")


def kl_term(
    value: Tensor, logprobs: Tensor, ref_logprobs: Tensor, ratio: Tensor, *, mask: Tensor | None = None
) -> Tensor:
    """A term of the loss, token by token: `value`, such as `kl_estimate` gives, with the gradient of
    KL(policy ‖ reference).

    `ratio`, with a gradient, is how much likelier the policy makes a token than the policy that sampled it. The
    gradient is that of `ratio (log p - log q)` with the parenthesis held constant, which is also that of `ratio` times
    `k3`. The ratio is not clipped: a clipped one would let go of the tokens that have moved the furthest.
    `log p - log q` is clamped to `MAX_LOG_RATIO`, and a token whose ratio is beyond its bound has no gradient.
    """
    pull = ratio * _kl_gap(logprobs, ref_logprobs, mask).detach()
    if mask is not None:
        pull = _within(mask, pull)
    return value.detach() + (pull - pull.detach())


def _kl_gap(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor | None) -> Tensor:
    """`log p - log q`, bounded; zero where `mask` is False."""
    gap = logprobs - ref_logprobs
    return _bounded(gap if mask is None else _within(mask, gap), MAX_LOG_RATIO)


def token_weights(
    mask: Tensor,
    mode: str,
    *,
    dtype: torch.dtype,
    rows: Tensor | None = None,
    lengths: Tensor | None = None,
    norm_length: float = 0.0,
) -> Tensor:
    """The weight of each token's loss, in the shape of `mask` `[rows, t]`, or `[tokens]` with `rows` `[tokens]`.

    Where a rollout has several rows, they weigh as one sequence together. By `token-mean` (DAPO) each token weighs the
    same, whichever rollout it is of; by the sums (RLOO, Dr. GRPO) the loss of a rollout is the sum over the tokens of
    all of its rows: both follow from the weights of single tokens. The mean (GRPO) is over the tokens of all of its
    rows, which may be in other passes: `lengths`, in the shape of `mask`, has their number for each token; None where
    each row is a rollout.
    """
    weights = mask.to(dtype)
    if mode in ("token-mean", "seq-mean-token-sum"):
        return weights
    if mode == "seq-mean-token-sum-norm":
        if norm_length <= 0:
            raise ValueError("seq-mean-token-sum-norm needs a norm_length above 0")
        return weights / norm_length
    if mode != "seq-mean-token-mean":
        raise ValueError(f"loss_agg_mode {mode!r} is not known")
    if lengths is not None:
        return weights / lengths.clamp(min=1.0)
    if rows is None:
        return weights / weights.sum(dim=-1, keepdim=True).clamp(min=1.0)
    return weights / _row_lengths(weights, rows).clamp(min=1.0)[rows]


def mini_batch_weight(mode: str, *, tokens: float, sequences: float) -> float:
    """The divisor of the summed loss of a mini-batch with this many tokens in this many sequences. Sequences without a
    token do not count, and the rows of a rollout are one."""
    return float(tokens if mode == "token-mean" else sequences)


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    mode: str,
    metrics: Mapping[str, Tensor],
    *,
    rows: Tensor | None,
    norm_length: float,
    lengths: Tensor | None = None,
) -> LossSum:
    """The sum of a per-token loss by `loss_agg_mode`, its weight, and the sums of per-token metrics. For `lengths` see
    `token_weights`; of a rollout with rows elsewhere the weight is the share that is here."""
    weights = token_weights(
        mask, mode, dtype=per_token.dtype, rows=rows, lengths=lengths, norm_length=norm_length
    )
    if mode == "token-mean":
        weight = mask.sum()
    elif mode == "seq-mean-token-mean" and lengths is not None:
        weight = weights.sum()
    elif rows is None:
        weight = mask.any(dim=-1).sum()
    else:
        weight = (_row_lengths(weights, rows) > 0).sum()
    sums = {name: _within(mask, value.detach().to(per_token.dtype)).sum() for name, value in metrics.items()}
    return LossSum(
        loss=(_within(mask, per_token) * weights).sum(),
        weight=weight.to(per_token.dtype),
        metrics={"tokens": mask.sum().to(per_token.dtype), **sums},
    )


def _row_lengths(weights: Tensor, rows: Tensor) -> Tensor:
    count = int(rows.max()) + 1 if rows.numel() else 0
    return torch.zeros(count, dtype=weights.dtype, device=weights.device).index_add(0, rows, weights)


def _within(mask: Tensor, value: Tensor) -> Tensor:
    """Zero outside the mask, in the value and in the gradient, whatever the value there."""
    return torch.where(mask, value, torch.zeros((), dtype=value.dtype, device=value.device))


def _bounded(value: Tensor, bound: float) -> Tensor:
    """Clamp to `-bound .. bound`, without a gradient beyond. A NaN stays a NaN, also in the gradient, because it is a
    fault to report and no outlier. (`clamp` alone would give it a gradient of 0.)"""
    return torch.where(value.abs() > bound, value.detach().clamp(-bound, bound), value)


def _needed(value: Tensor | None, setting: str, name: str) -> Tensor:
    if value is None:
        raise ValueError(f"loss.{setting} is on, but {name} were not given")
    return value
