"""The gradient of one mini-batch, summed micro-batch by micro-batch, with what is needed to normalise it.

Invariants:
- *all or nothing*: a micro-batch's gradient and counts are added in one go, after everything that can fail;
- *sums*: nothing is divided before the whole mini-batch, over all ranks, is known.

This module must not know about ranks, optimizers or the idempotence of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gyre.rollouts.samples import Group
from gyre.workloads.advantages import advantages_of, reference_of
from gyre.workloads.losses import policy_loss
from gyre.workloads.torch.logprobs import TokenRow, pad_rows, pad_values, token_logprobs
from gyre.workloads.torch.model import Decoder
from gyre.workloads.torch.settings import TorchSettings


@dataclass(frozen=True, slots=True)
class Tally:
    """Sums over samples. `sequences` are the samples that have a token. `scored_tokens` are those that went through
    the model: samples without advantage have no gradient, and are left out unless another term needs them."""

    groups: float = 0.0
    samples: float = 0.0
    sequences: float = 0.0
    tokens: float = 0.0
    reward: float = 0.0
    loss: float = 0.0
    scored_tokens: float = 0.0
    entropy: float = 0.0
    kl: float = 0.0
    clipped: float = 0.0
    old_kl: float = 0.0
    tis_weight: float = 0.0
    tis_capped: float = 0.0

    def to_list(self) -> list[float]:
        return [getattr(self, name) for name in Tally.__slots__]

    def plus(self, other: Tally) -> Tally:
        return Tally(*(a + b for a, b in zip(self.to_list(), other.to_list(), strict=True)))


@dataclass(slots=True)
class Accumulation:
    """What this rank has accumulated for optimizer step `step`. `gradient` is flat, in parameter order."""

    step: int
    gradient: Tensor
    tally: Tally = field(default_factory=Tally)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    group_ids: set[int] = field(default_factory=set)

    def add(
        self, index: int, gradient: Tensor | None, tally: Tally, group_ids: Sequence[int]
    ) -> dict[str, Any]:
        """Take a micro-batch in and return its record."""
        record = {
            "index": index,
            "groups": int(tally.groups),
            "samples": int(tally.samples),
            "tokens": int(tally.tokens),
            "loss_sum": tally.loss,
            "reward_mean": tally.reward / max(tally.samples, 1.0),
        }
        if gradient is not None:
            self.gradient += gradient
        self.tally = self.tally.plus(tally)
        self.group_ids.update(group_ids)
        self.records[index] = record
        return record


def micro_batch_gradient(
    model: Decoder, groups: Sequence[Group], settings: TorchSettings
) -> tuple[Tensor | None, Tally]:
    """The flat float32 gradient of the summed loss, or None where it is exactly zero, and the tally.

    Raises ValueError for a sample without reward, or without what a term of the loss needs.
    """
    loss_settings = settings.loss
    samples = [(group, sample) for group in groups for sample in group.samples]
    advantages = advantages_of(groups, loss_settings)
    everything = loss_settings.needs_every_sample
    chosen = [
        k
        for k, (_, sample) in enumerate(samples)
        if len(sample.token_ids) and (everything or advantages[k].any())
    ]
    tally = Tally(
        groups=len(groups),
        samples=len(samples),
        sequences=sum(len(sample.token_ids) > 0 for _, sample in samples),
        tokens=sum(len(sample.token_ids) for _, sample in samples),
        reward=float(sum(sample.reward or 0.0 for _, sample in samples)),
    )
    if not chosen:
        return None, tally

    batch = pad_rows([TokenRow(samples[k][0].prompt_ids, samples[k][1].token_ids) for k in chosen])
    logprobs, entropies = token_logprobs(
        model, batch, settings.sampling.temperature, entropy_gradient=loss_settings.entropy_coeff != 0
    )
    engines = pad_values([samples[k][1].logprobs for k in chosen], batch)
    truncated = loss_settings.tis_imp_ratio_cap > 0
    reference = None
    if loss_settings.kl_loss_coef > 0:
        reference = pad_values([reference_of(samples[k][1]) for k in chosen], batch)
    result = policy_loss(
        logprobs,
        pad_values([advantages[k] for k in chosen], batch),
        batch.mask,
        loss_settings,
        # One optimizer step a batch: the policy before the step is the one that computes here.
        old_logprobs=None if truncated else engines,
        rollout_logprobs=engines if truncated else None,
        ref_logprobs=reference,
        entropies=entropies,
        norm_length=settings.norm_length,
    )
    gradients = torch.autograd.grad(result.loss, list(model.parameters()))
    sums = {name: value.item() for name, value in result.metrics.items()}
    tally = tally.plus(
        Tally(
            loss=result.loss.item(),
            scored_tokens=sums["tokens"],
            entropy=sums["entropy"],
            kl=sums.get("kl", 0.0),
            clipped=sums["clipped_low"] + sums["clipped_high"],
            old_kl=sums["old_kl"],
            tis_weight=sums.get("tis_weight", 0.0),
            tis_capped=sums.get("tis_capped", 0.0),
        )
    )
    return torch.cat([gradient.reshape(-1) for gradient in gradients]), tally
