"""The section `config.loss`: what the policy's and the critic's losses are made of.

The names are veRL's where it has one (`clip_ratio_low`, `loss_agg_mode`, `kl_loss_type`, ...), so that its users find
theirs. A recipe brings its own defaults (`gyre.graph.recipes`); what the job says goes over them. How the losses are
computed: `gyre.workloads.algorithms.losses` and `gyre.workloads.algorithms.advantages`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import Field, model_validator

from gyre.config.estimators import ESTIMATORS, Estimator
from gyre.config.plugins import ADVANTAGE, LOSS, AdvantageName, LossName
from gyre.config.sections.section import Section

LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
KlType = Literal["k1", "k2", "k3"]

ADV_ESTIMATORS = ADVANTAGE.built_in
LOSS_AGG_MODES: tuple[str, ...] = get_args(LossAggMode)
KL_TYPES: tuple[str, ...] = get_args(KlType)

Share = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]


class LossSettings(Section):
    """The loss, term by term. A coefficient or cap of 0 turns its term off."""

    loss_mode: LossName = "vanilla"
    """`vanilla`: the clipped surrogate of PPO. Or your own function, `module:function`."""
    loss_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own loss."""
    adv_estimator: AdvantageName = "grpo"
    """`grpo`: beyond the group's mean, over its deviation. `dr_grpo`: beyond the mean alone. `rloo`: beyond the mean
    of the others. `gae`: generalised advantage estimation on a critic's values. Or your own function,
    `module:function`."""
    adv_options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of your own advantage estimator."""
    gamma: Share = 1.0
    """Discount a token, for `gae`."""
    lam: Share = 1.0
    """λ of `gae`: 1 takes the whole return, 0 one step and the critic's value."""
    clip_ratio_low: Share = 0.2
    """The probability ratio is held above 1 - this."""
    clip_ratio_high: NotNegative = 0.28
    """The probability ratio is held below 1 + this; higher than `clip_ratio_low` is DAPO's clip-higher."""
    loss_agg_mode: LossAggMode = "token-mean"
    """What the mini-batch's sum is a mean of: `token-mean` over all tokens (DAPO), `seq-mean-token-mean` over
    sequences of each one's mean (GRPO), `seq-mean-token-sum` of each one's sum (RLOO), `seq-mean-token-sum-norm` of
    each one's sum over a constant length (Dr. GRPO)."""
    loss_scale_factor: NotNegative = 0.0
    """The constant of `seq-mean-token-sum-norm`; 0 takes `sampling.max_new_tokens`."""
    kl_loss_coef: NotNegative = 0.0
    """Weight of the KL divergence to the reference policy, in the loss. It needs a reference role, unless `lora` is
    given: the reference is then the model without its adapter."""
    kl_loss_type: KlType = "k3"
    """The estimator of that divergence."""
    kl_reward_coef: NotNegative = 0.0
    """Weight of `k1` as a penalty in the reward, token by token for `gae`, summed for the others. It needs a reference
    as `kl_loss_coef` does."""
    entropy_coeff: float = 0.0
    """Weight of the entropy bonus."""
    tis_imp_ratio_cap: NotNegative = 0.0
    """Cap of truncated importance sampling against the engine's log-probs. With it, the ratio that is clipped is to the
    trainer's own log-probs before the step; without, to the engine's."""
    cliprange_value: Annotated[float, Field(gt=0)] = 0.5
    """How far a critic's value may move from what it was, in the clipped value loss."""

    @property
    def estimator(self) -> Estimator | None:
        """The record of `adv_estimator`; None for the user's own."""
        return ESTIMATORS.get(self.adv_estimator)

    @property
    def needs_reference(self) -> bool:
        """Whether a term is a divergence to the reference policy."""
        return self.kl_loss_coef > 0 or self.kl_reward_coef > 0

    @property
    def needs_every_sample(self) -> bool:
        """Whether a sample without advantage has a gradient all the same."""
        return self.kl_loss_coef > 0 or self.entropy_coeff != 0 or self.loss_mode not in LOSS.built_in

    @model_validator(mode="after")
    def _built_in_ones_take_no_options(self) -> LossSettings:
        for kind, name, options in (
            (LOSS, "loss_mode", "loss_options"),
            (ADVANTAGE, "adv_estimator", "adv_options"),
        ):
            if getattr(self, options) and getattr(self, name) in kind.built_in:
                raise ValueError(f"{options} are given, but {name} {getattr(self, name)!r} takes none")
        return self
