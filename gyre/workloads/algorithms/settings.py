"""What a policy or value loss is made of, as settings in the field's names; no torch.

The names are veRL's where it has one (`clip_ratio_low`, `loss_agg_mode`, `kl_loss_type`, …), so that its users
find theirs. A recipe brings its own defaults (`gyre.graph.recipes`); what the job's `config.loss` says goes over
them. How they are computed: `gyre.workloads.algorithms.losses` and `gyre.workloads.algorithms.advantages`.

This module must not import torch: the master and the command line read settings too.
"""

from __future__ import annotations

from dataclasses import dataclass

from gyre.errors import ConfigError, nearest

ADV_ESTIMATORS = ("grpo", "dr_grpo", "rloo", "gae")
LOSS_AGG_MODES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")
KL_TYPES = ("k1", "k2", "k3")


@dataclass(frozen=True, slots=True)
class LossSettings:
    """The section `config.loss`. A coefficient or cap of 0 turns its term off."""

    adv_estimator: str = "grpo"
    """`grpo`: beyond the group's mean, over its deviation. `dr_grpo`: beyond the mean alone. `rloo`: beyond the mean
    of the others. `gae`: generalised advantage estimation on a critic's values."""
    gamma: float = 1.0
    """Discount a token, for `gae`."""
    lam: float = 1.0
    """λ of `gae`: 1 takes the whole return, 0 one step and the critic's word."""
    clip_ratio_low: float = 0.2
    """The probability ratio is held above 1 - this …"""
    clip_ratio_high: float = 0.28
    """… and below 1 + this; higher than `clip_ratio_low` is DAPO's clip-higher."""
    loss_agg_mode: str = "token-mean"
    """What the mini-batch's sum is a mean of: `token-mean` over all tokens (DAPO), `seq-mean-token-mean` over
    sequences of each one's mean (GRPO), `seq-mean-token-sum` of each one's sum (RLOO), `seq-mean-token-sum-norm` of
    each one's sum over a constant length (Dr. GRPO)."""
    loss_scale_factor: float = 0.0
    """The constant of `seq-mean-token-sum-norm`; 0 takes `sampling.max_new_tokens`."""
    kl_loss_coef: float = 0.0
    """Weight of the KL divergence to the reference policy, in the loss. It needs a reference role."""
    kl_loss_type: str = "k3"
    """The estimator of that divergence: `k1`, `k2` or `k3`."""
    kl_reward_coef: float = 0.0
    """Weight of `k1` as a penalty in the reward, token by token for `gae`, summed for the others. It needs a reference
    role."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    tis_imp_ratio_cap: float = 0.0
    """Cap of truncated importance sampling against the engine's log-probs. With it, the ratio that is clipped is to the
    trainer's own log-probs before the step; without, to the engine's."""
    cliprange_value: float = 0.5
    """How far a critic's value may move from what it was, in the clipped value loss."""

    @property
    def needs_reference(self) -> bool:
        return self.kl_loss_coef > 0 or self.kl_reward_coef > 0

    @property
    def needs_every_sample(self) -> bool:
        """Whether a sample without advantage has a gradient all the same."""
        return self.kl_loss_coef > 0 or self.entropy_coeff != 0

    def check(self, path: str = "config.loss") -> None:
        """Raises ConfigError for a value outside its range."""
        for key, choices in (
            ("adv_estimator", ADV_ESTIMATORS),
            ("loss_agg_mode", LOSS_AGG_MODES),
            ("kl_loss_type", KL_TYPES),
        ):
            value = getattr(self, key)
            if value not in choices:
                raise ConfigError(
                    f"{path}.{key} is {value!r}; it is one of {', '.join(choices)}.",
                    hint=nearest(value, choices),
                )
        rules = [
            (0 <= self.gamma <= 1 and 0 <= self.lam <= 1, "gamma and lam must be in 0..1"),
            (0 <= self.clip_ratio_low <= 1, "clip_ratio_low must be in 0..1"),
            (self.clip_ratio_high >= 0, "clip_ratio_high must not be negative"),
            (
                min(self.kl_loss_coef, self.kl_reward_coef, self.tis_imp_ratio_cap, self.loss_scale_factor)
                >= 0,
                "kl_loss_coef, kl_reward_coef, tis_imp_ratio_cap and loss_scale_factor must not be negative",
            ),
            (self.cliprange_value > 0, "cliprange_value must be positive"),
        ]
        for holds, sentence in rules:
            if not holds:
                raise ConfigError(f"{path}: {sentence}.")
